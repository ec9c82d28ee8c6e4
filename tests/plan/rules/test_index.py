"""What becomes an index is f32, whatever else reads it."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, needed


@needed(X, W, array(1, 16), of="add", gets=[F32], nearest=[BF16])
def test_index(needs, x, w, b):
    becomes = jnp.floor if needs else jnp.sin
    h = x @ w + b
    return becomes(h) @ w, h @ w
