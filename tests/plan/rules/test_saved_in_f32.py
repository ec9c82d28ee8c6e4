"""What saturates a dear f32 value for half precision is half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed, planned


@needed(of="tanh", gets=[BF16], nearest=[F32])
def test_saved_in_f32(needs, x, w):
    h = x @ w
    return jnp.tanh(jnp.cumsum(h, axis=0) if needs else jnp.exp(h)) @ w


def test_a_difference_of_dear_values_is_f32():
    def differs(x, w):
        sums = jnp.cumsum(x @ w, axis=0)
        return (sums[1:] - sums[:-1]) @ w

    assert planned(differs, X, W, of="sub") == [F32]
