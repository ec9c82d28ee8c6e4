"""A bound that would round to the number it keeps away from is f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="min", gets=[F32], nearest=[BF16])
def test_met(needs, x, w):
    # In half precision 1 - 1e-4 is 1.
    return jnp.minimum(jnp.tanh(x @ w), 1 - 1e-4 if needs else 0.9) @ w
