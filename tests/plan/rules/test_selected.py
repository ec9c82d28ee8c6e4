"""Of a selection by a number, what it does not take becomes no index."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.plan.rules import BF16, F32, W, X, needed


@needed(X, W, W, of="add", gets=[BF16], nearest=[F32])
def test_selected(needs, x, w, v):
    h = x @ w + x @ v
    taken = lax.select_n(np.bool_(not needs), jnp.sin(x @ w), h)
    return jnp.floor(taken), h @ w
