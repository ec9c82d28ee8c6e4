"""What runs in f32 whole: solvers, sums, linear algebra; sums over many turns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from tests.programs import (
    dtypes_of,
    equations,
    planned,
    products,
    reason_of,
    results_of,
)
from tests.rounding import BF16, F16, KEY, POLICIES, W, X

STATE = jax.random.normal(jax.random.key(2), (16, 16))
each_policy = pytest.mark.parametrize("policy", POLICIES)


# Solvers


def fixed_point(x, w):
    def is_far(carry):
        y, old, _ = carry
        return jnp.max(abs(y - old)) > 1e-5

    def turn(carry):
        y, _, count = carry
        return 0.5 * jnp.tanh(y @ w) + x, y, count + 1

    return lax.while_loop(is_far, turn, (x, x + 1.0, 0))


def with_a_flag(x, w):
    def turn(carry):
        y, _, count = carry
        new = 0.5 * jnp.tanh(y @ w) + x
        is_far = jax.jit(lambda a, b: jnp.logical_not(jnp.all(abs(a - b) < 1e-5)))
        return new, jnp.logical_and(is_far(new, y), count < 100), count + 1

    return lax.while_loop(lambda c: c[1], turn, (x, True, 0))


def with_the_flag_of_the_turn_before(x, w):
    def turn(carry):
        y, (_, is_far), count = carry
        new = 0.5 * jnp.tanh(y @ w) + x
        return new, (is_far, jnp.max(abs(new - y)) > 1e-5), count + 1

    return lax.while_loop(lambda c: c[1][0], turn, (x, (True, True), 0))


@pytest.mark.breadth(2)
@each_policy
@pytest.mark.parametrize(
    "solve", [fixed_point, with_a_flag, with_the_flag_of_the_turn_before]
)
def test_a_solver_runs_in_f32_and_stops(solve, policy):
    assert products(amp.autocast(solve, policy), X, W) == ["float32"]
    y, _, count = jax.jit(amp.autocast(solve, policy))(X, W)
    expected, _, turns = jax.jit(solve)(X, W)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert count == turns < 100
    text = "a solver: its condition reads a float of its body"
    assert reason_of(solve, X, W, operation="dot_general") == text


def test_a_loop_that_counts_or_waits_for_a_token_is_no_solver():
    def counts(x, w):
        return lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x)
        )[1]

    def counts_in_floats(x, w):
        return lax.while_loop(
            lambda c: c[0] < 1.0, lambda c: (c[0] + 0.3, jnp.tanh(c[1] @ w)), (0.0, x)
        )[1]

    def decodes(x, w):
        def turn(carry):
            h, _ = carry
            h = jnp.tanh(h @ w)
            return h, jnp.argmax(h[0])

        return lax.while_loop(lambda c: c[1] != 3, turn, (x, jnp.argmax(x[0])))[0]

    def while_finite(x, w):
        def turn(carry):
            h, _ = carry
            h = jnp.tanh(h @ w)
            return h, jnp.any(h != h)

        return lax.while_loop(lambda c: ~c[1], turn, (x, True))[0]

    def waits_for_a_number(x, w):
        def turn(carry):
            h, _ = carry
            h = jnp.tanh(h @ w)
            return h, jnp.sum(h > 0.5)

        return lax.while_loop(lambda c: c[1] > 3, turn, (x, 9))[0]

    loops = (counts, counts_in_floats, decodes, while_finite, waits_for_a_number)
    for fn in loops:
        assert products(amp.autocast(fn), X, W) == ["bfloat16"], fn.__name__


def test_a_policy_that_names_the_product_decides_in_a_solver_too():
    policy = amp.Policy(compute_dtype="bfloat16", low=("dot_general",))
    assert products(amp.autocast(fixed_point, policy), X, W) == ["bfloat16"]


# Products that are none, functions that are f32 whole, wishes


@pytest.mark.parametrize(
    ("product", "dtype"),
    [
        (lambda w: jnp.vdot(w, w), "float32"),
        (lambda w: w.ravel() @ w.ravel(), "float32"),
        (lambda w: jnp.einsum("bi,bi->b", w, w), "float32"),
        (lambda w: w @ w[0], "bfloat16"),
        (lambda w: w[:1] @ w[:, :1], "bfloat16"),
        (lambda w: jnp.einsum("bi,bij->bj", w, w[:, None] * w[None]), "bfloat16"),
    ],
    ids="vdot ravel rows matvec one_by_one batched".split(),
)
def test_a_product_without_a_free_dimension_is_a_sum(product, dtype):
    assert products(amp.autocast(product), W) == [dtype]


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


@pytest.mark.parametrize(
    ("product", "dtypes"),
    [
        # As `*`: of parameters and inputs alone as traced, of activations half.
        (lambda w: jnp.einsum("i,ij->ij", w[0], w), ["float32"]),
        (lambda w: jnp.einsum("bi,bj->bij", w @ w, w @ w) @ w, ["bfloat16"] * 4),
        # A layer of one feature.
        (lambda w: w[:, :1] @ w[:1], ["bfloat16"]),
        (lambda w: (w @ w)[:, :1] @ w[:1], ["bfloat16"] * 2),
        # What a gradient penalty differentiates: the cotangents of a score are 1.
        (jax.grad(lambda w: jnp.sum(jnp.tanh(w) @ w[0])), ["bfloat16"] * 2),
        (jax.grad(lambda w: jnp.sum(jnp.tanh(w) @ w[:, :1])), ["bfloat16"] * 2),
    ],
    ids=("scaled outer_of_activations one_feature one_activation score scores".split()),
)
def test_a_product_without_terms_to_add_is_planned_as(product, dtypes):
    assert products(amp.autocast(product), W) == dtypes


def test_frequencies_may_be_an_argument():
    def angles(positions, frequencies):
        return positions.astype(jnp.float32)[:, None] @ frequencies[None]

    assert products(amp.autocast(angles), jnp.arange(4), W[0]) == ["float32"]


def test_constants_that_a_product_makes_too_large_are_known():
    def scaled(x, w):
        numbers = jnp.array([1.0, 2.0, 1e3, 2e3])
        return (x @ w)[:, :4] * jnp.einsum("i,i->i", numbers, numbers)[None]

    got = jax.jit(amp.autocast(scaled, F16))(X, W)
    np.testing.assert_allclose(got, scaled(X, W), rtol=0.01, atol=2e-3 * 4e6)
    assert reason_of(scaled, X, W, operation="mul", policy=F16).startswith(
        "the constant 4e+06 overflows"
    )


def test_a_policy_may_name_a_product_that_adds_nothing_up():
    policy = amp.Policy(compute_dtype="bfloat16", low=("dot_general",))
    table = TABLES["einsum"]
    assert products(amp.autocast(lambda w: table(w[0], w[1]), policy), W) == [
        "bfloat16"
    ]


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


def test_a_product_that_is_rounded_is_half_unless_a_constant_is_in_it():
    # Quantisation in training rounds what every layer makes.
    def layers(w, scale):
        return jnp.round(jnp.round(w @ w * scale) @ w)

    def pixels(w):
        grid = jnp.linspace(-1.0, 1.0, len(w))
        return jnp.floor((w @ w) @ jnp.stack([grid, grid**2], 1))

    assert products(amp.autocast(layers), W, jnp.float32(8)) == ["bfloat16"] * 2
    assert products(amp.autocast(pixels), W) == ["bfloat16", "float32"]


@pytest.mark.breadth(2)
@each_policy
@pytest.mark.parametrize(
    "draw",
    [
        jax.random.normal,
        lambda key, shape: jax.random.uniform(key, shape, minval=-3.0, maxval=5.0),
        lambda key, shape: jax.random.t(key, 3.0, shape),
    ],
    ids="normal uniform t".split(),
)
def test_noise_that_the_program_draws_is_no_grid(draw, policy):
    def fn(w, key):
        return jnp.tanh((w + draw(key, w.shape)) @ draw(key, w.shape))

    half = amp.get_policy(policy).compute_dtype.name
    assert products(amp.autocast(fn, policy), W, KEY) == [half]


def test_numbers_that_the_program_has_in_half_stay_half():
    def rows(w):
        return (
            w.astype(jnp.bfloat16)
            @ jnp.arange(len(w) * 64.0, dtype=jnp.bfloat16)[: len(w), None]
        )

    assert products(amp.autocast(rows), W) == ["bfloat16"]


def test_the_sizes_of_groups_are_no_places():
    def experts(x, w):
        return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([300, 700])) @ w

    dtypes = results_of(
        amp.autocast(experts), jnp.ones((1000, 16)), W, primitive="ragged_dot_general"
    )
    assert dtypes == ["bfloat16"]


def test_a_table_of_small_numbers_is_half():
    def expected(w):
        return jax.nn.softmax(w @ w) @ jnp.linspace(-10.0, 10.0, len(w))[:, None]

    assert products(amp.autocast(expected), W) == ["bfloat16"] * 2


@pytest.mark.breadth(2)
@each_policy
@pytest.mark.parametrize("seed", range(4))
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
    jaxpr = jax.make_jaxpr(amp.autocast(function, F16))(W)
    assert "f16[" not in str(jaxpr)


@pytest.mark.parametrize(
    "function",
    [
        lambda w: jnp.linalg.matmul(w, w),
        lambda w: jnp.linalg.multi_dot([w, w, w]),
        lambda w: jnp.linalg.tensordot(w, w, axes=1),
        lambda w: jnp.linalg.outer(w[0], w[1]) @ w,
    ],
    ids="matmul multi_dot tensordot outer".split(),
)
def test_products_of_the_module_of_linear_algebra_are_products(function):
    assert set(products(amp.autocast(function), W)) == {"bfloat16"}


def test_an_associative_scan_is_f32_but_for_its_products():
    def decayed(x, w):
        decay = jax.nn.sigmoid(x @ w)

        def after(a, b):
            return a[0] * b[0], b[0] * a[1] + b[1]

        return lax.associative_scan(after, (decay, decay))[1] @ w

    assert set(planned(decayed, X, W, primitive="mul")) == {"float32"}
    assert set(planned(decayed, X, W, primitive="add")) == {"float32"}

    def chained(w):
        return lax.associative_scan(jnp.matmul, jnp.stack([w @ w] * 4)) @ w

    assert set(products(amp.autocast(chained), W)) == {"bfloat16"}


def test_random_numbers_between_predicted_bounds_are_f32():
    def fn(x, w):
        mean = x @ w
        return jax.random.truncated_normal(KEY, mean - 1.0, mean + 1.0)

    assert set(planned(fn, X, W, primitive="erf_inv")) == {"float32"}
    assert "bfloat16" not in planned(fn, X, W, primitive="mul")


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


def test_the_default_precision_of_a_resized_image_is_no_wish():
    def fn(x, w):
        return jax.image.resize(x @ w, (16, 32), "bilinear") @ jnp.ones((32, 4))

    assert products(amp.autocast(fn), X, W) == ["bfloat16"] * 4


def test_rotations_in_highest_precision_have_the_digits_of_f32():
    def rotate(x, w):
        return jnp.dot(x @ w, STATE, precision="highest")

    rows = dtypes_of(amp.autocast(rotate), X, W, primitive="dot_general")
    assert rows[-1] == ("float32",) * 3


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
    assert carried_back(8, BF16) == {"bfloat16"}
    assert carried_back(100, BF16) == {"float32"}
    assert carried_back(100, F16) == {"float16"}
    assert carried_back(200, F16) == {"float32"}


def test_the_counter_of_a_loop_is_no_size_of_what_it_picks():
    def fn(x, w):
        def turn(i, total):
            return total + jnp.tanh(x[i] @ w)

        return lax.fori_loop(0, x.shape[0], turn, jnp.zeros(16))

    def while_it_counts(x, w):
        def turn(carry):
            i, total = carry
            return i + 1, total + jnp.tanh(x[i] @ w)

        return lax.while_loop(lambda c: c[0] < 8, turn, (0, jnp.zeros(16)))[1]

    for each in (fn, while_it_counts):
        assert products(amp.autocast(each, F16), X, W) == ["float16"]


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
