"""A factor of a product that linear algebra reads is f32, if no layer is."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, needed


@needed(W, W, of="dot_general", gets=[F32, F32], nearest=[BF16, F32])
def test_factor(needs, x, y):
    a = (x.T if needs else x) @ y
    return jnp.linalg.cholesky(a @ a.T)
