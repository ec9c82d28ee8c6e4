"""What parameters are computed to is kept in half for half readers."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed, planned, stored


@needed(of="sin", gets=[BF16], nearest=[F32], read=stored)
def test_stored_in_half(needs, x, w):
    made = jnp.sin(w)
    # Two gradients are summed in f32.
    return x @ made if needs else (x @ made, (2 * x) @ made)


def test_it_is_computed_in_f32():
    assert planned(lambda x, w: x @ jnp.sin(w), X, W, of="sin") == [F32]
