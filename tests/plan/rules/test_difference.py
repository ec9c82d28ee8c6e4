"""An argument is subtracted in f32, unless it is broadcast."""

from tests.plan.rules import BF16, F32, W, X, array, planned


def test_difference():
    def error(x, w, y):
        return (x @ w - y) @ w

    mean = array(1, 16)
    assert planned(error, X, W, X, of="sub") == [F32]
    assert planned(error, X, W, X, of="sub", without="difference") == [BF16]
    assert planned(error, X, W, mean, of="sub") == [BF16]
