"""What divides by a difference, or takes its root, is f32: its digits cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from tests.plan.rules import BF16, F32, W, X, planned


def odds(x, w):
    p = jax.nn.sigmoid(x @ w)
    return (p / (1 - p)) @ w


def sine(x, w):
    cosine = jnp.tanh(x @ w)
    return jnp.sqrt(1 - cosine * cosine) @ w


# Divided by sums of what is nowhere negative.
NEAREST = {
    "softsign": lambda h: h / (1 + jnp.abs(h)),
    "of a sigmoid": lambda h: h / (1 + jax.nn.sigmoid(h)),
    "of a square": lambda h: h / (1 + 0.5 * jnp.square(jnp.tanh(h))),
    "of a negative's square": lambda h: h / (1 + jnp.square(-h)),
    "of a fourth power": lambda h: h / (1 + jnp.tanh(h) ** 4),
    "of what is no less than zero": lambda h: h / (1 + lax.max(jnp.tanh(h), 0.0)),
}


def test_steep():
    for fn, steep, curve in ((odds, "div", "logistic"), (sine, "sqrt", "tanh")):
        for of in (steep, "sub", curve):
            assert planned(fn, X, W, of=of) == [F32]
            assert planned(fn, X, W, of=of, without="steep") == [BF16]
    for nearest in NEAREST.values():
        assert planned(lambda x, w: nearest(x @ w) @ w, X, W, of="div") == [BF16]  # noqa: B023


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
    "a curve that may be negative": lambda d: 1 + jnp.tanh(d),
}
# Sums that are near zero, of a sigmoid and of the product that it is made of.
NEGATIVE = jnp.full((8, 1), -0.999)
SUMS = {
    "a negative": lambda p, h: 1 + -p,
    "a negative multiple": lambda p, h: 1 + -0.999 * p,
    "a multiple of a constant": lambda p, h: 1 + NEGATIVE * p,
    "a multiple in a call": lambda p, h: jax.jit(lambda p, c: 1 + c * p)(p, -0.999),
    "a quotient of a product": lambda p, h: 1.001 + h / jnp.sqrt(1 + h * h),
    "what is clipped": lambda p, h: 1.001 + jnp.clip(p, -1.0, 1.0) + jnp.clip(h, -1, 1),
}


@pytest.mark.parametrize("half", ("bfloat16", "float16"))
def test_derivatives_of_logarithms_near_zero(half):
    """`log1p` derives to a division by a sum; in a whole gradient it is half."""
    rng = np.random.default_rng(0)
    x, w = (np.float32(rng.normal(size=(16, 16)) / d) for d in (1, 2))

    def loss(w):
        return jnp.mean(jnp.log1p(-0.9999 * jax.nn.sigmoid(4 * x @ w)))

    p = 0.9999 / (1 + np.exp(-4 * (x.astype(float) @ w)))
    slope = -p / (1 - p) * (1 - p / 0.9999) * 4 / 256
    expected = x.T.astype(float) @ slope
    found = jax.jit(amp.autocast(jax.grad(loss), f"mixed_{half}"))(w)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 2 * float(jnp.finfo(half).eps)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_one_whatever_it_becomes(name):
    def fn(x, w):
        p = jax.nn.sigmoid(x @ w)
        return (p / DIFFERENCES[name](1 - p)) @ w

    assert {*planned(fn, X, W, of="div"), *planned(fn, X, W, of="logistic")} == {F32}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_with_what_may_be_negative_is_a_difference(name):
    def fn(x, w):
        h = x @ w
        p = jax.nn.sigmoid(h)
        return (p / SUMS[name](p, h)) @ w

    assert planned(fn, X, W, of="div")[-1] == F32


def test_a_factor_of_unknown_sign_is_one_as_an_argument_or_closed_over():
    """An array that `jax.jit` around makes an argument has the plan that it had."""

    def closes_over(factor):
        def fn(x, w):
            p = jax.nn.sigmoid(x @ w)
            return (p / (1 + factor * p)) @ w

        return fn

    for factor in (NEGATIVE, -NEGATIVE):
        given = lambda x, w, f: closes_over(f)(x, w)  # noqa: E731
        assert planned(closes_over(factor), X, W, of="div") == [F32]
        assert planned(given, X, W, factor, of="div") == [F32]


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
