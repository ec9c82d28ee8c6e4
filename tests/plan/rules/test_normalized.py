"""What a parameter scales is f16 if a norm made it: it is in range."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import F16, F32, W, X, array, needed


@needed(*(X, W, array(1, 16)), of="mul", gets=[F32, F16], nearest=[F32, F32], half=F16)
def test_normalized(needs, x, w, scale):
    h = x @ w
    factor = lax.rsqrt if needs else jnp.exp
    return (h * factor(jnp.mean(jnp.exp(h), axis=1, keepdims=True)) * scale) @ w
