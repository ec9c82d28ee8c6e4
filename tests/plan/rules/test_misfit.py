"""A constant that half precision has no place for scales in f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F16, F32, needed


@needed(of="mul", gets=[F32], nearest=[F16], half=F16, other_half=[BF16])
def test_misfit(needs, x, w):
    return jnp.cos(x @ w * (1e5 if needs else 1e4)) @ w
