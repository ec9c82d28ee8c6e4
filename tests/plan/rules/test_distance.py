"""The product in `|a|^2 - 2 a b + |b|^2` is f32: the digits cancel."""

from tests.plan.rules import BF16, F32, X, needed


@needed(X, X, of="dot_general", gets=[F32], nearest=[BF16])
def test_distance(needs, a, b):
    power = 2 if needs else 1
    return (a**power).sum(1)[:, None] - 2 * (a @ b.T) + (b**power).sum(1)[None]
