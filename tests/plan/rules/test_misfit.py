"""A constant that half precision has no place for is chosen in f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F16, F32, needed


@needed(of="select_n", gets=[F32], nearest=[F16], half=F16, other_half=[BF16])
def test_misfit(needs, x, w):
    h = jnp.where(x > 0, x @ w, -1e9 if needs else -1e4)
    return jnp.exp(h) @ w, h @ w
