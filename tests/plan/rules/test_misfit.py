"""A constant that half precision has no place for scales in f32."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F16, F32, W, X, planned


def scaled(constant):
    return lambda x, w: jnp.cos(x @ w * constant) @ w


def test_misfit():
    assert planned(scaled(1e5), X, W, of="mul", half=F16) == [F32]
    assert planned(scaled(1e5), X, W, of="mul", half=F16, without="misfit") == [F16]
    assert planned(scaled(1e4), X, W, of="mul", half=F16) == [F16]
    assert planned(scaled(1e5), X, W, of="mul", half=BF16) == [BF16]
