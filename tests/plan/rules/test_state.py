"""An argument to which something made of it is added is a state, and f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_state():
    def step(y, b, w):
        return (y + jnp.tanh(y @ w)) @ w

    def nearest(y, b, w):
        return (b + jnp.tanh(y @ w)) @ w

    assert planned(step, X, X, W, of="add") == [F32]
    assert planned(step, X, X, W, of="add", without="state") == [BF16]
    assert planned(nearest, X, X, W, of="add") == [BF16]
