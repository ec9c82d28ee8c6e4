"""Loops and branches under `autocast`: what they compute, and what they carry it in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jmp_amp as amp
from tests.measures import EXACTLY_AS_WRITTEN, compiled
from tests.programs import dtypes_of, equations, results_of
from tests.rounding import (
    BF16,
    F16,
    KEY,
    POLICIES,
    ROUNDINGS,
    W,
    X,
    assert_only_rounded,
    eps,
    half_of,
    mean_square,
    one_policy,
    relative_error,
)

LAYERS = jax.random.normal(jax.random.key(2), (4, 16, 16)) * 0.2


# Programs, each a scalar function of the weights


def layer(h, w):
    return jnp.tanh(h @ w)


def residual(h, w):
    return h + 0.5 * jnp.tanh(h @ w)


def scan(body, init, xs=None, length=None, **options):
    return lax.scan(body, init, xs, length=length, **options)


def zeros_rnn(w, zeros=jnp.zeros):
    def cell(h, x):
        h = jnp.tanh(x @ w + h @ w)
        return h, h

    return scan(cell, zeros((16,)), X)


def rotating(w):
    # Each carry becomes the other: one of them starts as zeros.
    def body(carry, _):
        a, b = carry
        return (jnp.tanh(b @ w) + a, a), None

    (a, b), _ = scan(body, (X @ w, jnp.zeros((8, 16))), length=3)
    return mean_square(a) + mean_square(b)


def with_counters(w):
    def body(carry, x):
        h, count, flag, key, spectrum, nothing = carry
        key, inner = jax.random.split(key)
        noise = jax.random.normal(inner, h.shape)
        h = jnp.tanh(h @ w + 0.1 * noise * x)
        spectrum = spectrum + h.astype(jnp.complex64) * 1j
        return (h, count + 1, ~flag, key, spectrum, nothing), count

    start = (X @ w, 0, False, KEY, jnp.zeros((8, 16), jnp.complex64), None)
    (h, count, flag, _, spectrum, _), counts = scan(body, start, jnp.ones(3))
    factor = jnp.where(flag, 1.0, 2.0) * (count + counts[-1]).astype(jnp.float32)
    return mean_square(h) * factor + jnp.mean(jnp.abs(spectrum))


def named_block(w):
    def body(h, _):
        return jax.checkpoint(
            lambda h: residual(jax.nn.softmax(h), w),
            policy=jax.checkpoint_policies.dots_saveable,
        )(h), None

    return mean_square(scan(body, X @ w, length=3)[0])


def cond_in_scan_in_cond(w):
    def body(h, i):
        return lax.cond(i % 2 == 0, lambda h: layer(h, w), lambda h: h * 0.5, h), None

    def loop(h):
        return scan(body, h, jnp.arange(4))[0]

    return mean_square(lax.cond(w[0, 0] < 9, loop, lambda h: h, X @ w))


def masked_branch(w):
    # -1e9 has no place in f16.
    def masked(h):
        return jnp.where(h > 0, h, -1e9)

    h = lax.cond(w[0, 0] < 9, masked, lambda h: h, X @ w)
    return mean_square(jax.nn.softmax(h) @ w)


def oversize_constant_branch(w):
    h = lax.cond(w[0, 0] > 9, lambda h: h, lambda h: h * 0 + 1e6, X @ w)
    return mean_square(h * 1e-6 + X @ w)


def branches_of_different_origins(w):
    branches = (
        lambda h: h @ w,  # low
        lambda h: jnp.exp(-jnp.square(h)),  # full
        lambda h: jnp.ones_like(h),  # a constant
        lambda h: X,  # free
    )
    total = jnp.float32(0)
    for index in range(4):
        total += mean_square(
            lax.switch(index + (w[0, 0] > 9).astype(int), branches, X @ w) @ w
        )
    return total


def integer_branch(w):
    h, i = lax.cond(
        w[0, 0] < 9, lambda h: (h * 2, jnp.int32(3)), lambda h: (h, jnp.int32(5)), X @ w
    )
    return mean_square(h) * i.astype(jnp.float32)


def unused_operands(w):
    h = lax.cond(
        w[0, 0] > 9, lambda a, b, c: a @ c, lambda a, b, c: jnp.tanh(b), X, X @ w, w
    )
    return mean_square(h)


def tied_stack(w):
    # A stacked parameter, and a shared one, cast inside the body.
    def body(h, layer_w):
        return residual(h, layer_w + w), jnp.mean(h)

    h, means = scan(body, X, LAYERS)
    return mean_square(h) + jnp.sum(means)


def scan_of_differentiated(w):
    def body(h, _):
        return h - 0.1 * jax.grad(lambda h: jnp.sum(jnp.tanh(h @ w) ** 2))(h), None

    return mean_square(scan(body, X, length=2)[0])


def updated_buffer(w):
    def body(i, buffer):
        return buffer.at[i].set(jnp.tanh(buffer[i - 1] @ w))

    return mean_square(lax.fori_loop(1, 5, body, X @ w))


def online_softmax(w):
    def body(carry, block):
        highest, total, out = carry
        scores = (X @ w) @ block.T
        new = jnp.maximum(highest, jnp.max(scores, axis=1))
        shift = jnp.exp(highest - new)
        p = jnp.exp(scores - new[:, None])
        total = total * shift + jnp.sum(p, axis=1)
        return (new, total, out * shift[:, None] + p @ block), None

    start = jnp.full(8, -jnp.inf), jnp.zeros(8), jnp.zeros((8, 16))
    (_, total, out), _ = scan(body, start, (X @ w).reshape(4, 2, 16))
    return mean_square(out / total[:, None])


def closed_over_activation(w):
    h = X @ w
    return mean_square(scan(lambda c, _: (jnp.tanh(c @ w) + h, None), h, length=3)[0])


def state_space(w):
    # A linear recurrence: gates and inputs are combined in pairs.
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    gates = jnp.exp(-jnp.abs(X @ w))
    return mean_square(lax.associative_scan(combine, (gates, X @ w))[1] @ w)


def literal_results(w):
    def body(h, _):
        return jnp.tanh(h @ w), (1.0, 2, True, h)

    h, (one, two, true, hs) = scan(body, X @ w, length=2)
    branches = lambda h: (h, 1.0, 3, h), lambda h: (h * 2, 2.0, 4, X)
    h, x, i, again = lax.cond(w[0, 0] < 9, *branches, h)
    numbers = jnp.sum(one) + jnp.sum(jnp.where(true, two, 0)).astype(x.dtype) + x + i
    return mean_square(h + again) * numbers + mean_square(hs)


def lowest_so_far(w):
    # 1e9 has no place in f16.
    def body(lowest, x):
        return jnp.minimum(lowest, x[None] @ w), None

    return mean_square(scan(body, jnp.full((1, 16), 1e9), X)[0] @ w)


def carried_parameter(w):
    def body(carry, _):
        h, w = carry
        return (jnp.tanh(h @ w), w), None

    (h, same), _ = scan(body, (X @ w, w), length=2)
    return mean_square(h) + mean_square(same)


def random_turns(w):
    def body(h, key):
        return jnp.tanh(h @ w + jax.random.normal(key, h.shape)), None

    return mean_square(scan(body, X @ w, jax.random.split(KEY, 3))[0])


def growing_constant(w):
    # Nothing but constants goes into the first carry: 1e7 at the end.
    def body(carry, _):
        power, h = carry
        return (power * 10.0, h + (X @ w) * power * 1e-6), None

    return mean_square(scan(body, (1.0, X @ w), length=7)[0][1])


PROGRAMS = {
    "state_space": state_space,
    "literals": literal_results,
    "lowest_so_far": lowest_so_far,
    "carried_parameter": carried_parameter,
    "random_turns": random_turns,
    "growing_constant": growing_constant,
    "weak_fori": lambda w: mean_square(
        lax.fori_loop(0, 3, lambda _, c: c * 2.0, 1.0) * (X @ w)
    ),
    "split_transpose": lambda w: mean_square(
        scan(
            lambda h, x: (jnp.tanh((h + x) @ w), h), X[0] @ w, X, _split_transpose=True
        )[1]
    ),
    "residual": lambda w: mean_square(
        scan(lambda h, _: (residual(h, w), None), X @ w, length=3)[0]
    ),
    "zeros": lambda w: mean_square(zeros_rnn(w)[0]) + mean_square(zeros_rnn(w)[1]),
    "stacked": tied_stack,
    "reverse": lambda w: mean_square(
        scan(lambda h, x: (layer(h, w) + x, h), X[0] @ w, X, reverse=True)[1]
    ),
    "unroll_2": lambda w: mean_square(
        scan(lambda h, x: (layer(h, w) + x, h), X[0] @ w, X, unroll=3)[1]
    ),
    "unroll_all": lambda w: mean_square(
        scan(lambda h, x: (layer(h, w) + x, h), X[0] @ w, X, unroll=True)[1]
    ),
    "no_turns": lambda w: mean_square(
        scan(lambda h, _: (layer(h, w), h), X @ w, length=0)[0]
    ),
    "nested": lambda w: mean_square(
        scan(
            lambda h, _: scan(lambda h, x: (layer(h, w) + x, h), h, X[:2]),
            X[0] @ w,
            length=2,
        )[1]
    ),
    "jitted_body": lambda w: mean_square(
        scan(lambda h, _: (jax.jit(residual)(h, w), None), X @ w, length=3)[0]
    ),
    "jitted_scan": lambda w: mean_square(
        jax.jit(lambda h, w: scan(lambda h, _: (residual(h, w), None), h, length=3)[0])(
            X @ w, w
        )
    ),
    "checkpointed_body": named_block,
    "checkpoint_of_scan": lambda w: mean_square(
        jax.checkpoint(
            lambda h: scan(lambda h, _: (residual(h, w), None), h, length=3)[0]
        )(X @ w)
    ),
    "rotating": rotating,
    "counters": with_counters,
    "meets_full": lambda w: mean_square(
        scan(lambda h, _: (h + jax.nn.softmax(h @ w), None), X @ w, length=3)[0]
    ),
    "pytree": lambda w: mean_square(
        scan(
            lambda c, x: (
                {"h": layer(c["h"], w), "sum": (c["sum"][0] + jnp.sum(c["h"] * x),)},
                {"y": c["h"] + x},
            ),
            {"h": X @ w, "sum": (0.0,)},
            jnp.ones(3),
        )[1]["y"]
    ),
    "no_carry": lambda w: mean_square(
        scan(lambda _, x: (None, layer(x, w)), None, X)[1]
    ),
    "no_results": lambda w: mean_square(
        scan(lambda h, _: (layer(h, w), ()), X @ w, length=2)[0]
    ),
    "of_gradients": scan_of_differentiated,
    "closed_over": closed_over_activation,
    "map": lambda w: mean_square(lax.map(lambda x: layer(x, w) @ w, X)),
    "map_batched": lambda w: mean_square(
        lax.map(lambda x: layer(x, w) @ w, X, batch_size=3)
    ),
    "associative": lambda w: mean_square(
        lax.associative_scan(lambda a, b: a @ b, jnp.tanh(LAYERS @ w))
    ),
    "associative_reverse": lambda w: mean_square(
        lax.associative_scan(jnp.add, X @ w, reverse=True) @ w
    ),
    "fori": lambda w: mean_square(
        lax.fori_loop(0, 3, lambda i, h: residual(h, w) * (1.0 + i), X @ w)
    ),
    "fori_unrolled": lambda w: mean_square(
        lax.fori_loop(0, 3, lambda i, h: residual(h, w), X @ w, unroll=True)
    ),
    "buffer": updated_buffer,
    "online_softmax": online_softmax,
    "cond": lambda w: mean_square(
        lax.cond(w[0, 0] < 9, lambda h: layer(h, w), lambda h: h, X @ w)
    ),
    "cond_other": lambda w: mean_square(
        lax.cond(w[0, 0] > 9, lambda h: layer(h, w), lambda h: h, X @ w)
    ),
    "cond_in_scan_in_cond": cond_in_scan_in_cond,
    "masked_branch": masked_branch,
    "oversize_constant_branch": oversize_constant_branch,
    "origins": branches_of_different_origins,
    "integer_branch": integer_branch,
    "unused_operands": unused_operands,
    "vmap_of_scan": lambda w: mean_square(
        jax.vmap(
            lambda x: scan(lambda h, _: (residual(h, w), None), x @ w, length=2)[0]
        )(X)
    ),
    "vmap_of_cond": lambda w: mean_square(
        jax.vmap(
            lambda x: lax.cond(x[0] > 0, lambda h: layer(h, w), lambda h: h, x @ w)
        )(X)
    ),
    "vmap_of_switch": lambda w: mean_square(
        jax.vmap(
            lambda x, i: lax.switch(
                i, [lambda h: layer(h, w), lambda h: h, jnp.exp], x @ w
            )
        )(X, jnp.arange(8) % 3)
    ),
    "select": lambda w: mean_square(lax.select(X > 0, X @ w, jnp.zeros((8, 16))) @ w),
}


def counted_while(w):
    def turn(state):
        i, h = state
        return i + 1, residual(h, w)

    return mean_square(lax.while_loop(lambda s: s[0] < 3, turn, (0, X @ w))[1])


def converging_while(w):
    def turn(state):
        h, _ = state
        new = 0.5 * jnp.tanh(h @ w)
        return new, jnp.max(jnp.abs(new - h))

    return mean_square(
        1 + lax.while_loop(lambda s: s[1] > 0.1, turn, (X @ w, jnp.float32(1)))[0]
    )


def activations_while(w):
    def turn(state):
        h, c = state
        return 0.5 * jax.nn.gelu(jax.nn.silu(h @ w) + h), c * 2.0

    h, c = lax.while_loop(
        lambda s: (jnp.max(jnp.abs(s[0])) > 0.2) & (s[1] < 1e9), turn, (X @ w, 1.0)
    )
    return mean_square(1 + h) * jnp.log(c + 1.0)


# Loops whose number of turns is not known: forward mode only.
FORWARD_PROGRAMS = {
    "while": counted_while,
    "while_of_values": converging_while,
    "while_of_activations": activations_while,
    "lowest_in_while": lambda w: mean_square(
        lax.fori_loop(
            *(0, 3 + (w[0, 0] > 9).astype(int)),
            lambda i, lowest: jnp.minimum(lowest, X[:1] @ w),
            jnp.full((1, 16), 1e9),
        )
        @ w
    ),
    "weak_while": lambda w: mean_square(
        lax.while_loop(
            lambda c: c[0] < 10.0, lambda c: (c[0] * 2.0, c[1] @ w), (1.0, X)
        )[1]
    ),
    "fori_dynamic": lambda w: mean_square(
        lax.fori_loop(
            0, 2 + (w[0, 0] < 9).astype(int), lambda _, h: residual(h, w), X @ w
        )
    ),
    "vmap_of_while": lambda w: mean_square(
        jax.vmap(
            lambda x, n: lax.while_loop(
                lambda s: s[0] < n, lambda s: (s[0] + 1, residual(s[1], w)), (0, x @ w)
            )[1]
        )(X, jnp.arange(8) % 3)
    ),
    "while_in_scan": lambda w: mean_square(
        scan(
            lambda h, n: (
                lax.fori_loop(0, n, lambda _, h: residual(h, w), h),
                None,
            ),
            X @ w,
            jnp.arange(3),
        )[0]
    ),
    "scan_in_while": lambda w: mean_square(
        lax.while_loop(
            lambda s: s[0] < 2,
            lambda s: (
                s[0] + 1,
                scan(lambda h, _: (residual(h, w), None), s[1], length=2)[0],
            ),
            (0, X @ w),
        )[1]
    ),
    "cond_in_while": lambda w: mean_square(
        lax.while_loop(
            lambda s: s[0] < 2,
            lambda s: (
                s[0] + 1,
                lax.cond(s[0] == 0, lambda h: layer(h, w), lambda h: h, s[1]),
            ),
            (0, X @ w),
        )[1]
    ),
}


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_value_and_gradient_are_those_of_f32(name):
    fn = PROGRAMS[name]
    assert_only_rounded(lambda transform, w: jax.value_and_grad(transform(fn))(w))


@pytest.mark.parametrize("name", sorted(FORWARD_PROGRAMS))
def test_value_and_directional_derivative_are_those_of_f32(name):
    fn = FORWARD_PROGRAMS[name]
    assert_only_rounded(lambda transform, w: jax.jvp(transform(fn), (w,), (w,)))


# What is carried in which dtype


def loops(fn, *args, primitive="scan"):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [e for e in equations(jaxpr) if e.primitive.name == primitive]


def results(eqn):
    return [str(v.aval.dtype) for v in eqn.outvars]


@one_policy
@pytest.mark.parametrize(
    ("start", "carried"),
    [
        (lambda w, x: x @ w, "half"),
        (lambda w, x: w[jnp.arange(8)], "half"),  # as an embedding is looked up
        (lambda w, x: w[jnp.arange(8)] + x, "half"),  # and a position added
        (lambda w, x: w[:8], "float32"),
        (lambda w, x: x, "float32"),
        (lambda w, x: x + 1.0, "float32"),
        (lambda w, x: jnp.zeros((8, 16)), "float32"),
        (lambda w, x: jnp.full((8, 16), 0.5), "float32"),
        (lambda w, x: jnp.zeros_like(x), "float32"),
        (lambda w, x: jnp.exp(x @ w), "float32"),
    ],
    ids="product lookup position slice input sum zeros full like exp".split(),
)
def test_a_carry_is_half_if_a_product_or_a_lookup_began_it(start, carried, policy):
    def fn(w, x):
        layers = jnp.stack([w] * 3)
        return scan(lambda h, w: (residual(h, w), None), start(w, x), layers)[0] @ w

    (loop,) = loops(amp.autocast(fn, policy), W, X)
    assert results(loop) == [carried.replace("half", half_of(policy))]


@one_policy
def test_a_carry_that_meets_a_full_value_is_f32(policy):
    def fn(w):
        return scan(lambda h, _: (h + jnp.exp(-(h @ w)), None), X @ w, length=3)[0] @ w

    (loop,) = loops(amp.autocast(fn, policy), W)
    assert results(loop) == ["float32"]


@one_policy
def test_carries_that_feed_each_other_are_settled_together(policy):
    def turn(carry, w):
        a, b, c, d = carry
        return (b @ w, jnp.tanh(a), d + 1.0, c * 2.0), None

    def fn(w, start):
        layers = jnp.stack([w] * 4)
        return scan(turn, (X @ w, start, jnp.zeros(()), X[0, 0]), layers)[0]

    (loop,) = loops(amp.autocast(lambda w: fn(w, X @ w)[0] @ w, policy), W)
    assert results(loop)[:2] == [half_of(policy)] * 2
    # The second starts from zeros: it is f32, and the first takes it over.
    zeros = jnp.zeros((8, 16))
    (loop,) = loops(amp.autocast(lambda w: fn(w, zeros)[0] @ w, policy), W)
    assert results(loop)[:2] in ([half_of(policy), "float32"], ["float32"] * 2)
    assert results(loop)[2:] == ["float32"] * 2


def test_what_a_loop_or_branch_hands_on_is_weakly_typed_if_it_was():
    def fn(w):
        c = lax.fori_loop(0, 3, lambda _, c: c * 2.0, 1.0)
        c = lax.fori_loop(0, w.astype(int)[0, 0], lambda _, c: c * 2.0, c)
        return lax.cond(w[0, 0] < 9, lambda c: c * 2.0, lambda c: 3.0, c)

    jaxpr = jax.make_jaxpr(amp.autocast(fn, F16))(W)
    found = [
        (e.primitive.name, e.outvars[-1].aval.weak_type)
        for e in jaxpr.eqns
        if e.primitive.name in ("scan", "while", "cond")
    ]
    assert found == [("scan", True), ("while", True), ("cond", True)]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_accumulator_of_a_carry_that_turns_half_is_f32(policy):
    def fn(w, x):
        def turn(carry, i):
            # What is added up is f32 before the first turn, and half after it.
            h, total = carry
            return (jnp.tanh(h @ layers[i]), total + h), None

        layers = jnp.stack([w] * 3)
        start = x[jnp.arange(8)], jnp.zeros((8, 16))
        h, total = scan(turn, start, jnp.arange(3000) % 3)[0]
        return h @ w, total

    mixed = amp.autocast(fn, policy)
    (loop,) = loops(mixed, W, X)
    assert results(loop) == [half_of(policy), "float32"]
    # tanh(20) is 1. In bf16 a sum of ones stops at 256, in f16 at 2048.
    _, total = mixed(20 * jnp.eye(16), jnp.ones((8, 16)))
    np.testing.assert_array_equal(total, 3000)


@pytest.mark.parametrize("policy", POLICIES)
def test_carries_that_are_no_f32_are_untouched(policy):
    with jax.enable_x64(True):

        def turn(carry, _):
            h, i, flag, key, z, d, f = carry
            key, _ = jax.random.split(key)
            z = z * jnp.complex64(1j)
            d, f = d * jnp.float64(1 + 2.0**-40), f * jnp.bfloat16(2)
            return (jnp.tanh(h @ W), i + 1, ~flag, key, z, d, f), (i, d)

        start = (
            *(X @ W, jnp.int32(2**24 + 1), True, KEY, jnp.complex64(1)),
            *(jnp.float64(1), jnp.bfloat16(1)),
        )
        fn = functools.partial(scan, turn, start, length=3)
        (loop,) = loops(amp.autocast(fn, policy))
        types = [str(KEY.dtype), "complex64", "float64", "bfloat16"]
        assert results(loop)[1:] == ["int32", "bool", *types, "int32", "float64"]
        found, expected = amp.autocast(fn, policy)(), fn()
        (h, *others), (h32, *others32) = found[0], expected[0]
        jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
        for a, b in zip(others, others32, strict=True):
            assert a.dtype == b.dtype and jnp.all(a == b)
        assert relative_error(h, h32) < ROUNDINGS * eps(policy)


@one_policy
def test_a_while_carries_what_it_was_traced_with(policy):
    (loop,) = loops(amp.autocast(counted_while, policy), W, primitive="while")
    assert results(loop) == ["int32", "float32"]
    rows = dtypes_of(amp.autocast(counted_while, policy), W, primitive="dot_general")
    assert rows == [(half_of(policy),) * 3] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_an_accumulator_counts_further_than_half_precision(policy):
    def mean(w):
        # In bf16 a sum of ones stops at 256, in f16 at 2048.
        def turn(total, x):
            return total + jnp.sum(jnp.tanh(x @ w) ** 2 * 0 + 1.0), None

        return scan(turn, jnp.float32(0), jnp.ones((300, 16)))[0]

    assert amp.autocast(mean, policy)(W) == 300 * 16


@one_policy
@pytest.mark.parametrize("name", ["scan", "fori", "map", "while", "associative"])
def test_the_products_of_a_loop_run_in_half_both_ways(name, policy):
    half = half_of(policy)
    if name == "while":
        fn, derivative = counted_while, lambda f: lambda w: jax.jvp(f, (w,), (w,))
    else:
        program = {"scan": "residual"}.get(name, name)
        fn, derivative = PROGRAMS[program], jax.grad
    rows = dtypes_of(derivative(amp.autocast(fn, policy)), W, primitive="dot_general")
    assert rows and set(rows) == {(half,) * 3}


@one_policy
@pytest.mark.parametrize("name", ["cond", "masked_branch", "unused_operands"])
def test_the_products_of_a_branch_run_in_half_both_ways(name, policy):
    fn = amp.autocast(PROGRAMS[name], policy)
    rows = dtypes_of(jax.grad(fn), W, primitive="dot_general")
    assert rows and set(rows) == {(half_of(policy),) * 3}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("returned", "read_by", "agreed"),
    [
        (("low", "low"), "product", "half"),
        (("low", "full"), "tanh", "float32"),
        (("full", "full"), "tanh", "float32"),
        # Nobody reads what they return in f32.
        (("low", "full"), "product", "half"),
        (("full", "full"), "product", "half"),
        (("low", "free"), "product", "half"),
        (("low", "free"), "tanh", "half"),
        (("full", "free"), "tanh", "float32"),
    ],
)
def test_branches_agree_on_what_they_return(returned, read_by, agreed, policy, swapped):
    def fn(w):
        branches = {
            "low": lambda h: h @ w,
            "full": lambda h: jnp.exp(-jnp.square(h)),
            "free": lambda h: X,
        }
        first, second = (branches[name] for name in returned)
        if swapped:
            first, second = second, first
        h = lax.cond(w[0, 0] > 0, first, second, X @ w)
        return (jnp.tanh(h) if read_by == "tanh" else h) @ w

    (branch,) = loops(amp.autocast(fn, policy), W, primitive="cond")
    assert results(branch) == [agreed.replace("half", half_of(policy))]
    assert results(branch) == [agreed.replace("half", half_of(policy))]
    found, expected = (compiled(f)(W) for f in (amp.autocast(fn, policy), fn))
    assert relative_error(found, expected) < ROUNDINGS * eps(policy)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    "other", [lambda h: h, lambda h: jnp.ones_like(h)], ids=["activation", "constant"]
)
def test_a_branch_that_returns_a_constant_beyond_f16_makes_what_reads_it_f32(
    other, swapped
):
    def fn(w):
        h = X @ w
        branches = lambda h: jnp.full_like(h, 1e6), other
        if swapped:
            c = lax.cond(w[0, 0] > 9, *branches[::-1], h)
        else:
            c = lax.cond(w[0, 0] < 9, *branches, h)
        return (h * c * 1e-6) @ w

    for policy, dtype in ((F16, "float32"), (BF16, "bfloat16")):
        found = amp.autocast(fn, policy)
        assert dtypes_of(found, W, primitive="mul") == [(dtype,) * 3] * 2
        assert relative_error(found(W), fn(W)) < ROUNDINGS * eps(policy)


def test_a_constant_that_grows_from_turn_to_turn_is_taken_to_grow_beyond_f16():
    # 1, 1e3 and 1e6: each of them meets an activation.
    def fn(w):
        def turn(carry, _):
            power, h = carry
            return (power * 1e3, h * power * 1e-3), None

        return scan(turn, (1.0, X @ w), length=3)[0][1] @ w

    mixed = amp.autocast(fn, F16)
    rows = dtypes_of(mixed, W, primitive="mul")
    assert rows and set(rows) == {("float32",) * 3}
    assert relative_error(mixed(W), fn(W)) < ROUNDINGS * eps(F16)
    # One that does not grow stays what it is.
    same = lambda w: scan(  # noqa: E731
        lambda c, w: ((c[0], (c[1] @ w) * c[0]), None), (2.0, X @ w), jnp.stack([W] * 3)
    )[0][1]
    rows = dtypes_of(amp.autocast(lambda w: same(w) @ w, F16), W, primitive="mul")
    assert rows == [("float16",) * 3]


@one_policy
def test_the_stacked_results_of_a_loop_between_products_are_half(policy):
    def fn(w):
        layers = jnp.stack([w] * 3)
        return scan(lambda h, w: (residual(h, w),) * 2, X @ w, layers)[1] @ w

    (loop,) = loops(amp.autocast(fn, policy), W)
    assert results(loop) == [half_of(policy)] * 2


# Gradients of parameters


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_of_a_shared_weight_is_summed_in_f32(policy):
    # 64 turns that each add a gradient of 1: in half precision the sum of the small
    # parts after the large first one is lost.
    xs = np.concatenate([[1.0], np.full(63, 2.0**-9)]).astype(np.float32)

    def fn(w):
        def turn(total, x):
            return total + jnp.sum(x.reshape(1, 1) @ w), None

        return scan(turn, jnp.float32(0), jnp.asarray(xs))[0]

    gradient = jax.grad(amp.autocast(fn, policy))(jnp.ones((1, 1)))
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, np.sum(xs, dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("remat", [False, True])
def test_stacked_parameters_are_cast_inside_the_body(policy, remat):
    def fn(layers):
        body = lambda h, w: (residual(h, w), None)  # noqa: E731
        body = jax.checkpoint(body) if remat else body
        return mean_square(scan(body, X, layers)[0])

    mixed = amp.autocast(fn, policy)
    gradient = jax.grad(mixed)(LAYERS)
    assert gradient.dtype == jnp.float32
    assert relative_error(gradient, jax.grad(fn)(LAYERS)) < ROUNDINGS * eps(policy)
    (loop,) = loops(mixed, LAYERS)
    assert [str(v.aval.dtype) for v in loop.invars if v.aval.shape == (4, 16, 16)] == [
        "float32"
    ]


@one_policy
def test_stacked_parameters_that_are_moved_first_are_cast_inside_the_body(policy):
    def fn(layers):
        layers = layers.reshape(4, 16, 16).swapaxes(1, 2)
        return mean_square(scan(lambda h, w: (residual(h, w), None), X, layers)[0])

    flat = LAYERS.reshape(64, 16)
    (loop,) = loops(amp.autocast(fn, policy), flat)
    assert [str(v.aval.dtype) for v in loop.invars if v.aval.shape == (4, 16, 16)] == [
        "float32"
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_every_turn_of_a_loop_reads_is_cast_there_however_it_was_moved(policy):
    # Cast before the loop, its gradient would be summed up in half precision.
    def fn(flat, xs):
        w = flat.reshape(16, 16).T
        return jnp.sum(
            scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, xs)[0]
        )

    # The terms are 1, and in bf16 the sum of more than 256 of them would not move.
    args = jnp.ones(256), jnp.ones((600, 1, 16))
    mixed = amp.autocast(fn, policy)
    (loop,) = loops(mixed, *args)
    (weights,) = [v.aval for v in loop.invars if v.aval.shape == (16, 16)]
    assert weights.dtype == jnp.float32
    gradient = jax.jit(jax.grad(mixed), compiler_options=EXACTLY_AS_WRITTEN)(*args)
    np.testing.assert_array_equal(gradient, np.full(256, 600.0))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_loop_begins_with_and_goes_through_is_cast_before_it_is_moved(policy):
    # A pipeline: at every turn the next one of the embedded texts comes in.
    def fn(table, positions, w):
        x = table[jnp.arange(24).reshape(3, 8)] + positions[None]
        idle = jnp.broadcast_to(x[-1:], (2, *x.shape[1:]))

        def turn(h, arrived_and_weights):
            arrived, w = arrived_and_weights
            h = jnp.where(h[:1] > 0, h, arrived) @ w
            return h, h

        through = jnp.concatenate([x, idle]), jnp.stack([w] * 5)
        return mean_square(scan(turn, x[0], through)[1])

    args = jax.random.normal(KEY, (24, 16)), X, W
    mixed = amp.autocast(fn, policy)
    half = half_of(policy)
    assert set(results_of(mixed, *args, primitive="concatenate")) == {half}
    (loop,) = loops(mixed, *args)
    carried_and_read = [v.aval for v in loop.invars if v.aval.shape[-2:] == (8, 16)]
    assert len(carried_and_read) == 2
    assert {aval.dtype.name for aval in carried_and_read} == {half}
    gradients, expected = (
        compiled(jax.grad(each, (0, 1, 2)))(*args) for each in (mixed, fn)
    )
    for ours, plain in zip(gradients, expected, strict=True):
        assert ours.dtype == jnp.float32
        assert relative_error(ours, plain) < ROUNDINGS * eps(policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpointed_loop_saves_half_precision(policy):
    def fn(layers):
        body = jax.checkpoint(lambda h, w: (residual(h, w), None))
        return mean_square(scan(body, X @ W, layers)[0])

    _, backward = jax.vjp(amp.autocast(fn, policy), LAYERS)
    saved = [x for x in jax.tree.leaves(backward) if x.shape == (4, 8, 16)]
    assert [x.dtype.name for x in saved] == [half_of(policy)]


# Training inside


def gradient_step(p):
    return p - 1e-3 * jax.grad(lambda p: mean_square(X @ p - 1.0))(p)


def looped(p):
    for _ in range(20):
        p = gradient_step(p)
    return p


def scanned(p):
    return scan(lambda p, _: (gradient_step(p), None), p, length=20)[0]


@pytest.mark.parametrize("train", [looped, scanned])
def test_training_steps_inside_autocast_do_not_lose_their_updates(train):
    # Each update is far below the rounding of a half-precision parameter.
    assert_only_rounded(lambda transform, w: transform(train)(w) - w)


def test_gradients_accumulated_over_a_loop_inside_autocast_are_f32():
    def fn(w):
        def turn(total, x):
            return total + jax.grad(lambda w: mean_square(x[None] @ w))(w), None

        return scan(turn, jnp.zeros((16, 16)), X)[0]

    (loop,) = loops(amp.autocast(fn), W)
    assert results(loop) == ["float32"]
    assert_only_rounded(lambda transform, w: transform(fn)(w))


def test_a_moving_average_of_activations_moves():
    def fn(average, w):
        def turn(average, x):
            return 0.999 * average + 0.001 * jnp.mean(jnp.tanh(x[None] @ w), 0), None

        return scan(turn, average, X)[0]

    average = jnp.ones(16)
    assert_only_rounded(lambda transform, w: transform(fn)(average, w) - average)


# Flax


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        return h + nn.Dense(16)(jnp.tanh(nn.Dense(16)(nn.LayerNorm()(h)))), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        h, _ = scanned(name="layers")(nn.Dense(16)(x), None)
        return nn.Dense(4)(h)


@pytest.mark.parametrize("policy", POLICIES)
def test_scanned_layers_of_linen_have_a_half_residual_stream(policy):
    half, model = half_of(policy), Stack()
    with jax.numpy_dtype_promotion("standard"):
        variables = model.init(KEY, X)

        def fn(variables):
            return mean_square(model.apply(variables, X))

        mixed = amp.autocast(fn, policy)
        found, expected = (
            jax.jit(jax.value_and_grad(f))(variables) for f in (mixed, fn)
        )
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert a.dtype == jnp.float32
            assert relative_error(a, b) < 2 * ROUNDINGS * eps(policy)
        (loop,) = loops(mixed, variables)
        assert results(loop) == [half]
        rows = dtypes_of(jax.grad(mixed), variables, primitive="dot_general")
        assert set(rows) == {(half,) * 3}
        assert set(results_of(mixed, variables, primitive="rsqrt")) == {"float32"}
        _, backward = jax.vjp(mixed, variables)
        saved = [x for x in jax.tree.leaves(backward) if x.shape == (3, 8, 16)]
        assert [x.dtype.name for x in saved] == [half]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "cell",
    [
        nn.LSTMCell,
        pytest.param(nn.GRUCell, marks=pytest.mark.slow),
        pytest.param(nn.SimpleCell, marks=pytest.mark.slow),
    ],
)
def test_the_state_of_a_recurrent_cell_is_f32(cell, policy):
    model = nn.RNN(cell(16))
    sequence = X[None]
    variables = model.init(KEY, sequence)

    def fn(variables):
        return mean_square(model.apply(variables, sequence))

    mixed = amp.autocast(fn, policy)
    found, expected = (jax.jit(jax.value_and_grad(f))(variables) for f in (mixed, fn))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == jnp.float32
        assert relative_error(a, b) < ROUNDINGS * eps(policy)
    (loop,) = loops(mixed, variables)
    carried = results(loop)[: 2 if cell is nn.LSTMCell else 1]
    assert set(carried) == {"float32"}
    rows = dtypes_of(jax.grad(mixed), variables, primitive="dot_general")
    assert set(rows) == {(half_of(policy),) * 3}


@pytest.mark.parametrize("policy", POLICIES)
def test_scanned_layers_of_nnx_are_those_of_f32(policy):
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(key):
        return nnx.Linear(16, 16, rngs=nnx.Rngs(key))

    layers = create(jax.random.split(KEY, 3))
    graph, parameters = nnx.split(layers)

    def fn(parameters):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(h, layer):
            return h + jnp.tanh(layer(h))

        return mean_square(forward(X @ W, nnx.merge(graph, parameters)))

    mixed = amp.autocast(fn, policy)
    found, expected = (jax.jit(jax.grad(f))(parameters) for f in (mixed, fn))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == jnp.float32
        assert relative_error(a, b) < ROUNDINGS * eps(policy)
    rows = dtypes_of(jax.grad(mixed), parameters, primitive="dot_general")
    assert set(rows) == {(half_of(policy),) * 3}
    (loop,) = loops(mixed, parameters)
    assert half_of(policy) in results(loop)


# Transformations of each


CONSTRUCTS = {
    "scan": lambda w: scan(lambda h, _: (residual(h, w), None), X @ w, length=2)[0],
    "zeros_scan": lambda w: zeros_rnn(w)[1],
    "map": lambda w: lax.map(lambda x: layer(x, w), X),
    "associative_scan": lambda w: lax.associative_scan(jnp.multiply, jnp.exp(X @ w)),
    "fori": lambda w: lax.fori_loop(0, 2, lambda _, h: residual(h, w), X @ w),
    "cond": lambda w: lax.cond(w[0, 0] < 9, lambda h: layer(h, w), lambda h: h, X @ w),
    "switch": lambda w: lax.switch(
        (w[0, 0] < 9).astype(int),
        [lambda h: h, lambda h: layer(h, w), lambda h: h * 2.0],
        X @ w,
    ),
    "checkpoint": lambda w: jax.checkpoint(lambda h: layer(h, w))(X @ w),
}


def along(fn):
    """`fn` on a line: functions of one number, so that second derivatives are small."""
    return lambda t: jnp.mean(fn(W * (1 + t)) ** 2)


TRANSFORMATIONS = {
    "vmap": lambda t, f, w: jax.vmap(t(f))(jnp.stack([w, 0.5 * w])),
    "jvp": lambda t, f, w: jax.jvp(t(f), (w,), (w,)),
    "linearize": lambda t, f, w: jax.linearize(t(f), w)[1](w),
    "vjp": lambda t, f, w: jax.vjp(t(f), w)[1](X),
    "jacfwd": lambda t, f, w: jax.jacfwd(t(lambda s: f(w * s)))(jnp.ones((1, 16))),
    "jacrev": lambda t, f, w: jax.jacrev(
        t(lambda s: jnp.mean(f(w * s), axis=0)), has_aux=False
    )(jnp.ones((1, 16))),
    "hessian": lambda t, f, w: jax.hessian(t(lambda s: jnp.mean(f(w * (1 + s)) ** 2)))(
        jnp.float32(0)
    ),
    "inside": lambda t, f, w: t(jax.grad(lambda w: mean_square(f(w))))(w),
    "inside_vmap": lambda t, f, w: t(jax.vmap(f))(jnp.stack([w, 0.5 * w])),
    "inside_vmap_grad": lambda t, f, w: t(
        jax.vmap(jax.grad(lambda w: mean_square(f(w))))
    )(jnp.stack([w, 0.5 * w])),
    "inside_jvp": lambda t, f, w: t(lambda w: jax.jvp(f, (w,), (w,)))(w),
    "inside_linearize": lambda t, f, w: t(lambda w: jax.linearize(f, w)[1](w))(w),
    "jit_inside": lambda t, f, w: t(jax.jit(f))(w),
    "grad_of_vmap": lambda t, f, w: jax.grad(
        lambda w: mean_square(jax.vmap(t(f))(jnp.stack([w, 0.5 * w])))
    )(w),
    "checkpoint_outside": lambda t, f, w: jax.grad(
        lambda w: mean_square(jax.checkpoint(t(f))(w))
    )(w),
    "checkpoint_inside": lambda t, f, w: jax.grad(
        t(lambda w: mean_square(jax.checkpoint(f)(w)))
    )(w),
    "scan_outside": lambda t, f, w: scan(
        lambda c, _: (c + mean_square(t(f)(w)), None), jnp.float32(0), length=2
    )[0],
}


@pytest.mark.parametrize("transformation", sorted(TRANSFORMATIONS))
@pytest.mark.parametrize(
    "name",
    [
        name if name == "scan" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(CONSTRUCTS)
    ],
)
def test_a_transformation_of_it_is_that_of_f32(name, transformation):
    fn, apply = CONSTRUCTS[name], TRANSFORMATIONS[transformation]
    assert_only_rounded(
        lambda transform, w: apply(transform, fn, w), roundings=2 * ROUNDINGS
    )


@one_policy
@pytest.mark.parametrize(
    "name", ["scan", "zeros_scan", "fori", "map", "cond", "switch", "checkpoint"]
)
def test_twice_is_once(name, policy):
    once = amp.autocast(CONSTRUCTS[name], policy)
    twice = amp.autocast(once, policy)
    assert str(jax.make_jaxpr(twice)(W)) == str(jax.make_jaxpr(once)(W))


@pytest.mark.parametrize("name", ["while", "while_in_scan"])
def test_twice_is_once_in_loops_without_a_known_length(name):
    once = amp.autocast(FORWARD_PROGRAMS[name], F16)
    twice = amp.autocast(once, F16)
    assert str(jax.make_jaxpr(twice)(W)) == str(jax.make_jaxpr(once)(W))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_an_f32_policy_changes_nothing(name):
    fn = PROGRAMS[name]
    found = jax.jit(jax.value_and_grad(amp.autocast(fn, "float32")))(W)
    expected = jax.jit(jax.value_and_grad(fn))(W)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# Effects and donation


def test_a_callback_in_a_body_runs_once_a_turn_and_sees_f32():
    seen = []

    def body(h, i):
        h = layer(h, W)
        jax.debug.callback(lambda i, v: seen.append((int(i), v.dtype.name)), i, h)
        return h, None

    fn = amp.autocast(lambda x: scan(body, x @ W, jnp.arange(3))[0], BF16)
    jax.block_until_ready(jax.jit(fn)(X))
    jax.effects_barrier()
    assert sorted(seen) == [(0, "float32"), (1, "float32"), (2, "float32")]


def test_donated_arguments_of_an_inner_jit_stay_donated():
    step = jax.jit(lambda h, w: residual(h, w), donate_argnums=0)

    def fn(w):
        return scan(lambda h, _: (step(h, w), None), X @ w, length=3)[0]

    calls = loops(amp.autocast(fn, BF16), W, primitive="jit")
    calls = calls or loops(amp.autocast(fn, BF16), W, primitive="pjit")
    assert [e.params["donated_invars"] for e in calls] == [(True, False)]


def test_the_options_of_a_loop_survive():
    def fn(w):
        return scan(
            lambda h, x: (layer(h, w) + x, h), X[0] @ w, X, reverse=True, unroll=4
        )

    (loop,) = loops(amp.autocast(fn, BF16), W)
    assert loop.params["reverse"] and loop.params["unroll"] == 4
    assert loop.params["length"] == 8


def test_a_body_that_is_called_often_is_staged_once():
    body = jax.jit(lambda h, w: (residual(h, w), None))

    def fn(w):
        h = X @ w
        for _ in range(5):
            h, _ = lax.scan(lambda h, _: body(h, w), h, None, length=2)
        return h @ w

    inner = loops(amp.autocast(fn, BF16), W, primitive="jit")
    inner = inner or loops(amp.autocast(fn, BF16), W, primitive="pjit")
    assert len(inner) == 5
