"""What a loop keeps over its turns is made in f32, whatever else reads it."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, W, X, array, needed


@needed(X, W, array(16), of="add", gets=[F32], nearest=[BF16])
def test_carried(needs, x, w, h):
    def turn(h, row):
        new = row @ w + jnp.tanh(h) @ w
        return (new if needs else jnp.cos(h)), new

    return lax.scan(turn, h, x)[1] @ w
