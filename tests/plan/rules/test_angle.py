"""An argument and a prediction, of which a sine is taken, are added in f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, planned


def test_angle():
    def warped(x, w, at):
        return jnp.sin((at + x @ w) * 64.0) @ w

    def nearest(x, w, at):
        return jnp.tanh((at + x @ w) * 64.0) @ w

    def with_a_bias(x, w, bias):
        return jnp.sin((x @ w + bias) * 64.0) @ w

    assert planned(warped, X, W, X, of="add") == [F32]
    assert planned(warped, X, W, X, of="add", without="angle") == [BF16]
    assert planned(nearest, X, W, X, of="add") == [BF16]
    assert planned(with_a_bias, X, W, array(1, 16), of="add") == [BF16]
