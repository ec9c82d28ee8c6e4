"""What runs in f32 whole: solvers, sums, linear algebra; sums over many turns.

Programs of these kinds are measured in `tests/idioms`: solvers, algebra, precision.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from tests.programs import (
    BF16,
    F16,
    F32,
    HALF,
    check_plan,
    each_plan,
    equations,
    plans,
    products,
    reason_of,
)
from tests.rounding import F16 as MIXED_F16
from tests.rounding import KEY, POLICIES, W, X

each_policy = pytest.mark.parametrize("policy", POLICIES)


def with_the_flag_of_the_turn_before(x, w):
    def turn(carry):
        y, (_, is_far), count = carry
        new = 0.5 * jnp.tanh(y @ w) + x
        return new, (is_far, jnp.max(abs(new - y)) > 1e-5), count + 1

    return lax.while_loop(lambda c: c[1][0], turn, (x, (True, True), 0))


@pytest.mark.breadth(1)
@each_policy
def test_a_solver_runs_in_f32_and_stops(policy):
    solve = with_the_flag_of_the_turn_before
    assert products(amp.autocast(solve, policy), X, W) == ["float32"]
    y, _, count = jax.jit(amp.autocast(solve, policy))(X, W)
    expected, _, turns = jax.jit(solve)(X, W)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert count == turns < 100
    text = "a solver: its condition reads a float of its body"
    assert reason_of(solve, X, W, operation="dot_general") == text


def until(goes_on, told, first):
    """A loop of a layer, and of what is told of it."""

    def fn(x, w):
        def turn(carry):
            h = jnp.tanh(carry[0] @ w)
            return h, told(h, carry[1])

        return lax.while_loop(lambda c: goes_on(c[1]), turn, (x, first))[0]

    return plans(fn, dot_general=[HALF])


def counted(loop):
    """Layers of what a loop picks by its counter."""

    def fn(x, w):
        return loop(lambda i, total: total + jnp.tanh(x[i] @ w), jnp.zeros(16))

    return plans(fn, half=F16, dot_general=[F16])


def while_it_counts(turn, start):
    step = lambda c: (c[0] + 1, turn(*c))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 8, step, (0, start))[1]


def of(product, *dtypes, args=(W,)):
    """The dtypes of the products of a program of a matrix."""
    return plans(product, *args, dot_general=[*dtypes])


def layers(w, scale):
    """Quantisation in training rounds what every layer makes."""
    return jnp.round(jnp.round(w @ w * scale) @ w)


def pixels(w):
    grid = jnp.linspace(-1.0, 1.0, len(w))
    return jnp.floor((w @ w) @ jnp.stack([grid, grid**2], 1))


def numbers_in_half(w):
    numbers = jnp.arange(len(w) * 64.0, dtype=jnp.bfloat16)
    return w.astype(jnp.bfloat16) @ numbers[: len(w), None]


def experts(x, w):
    return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([300, 700])) @ w


def expected_number(w):
    return jax.nn.softmax(w @ w) @ jnp.linspace(-10.0, 10.0, len(w))[:, None]


def noisy(draw):
    return lambda w, key: jnp.tanh((w + draw(key, w.shape)) @ draw(key, w.shape))


def uniform(key, shape):
    return jax.random.uniform(key, shape, minval=-3.0, maxval=5.0)


def student(key, shape):
    return jax.random.t(key, 3.0, shape)


def decayed(x, w):
    decay = jax.nn.sigmoid(x @ w)

    def after(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    return lax.associative_scan(after, (decay, decay))[1] @ w


def chained(w):
    return lax.associative_scan(jnp.matmul, jnp.stack([w @ w] * 4)) @ w


def resized(x, w):
    return jax.image.resize(x @ w, (16, 32), "bilinear") @ jnp.ones((32, 4))


PLANNED = {
    # No solver: it counts, or waits for a token.
    "a loop that counts": until(lambda n: n < 3, lambda h, n: n + 1, 0),
    "a loop that counts in floats": until(lambda t: t < 1.0, lambda h, t: t + 0.3, 0.0),
    "a loop that waits for a token": until(
        lambda token: token != 3, lambda h, _: jnp.argmax(h[0]), 0
    ),
    "a loop while all is finite": until(
        lambda is_nan: ~is_nan, lambda h, _: jnp.any(h != h), True
    ),
    "a loop that waits for a number": until(
        lambda n: n > 3, lambda h, _: jnp.sum(h > 0.5), 9
    ),
    "the counter of a for loop is no size of what it picks": counted(
        lambda turn, start: lax.fori_loop(0, 8, turn, start)
    ),
    "the counter of a while loop is none": counted(while_it_counts),
    # A product without a free dimension is a sum.
    "vdot": of(lambda w: jnp.vdot(w, w), F32),
    "a product of vectors": of(lambda w: w.ravel() @ w.ravel(), F32),
    "a product of rows": of(lambda w: jnp.einsum("bi,bi->b", w, w), F32),
    "a matrix and a vector": of(lambda w: w @ w[0], HALF),
    "one by one": of(lambda w: w[:1] @ w[:, :1], HALF),
    "vectors of a batch": of(
        lambda w: jnp.einsum("bi,bij->bj", w, w[:, None] * w[None]), HALF
    ),
    # One without terms to add, as `*`: of parameters and inputs alone as traced, of
    # activations half.
    "rows that are scaled": of(lambda w: jnp.einsum("i,ij->ij", w[0], w), F32),
    "an outer product of activations": of(
        lambda w: jnp.einsum("bi,bj->bij", w @ w, w @ w) @ w, *[HALF] * 4
    ),
    "frequencies that are an argument": of(
        lambda n, f: n.astype(jnp.float32)[:, None] @ f[None],
        F32,
        args=(jnp.arange(4), W[0]),
    ),
    "a layer of one feature": of(lambda w: w[:, :1] @ w[:1], HALF),
    "a layer of one activation": of(lambda w: (w @ w)[:, :1] @ w[:1], HALF, HALF),
    # What a gradient penalty differentiates: the cotangents of a score are 1.
    "a score": of(jax.grad(lambda w: jnp.sum(jnp.tanh(w) @ w[0])), HALF, HALF),
    "scores": of(jax.grad(lambda w: jnp.sum(jnp.tanh(w) @ w[:, :1])), HALF, HALF),
    # Products that are places
    "a product that is rounded": of(layers, HALF, HALF, args=(W, jnp.float32(8))),
    "one that is rounded with a constant in it": of(pixels, HALF, F32),
    "numbers that the program has in half": plans(
        numbers_in_half, W, half=BF16, dot_general=[BF16]
    ),
    "the sizes of groups are no places": plans(
        experts, jnp.ones((1000, 16)), W, ragged_dot_general=[HALF]
    ),
    "a table of small numbers": of(expected_number, HALF, HALF),
    # Noise that the program draws is no grid.
    "normal noise": of(noisy(jax.random.normal), HALF, args=(W, KEY)),
    "uniform noise": of(noisy(uniform), HALF, args=(W, KEY)),
    "noise of Student": of(noisy(student), HALF, args=(W, KEY)),
    # Functions of libraries
    "linalg.matmul": of(lambda w: jnp.linalg.matmul(w, w), HALF),
    "linalg.multi_dot": of(lambda w: jnp.linalg.multi_dot([w, w, w]), HALF, HALF),
    "linalg.tensordot": of(lambda w: jnp.linalg.tensordot(w, w, axes=1), HALF),
    "linalg.outer": of(lambda w: jnp.linalg.outer(w[0], w[1]) @ w, HALF),
    "an associative scan is f32": plans(decayed, mul={F32}, add={F32}),
    "but for its products": plans(chained, W, dot_general={HALF}),
    "the default precision of a resized image is no wish": plans(
        resized, dot_general=[HALF] * 4
    ),
}


@each_plan(PLANNED)
def test_planned(row, half):
    check_plan(row, half)


@pytest.mark.parametrize(
    "fn",
    [
        with_the_flag_of_the_turn_before,
        lambda x, w: jnp.einsum("i,j->ij", x[0], w[0]),
    ],
    ids=["solver", "multiplication"],
)
def test_a_policy_that_names_the_product_decides(fn):
    policy = amp.Policy(compute_dtype="bfloat16", low=("dot_general",))
    assert products(amp.autocast(fn, policy), X, W) == ["bfloat16"]


# Multiplications that are spelled as products: rotary embeddings, noise levels
POSITIONS = np.arange(2000, dtype=np.float32)
FREQUENCIES = 1e4 ** -np.linspace(0, 1, 8, dtype=np.float32)


def mixed(x, y):
    """The product of integers and floats, as `jnp.einsum` binds it."""
    dimensions = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)


TABLES = {
    "einsum": lambda p, f: jnp.einsum("i,j->ij", p, f),
    "tensordot": lambda p, f: jnp.tensordot(p, f, 0),
    "matmul": lambda p, f: p[:, None] @ f[None],
    "batched": lambda p, f: (f[None, :, None] @ p[None, None])[0].T,
    "integers": lambda p, f: mixed(p.astype(jnp.int32)[:, None], f[None]),
}


@pytest.mark.breadth(2)
@each_policy
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_angles_have_all_their_digits_however_they_are_spelled(table, policy):
    def angles(positions):
        return jnp.sin(table(positions.astype(jnp.float32), jnp.asarray(FREQUENCIES)))

    exact = np.sin(np.outer(POSITIONS, FREQUENCIES).astype(np.float64))
    got = jax.jit(amp.autocast(angles, policy))(jnp.arange(2000))
    np.testing.assert_allclose(got, exact, atol=2e-4)


def test_constants_that_a_product_makes_too_large_are_known():
    def scaled(x, w):
        numbers = jnp.array([1.0, 2.0, 1e3, 2e3])
        return (x @ w)[:, :4] * jnp.einsum("i,i->i", numbers, numbers)[None]

    got = jax.jit(amp.autocast(scaled, MIXED_F16))(X, W)
    np.testing.assert_allclose(got, scaled(X, W), rtol=0.01, atol=2e-3 * 4e6)
    assert reason_of(scaled, X, W, operation="mul", policy=MIXED_F16).startswith(
        "the constant 4e+06 overflows"
    )


# Products that are places


@pytest.mark.breadth(2)
@each_policy
@pytest.mark.parametrize(
    "row",
    [
        lambda rows, numbers: (rows @ numbers).astype(jnp.int32),
        lambda rows, numbers: jnp.einsum("bn,n->b", rows, numbers),
        lambda rows, numbers: jnp.round(numbers @ rows.T),
        lambda rows, numbers: mixed(rows.astype(jnp.int32), numbers),
        lambda rows, numbers: mixed(rows > 0, numbers),
        lambda rows, numbers: mixed(rows, numbers.astype(jnp.int32)),
        lambda rows, numbers: (jnp.tril(jnp.ones((2400, 2400))) @ jnp.ones(2400))[
            jnp.argmax(rows, -1) - 1
        ].astype(jnp.int32),
    ],
    ids="cast returned rounded integers flags grid counted".split(),
)
def test_one_hot_rows_times_numbers_are_the_numbers(row, policy):
    wanted = np.arange(2049, 2061)
    rows = jnp.asarray(np.eye(2400, dtype=np.float32)[wanted])

    def fn(rows):
        return row(rows, jnp.arange(2400, dtype=jnp.float32))

    np.testing.assert_array_equal(jax.jit(amp.autocast(fn, policy))(rows), wanted)


def test_a_table_that_integers_make_is_a_place_too():
    def fn(labels, numbers):
        rows = jax.nn.one_hot(labels, 512)
        return (rows @ numbers.astype(jnp.float32)).astype(jnp.int32)

    labels = jnp.arange(500, 508)
    got = jax.jit(amp.autocast(fn))(labels, jnp.arange(1000, 1512))
    np.testing.assert_array_equal(got, np.arange(1500, 1508))


@pytest.mark.breadth(1)
@each_policy
@pytest.mark.parametrize("seed", range(2))
def test_a_histogram_counts_every_value(seed, policy):
    x, w = (jax.random.normal(jax.random.key(i), (8, 8)) for i in (seed, seed + 9))
    counts, edges = jax.jit(
        amp.autocast(lambda x, w: jnp.histogram(abs(x @ w) * 0.5 + 0.5), policy)
    )(x, w)
    assert counts.sum() == 64 and edges.dtype == jnp.float32


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "function",
    [
        jax.scipy.linalg.expm,
        jnp.linalg.pinv,
        lambda w: jnp.linalg.lstsq(w, w[:, :2])[0],
        lambda w: jnp.linalg.matrix_power(w, 5),
        lambda w: jnp.polyfit(w[0], w[1], 3),
        lambda w: jax.scipy.linalg.solve_sylvester(w, w, w),
        lambda w: jax.scipy.special.betaln(w, w),
    ],
    ids="expm pinv lstsq matrix_power polyfit solve_sylvester betaln".split(),
)
def test_linear_algebra_and_series_run_in_f32_whole(function):
    jaxpr = jax.make_jaxpr(amp.autocast(function, MIXED_F16))(W)
    assert "f16[" not in str(jaxpr)


@pytest.mark.parametrize("wish", ["high", "highest"])
def test_a_precision_that_is_asked_for_is_obeyed(wish):
    def fn(x, w):
        return jnp.dot(x, w, precision=wish) @ w

    # The user's names win.
    low = amp.Policy(compute_dtype="bfloat16", low=("dot_general",))
    assert products(amp.autocast(fn), X, W) == ["float32", "bfloat16"]
    assert products(amp.autocast(fn, low), X, W) == ["bfloat16"] * 2
    report = amp.explain(fn)(X, W)
    first = next(e for e in report.equations if e.matmuls)
    assert first.reason == f"precision={wish.upper()} was asked for"
    costs = {row.reason: row.flops for row in report.stays_full}
    assert costs[first.reason] == 2 * 8 * 16 * 16

    def default(x, w):
        return jnp.dot(x, w, precision="default")

    assert products(amp.autocast(default), X, W) == ["bfloat16"]
    # The precision around the program is no wish of a product.
    with jax.default_matmul_precision(wish):
        assert products(amp.autocast(lambda x, w: x @ w), X, W) == ["bfloat16"]


# What is read in every turn, and where


def test_gradients_of_a_half_value_that_many_turns_read_are_added_up_in_f32():
    def loss(turns):
        def fn(w):
            mixing = w @ w  # a half value: the loop does not cast it turn by turn

            def turn(h, _):
                return jnp.tanh(h @ mixing) * 0.5 + X, None

            return jnp.mean(lax.scan(turn, X, length=turns)[0] ** 2)

        return fn

    def carried_back(turns, policy):
        jaxpr = jax.make_jaxpr(jax.grad(amp.autocast(loss(turns), policy)))(W)
        loops = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
        outputs = [v.aval for v in loops[-1].outvars if v.aval.shape == (16, 16)]
        return {aval.dtype.name for aval in outputs}

    # In bf16 17 roundings are wrong by up to 17 * 2^-8, more than 1/16.
    assert carried_back(8, "mixed_bfloat16") == {"bfloat16"}
    assert carried_back(100, "mixed_bfloat16") == {"float32"}
    assert carried_back(100, MIXED_F16) == {"float16"}
    assert carried_back(200, MIXED_F16) == {"float32"}


def test_a_primitive_in_a_policy_is_no_function_of_the_user():
    def square(w):
        return w @ w

    def twice(w):
        return w @ w

    policy = amp.Policy(compute_dtype="bfloat16", full=("square",))
    assert products(amp.autocast(square, policy), W) == ["bfloat16"]
    assert products(amp.autocast(lambda w: square(w), policy), W) == ["bfloat16"]
    policy = policy.with_full("twice")
    assert products(amp.autocast(lambda w: twice(w), policy), W) == ["float32"]
