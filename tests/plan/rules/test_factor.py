"""A factor of a product that linear algebra reads is f32, if no layer is."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_factor():
    def columns(x, y):
        a = x.T @ y
        return jnp.linalg.cholesky(a @ a.T)

    def nearest(x, y):
        a = x @ y
        return jnp.linalg.cholesky(a @ a.T)

    assert planned(columns, X, X, of="dot_general") == [F32, F32]
    assert planned(columns, X, X, of="dot_general", without="factor")[0] == BF16
    assert planned(nearest, W, W, of="dot_general")[0] == BF16
