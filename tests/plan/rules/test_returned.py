"""What the program returns in f32 is made in f32, whatever else reads it."""

from tests.plan.rules import BF16, F32, W, X, array, needed


@needed(X, W, array(1, 16), of="add", gets=[F32], nearest=[BF16])
def test_returned(needs, x, w, b):
    h = x @ w + b
    return (h, h @ w) if needs else h @ w
