"""A matrix that a layer reads too leads to no linear algebra: it is half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_settled():
    def stream(x, w):
        h = jnp.tanh(x @ w)
        m = h.T @ h
        return jnp.linalg.cholesky(m), jnp.tanh(m @ w)

    def nearest(x, w):
        h = jnp.tanh(x @ w)
        m = h.T @ h
        return jnp.linalg.cholesky(m), jnp.tanh(m)

    assert planned(stream, X, W, of="dot_general") == [BF16, BF16, BF16]
    assert planned(stream, X, W, of="dot_general", without="settled")[1] == F32
    assert planned(nearest, X, W, of="dot_general") == [BF16, F32]
