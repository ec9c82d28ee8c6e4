"""An argument that is returned after several sums is f32 in all of them."""

from tests.plan.rules import BF16, F32, W, X, planned


def summed(x, w, h):
    for _ in range(3):
        h = h + x @ w
    return h, h @ w


def test_sums_argument():
    def state(x, w, y):
        return summed(x, w, y)

    def nearest(x, w, y):
        return summed(x, w, x @ w)

    assert planned(state, X, W, X, of="add") == [F32, F32, F32]
    found = planned(state, X, W, X, of="add", without="sums_argument")
    assert found[1] == BF16
    assert planned(nearest, X, W, X, of="add") == [BF16, BF16, F32]
