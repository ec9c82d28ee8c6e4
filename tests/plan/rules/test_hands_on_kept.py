"""A sum that is moved and then returned in f32 is f32 as well."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, needed


@needed(X, W, array(1, 16), of="add", gets=[F32], nearest=[BF16])
def test_hands_on_kept(needs, x, w, b):
    h = x @ w + b
    return (h[::-1] if needs else jnp.sin(h)), h @ w
