"""The other products of a method are f32, but for those behind an activation."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, array, needed

B = array(8, 16)


@needed(W, B, of="dot_general", gets=[F32, F32], nearest=[F32, BF16])
def test_companions(needs, a, b):
    def turn(x, _):
        x = x @ a
        return x, b @ (x if needs else jnp.tanh(x)).T

    return jax.lax.scan(turn, b, length=9)[1]
