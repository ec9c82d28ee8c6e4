"""What rounds, and only f32 reads, is f32: it is rounded once less."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_worth_f32():
    def read_in_f32(x, w):
        return jnp.exp(jnp.sin(x @ w)) @ w

    def nearest(x, w):
        return jnp.cos(jnp.sin(x @ w)) @ w

    assert planned(read_in_f32, X, W, of="sin") == [F32]
    assert planned(read_in_f32, X, W, of="sin", without="worth_f32") == [BF16]
    assert planned(nearest, X, W, of="sin") == [BF16]
