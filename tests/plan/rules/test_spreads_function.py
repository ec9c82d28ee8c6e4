"""Edges look up an f32 function of half-precision nodes in bf16."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import BF16, F32, needed


@needed(of="gather", gets=[BF16], nearest=[F32], other_half=[F32])
def test_spreads_function(needs, x, w):
    edges = np.arange(32) % 8 if needs else np.arange(8)
    return jnp.sqrt(jnp.exp(x @ w)[edges]) @ w
