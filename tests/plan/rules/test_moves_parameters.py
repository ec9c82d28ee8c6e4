"""A parameter is cast before it is moved, if one product reads it."""

from tests.plan.rules import BF16, F32, W, X, planned


def test_moves_parameters():
    def once(x, w):
        moved = w[::-1]
        return x @ moved

    def nearest(x, w):
        moved = w[::-1]
        return x @ moved, (2 * x) @ moved  # their gradients are summed in f32

    assert planned(once, X, W, of="rev") == [BF16]
    assert planned(once, X, W, of="rev", without="moves_parameters") == [F32]
    assert planned(nearest, X, W, of="rev") == [F32]
