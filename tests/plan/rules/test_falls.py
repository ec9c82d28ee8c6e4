"""What a parameter scales in f32, as the last step of a norm, falls to half."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F32, W, X, array, needed


@needed(X, W, array(1, 16), of="mul", gets=[BF16], nearest=[F32])
def test_falls(needs, x, w, scale):
    return (jnp.exp(x @ w) * (scale if needs else 0.3)) @ w
