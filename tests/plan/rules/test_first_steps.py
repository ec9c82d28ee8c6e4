"""A product outside of a loop with the matrix of its recursion is of the method."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, array, planned


def richardson(a, b, first, last):
    def turn(carry, _):
        x, r = carry
        return (x + 0.3 * r, r - 0.3 * (a @ r)), None

    x, _ = jax.lax.scan(turn, (first, b - a @ first), length=20)[0]
    return last @ x


def test_first_steps():
    B = array(16)

    def residual(a, b, x, w):
        return b - a @ richardson(a, b, x, w)

    found = planned(residual, W, B, B, W, of="dot_general")
    assert found == [F32, F32, BF16, F32]
    off = planned(residual, W, B, B, W, of="dot_general", without="first_steps")
    assert off == [BF16, F32, BF16, BF16]


def test_a_helper_may_take_the_step():
    @jax.jit
    def times(a, x):
        return a.T @ x

    def program(a, b):
        return jax.lax.fori_loop(0, 9, lambda _, x: b - times(a, x), times(a, b))

    assert planned(program, W, array(16), of="dot_general") == [F32, F32]


def test_behind_an_activation_it_is_a_layer():
    def program(a, b):
        x = jax.lax.fori_loop(0, 9, lambda _, x: b - a @ x, b)
        return a @ jnp.tanh(x)

    assert planned(program, W, array(16), of="dot_general") == [F32, BF16]
