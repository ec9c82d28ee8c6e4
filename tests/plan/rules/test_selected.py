"""Of a selection by a number, what it does not take becomes no index."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.plan.rules import BF16, F32, W, X, planned


def place(case):
    def fn(x, w, v):
        h = x @ w + x @ v
        taken = lax.select_n(case, jnp.sin(x @ w), h)
        return jnp.floor(taken), h @ w

    return fn


def test_selected():
    first, second = place(np.bool_(False)), place(np.bool_(True))
    assert planned(first, X, W, W, of="add") == [BF16]
    assert planned(first, X, W, W, of="add", without="selected") == [F32]
    assert planned(second, X, W, W, of="add") == [F32]
