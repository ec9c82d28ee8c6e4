"""What the program returns in f32 is made in f32, whatever else reads it."""

from tests.plan.rules import BF16, F32, W, X, planned


def test_returned():
    def returns(x, w):
        h = x @ w + x @ w.T
        return h, h @ w

    def nearest(x, w):
        h = x @ w + x @ w.T
        return h @ w

    assert planned(returns, X, W, of="add") == [F32]
    assert planned(returns, X, W, of="add", without="returned") == [BF16]
    assert planned(nearest, X, W, of="add") == [BF16]
