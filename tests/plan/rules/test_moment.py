"""A second moment from which a squared mean is subtracted is f32."""

from tests.plan.rules import BF16, F32, X, planned


def test_moment():
    def variance(r, y):
        return r.T @ (y * y) - (r.T @ y) ** 2

    def nearest(r, y):
        return r.T @ (y * y) - (r.T @ y) ** 3

    assert planned(variance, X, X, of="dot_general") == [F32, F32]
    assert planned(variance, X, X, of="dot_general", without="moment") == [BF16] * 2
    assert planned(nearest, X, X, of="dot_general") == [BF16] * 2
