"""Of a selection by a number, what it does not take becomes no index."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.plan.rules import BF16, F32, W, X, array, needed


@needed(X, W, array(1, 16), of="add", gets=[BF16], nearest=[F32])
def test_selected(needs, x, w, b):
    h = x @ w + b
    taken = lax.select_n(np.bool_(not needs), jnp.sin(x @ w), h)
    return jnp.floor(taken), h @ w
