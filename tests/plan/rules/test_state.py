"""An argument to which something made of it is added is a state, and f32."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed, planned


@needed(X, X, W, of="add", gets=[F32], nearest=[BF16])
def test_state(needs, y, b, w):
    return ((y if needs else b) + jnp.tanh(y @ w)) @ w


def test_state_of_which_autodiff_adds_the_terms():
    def energy(y, w):
        return jnp.sum(y * y) + jnp.sum(jnp.tanh(y @ w))

    def force(y, w):
        return jax.grad(energy)(y, w) @ w

    def nearest(y, c, w):
        return jax.grad(lambda b: jnp.sum(b * (y @ w)) + jnp.sum(b * c))(y) @ w

    assert planned(force, X, W, of="add_any")[-1] == F32
    assert planned(force, X, W, of="add_any", without="state")[-1] == BF16
    assert planned(nearest, X, X, W, of="add_any") == [BF16]
