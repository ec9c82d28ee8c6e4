"""What an argument scales is f32 up to the next product: f16 has no range."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F16, F32, W, X, array, planned, reasons


def test_scaled():
    def units(x, w, scale):
        return jnp.tanh((x @ w) * scale) @ w

    def nearest(x, w, scale):
        return jnp.tanh((x @ w) * 3.0) @ w

    args = (X, W, array(1, 16))
    assert planned(units, *args, of="mul", half=F16) == [F32]
    assert planned(units, *args, of="mul", half=F16, without="scaled") == [F16]
    assert planned(nearest, *args, of="mul", half=F16) == [F16]
    assert planned(units, *args, of="mul", half=BF16) == [BF16]
    told = "in a unit that float16 may have no place for"
    assert reasons(units, *args, of="mul", half=F16) == [told]
