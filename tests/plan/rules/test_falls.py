"""What a parameter scales in f32, as the last step of a norm, falls to half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, planned


def test_falls():
    def norm(x, w, scale):
        return (jnp.exp(x @ w) * scale) @ w

    def nearest(x, w, scale):
        return (jnp.exp(x @ w) * 0.3) @ w

    args = (X, W, array(1, 16))
    assert planned(norm, *args, of="mul") == [BF16]
    assert planned(norm, *args, of="mul", without="falls") == [F32]
    assert planned(nearest, *args, of="mul") == [F32]
