"""The other products of a method are f32, but for those behind an activation."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, array, planned

B = array(8, 16)


def test_companions():
    def observed(a, b):
        def turn(x, _):
            x = x @ a
            return x, b @ x.T

        return jax.lax.scan(turn, b, length=9)[1]

    def activated(a, b):
        def turn(x, _):
            x = x @ a
            return x, b @ jnp.tanh(x).T

        return jax.lax.scan(turn, b, length=9)[1]

    assert planned(observed, W, B, of="dot_general") == [F32, F32]
    off = planned(observed, W, B, of="dot_general", without="companions")
    assert off == [F32, BF16]
    assert planned(activated, W, B, of="dot_general") == [F32, BF16]
