"""An f32 sum that a half-precision value gates is multiplied in bf16."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F16, F32, W, X, planned


def test_gates_a_sum():
    def gate(x, w):
        sums = jnp.sum(jnp.exp(jnp.stack([x @ w, x @ w.T])), axis=0)
        return (sums * jnp.sin(x @ w)) @ w

    def nearest(x, w):
        sums = jnp.exp(x @ w)
        return (sums * jnp.sin(x @ w)) @ w

    assert planned(gate, X, W, of="mul") == [BF16]
    assert planned(gate, X, W, of="mul", without="gates_a_sum") == [F32]
    assert planned(nearest, X, W, of="mul") == [F32]
    assert planned(gate, X, W, of="mul", half=F16) == [F32]
