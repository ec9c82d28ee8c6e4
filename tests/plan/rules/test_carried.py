"""What a loop keeps over its turns is made in f32, whatever else reads it."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, W, X, array, planned


def loop(keeps):
    def turn(h, row, w):
        new = row @ w + jnp.tanh(h) @ w
        return (new if keeps else jnp.cos(h)), new

    def fn(x, w, h):
        return lax.scan(lambda h, row: turn(h, row, w), h, x)[1] @ w

    return fn


def test_carried():
    args = (X, W, array(16))
    assert planned(loop(True), *args, of="add") == [F32]
    assert planned(loop(True), *args, of="add", without="carried") == [BF16]
    assert planned(loop(False), *args, of="add") == [BF16]
