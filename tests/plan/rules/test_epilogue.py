"""A gelu is half between products: XLA computes it where it makes one."""

import jax
import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


def by_hand(h):
    return 0.5 * h * (1 + jnp.tanh(0.8 * (h + 0.04 * h**3)))


@needed(of="tanh", gets=[BF16], nearest=[F32])
def test_epilogue(needs, x, w):
    return (jax.nn.gelu if needs else by_hand)(x @ w) @ w
