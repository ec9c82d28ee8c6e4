"""A product that linear algebra reads, and that is no layer, is f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_solved():
    def gram(x, w):
        h = x @ w
        return jnp.linalg.cholesky(h.T @ h)

    def nearest(x, w):
        h = x @ w
        return jnp.tanh(h.T @ h)

    assert planned(gram, X, W, of="dot_general") == [BF16, F32]
    assert planned(gram, X, W, of="dot_general", without="solved") == [BF16, BF16]
    assert planned(nearest, X, W, of="dot_general") == [BF16, BF16]
