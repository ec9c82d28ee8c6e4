"""What holds a constant too large for f16 comes out of a call in f32."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.plan.rules import F16, F32, W, X, stored


def masked(constant):
    def called(h):
        return jnp.where(np.arange(16) < 9, h, constant).T

    return lambda x, w: w @ jax.jit(called)(x @ w)


def test_oversized():
    options = {"of": "jit", "half": F16}
    # The product that reads it makes -65504 of it, not infinity.
    assert stored(masked(-1e9), X, W, **options)[0] == F32
    assert stored(masked(-1e9), X, W, **options, without="oversized")[0] == F16
    assert stored(masked(-1e4), X, W, **options)[0] == F16
