"""What divides by a difference, or takes its root, is f32: its digits cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests.plan.rules import BF16, F32, W, X, planned


def odds(x, w):
    p = jax.nn.sigmoid(x @ w)
    return (p / (1 - p)) @ w


def sine(x, w):
    cosine = jnp.tanh(x @ w)
    return jnp.sqrt(1 - cosine * cosine) @ w


def softsign(x, w):
    h = x @ w
    return (h / (1 + jnp.abs(h))) @ w


def test_steep():
    for fn, steep, curve in ((odds, "div", "logistic"), (sine, "sqrt", "tanh")):
        for of in (steep, "sub", curve):
            assert planned(fn, X, W, of=of) == [F32]
            assert planned(fn, X, W, of=of, without="steep") == [BF16]
    assert planned(softsign, X, W, of="div") == [BF16]


# What the difference becomes before it is divided by.
DIFFERENCES = {
    "itself": lambda d: d,
    "beside an epsilon": lambda d: d + 1e-6,
    "scaled": lambda d: 2 * d,
    "raised": jnp.square,
    "bounded": lambda d: jnp.clip(d, 1e-6, 1),
    "negative": lambda d: -d,
    "moved": lambda d: d.T[::-1].T[:, ::-1],
    "in a call": jax.jit(lambda d: d),
    "a sum of two": lambda d: d + d * d,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_one_whatever_it_becomes(name):
    def fn(x, w):
        p = jax.nn.sigmoid(x @ w)
        return (p / DIFFERENCES[name](1 - p)) @ w

    assert planned(fn, X, W, of="div") == planned(fn, X, W, of="logistic") == [F32]


@pytest.mark.parametrize("half", ("bfloat16", "float16"))
def test_odds_are_as_exact_as_products_alone_in_half_make_them(half):
    rng = np.random.default_rng(0)
    x, w = (np.float32(rng.normal(size=(16, 16))) for _ in "xw")
    # In half, a sigmoid above 8.4 is one; the odds of 9 are 8103.
    w *= 9 / np.max(x @ w)
    p = 1 / (1 + np.exp(-(x.astype(float) @ w)))
    expected = (p / (1 - p)) @ w
    products = amp.recipe("OD", half_dtype=half).autocast(odds)
    ours, least = (
        np.linalg.norm(jax.jit(fn)(x, w) - expected) / np.linalg.norm(expected)
        for fn in (amp.autocast(odds, f"mixed_{half}"), products)
    )
    assert ours < 1.1 * least < 0.1
    halved = amp.autocast(odds, f"mixed_{half}")
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(halved(x, w))))(w)
    assert np.isfinite(gradient).all()
