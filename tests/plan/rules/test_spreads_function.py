"""Edges look up an f32 function of half-precision nodes in bf16."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import BF16, F16, F32, W, X, planned


def messages(edges):
    return lambda x, w: jnp.sqrt(jnp.exp(x @ w)[edges]) @ w


def test_spreads_function():
    many, few = messages(np.arange(32) % 8), messages(np.arange(8))
    assert planned(many, X, W, of="gather") == [BF16]
    assert planned(many, X, W, of="gather", without="spreads_function") == [F32]
    assert planned(few, X, W, of="gather") == [F32]
    assert planned(many, X, W, of="gather", half=F16) == [F32]
