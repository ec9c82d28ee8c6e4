"""A norm that hands on half precision takes what it normalises in half."""

import jax.numpy as jnp

import jmp_amp as amp
from jmp_amp.plan.program.scope_text import policy_noted
from tests.plan.rules import BF16, F32, W, X, planned

NORM = amp.Policy("float32", "float32", "bfloat16")


def test_takes_half():
    def norm(x, w):
        h = jnp.sin(x @ w)
        with policy_noted(NORM):
            return jnp.exp(h) @ w

    def nearest(x, w):
        h = jnp.sin(x @ w)
        return jnp.exp(h) @ w

    assert planned(norm, X, W, of="sin") == [BF16]
    assert planned(norm, X, W, of="sin", without="takes_half") == [F32]
    assert planned(nearest, X, W, of="sin") == [F32]
