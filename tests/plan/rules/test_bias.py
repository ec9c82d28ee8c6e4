"""A product and its bias are one operation, whatever else reads it."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, needed


@needed(X, W, array(1, 16), of="add", gets=[BF16], nearest=[F32])
def test_bias(needs, x, w, b):
    h = x @ w + (b if needs else x @ w.T)
    return jnp.exp(h) @ w, h @ w
