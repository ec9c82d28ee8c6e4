"""A product that linear algebra reads, and that is no layer, is f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="dot_general", gets=[BF16, F32], nearest=[BF16, BF16])
def test_solved(needs, x, w):
    h = x @ w
    return (jnp.linalg.cholesky if needs else jnp.tanh)(h.T @ h)
