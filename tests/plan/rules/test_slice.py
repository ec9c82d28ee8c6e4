"""A stream that each turn of a loop multiplies by other weights is half."""

from jax import lax

from tests.plan.rules import BF16, F32, X, array, needed


@needed(X, array(3, 16, 16), of="add", gets=[BF16], nearest=[F32])
def test_slice(needs, x, stack):
    def turn(h, w):
        return h + h @ (w if needs else stack[0]), None

    return lax.scan(turn, x @ stack[0], stack)[0] @ stack[0]
