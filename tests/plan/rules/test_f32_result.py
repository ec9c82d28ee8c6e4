"""A product of half operands with an f32 result has half derivatives."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import F32, W, X, planned, rewritten


def product(result):
    def fn(x, w):
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return lax.dot(x, w, preferred_element_type=result)

    return fn


def test_f32_result():
    wide, nearest = product(jnp.float32), product(jnp.bfloat16)
    assert rewritten(wide, X, W, of="dot_general") == [True]
    assert rewritten(wide, X, W, of="dot_general", without="f32_result") == [False]
    assert planned(wide, X, W, of="dot_general") == [F32]
    assert rewritten(nearest, X, W, of="dot_general") == [False]
