"""An f32 sum that a half-precision value gates is multiplied in bf16."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="mul", gets=[BF16], nearest=[F32], other_half=[F32])
def test_gates_a_sum(needs, x, w):
    sums = jnp.exp(x @ w)
    if needs:
        sums = jnp.sum(jnp.exp(jnp.stack([x @ w, x @ w.T])), axis=0)
    return (sums * (x @ w)) @ w
