"""What `stop_gradient` alone reads is f32: no derivative saves it."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, W, X, planned


def test_stopped():
    def barrier(x, w):
        return lax.stop_gradient(jnp.tanh(x @ w)) @ w

    def nearest(x, w):
        return jnp.tanh(x @ w) @ w

    assert planned(barrier, X, W, of="tanh") == [F32]
    assert planned(barrier, X, W, of="tanh", without="stopped") == [BF16]
    assert planned(nearest, X, W, of="tanh") == [BF16]
