"""A number that leaves few digits is added in f32."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_offset():
    def kelvin(x, w):
        return jnp.tanh((x @ w + 273.0) * 0.5) @ w

    def in_a_helper(x, w):
        shifted = jax.jit(jnp.add)(x @ w, 273.0)
        return jnp.tanh(shifted * 0.5) @ w

    def nearest(x, w):
        return jnp.tanh((x @ w + 3.0) * 0.5) @ w

    assert planned(kelvin, X, W, of="add") == [F32]
    assert planned(kelvin, X, W, of="mul") == [F32]
    assert planned(in_a_helper, X, W, of="add") == [F32]
    assert planned(kelvin, X, W, of="add", without="offset") == [BF16]
    assert planned(nearest, X, W, of="add") == [BF16]
