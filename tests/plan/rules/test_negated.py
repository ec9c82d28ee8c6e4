"""To add the negative of a value is to subtract the value."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned


def test_negated():
    def difference(x, w, at):
        place = at + x @ w
        return jnp.tanh((place + -place[:1]) @ w)

    def nearest(x, w, at):
        place = at + x @ w
        return jnp.tanh((place + place[:1]) @ w)

    assert planned(difference, X, W, X, of="add")[0] == F32
    assert planned(difference, X, W, X, of="add", without="negated")[0] == BF16
    assert planned(nearest, X, W, X, of="add")[0] == BF16
