"""The product in `|a|^2 - 2 a b + |b|^2` is f32: the digits cancel."""

from tests.plan.rules import BF16, F32, X, planned


def test_distance():
    def squares(a, b):
        return (a**2).sum(1)[:, None] - 2 * (a @ b.T) + (b**2).sum(1)[None]

    def nearest(a, b):
        return a.sum(1)[:, None] - 2 * (a @ b.T) + b.sum(1)[None]

    assert planned(squares, X, X, of="dot_general") == [F32]
    assert planned(squares, X, X, of="dot_general", without="distance") == [BF16]
    assert planned(nearest, X, X, of="dot_general") == [BF16]
