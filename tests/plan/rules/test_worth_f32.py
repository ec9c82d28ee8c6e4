"""What rounds, and only f32 reads, is f32: it is rounded once less."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="sin", gets=[F32], nearest=[BF16])
def test_worth_f32(needs, x, w):
    reads = jnp.exp if needs else jnp.cos
    return reads(jnp.sin(x @ w)) @ w
