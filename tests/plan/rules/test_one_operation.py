"""A function with a derivative of its own is one operation on half values."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed, planned


def wave(h):
    return jnp.sin(h * 0.3)


ruled = jax.custom_jvp(wave)
ruled.defjvps(lambda t, y, h: t * jnp.cos(h * 0.3) * 0.3)


@needed(of="sin", gets=[BF16], nearest=[F32])
def test_one_operation(needs, x, w):
    return (ruled if needs else wave)(x @ w) @ w


def test_what_the_table_has_in_f32_stays_there():
    ruled = jax.custom_jvp(lambda h: jnp.exp(h))
    ruled.defjvps(lambda t, y, h: t * y)
    assert planned(lambda x, w: ruled(x @ w) @ w, X, W, of="exp") == [F32]
