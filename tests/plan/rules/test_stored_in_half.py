"""What parameters are computed to is kept in half for half readers."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, planned, stored


def test_stored_in_half():
    def once(x, w):
        made = jnp.sin(w)
        return x @ made

    def nearest(x, w):
        made = jnp.sin(w)
        return x @ made, (2 * x) @ made  # their gradients are summed in f32

    assert planned(once, X, W, of="sin") == [F32]
    assert stored(once, X, W, of="sin") == [BF16]
    assert stored(once, X, W, of="sin", without="stored_in_half") == [F32]
    assert stored(nearest, X, W, of="sin") == [F32]
