"""What a parameter scales is f16 if a norm made it: it is in range."""

import jax.numpy as jnp
from jax import lax

from tests.plan.rules import F16, F32, W, X, array, planned


def test_normalized():
    def norm(x, w, scale):
        h = x @ w
        factor = lax.rsqrt(jnp.mean(jnp.exp(h), axis=1, keepdims=True))
        return (h * factor * scale) @ w

    def nearest(x, w, scale):
        h = x @ w
        factor = jnp.exp(jnp.mean(jnp.exp(h), axis=1, keepdims=True))
        return (h * factor * scale) @ w

    options = {"of": "mul", "half": F16}
    args = (X, W, array(1, 16))
    assert planned(norm, *args, **options) == [F32, F16]
    assert planned(norm, *args, **options, without="normalized") == [F32, F32]
    assert planned(nearest, *args, **options) == [F32, F32]
