"""A number that leaves few digits is added in f32."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed, planned


def warmer(add, number):
    return lambda x, w: jnp.tanh(add(x @ w, number) * 0.5) @ w


@needed(of="add", gets=[F32], nearest=[BF16])
def test_offset(needs, x, w):
    return warmer(jnp.add, 273.0 if needs else 3.0)(x, w)


def test_what_follows_is_f32_too_and_a_helper_may_add():
    assert planned(warmer(jnp.add, 273.0), X, W, of="mul") == [F32]
    assert planned(warmer(jax.jit(jnp.add), 273.0), X, W, of="add") == [F32]
