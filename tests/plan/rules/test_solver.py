"""A loop that waits for a float of its body is f32, products and all."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, X, planned


def loop(goes_on):
    def turn(carry):
        count, _, y = carry
        moved = jnp.tanh(y @ jnp.ones((16, 16)))
        return count + 1, jnp.max(jnp.abs(moved - y)), moved

    return lambda x: lax.while_loop(goes_on, turn, (0, 1.0, x))


def test_solver():
    solver, counter = loop(lambda c: c[1] > 1e-5), loop(lambda c: c[0] < 9)
    assert planned(solver, X, of="dot_general") == [F32]
    assert planned(solver, X, of="dot_general", without="solver") == [BF16]
    assert planned(counter, X, of="dot_general") == [BF16]
