"""A product of numbers that adds nothing up is a multiplication: f32."""

import jax.numpy as jnp
import numpy as np

from tests.plan.rules import BF16, F32, array, planned


def test_multiplies():
    def angles(frequencies, w):
        numbers = np.arange(8, dtype=np.float32)[:, None]
        return jnp.sin(numbers @ frequencies)

    def nearest(frequencies, w):
        return jnp.sin(w @ frequencies)  # a layer of one feature

    args = (array(1, 16), array(8, 1))
    assert planned(angles, *args, of="dot_general") == [F32]
    assert planned(angles, *args, of="dot_general", without="multiplies") == [BF16]
    assert planned(nearest, *args, of="dot_general") == [BF16]
