"""A loop carries in f32 what a pin keeps there."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, X, array, needed, stored


@needed(X, array(3, 16, 16), of="scan", gets=[F32], nearest=[BF16], read=stored)
def test_pinned(needs, x, stack):
    def turn(h, w):
        h = h + h @ w
        return h, (jnp.floor if needs else jnp.sin)(h)

    return lax.scan(turn, x @ stack[0], stack)[0] @ stack[0]
