"""Kinds of programs whose numbers were wrong: what tells each from its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.dataflow import constants
from tests.programs import BF16, F16, F32, HALF, check_plan, each_plan, plans

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32) / 3
X = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), jnp.float32)


def printed(x, w):
    h = jnp.tanh(x @ w)
    jax.debug.print("{}", h[0, 0])
    return h @ w


def edges(other):
    ids = jnp.arange(32) % 16

    def fn(x, w, b):
        h = jnp.tanh(x @ w)
        d = h[ids] - jnp.concatenate([other(h, b)[:8], h[8:]])[ids]
        return jnp.sum(d * d), h @ w

    return fn


# A second moment less squared means; spellings of a covariance are in
# `tests/idioms/moments.py`, and choices by rank in `ranks.py`.
MOMENTS = {
    "a mean in a sum": lambda x, w: (
        jax.jit(lambda y: y.T @ y / 16)(x) - jnp.outer(x[0] * 0 + x.mean(0), x.mean(0))
    ),
    "the negative": lambda x, w: (lambda m: m[:, None] * m[None] - x.T @ x / 16)(
        x.mean(0)
    ),
}
LAYERS = {
    "the divergence of a variational bound": lambda x, w: jnp.sum(
        1 + (x @ w) - (x @ w.T) ** 2
    ),
    "a residual": lambda x, w: (x @ w - jnp.square(x)) @ w,
    "a bilinear layer": lambda x, w: x @ w - (x @ w) * (x @ w.T),
}
MOVES = "moves or chooses half values"
PLANNED = {
    "a print does not change what a value is computed in": plans(
        printed, X, W, tanh=[HALF]
    ),
    "a bound that half precision holds stays half": plans(
        lambda x, w: jnp.clip(x @ w, 0.0, 6.0) @ w, X, W, min=[HALF]
    ),
    "the largest values alone are no choice": plans(
        lambda x, w, b: lax.top_k(x @ w + b[None], 2)[0] @ w[:2],
        *(X, W, W[0]),
        add=[HALF],
    ),
    **{
        f"f32, {name}": plans(fn, X, W, dot_general={F32})
        for name, fn in MOMENTS.items()
    },
    **{
        f"half, {name}": plans(fn, X, W, dot_general={HALF})
        for name, fn in LAYERS.items()
    },
    "rows of one value that are subtracted are looked up in f32": plans(
        edges(lambda h, b: h), X, W, X, gather=[F32, F32]
    ),
    "and those that are joined of two": plans(
        edges(lambda h, b: b), X, W, X, gather=[F32, F32]
    ),
    "a lookup of few says in what its gradient is summed": plans(
        lambda x, w: (x @ w)[jnp.arange(16)] @ w,
        *(X, W),
        half=BF16,
        why={
            "gather": "moves or chooses half values; its gradient is summed in bfloat16"
        },
    ),
    "a lookup of many is summed in f32": plans(
        lambda x, w: (x @ w)[jnp.zeros(256, jnp.int32)] @ w,
        *(X, W),
        half=BF16,
        why={"gather": MOVES},
    ),
}


@each_plan(PLANNED)
def test_planned(row, half):
    check_plan(row, half)


# Second readers


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "reader",
    [
        lambda v: v @ W,
        lambda v: jnp.tanh(v) @ W,
    ],
)
def test_a_half_reader_takes_no_digits_from_an_f32_reader(reader):
    def fn(x):
        v = 1 + 0.001 * jax.nn.sigmoid(x @ jnp.eye(8))
        return (v - 1) * 1000, reader(v)

    x = jnp.round(4 * X) / 4  # exact in half, and so is the product
    exact = 1 / (1 + np.exp(-np.float64(x)))
    np.testing.assert_allclose(amp.autocast(fn)(x)[0], exact, atol=2e-4)


# Bounds


@pytest.mark.parametrize(
    ("bound", "met"),
    [
        (1 - 1e-4, {BF16: 1.0, F16: 1.0}),
        (-0.9999, {BF16: -1.0, F16: -1.0}),
        (0.999, {BF16: 1.0}),
        (2 + 1e-4, {BF16: 2.0, F16: 2.0}),
        (5.9999, {BF16: 6.0, F16: 6.0}),
        *((number, {}) for number in (1.0, 6.0, 0.1, 0.9, 1e-4, 1e-8, 1 / 3, -1e9)),
    ],
)
def test_a_bound_meets_the_round_number_that_half_precision_rounds_it_to(bound, met):
    found = {d: constants.met(bound, jnp.dtype(d)) for d in (BF16, F16)}
    assert {d: number for d, number in found.items() if number is not None} == met


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "clip",
    [
        lambda y: jnp.clip(y, -0.9999, 0.9999),
        lambda y: jnp.minimum(jnp.maximum(y, -0.9999), 0.9999),
        lambda y: jnp.where(jnp.abs(y) > 0.9999, 0.9999 * jnp.sign(y), y),
        lambda y: lax.clamp(-0.9999, y, 0.9999),
    ],
)
def test_a_bound_near_one_keeps_from_one(clip):
    def fn(x, w):
        c = clip(x @ w)
        return jnp.sqrt(1 - c * c) @ w

    gradient = jax.jit(jax.grad(lambda w: jnp.sum(amp.autocast(fn)(3 * X, w))))(W)
    assert np.isfinite(gradient).all()


def test_the_gradient_of_activations_that_are_looked_up_often_is_summed_in_f32():
    ids = jnp.zeros(4096, jnp.int32)
    loss = amp.autocast(lambda x: jnp.mean((x @ jnp.eye(8))[ids] @ jnp.eye(8)))
    gradient = jax.grad(loss)(jnp.ones((2, 8)))
    np.testing.assert_allclose(gradient[0], 1 / 8, rtol=2**-8)
