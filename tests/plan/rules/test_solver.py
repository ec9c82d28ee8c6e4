"""A loop that waits for a float of its body is f32, products and all."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import BF16, F32, X, needed


@needed(X, of="dot_general", gets=[F32], nearest=[BF16])
def test_solver(needs, x):
    def turn(carry):
        count, _, y = carry
        moved = jnp.tanh(y @ jnp.ones((16, 16)))
        return count + 1, jnp.max(jnp.abs(moved - y)), moved

    def goes_on(carry):
        return carry[1] > 1e-5 if needs else carry[0] < 9

    return lax.while_loop(goes_on, turn, (0, 1.0, x))
