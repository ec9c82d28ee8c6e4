"""What `stop_gradient` alone reads is f32: no derivative saves it."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, needed


@needed(of="tanh", gets=[F32], nearest=[BF16])
def test_stopped(needs, x, w):
    h = jnp.tanh(x @ w)
    return (lax.stop_gradient(h) if needs else h) @ w
