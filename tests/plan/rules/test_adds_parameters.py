"""Parameters that only half precision reads are added up in half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, needed


@needed(X, W, W, of="add", gets=[BF16], nearest=[F32])
def test_adds_parameters(needs, x, w, v):
    return x @ (w + (v if needs else jnp.sin(v)))
