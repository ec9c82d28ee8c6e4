"""What the backward pass of a loop keeps is half, if it is one sum of half values."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, X, array, needed


@needed(X, array(3, 16, 16), of="add", gets=[BF16, BF16], nearest=[F32, BF16])
def test_kept(needs, x, stack):
    def turn(h, w):
        return h + jnp.exp(h @ w + h @ w.T) @ w, None

    h = x @ stack[0]
    h = lax.scan(turn, h, stack)[0] if needs else turn(h, stack[1])[0]
    return h @ stack[0]
