"""An argument and a prediction, of which a sine is taken, are added in f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, needed, planned


@needed(X, W, X, of="add", gets=[F32], nearest=[BF16])
def test_angle(needs, x, w, at):
    curve = jnp.sin if needs else jnp.tanh
    return curve((at + x @ w) * 64.0) @ w


def test_a_bias_is_no_angle():
    def with_a_bias(x, w, bias):
        return jnp.sin((x @ w + bias) * 64.0) @ w

    assert planned(with_a_bias, X, W, array(1, 16), of="add") == [BF16]
