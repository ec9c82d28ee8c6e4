"""What an argument scales is f32 up to the next product: f16 has no range."""

import jax.numpy as jnp

from tests.plan.rules import BF16, F16, F32, W, X, array, needed, planned, reasons


@needed(
    *(X, W, array(1, 16)),
    of="mul",
    gets=[F32],
    nearest=[F16],
    half=F16,
    other_half=[BF16],
)
def test_scaled(needs, x, w, scale):
    return jnp.tanh((x @ w) * (scale if needs else 3.0)) @ w


def test_its_reason_names_the_dtype():
    def fn(x, w, scale):
        return jnp.tanh((x @ w) * scale) @ w

    told = "in a unit that float16 may have no place for"
    assert reasons(fn, X, W, array(1, 16), of="mul", half=F16) == [told]


def test_a_division_by_an_activation_scales():
    def divided(x, w):
        return ((x @ w) / jnp.tanh(x @ w.T)) @ w

    def nearest(x, w):
        return ((x @ w) / 3.0) @ w

    assert planned(divided, X, W, of="div", half=F16) == [F32]
    assert planned(divided, X, W, of="div", half=F16, without="scaled") == [F16]
    assert planned(divided, X, W, of="div") == [BF16]
    assert planned(nearest, X, W, of="div", half=F16) == [F16]
