"""A mask that is too large for f16 saturates beside half readers alone."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import F16, F32, W, X, planned


def test_saturates():
    def masked(x, w):
        h = jnp.where(np.arange(16) < 9, x @ w, -1e9)
        return h @ w

    def nearest(x, w):
        h = jnp.where(np.arange(16) < 9, x @ w, -1e9)
        return h @ w, h > -1e8

    options = {"of": "select_n", "half": F16}
    assert planned(masked, X, W, **options) == [F16]
    assert planned(masked, X, W, **options, without="saturates") == [F32]
    assert planned(nearest, X, W, **options) == [F32]
