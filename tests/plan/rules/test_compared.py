"""What only comparisons read is f32, and asks nothing of what it is made of."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_compared():
    def metric(x, w):
        h = jnp.tanh(x @ w)
        return h @ w, abs(h) < 0.5

    def nearest(x, w):
        h = jnp.tanh(x @ w)
        return h @ w, abs(h) @ w

    assert planned(metric, X, W, of="abs") == [F32]
    assert planned(metric, X, W, of="abs", without="compared") == [BF16]
    assert planned(metric, X, W, of="tanh") == [BF16]
    assert planned(nearest, X, W, of="abs") == [BF16]
