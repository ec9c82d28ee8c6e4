"""A second moment from which a squared mean is subtracted is f32."""

from tests.plan.rules import BF16, F32, X, needed


@needed(X, X, of="dot_general", gets=[F32, F32], nearest=[BF16, BF16])
def test_moment(needs, r, y):
    return r.T @ (y * y) - (r.T @ y) ** (2 if needs else 3)
