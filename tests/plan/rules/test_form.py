"""The `f @ p` of `f @ p @ f.T`, which linear algebra reads, is f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, needed


@needed(W, W, W, of="dot_general", gets=[F32, F32], nearest=[BF16, BF16])
def test_form(needs, f, p, g):
    return jnp.linalg.cholesky(f @ p @ (f if needs else g).T)
