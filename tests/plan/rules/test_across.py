"""A sum of half values that waits for a product in memory is half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="add", gets=[BF16], nearest=[F32])
def test_across(needs, x, w):
    h = x @ w + x @ w.T
    return jnp.cos(jnp.exp(h) @ w - (h if needs else x @ w))
