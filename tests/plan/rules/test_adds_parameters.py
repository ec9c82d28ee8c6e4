"""Parameters that only half precision reads are added up in half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_adds_parameters():
    def embedded(x, w, v):
        return x @ (w + v)

    def nearest(x, w, v):
        return x @ (w + jnp.sin(v))

    assert planned(embedded, X, W, W, of="add") == [BF16]
    assert planned(embedded, X, W, W, of="add", without="adds_parameters") == [F32]
    assert planned(nearest, X, W, W, of="add") == [F32]
