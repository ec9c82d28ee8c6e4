"""What is chosen by rank is an index: the scores are f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_ranked():
    def rank(x, w):
        h = jnp.tanh(x @ w)
        return jnp.argmax(h, axis=1), h @ w

    def nearest(x, w):
        h = jnp.tanh(x @ w)
        return h > 0, h @ w

    assert planned(rank, X, W, of="tanh") == [F32]
    assert planned(rank, X, W, of="tanh", without="ranked") == [BF16]
    assert planned(nearest, X, W, of="tanh") == [BF16]
