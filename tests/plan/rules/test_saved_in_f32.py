"""What saturates a dear f32 value for half precision is half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_saved_in_f32():
    def dear(x, w):
        return jnp.tanh(jnp.cumsum(x @ w, axis=0)) @ w

    def nearest(x, w):
        return jnp.tanh(jnp.exp(x @ w)) @ w

    assert planned(dear, X, W, of="tanh") == [BF16]
    assert planned(dear, X, W, of="tanh", without="saved_in_f32") == [F32]
    assert planned(nearest, X, W, of="tanh") == [F32]

    def differs(x, w):
        sums = jnp.cumsum(x @ w, axis=0)
        return (sums[1:] - sums[:-1]) @ w

    assert planned(differs, X, W, of="sub") == [F32]
