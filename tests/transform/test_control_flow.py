"""Loops and branches under `autocast`: what they carry, and in which dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jmp_amp as amp
from tests import rounding
from tests.constructs.branches import layer
from tests.constructs.loops import LAYERS, counted_while, residual, scan
from tests.measures import EXACTLY_AS_WRITTEN
from tests.programs import dtypes_of, equations, products, results_of, saved
from tests.rounding import (
    BF16,
    F16,
    KEY,
    POLICIES,
    ROUNDINGS,
    W,
    X,
    eps,
    half_of,
    mean_square,
    relative_error,
)

HALF = "bfloat16"
# Which half it is matters where a constant does not fit: `test_every_construct.py` has
# both for every construct.
assert_only_rounded = functools.partial(rounding.assert_only_rounded, policies=[F16])

# What is carried in which dtype


def loops(fn, *args, primitive="scan"):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [e for e in equations(jaxpr) if e.primitive.name == primitive]


def results(eqn):
    return [str(v.aval.dtype) for v in eqn.outvars]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("start", "carried"),
    [
        (lambda w, x: x @ w, HALF),
        (lambda w, x: w[jnp.arange(8)], HALF),  # as an embedding is looked up
        (lambda w, x: w[jnp.arange(8)] + x, HALF),  # and a position added
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
def test_a_carry_is_half_if_a_product_or_a_lookup_began_it(start, carried):
    def fn(w, x):
        layers = jnp.stack([w] * 3)
        return scan(lambda h, w: (residual(h, w), None), start(w, x), layers)[0] @ w

    (loop,) = loops(amp.autocast(fn, BF16), W, X)
    assert results(loop) == [carried]


def test_a_carry_that_meets_a_full_value_is_f32():
    def fn(w):
        return scan(lambda h, _: (h + jnp.exp(-(h @ w)), None), X @ w, length=3)[0] @ w

    (loop,) = loops(amp.autocast(fn, BF16), W)
    assert results(loop) == ["float32"]


def test_carries_that_feed_each_other_are_settled_together():
    def turn(carry, w):
        a, b, c, d = carry
        return (b @ w, jnp.tanh(a), d + 1.0, c * 2.0), None

    def fn(w, start):
        layers = jnp.stack([w] * 4)
        return scan(turn, (X @ w, start, jnp.zeros(()), X[0, 0]), layers)[0]

    (loop,) = loops(amp.autocast(lambda w: fn(w, X @ w)[0] @ w, BF16), W)
    assert results(loop)[:2] == [HALF] * 2
    # The second starts from zeros: it is f32, and the first takes it over.
    zeros = jnp.zeros((8, 16))
    (loop,) = loops(amp.autocast(lambda w: fn(w, zeros)[0] @ w, BF16), W)
    assert results(loop)[:2] in ([HALF, "float32"], ["float32"] * 2)
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
    _, total = jax.jit(mixed)(20 * np.eye(16, dtype=np.float32), np.ones_like(X))
    np.testing.assert_array_equal(total, 3000)


def test_carries_that_are_no_f32_are_untouched():
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
        (loop,) = loops(amp.autocast(fn, BF16))
        types = [str(KEY.dtype), "complex64", "float64", "bfloat16"]
        assert results(loop)[1:] == ["int32", "bool", *types, "int32", "float64"]
        found, expected = (jax.jit(each)() for each in (amp.autocast(fn, BF16), fn))
        (h, *others), (h32, *others32) = found[0], expected[0]
        jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
        for a, b in zip(others, others32, strict=True):
            assert a.dtype == b.dtype and jnp.all(a == b)
        assert relative_error(h, h32) < ROUNDINGS * eps(BF16)


def test_a_while_carries_what_it_was_traced_with():
    fn = amp.autocast(lambda w: counted_while(w) @ w, BF16)
    (loop,) = loops(fn, W, primitive="while")
    assert results(loop) == ["int32", "float32"]
    rows = dtypes_of(fn, W, primitive="dot_general")
    assert rows == [(HALF,) * 3] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_an_accumulator_counts_further_than_half_precision(policy):
    def mean(w):
        # In bf16 a sum of ones stops at 256, in f16 at 2048.
        def turn(total, x):
            return total + jnp.sum(jnp.tanh(x @ w) ** 2 * 0 + 1.0), None

        return scan(turn, jnp.float32(0), jnp.ones((300, 16)))[0]

    assert amp.autocast(mean, policy)(W) == 300 * 16


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("returned", "read_by", "agreed"),
    [
        (("low", "low"), "product", "bfloat16"),
        (("low", "full"), "tanh", "float32"),
        (("full", "full"), "tanh", "float32"),
        # Nobody reads what they return in f32.
        (("low", "full"), "product", "bfloat16"),
        (("full", "full"), "product", "bfloat16"),
        (("low", "free"), "product", "bfloat16"),
        (("low", "free"), "tanh", "bfloat16"),
        (("full", "free"), "tanh", "float32"),
    ],
)
def test_branches_agree_on_what_they_return(returned, read_by, agreed):
    def fn(w, swapped):
        branches = {
            "low": lambda h: h @ w,
            "full": lambda h: jnp.exp(-jnp.square(h)),
            "free": lambda h: X,
        }
        names = returned[::-1] if swapped else returned
        h = lax.cond(w[0, 0] > 0, *(branches[name] for name in names), X @ w)
        return (jnp.tanh(h) if read_by == "tanh" else h) @ w

    for swapped in {False, returned[0] != returned[1]}:
        either = functools.partial(fn, swapped=swapped)
        (branch,) = loops(amp.autocast(either), W, primitive="cond")
        assert results(branch) == [agreed]
        assert_only_rounded(lambda transform, w, fn=either: transform(fn)(w))


@pytest.mark.breadth(2)
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

    for policy in (F16, BF16):
        found = amp.autocast(fn, policy)
        assert dtypes_of(found, W, primitive="mul") == [("float32",) * 3] * 2
        both = (jax.jit(each)(W) for each in (found, fn))
        assert relative_error(*both) < ROUNDINGS * eps(policy)


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
    found, expected = (jax.jit(each)(W) for each in (mixed, fn))
    assert relative_error(found, expected) < ROUNDINGS * eps(F16)
    # One that does not grow stays what it is.
    same = lambda w: scan(  # noqa: E731
        lambda c, w: ((c[0], (c[1] @ w) * c[0]), None), (2.0, X @ w), jnp.stack([W] * 3)
    )[0][1]
    rows = dtypes_of(amp.autocast(lambda w: same(w) @ w, F16), W, primitive="mul")
    assert rows == [("float16",) * 3]


def test_the_stacked_results_of_a_loop_between_products_are_half():
    def fn(w):
        layers = jnp.stack([w] * 3)
        return scan(lambda h, w: (residual(h, w),) * 2, X @ w, layers)[1] @ w

    (loop,) = loops(amp.autocast(fn, BF16), W)
    assert results(loop) == [HALF] * 2


# Gradients of parameters


@pytest.mark.parametrize("product", [jnp.matmul, amp.cast_inputs(jnp.matmul)])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_of_a_shared_weight_is_summed_in_f32(policy, product):
    # 64 turns that each add a gradient of 1: in half precision the sum of the small
    # parts after the large first one is lost.
    xs = np.concatenate([[1.0], np.full(63, 2.0**-9)]).astype(np.float32)

    def fn(w):
        def turn(total, x):
            return total + jnp.sum(product(x.reshape(1, 1), w)), None

        return scan(turn, jnp.float32(0), xs)[0]

    gradient = jax.jit(jax.grad(amp.autocast(fn, policy)))(np.ones((1, 1), np.float32))
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, np.sum(xs, dtype=np.float64), rtol=1e-6)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("remat", [False, True])
def test_stacked_parameters_are_cast_inside_the_body(remat):
    def fn(layers):
        body = lambda h, w: (residual(h, w), None)  # noqa: E731
        body = jax.checkpoint(body) if remat else body
        return mean_square(scan(body, X, layers)[0])

    # Gradients too are f32, as the parameters are.
    assert_only_rounded(
        lambda transform, layers: jax.grad(transform(fn))(layers), args=LAYERS
    )
    (loop,) = loops(amp.autocast(fn), LAYERS)
    assert [str(v.aval.dtype) for v in loop.invars if v.aval.shape == (4, 16, 16)] == [
        "float32"
    ]


def test_stacked_parameters_that_are_moved_first_are_cast_inside_the_body():
    def fn(layers):
        layers = layers.reshape(4, 16, 16).swapaxes(1, 2)
        return mean_square(scan(lambda h, w: (residual(h, w), None), X, layers)[0])

    flat = LAYERS.reshape(64, 16)
    (loop,) = loops(amp.autocast(fn, BF16), flat)
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


def test_what_a_loop_begins_with_and_goes_through_is_cast_before_it_is_moved():
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
    mixed = amp.autocast(fn)
    assert set(results_of(mixed, *args, primitive="concatenate")) == {"bfloat16"}
    (loop,) = loops(mixed, *args)
    carried_and_read = [v.aval for v in loop.invars if v.aval.shape[-2:] == (8, 16)]
    assert len(carried_and_read) == 2
    assert {aval.dtype.name for aval in carried_and_read} == {"bfloat16"}
    assert_only_rounded(
        lambda transform, *args: jax.grad(transform(fn), (0, 1, 2))(*args), args=args
    )


def test_a_checkpointed_loop_saves_half_precision():
    def fn(layers):
        body = jax.checkpoint(lambda h, w: (residual(h, w), None))
        return mean_square(scan(body, X @ W, layers)[0])

    assert saved(amp.autocast(fn), LAYERS, (4, 8, 16)) == ["bfloat16"]


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


@pytest.mark.slow
def test_scanned_layers_of_linen_have_a_half_residual_stream():
    model = Stack()
    with jax.numpy_dtype_promotion("standard"):
        variables = jax.jit(model.init)(KEY, X)

        def fn(variables):
            return mean_square(model.apply(variables, X))

        assert_only_rounded(
            lambda transform, v: jax.value_and_grad(transform(fn))(v),
            roundings=2 * ROUNDINGS,
            args=variables,
        )
        mixed = amp.autocast(fn)
        (loop,) = loops(mixed, variables)
        assert results(loop) == ["bfloat16"]
        assert set(products(jax.grad(mixed), variables)) == {"bfloat16"}
        assert set(results_of(mixed, variables, primitive="rsqrt")) == {"float32"}
        assert saved(mixed, variables, (3, 8, 16)) == ["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        nn.LSTMCell,
        pytest.param(nn.GRUCell, marks=pytest.mark.slow),
        pytest.param(nn.SimpleCell, marks=pytest.mark.slow),
    ],
)
def test_the_state_of_a_recurrent_cell_is_f32(cell):
    model = nn.RNN(cell(16))
    sequence = X[None]
    variables = jax.jit(model.init)(KEY, sequence)

    def fn(variables):
        return mean_square(model.apply(variables, sequence))

    assert_only_rounded(
        lambda transform, v: jax.value_and_grad(transform(fn))(v), args=variables
    )
    mixed = amp.autocast(fn)
    (loop,) = loops(mixed, variables)
    carried = results(loop)[: 2 if cell is nn.LSTMCell else 1]
    assert set(carried) == {"float32"}
    assert set(products(jax.grad(mixed), variables)) == {"bfloat16"}


def test_scanned_layers_of_nnx_are_those_of_f32():
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

    assert_only_rounded(
        lambda transform, p: jax.grad(transform(fn))(p), args=parameters
    )
    mixed = amp.autocast(fn)
    assert set(products(jax.grad(mixed), parameters)) == {"bfloat16"}
    (loop,) = loops(mixed, parameters)
    assert "bfloat16" in results(loop)


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
