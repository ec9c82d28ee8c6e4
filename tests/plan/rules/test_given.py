"""What an argument is subtracted from is a coordinate."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, planned


def test_given():
    def from_a_point(x, w, at, point):
        return jnp.tanh((at + x @ w - point) @ w)

    def nearest(x, w, at, point):
        return jnp.tanh((at + x @ w - (point @ w)) @ w)

    args = X, W, X, array(1, 16)
    assert planned(from_a_point, *args, of="add") == [F32]
    assert planned(from_a_point, *args, of="add", without="given") == [BF16]
    assert planned(nearest, *args, of="add") == [BF16]
