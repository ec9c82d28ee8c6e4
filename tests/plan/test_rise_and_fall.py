"""Which f32 values fall to half precision, and which half-precision ones rise to f32.

What half precision reads need not be kept in f32 until it does; what f32 reads need not
be half before. Every rule here saves memory or digits, and each has its limits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jmp_amp as amp
from tests.programs import F16_IF_SLOW, dtypes_of, equations, results_of
from tests.rounding import assert_only_rounded

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (8, 16))
W = jax.random.normal(KEYS[1], (16, 16)) * 0.2
SCALE = jax.random.uniform(KEYS[2], (1, 16), minval=0.5, maxval=1.5)
SCALES = {"params": {"scale": jnp.ones(16), "bias": jnp.zeros(16)}}
IDS = jnp.array([0, 3, 3, 1])


@pytest.fixture(params=["bfloat16", F16_IF_SLOW])
def half(request):
    return request.param


def autocast(fn, half):
    return amp.autocast(fn, f"mixed_{half}")


def assert_loss_is_only_rounded(fn, *args, **options):
    def loss(transform, *args):
        return jax.value_and_grad(
            lambda *args: jnp.sum(jnp.square(transform(fn)(*args)))
        )(*args)

    assert_only_rounded(loss, args=args, **options)


# Costly f32 values


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda p, t: (soft(*p), t[0] * jax.nn.sigmoid(p[0])))


def host_sine(h):
    shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
    return jax.pure_callback(np.sin, shape, lax.stop_gradient(h))


def running_mean(h):
    turn = lambda c, row: (0.5 * c + 0.5 * row, c)  # noqa: E731
    return lax.scan(turn, jnp.zeros(16), h)[1]


def last_state(h):
    state, _ = lax.scan(lambda c, row: (c + row, None), jnp.zeros(16), h)
    return jnp.broadcast_to(state.reshape(1, 16), (8, 16))


# What is not computed again for the derivative, and so is in memory whatever reads it.
COSTLY = {
    "cumsum": lambda h: jnp.cumsum(h, axis=0),
    "segment_sum": lambda h: jax.ops.segment_sum(h, jnp.arange(8) // 2, 8),
    "qr": lambda h: jnp.linalg.qr(h.T)[0].T,
    "callback": host_sine,
    "custom_jvp": soft,
    "results_of_a_loop": running_mean,
    "carry_of_a_loop": last_state,
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", COSTLY)
def test_what_moves_or_saturates_a_costly_f32_value_for_half_is_half(name, half):
    def fn(w):
        return jnp.tanh(-COSTLY[name](X @ w)) @ w

    mixed = autocast(fn, half)
    found = [results_of(mixed, W, primitive=each)[-1] for each in ("neg", "tanh")]
    assert found == [half, half]
    assert_loss_is_only_rounded(fn, W, roundings=16)


def test_a_costly_f32_value_that_joins_a_half_stream_is_half(half):
    def fn(w):
        stream = X @ w
        return jnp.tanh(stream + jnp.cumsum(stream @ w, axis=0)) @ w

    assert results_of(autocast(fn, half), W, primitive="add") == [half]
    assert_loss_is_only_rounded(fn, W, roundings=16)


def test_a_bias_is_added_to_a_costly_f32_value_in_f32_and_half_keeps_the_sum(half):
    def fn(w, bias):
        return jax.nn.silu(jnp.cumsum(X @ w, axis=0) + bias) @ w

    mixed = autocast(fn, half)
    assert results_of(mixed, W, SCALE, primitive="add") == ["float32"]
    saved = jax.tree.leaves(jax.vjp(lambda w: mixed(w, SCALE), W)[1])
    assert not [x for x in saved if x.dtype == jnp.float32 and x.shape == (8, 16)]


# Their digits are those that the costly value has and half precision has not; the plain
# difference is in `tests/plan/rules`.
DELICATE = {
    "a difference of lookups": (
        "sub",
        lambda c: c[jnp.arange(1, 8)] - c[jnp.arange(7)],
    ),
    "a difference, scaled": ("sub", lambda c: 0.5 * (c[1:] - c[:-1])),
    "less a constant": ("sub", lambda c: c - 300.0),
    "a phase": ("sin", lambda c: jnp.sin(c)),
    "the phase of a harmonic": ("cos", lambda c: jnp.cos(3.0 * c)),
    "a remainder": ("rem", lambda c: lax.rem(c, jnp.ones_like(c))),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("operation", DELICATE)
@pytest.mark.parametrize("name", ("cumsum", "segment_sum", "results_of_a_loop"))
def test_what_needs_the_digits_of_a_costly_f32_value_has_them(name, operation, half):
    primitive, delicate = DELICATE[operation]

    def costly(x):
        return COSTLY[name](300.0 + 0.01 * jnp.tanh(x @ W))

    def fn(x):
        return delicate(costly(x)) @ W

    mixed = autocast(fn, half)
    rows = dtypes_of(mixed, X, primitive=primitive)
    assert {row[-1] for row in rows if row} == {"float32"}
    read = np.asarray(delicate(np.asarray(jax.jit(costly)(X))), np.float64)
    # What rounds is the product `x @ w`, and what the last product reads.
    scale = np.abs(read).max(initial=0.0)
    wanted = read @ np.asarray(W, np.float64)
    assert np.abs(jax.jit(mixed)(X) - wanted).max() <= 16 * jnp.finfo(half).eps * scale


def test_what_f32_reads_too_does_not_fall(half):
    def fn(w):
        h = jnp.cos(jnp.cumsum(X @ w, axis=0))
        return h @ w, jnp.exp(h) @ w

    assert results_of(autocast(fn, half), W, primitive="cos") == ["float32"]


def test_what_the_user_put_into_f32_does_not_fall(half):
    policy = amp.get_policy(f"mixed_{half}").with_full("cumsum")
    fn = amp.autocast(lambda w: jnp.cos(jnp.cumsum(X @ w, axis=0)) @ w, policy)
    assert results_of(fn, W, primitive="cos") == ["float32"]


@pytest.mark.parametrize("move", [lax.optimization_barrier, lax.sort])
def test_what_hands_on_a_costly_f32_value_for_half_hands_on_half(move, half):
    fn = autocast(lambda w: move(lax.cumsum(X @ w, axis=0)) @ w, half)
    assert results_of(fn, W, primitive=move.__name__) == [half]


def test_a_constant_that_half_cannot_hold_keeps_a_costly_value_in_f32():
    fn = autocast(lambda w: jnp.cos(jnp.cumsum(X @ w, axis=0) + 1e5) @ w, "float16")
    assert dtypes_of(fn, W, primitive="add") == [("float32",) * 3]
    assert jnp.isfinite(fn(W)).all()


@pytest.mark.parametrize("scaled", [lambda h: h / 8192, lambda h: h * 2.0**-13])
def test_a_sum_that_overflows_f16_may_still_become_a_mean(scaled):
    def fn(x):
        return scaled(jnp.cumsum(x @ jnp.eye(2), axis=0)) @ jnp.eye(2)

    x = jnp.full((8192, 2), 20.0)  # 163840 in all
    found = jax.jit(autocast(fn, "float16"))(x)
    np.testing.assert_allclose(found[-1], 20.0, rtol=2 * 2.0**-10)
    # bf16 has the range of f32.
    (eqn,) = (
        e
        for e in jax.make_jaxpr(autocast(fn, "bfloat16"))(x).eqns
        if e.primitive.name in ("div", "mul")
    )
    assert eqn.outvars[0].aval.dtype == jnp.bfloat16


def test_a_norm_of_a_costly_f32_value_has_its_digits(half):
    norm = nn.LayerNorm(use_fast_variance=False)

    def fn(x):
        sums = jnp.cumsum(300.0 + 0.1 * jnp.tanh(x @ W), axis=0)
        return norm.apply(SCALES, sums) @ W

    wanted, found = fn(X), jax.jit(autocast(fn, half))(X)
    assert (
        np.abs(found - wanted).max() <= 16 * jnp.finfo(half).eps * np.abs(wanted).max()
    )


# What a parameter scales


def test_what_a_parameter_scales_falls_to_f16_only_if_it_is_normalized():
    def fn(w, scale):
        return (jnp.exp(X * 0 + jnp.ones((8, 16)) @ w) * scale) @ w

    w, scale = 12 * jnp.eye(16), jnp.full((1, 16), 1e-3)  # exp(12) overflows f16
    rows = {
        half: dtypes_of(autocast(fn, half), w, scale, primitive="mul")[-1]
        for half in ("float16", "bfloat16")
    }
    assert rows == {"float16": ("float32",) * 3, "bfloat16": ("bfloat16",) * 3}
    found = jax.jit(autocast(fn, "float16"))(w, scale)
    expected = 12e-3 * np.exp(12.0)
    np.testing.assert_allclose(found, expected, rtol=4 * 2.0**-10)


def test_an_f32_result_of_a_call_is_handed_out_in_half_if_only_half_reads_it(half):
    called = jax.jit(lambda h: jnp.exp(h))

    def results(fn):
        eqns = jax.make_jaxpr(autocast(fn, half))(W).eqns
        (call,) = (e for e in eqns if e.params.get("name") == "<lambda>")
        return [v.aval.dtype.name for v in call.outvars]

    assert results(lambda w: called(X @ w) @ w) == [half]
    assert results(lambda w: jnp.log(called(X @ w)) @ w) == ["float32"]


# What parameters make


def both_ways(x, w):
    """Reads `w` twice; nothing but its two gradients is added up for the derivative."""
    return jnp.sum((x @ w) * (x[::-1] @ w))


def test_gradients_of_a_parameter_that_a_branch_hands_on_are_summed_in_f32(half):
    def fn(w, v):
        return both_ways(X, lax.cond(v[0, 0] < 9, lambda: w, lambda: v))

    gradient = jax.grad(autocast(fn, half))
    assert dtypes_of(gradient, W, W.T, primitive="add_any")[0] == ("float32",) * 3


def test_what_is_computed_from_parameters_is_kept_in_half_if_only_half_reads_it(half):
    layers = jnp.stack([W, 2 * W])

    def weights(layers):
        return lax.scan(lambda _, w: (None, jnp.sin(w) * 0.3), None, layers)[1]

    def fn(layers):
        return jnp.einsum("ij,ljk->lik", X, weights(layers))

    def stacked(fn):
        eqns = equations(jax.make_jaxpr(autocast(fn, half))(layers))
        (loop,) = (e for e in eqns if e.primitive.name == "scan")
        return [v.aval.dtype.name for v in loop.outvars]

    assert stacked(fn) == [half]
    # Computed in f32, and rounded once.
    rows = dtypes_of(autocast(fn, half), layers, primitive="mul")
    assert rows == [("float32",) * 3]
    assert stacked(lambda layers: jnp.sum(jnp.exp(weights(layers)))) == ["float32"]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "read_twice",
    [
        lambda w: both_ways(X, lax.rev(w, (0,))),
        lambda w: both_ways(X, jnp.flip(w, 0)),
        lambda w: both_ways(X, jnp.sin(w)),
        lambda w: jax.jit(functools.partial(both_ways, X))(lax.rev(w, (0,))),
        lambda w: both_ways(X, lax.optimization_barrier(lax.rev(w, (0,)))),
    ],
    ids=["moved", "moved by a helper", "computed", "in a call", "passed on"],
)
def test_gradients_of_what_is_made_of_a_parameter_are_summed_in_f32(read_twice, half):
    gradient = jax.grad(autocast(read_twice, half))
    assert dtypes_of(gradient, W, primitive="add_any") == [("float32",) * 3]


@pytest.mark.parametrize("loop", ["scan", "map"])
def test_gradients_of_what_a_loop_reads_are_summed_in_f32(loop, half):
    def fn(w):
        moved, xs = lax.rev(w, (0,)), jnp.stack([X, X])
        if loop == "map":
            return jnp.sum(lax.map(lambda x: x @ moved, xs))
        return jnp.sum(lax.scan(lambda c, x: (c, x @ moved), 0.0, xs)[1])

    eqns = equations(jax.make_jaxpr(jax.grad(autocast(fn, half)))(W))
    sums = [
        v.aval.dtype.name
        for e in eqns
        if e.primitive.name == "scan"
        for v in e.outvars
        if v.aval.shape == W.shape
    ]
    assert sums == ["float32"]


def test_the_sum_of_two_embeddings_is_half_if_only_half_reads_it(half):
    def fn(tokens, positions):
        return (tokens[IDS] + positions[jnp.arange(4)]) @ W

    rows = dtypes_of(autocast(fn, half), W, W.T, primitive="add")
    assert [row for row in rows if row] == [(half,) * 3]  # indices are added up too
    assert_loss_is_only_rounded(fn, W, W.T)

    def read_in_f32_too(tokens, positions):
        h = tokens[IDS] + positions[jnp.arange(4)]
        return h @ W, jnp.sum(jnp.exp(h))

    rows = dtypes_of(autocast(read_in_f32_too, half), W, W.T, primitive="add")
    assert [row for row in rows if row] == [("float32",) * 3]


# What f32 reads


def test_a_sum_that_only_f32_reads_is_f32(half):
    def fn(w):
        return jnp.exp(X @ w + X @ w.T) @ w

    assert dtypes_of(autocast(fn, half), W, primitive="add") == [("float32",) * 3]
    assert_loss_is_only_rounded(fn, W)
    biased = autocast(lambda w, b: jnp.exp(X @ w + b) @ w, half)
    assert dtypes_of(biased, W, SCALE, primitive="add") == [("float32",) * 3]


def test_what_is_looked_up_in_activations_for_f32_is_f32_however_much_it_is(half):
    for ids in (jnp.tile(IDS, 9), IDS[:2]):
        fn = autocast(lambda w: jnp.exp(jnp.sin(X @ w)[ids]) @ w, half)  # noqa: B023
        assert results_of(fn, W, primitive="gather") == ["float32"]
        assert results_of(fn, W, primitive="sin") == ["float32"]


def test_what_is_looked_up_is_f32_if_f32_reads_the_activations_too(half):
    # So that their gradients are summed in f32.
    def fn(w):
        h = jnp.sin(X @ w)
        return jnp.sum(jnp.exp(h)) + jnp.sum(jnp.exp(h[IDS]))

    assert results_of(autocast(fn, half), W, primitive="gather") == ["float32"]
    sums = results_of(jax.grad(autocast(fn, half)), W, primitive="add_any")
    assert sums and set(sums) == {"float32"}
