"""What a program keeps, keeps its digits: dtypes, and the bits that nobody wrote."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from tests.programs import dtypes_of, equations, products, results_of
from tests.rounding import BF16, F16, half_of

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 16))
W = jax.random.normal(jax.random.key(1), (16, 16)) * 0.2
STATE = jax.random.normal(jax.random.key(2), (16, 16))
POLICIES = (BF16, F16)
each_policy = pytest.mark.parametrize("policy", POLICIES)


def results(fn, *args, primitive, policy=BF16):
    rows = dtypes_of(amp.autocast(fn, policy), *args, primitive=primitive)
    return [row[-1] for row in rows if row]  # not those of integers


def reason(fn, *args, operation, policy=BF16):
    """Why the last equation of a name has its dtype."""
    report = amp.explain(fn, policy)(*args)
    return [e.reason for e in report.equations if e.operation == operation][-1]


# Outputs


@each_policy
def test_a_state_that_is_returned_is_made_in_f32_whatever_reads_it(policy):
    def step(state, x, w):
        state = 0.999 * state + 0.001 * (x.T @ (x @ w))
        return state, jnp.sum((x @ state) ** 2)

    assert results(step, STATE, X, W, primitive="add", policy=policy) == ["float32"]
    assert products(amp.autocast(step, policy), STATE, X, W) == [half_of(policy)] * 3
    assert reason(step, STATE, X, W, operation="add") == "returned in f32"


def test_a_state_that_comes_back_after_several_sums_is_f32_in_all_of_them():
    def steps(state, x, w):
        total = 0.0
        for _ in range(3):
            state = 0.999 * state + 0.001 * (x.T @ (x @ w))
            total += jnp.sum((x @ state) ** 2)
        return state, total

    assert set(results(steps, STATE, X, W, primitive="add")[:-1]) == {"float32"}


def test_of_a_stream_that_is_returned_the_last_sum_alone_is_f32():
    def stack(x, w):
        h = x @ w
        for _ in range(3):
            h = h + jnp.tanh(h @ w)
        return h, jnp.sum(h @ w)

    adds = results(stack, X, W, primitive="add")
    assert adds == ["bfloat16", "bfloat16", "float32"]


@each_policy
@pytest.mark.parametrize(
    "write",
    [
        lambda bank, row: bank.at[0].set(row),
        lambda bank, row: lax.dynamic_update_slice(bank, row[None], (0, 0)),
        lambda bank, row: jnp.where(jnp.arange(16)[:, None] == 0, row[None], bank),
        lambda bank, row: jnp.concatenate([row[None], bank[1:]]),
        lambda bank, row: jnp.stack([row, *bank[1:]]),
    ],
    ids="set dynamic_update_slice where concatenate stack".split(),
)
def test_rows_that_nobody_wrote_keep_their_bits(write, policy):
    def step(bank, x, w):
        bank = write(bank, (x @ w)[0])
        return bank, jnp.sum((x @ bank) ** 2)

    bank = STATE.at[3, 3].set(1e5)
    new, _ = jax.jit(amp.autocast(step, policy))(bank, X, W)
    np.testing.assert_array_equal(new[1:], bank[1:])
    assert not np.array_equal(new[0], bank[0])


# Arguments: states and parameters


def ran(turns):
    return lambda y, w: turns(lambda y: y - 1e-3 * (y @ w), y) - y


def in_python(step, y):
    for _ in range(300):
        y = step(y)
    return y


def in_a_scan(step, y):
    return lax.scan(lambda y, _: (step(y), None), y, length=300)[0]


def in_a_fori_loop(step, y):
    return lax.fori_loop(0, 300, lambda _, y: step(y), y)


def in_a_while_loop(step, y):
    return lax.while_loop(
        lambda c: c[0] < 300, lambda c: (c[0] + 1, step(c[1])), (0, y)
    )[1]


@each_policy
def test_the_spellings_of_a_loop_have_the_same_error(policy):
    spellings = (in_python, in_a_scan, in_a_fori_loop, in_a_while_loop)
    y, w = np.asarray(X, np.float64), np.asarray(W, np.float64)
    expected = y.copy()
    for _ in range(300):
        expected = expected - 1e-3 * (expected @ w)
    moved = expected - y
    errors = []
    for spelling in spellings:
        found = np.asarray(jax.jit(amp.autocast(ran(spelling), policy))(X, W))
        errors.append(np.linalg.norm(found - moved) / np.linalg.norm(moved))
    assert max(errors) < 2 * min(errors)
    # A product rounds its operands: half of an eps each.
    assert max(errors) < float(jnp.finfo(half_of(policy)).eps)


def test_a_state_is_f32_and_a_parameter_follows():
    def state(y, w):
        return (y + jnp.tanh(y @ w)) @ w

    assert results(state, X, W, primitive="add") == ["float32"]
    text = "a state: what is added to it is made of it"
    assert reason(state, X, W, operation="add") == text

    def bias(x, w, b):  # of one size with what it is added to, and shared by layers
        for _ in range(3):
            x = jnp.tanh(x @ w + b)
        return x @ w

    b = jnp.ones((8, 16))
    assert results(bias, X, W, b, primitive="add") == ["bfloat16"] * 3

    def positions(tokens, table, position, w):
        h = table[tokens] + position
        for _ in range(3):
            h = h + jnp.tanh((h + position) @ w)
        return h @ w

    adds = results(positions, jnp.arange(8), W, b, W, primitive="add")
    # The first two add arguments to one another.
    assert adds[2:] == ["bfloat16"] * 5


def test_a_state_in_a_jitted_sum_is_f32():
    add = jax.jit(lambda y, k: y + k)

    def fn(y, w):
        return add(y, jnp.tanh(y @ w)) @ w

    assert results(fn, X, W, primitive="add") == ["float32"]
    # Without the sum's other half it is a parameter.
    follows = results(lambda b, x, w: add(b, x @ w) @ w, X, X, W, primitive="add")
    assert follows == ["bfloat16"]


def test_an_argument_is_subtracted_in_f32_and_a_broadcast_statistic_in_half():
    def difference(x, w, y):
        return (x @ w - y) @ w

    assert results(difference, X, W, X, primitive="sub") == ["float32"]
    text = "an argument keeps its digits in a difference"
    assert reason(difference, X, W, X, operation="sub") == text
    for mean in (jnp.ones(()), jnp.ones((1, 16)), jnp.ones((8, 1))):
        centred = results(difference, X, W, mean, primitive="sub")
        assert centred == ["bfloat16"], mean.shape

    def spread(x, w, mean):
        return (x @ w - jnp.broadcast_to(mean, x.shape)) @ w

    assert results(spread, X, W, jnp.ones((1, 16)), primitive="sub") == ["bfloat16"]


def test_a_metric_beside_a_loss_changes_nothing():
    target = 1e5 * jnp.ones((8, 16))

    def loss(x, w):
        error = x @ w - target
        return jnp.mean(error**2), jnp.mean((abs(error) < 5).astype(jnp.float32))

    def of_rows(x, w):
        error = x @ w - target
        rows = jnp.array([1, 3])
        return jnp.mean(error[rows] ** 2), jnp.median(abs(error))

    for fn in (loss, of_rows):
        found, expected = amp.autocast(fn, F16)(X, W), fn(X, W)
        np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_what_only_comparisons_read_is_f32_and_asks_for_nothing():
    def fn(x, w):
        h = jnp.tanh(x @ w)
        return h @ w, jnp.sum(abs(h * 2.0) < 1.0)

    assert results(fn, X, W, primitive="tanh") == ["bfloat16"]
    assert results(fn, X, W, primitive="abs") == ["float32"]


# Carries


@each_policy
def test_a_carry_that_no_product_reads_is_f32(policy):
    def total(x, w):
        h = x @ w
        return lax.scan(lambda t, _: (t + jnp.tanh(h), None), h, length=3)[0] @ w

    def best_path(x, w):
        scores = x @ w

        def turn(c, e):
            return jnp.max(c[:, None] + w, 0) + e, None

        return lax.scan(turn, scores[0], scores[1:])[0]

    def stream(x, w):
        return lax.scan(lambda h, _: (h + jnp.tanh(h @ w), None), x @ w, length=3)[0]

    def carried(fn):
        jaxpr = jax.make_jaxpr(amp.autocast(fn, policy))(X, W)
        (loop,) = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
        return loop.outvars[0].aval.dtype.name

    assert carried(total) == carried(best_path) == "float32"
    assert carried(stream) == half_of(policy)
    body = reason(total, X, W, operation="add")
    assert body == "kept over the turns of a loop"


def test_two_carries_that_feed_each_other_are_a_stream():
    # The velocity reaches a product in the next turn, through the position.
    def fn(x, w):
        def turn(carry, _):
            h, v = carry
            return (h + v, v + jnp.tanh(h @ w)), None

        return lax.scan(turn, (x @ w, jnp.tanh(x @ w)), length=3)[0][0] @ w

    assert set(results(fn, X, W, primitive="add")) == {"bfloat16"}


# Indices


@pytest.mark.parametrize(
    "index",
    [jnp.floor, jnp.ceil, jnp.round, lambda x: x.astype(jnp.int32)],
    ids="floor ceil round cast".split(),
)
@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit, jax.checkpoint])
def test_the_chain_that_leads_to_an_index_is_f32(index, around):
    def fn(x, w):
        place = around(lambda flow: jnp.tanh(flow) * 3.7 + 511.0)(x @ w)
        return x @ w + place.T[:8, :8] @ x, around(index)(place)

    policy = amp.autocast(fn)
    assert products(policy, X, W) == ["bfloat16"] * 3
    assert results(fn, X, W, primitive="tanh") == ["float32"]
    assert results(fn, X, W, primitive="mul") == ["float32"]
    assert results_of(policy, X, W, primitive="add")[0] == "float32"
    reasons = [e.reason for e in amp.explain(fn)(X, W).equations]
    assert "becomes an index" in reasons
    np.testing.assert_array_equal(amp.autocast(fn, BF16)(X, W)[1].shape, (8, 16))


def test_a_place_that_a_loop_carries_to_an_index_is_f32():
    def fn(x, w):
        def turn(place, _):
            moved = place * 0.9 + jnp.tanh(place @ w)
            return moved, jnp.floor(place)

        return lax.scan(turn, x @ w, length=3)

    assert set(results(fn, X, W, primitive="add")) == {"float32"}
    assert set(results(fn, X, W, primitive="tanh")) == {"float32"}


def test_a_grid_that_counts_further_than_half_is_added_in_f32():
    def fn(count):
        return lambda x, w: (jnp.linspace(0.0, count, 8)[:, None] + x @ w) @ w

    def adds(count, policy):
        return results(fn(count), X, W, primitive="add", policy=policy)[-1]

    # Between 256 and 512 there is 2 between two bfloat16, between 2048 and 4096 f16.
    assert adds(255.0, BF16) == "bfloat16"
    assert adds(511.0, BF16) == "float32"
    assert adds(2047.0, F16) == "float16"
    assert adds(4095.0, F16) == "float32"


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


@each_policy
@pytest.mark.parametrize("solve", [fixed_point, with_a_flag])
def test_a_solver_runs_in_f32_and_stops(solve, policy):
    assert products(amp.autocast(solve, policy), X, W) == ["float32"]
    y, _, count = jax.jit(amp.autocast(solve, policy))(X, W)
    expected, _, turns = jax.jit(solve)(X, W)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert count == turns < 100
    text = "a solver: its condition reads a float of its body"
    assert reason(solve, X, W, operation="dot_general") == text


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


@pytest.mark.parametrize(
    "function",
    [
        jax.scipy.linalg.expm,
        jnp.linalg.pinv,
        lambda w: jnp.linalg.lstsq(w, w[:, :2])[0],
        lambda w: jnp.linalg.matrix_power(w, 5),
        lambda w: jnp.polyfit(w[0], w[1], 3),
        lambda w: jax.scipy.linalg.solve_sylvester(w, w, w),
    ],
    ids="expm pinv lstsq matrix_power polyfit solve_sylvester".split(),
)
def test_linear_algebra_runs_in_f32_whole(function):
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

    assert set(results(decayed, X, W, primitive="mul")) == {"float32"}
    assert set(results(decayed, X, W, primitive="add")) == {"float32"}

    def chained(w):
        return lax.associative_scan(jnp.matmul, jnp.stack([w @ w] * 4)) @ w

    assert set(products(amp.autocast(chained), W)) == {"bfloat16"}


def test_random_numbers_between_predicted_bounds_are_f32():
    def fn(x, w):
        mean = x @ w
        return jax.random.truncated_normal(KEY, mean - 1.0, mean + 1.0)

    assert set(results(fn, X, W, primitive="erf_inv")) == {"float32"}
    assert "bfloat16" not in results(fn, X, W, primitive="mul")


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

    policy = amp.Policy(compute_dtype="bfloat16", full=("square", "twice"))
    assert products(amp.autocast(square, policy), W) == ["bfloat16"]
    assert products(amp.autocast(lambda w: square(w), policy), W) == ["bfloat16"]
    assert products(amp.autocast(lambda w: twice(w), policy), W) == ["float32"]


def test_a_move_of_a_kept_sum_keeps_it():
    def step(x, w):
        h = x @ w
        h = h + jnp.tanh(h)
        return jnp.where(h > 0, h, 0.0).T, jnp.sum((h @ w) ** 2)

    assert results(step, X, W, primitive="add") == ["float32"]


def test_the_state_of_a_recurrence_is_made_in_f32_although_products_read_it():
    def fn(x, w):
        def turn(h, row):
            h = jnp.tanh(row @ w + h @ w)
            return h, h

        return lax.scan(turn, jnp.zeros(16), x)[1] @ w

    assert results(fn, X, W, primitive="tanh") == ["float32"]
    assert set(products(amp.autocast(fn), X, W)) == {"bfloat16"}
