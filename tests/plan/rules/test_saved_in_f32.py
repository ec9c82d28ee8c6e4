"""What reads a dear f32 value for half precision is half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_saved_in_f32():
    def dear(x, w):
        return jnp.cos(jnp.cumsum(x @ w, axis=0)) @ w

    def nearest(x, w):
        return jnp.cos(jnp.exp(x @ w)) @ w

    assert planned(dear, X, W, of="cos") == [BF16]
    assert planned(dear, X, W, of="cos", without="saved_in_f32") == [F32]
    assert planned(nearest, X, W, of="cos") == [F32]
