"""A sum that is moved and then returned in f32 is f32 as well."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, needed


@needed(of="add", gets=[F32], nearest=[BF16])
def test_hands_on_kept(needs, x, w):
    h = x @ w + x @ w.T
    return (h[::-1] if needs else jnp.sin(h)), h @ w
