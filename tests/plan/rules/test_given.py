"""What an argument is subtracted from is a coordinate."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, needed


@needed(X, W, X, array(1, 16), of="add", gets=[F32], nearest=[BF16])
def test_given(needs, x, w, at, point):
    return jnp.tanh((at + x @ w - (point if needs else point @ w)) @ w)
