"""A stream that an activation begins is a network's, although its layers are linear."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, planned


def linear(h, w):
    return jax.lax.scan(lambda h, w: (h @ w, None), h, w)[0]


def test_begun_stream():
    stacked = array(4, 16, 16)

    def begun(x, w, layers):
        return linear(x @ w, layers)

    def divided(x, w, layers):
        def turn(h, w):
            h = h @ w
            return h / jnp.sqrt(jnp.sum(h**2)), None

        return jax.lax.scan(turn, x @ w, layers)[0]

    assert planned(begun, X, W, stacked, of="dot_general") == [BF16, BF16]
    off = planned(begun, X, W, stacked, of="dot_general", without="begun_stream")
    assert off == [BF16, F32]
    # A power iteration divides by what its products made.
    assert planned(divided, X, W, stacked, of="dot_general") == [BF16, F32]
    assert planned(linear, X, stacked, of="dot_general") == [F32]


def test_a_carry_in_both_factors_is_no_stream():
    def squared(x, w):
        return jax.lax.fori_loop(0, 4, lambda _, h: h @ h, x @ w)

    assert planned(squared, W, W, of="dot_general") == [BF16, F32]
