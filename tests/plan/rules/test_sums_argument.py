"""An argument that is returned after several sums is f32 in all of them."""

from tests.plan.rules import BF16, F32, W, X, needed


@needed(X, W, X, of="add", gets=[F32, F32, F32], nearest=[BF16, BF16, F32])
def test_sums_argument(needs, x, w, y):
    h = y if needs else x @ w
    for _ in range(3):
        h = h + x @ w
    return h, h @ w
