"""What becomes an index is f32, back to the product that it begins with."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="tanh", gets=[F32], nearest=[BF16])
def test_index(needs, x, w):
    becomes = jnp.floor if needs else jnp.sin
    return becomes(jnp.tanh(x @ w)) @ w
