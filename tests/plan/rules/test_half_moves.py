"""A move of half values is half, whatever reads it."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="rev", gets=[BF16], nearest=[F32])
def test_half_moves(needs, x, w):
    h = x @ w
    moved = (h if needs else jnp.sin(h))[::-1]
    return jnp.exp(moved) @ w, moved @ w
