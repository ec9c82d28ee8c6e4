"""What becomes an index is f32, back to the product that it begins with."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_index():
    def place(x, w):
        return jnp.floor(jnp.tanh(x @ w)) @ w

    def nearest(x, w):
        return jnp.sin(jnp.tanh(x @ w)) @ w

    assert planned(place, X, W, of="tanh") == [F32]
    assert planned(place, X, W, of="tanh", without="index") == [BF16]
    assert planned(nearest, X, W, of="tanh") == [BF16]
