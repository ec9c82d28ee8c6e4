"""A mask that is too large for f16 saturates beside half readers alone."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import F16, F32, needed


@needed(of="select_n", gets=[F16], nearest=[F32], half=F16)
def test_saturates(needs, x, w):
    h = jnp.where(np.arange(16) < 9, x @ w, -1e9)
    return h @ w if needs else (h @ w, h > -1e8)
