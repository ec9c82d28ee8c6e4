"""A stream that each turn of a loop multiplies by other weights is half."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, X, array, planned

LAYERS = array(3, 16, 16)


def test_slice():
    def layers(x, stack):
        turn = lambda h, w: (h + jnp.tanh(h @ w), None)  # noqa: E731
        return lax.scan(turn, x @ stack[0], stack)[0] @ stack[0]

    def nearest(x, stack):
        turn = lambda h, w: (h + jnp.tanh(h @ stack[0]), None)  # noqa: E731
        return lax.scan(turn, x @ stack[0], stack)[0] @ stack[0]

    assert set(planned(layers, X, LAYERS, of="add")) == {BF16}
    assert set(planned(layers, X, LAYERS, of="add", without="slice")) == {F32}
    assert set(planned(nearest, X, LAYERS, of="add")) == {F32}
