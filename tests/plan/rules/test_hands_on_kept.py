"""A sum that is moved and then returned in f32 is f32 as well."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_hands_on_kept():
    def moved(x, w):
        h = x @ w + x @ w.T
        return h[::-1], h @ w

    def nearest(x, w):
        h = x @ w + x @ w.T
        return jnp.sin(h), h @ w

    assert planned(moved, X, W, of="add") == [F32]
    assert planned(moved, X, W, of="add", without="hands_on_kept") == [BF16]
    assert planned(nearest, X, W, of="add") == [BF16]
