"""A bound that would round to the number it keeps away from is f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def bounded(bound):
    return lambda x, w: jnp.minimum(jnp.tanh(x @ w), bound) @ w


def test_met():
    # In half precision 1 - 1e-4 is 1.
    assert planned(bounded(1 - 1e-4), X, W, of="min") == [F32]
    assert planned(bounded(1 - 1e-4), X, W, of="min", without="met") == [BF16]
    assert planned(bounded(0.9), X, W, of="min") == [BF16]
