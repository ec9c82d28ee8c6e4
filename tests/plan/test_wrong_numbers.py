"""Kinds of programs whose numbers were wrong: what tells each from its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.dataflow import constants
from tests.programs import planned, products, reason_of

F32, BF16, F16 = "float32", "bfloat16", "float16"
W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32) / 3
X = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), jnp.float32)

each_half = pytest.mark.parametrize("half", [BF16, F16])


# Second readers


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "reader",
    [
        lambda v: v @ W,
        lambda v: jnp.tanh(v) @ W,
        lambda v: jax.jit(lambda v: v @ W)(v),
        lambda v: lax.scan(lambda c, w: (c @ w, None), v, jnp.stack([W] * 2))[0],
        jax.checkpoint(lambda v: v @ W),
    ],
)
def test_a_half_reader_takes_no_digits_from_an_f32_reader(reader):
    def fn(x):
        v = 1 + 0.001 * jax.nn.sigmoid(x @ jnp.eye(8))
        return (v - 1) * 1000, reader(v)

    x = jnp.round(4 * X) / 4  # exact in half, and so is the product
    exact = 1 / (1 + np.exp(-np.float64(x)))
    np.testing.assert_allclose(amp.autocast(fn)(x)[0], exact, atol=2e-4)


def test_what_nothing_but_half_precision_reads_is_half():
    def fn(x, w):
        return (jnp.tanh(x @ w) * 2) @ w

    assert planned(fn, X, W, primitive="tanh") == [BF16]


def test_a_print_does_not_change_what_a_value_is_computed_in():
    def fn(x, w):
        h = jnp.tanh(x @ w)
        jax.debug.print("{}", h[0, 0])
        return h @ w

    assert planned(fn, X, W, primitive="tanh") == [BF16]


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

    gradient = jax.grad(lambda w: jnp.sum(amp.autocast(fn)(3 * X, w)))(W)
    assert np.isfinite(gradient).all()


def test_a_bound_that_half_precision_holds_stays_half():
    fn = lambda x, w: jnp.clip(x @ w, 0.0, 6.0) @ w  # noqa: E731
    assert planned(fn, X, W, primitive="min") == [BF16]


# Ranks


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "choose",
    [
        lambda s: lax.top_k(s, 2)[1],
        lambda s: jnp.argsort(s),
        lambda s: jnp.argmax(s, -1),
        lambda s: lax.sort_key_val(s, lax.broadcasted_iota(jnp.int32, s.shape, 1))[1],
        lambda s: lax.approx_max_k(s, 2)[1],
    ],
)
@each_half
def test_a_choice_by_rank_is_that_of_f32_whatever_else_reads_the_scores(choose, half):
    def fn(x, w):
        scores = x @ w + 0.0003 * jnp.arange(8.0)[None]
        return choose(scores), scores @ W

    x, w = jnp.ones((1, 4)), jnp.full((4, 8), 0.5)
    chosen, _ = amp.autocast(fn, f"mixed_{half}")(x, w)
    np.testing.assert_array_equal(chosen, choose(2 + 0.0003 * jnp.arange(8.0)[None]))


def test_the_largest_values_alone_are_no_choice():
    def fn(x, w, b):
        return lax.top_k(x @ w + b[None], 2)[0] @ w[:2]

    assert planned(fn, X, W, jnp.ones(8), primitive="add") == [BF16]


# Moments


def covariance(y, n=16):
    mean = y.mean(0)
    return y.T @ y / n - jnp.outer(mean, mean)


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x.T @ (x * x) - (x.T @ x) ** 2,
        lambda x, w: covariance(x),
        lambda x, w: jax.jit(covariance)(x),
        lambda x, w: (
            jax.jit(lambda y: y.T @ y / 16)(x)
            - jnp.outer(x[0] * 0 + x.mean(0), x.mean(0))
        ),
        lambda x, w: (lambda m: m[:, None] * m[None] - x.T @ x / 16)(x.mean(0)),
        # The difference is made in a helper, and so are the means.
        lambda x, w: jax.jit(lambda s, m: s - m)(
            x.T @ x / 16, jax.jit(lambda m: jnp.outer(m, m))(x.mean(0))
        ),
        lambda x, w: jax.checkpoint(lambda s, m: s - m[:, None] * m[None])(
            x.T @ x / 16, x.mean(0)
        ),
        # The means are products, and are multiplied by `einsum`.
        lambda x, w: (x.T @ x) - jnp.einsum("i,j->ij", x[0] @ w, x[0] @ w),
        # Of weighted rows, and of half of one value.
        lambda x, w: ((0.5 * x * x[:, :1]).T @ x) - jnp.outer(x[0] @ w, x[0] @ w),
        lambda x, w: lax.cond(x[0, 0] > 0, covariance, lambda y: 2 * covariance(y), x),
    ],
)
def test_a_second_moment_less_squared_means_is_f32(fn):
    assert set(products(amp.autocast(fn), X, W)) <= {F32}


@pytest.mark.parametrize(
    "fn",
    [
        # The divergence of a variational bound; a residual; a bilinear layer.
        lambda x, w: jnp.sum(1 + (x @ w) - (x @ w.T) ** 2),
        lambda x, w: (x @ w - jnp.square(x)) @ w,
        lambda x, w: x @ w - (x @ w) * (x @ w.T),
    ],
)
def test_a_layer_from_which_a_square_is_subtracted_is_half(fn):
    assert set(products(amp.autocast(fn), X, W)) == {BF16}


# Coordinates


@pytest.mark.parametrize(
    ("other", "dtype"), [(lambda h, b: h, F32), (lambda h, b: b, BF16)]
)
def test_rows_of_one_value_that_are_subtracted_are_looked_up_in_f32(other, dtype):
    ids = jnp.arange(32) % 16

    def fn(x, w, b):
        h = jnp.tanh(x @ w)
        d = h[ids] - jnp.concatenate([other(h, b)[:8], h[8:]])[ids]
        return jnp.sum(d * d), h @ w

    found = planned(fn, X, W, jnp.ones((16, 8)), primitive="gather")
    assert found == [dtype] * 2


# Units


def test_only_float16_is_too_small_for_a_unit():
    fn = lambda x, w, s: (((x @ w) * s) / s) @ w  # noqa: E731
    s = jnp.full((1, 8), 1e5)
    reason = "in a unit that float16 may have no place for"
    assert reason_of(fn, X, W, s, operation="mul", policy=f"mixed_{F16}") == reason
    assert planned(fn, X, W, s, primitive="mul") == [BF16]


def test_a_stream_takes_what_an_argument_scales_in_half():
    def fn(x, w, s):
        h = x @ w
        for _ in range(2):
            h = h + s * jnp.tanh(h @ w)
        return h @ w

    found = planned(fn, X, W, jnp.ones((1, 8)), primitive="add", policy=f"mixed_{F16}")
    assert found == [F16, F16]


# Lookups


def test_a_lookup_of_activations_says_in_what_its_gradient_is_summed():
    few = lambda x, w: (x @ w)[jnp.arange(16)] @ w  # noqa: E731
    many = lambda x, w: (x @ w)[jnp.zeros(256, jnp.int32)] @ w  # noqa: E731
    told = "follows its operands; its gradient is summed in bfloat16"
    assert reason_of(few, X, W, operation="gather") == told
    assert reason_of(many, X, W, operation="gather") == "follows its operands"


def test_the_gradient_of_activations_that_are_looked_up_often_is_summed_in_f32():
    ids = jnp.zeros(4096, jnp.int32)
    loss = amp.autocast(lambda x: jnp.mean((x @ jnp.eye(8))[ids] @ jnp.eye(8)))
    gradient = jax.grad(loss)(jnp.ones((2, 8)))
    np.testing.assert_allclose(gradient[0], 1 / 8, rtol=2**-8)
