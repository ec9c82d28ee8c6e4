"""What a program keeps, keeps its digits: dtypes, and the bits that nobody wrote."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from tests.programs import (
    planned,
    products,
    reason_of,
    results_of,
)
from tests.rounding import BF16, F16, POLICIES, W, X, half_of

STATE = jax.random.normal(jax.random.key(2), (16, 16))
each_policy = pytest.mark.parametrize("policy", POLICIES)


# Outputs


@each_policy
def test_a_state_that_is_returned_is_made_in_f32_whatever_reads_it(policy):
    def step(state, x, w):
        state = 0.999 * state + 0.001 * (x.T @ (x @ w))
        return state, jnp.sum((x @ state) ** 2)

    assert planned(step, STATE, X, W, primitive="add", policy=policy) == ["float32"]
    assert products(amp.autocast(step, policy), STATE, X, W) == [half_of(policy)] * 3
    assert reason_of(step, STATE, X, W, operation="add") == "returned in f32"


def test_a_state_that_comes_back_after_several_sums_is_f32_in_all_of_them():
    def steps(state, x, w):
        total = 0.0
        for _ in range(3):
            state = 0.999 * state + 0.001 * (x.T @ (x @ w))
            total += jnp.sum((x @ state) ** 2)
        return state, total

    assert set(planned(steps, STATE, X, W, primitive="add")[:-1]) == {"float32"}


def test_of_a_stream_that_is_returned_the_last_sum_alone_is_f32():
    def stack(x, w):
        h = x @ w
        for _ in range(3):
            h = h + jnp.tanh(h @ w)
        return h, jnp.sum(h @ w)

    adds = planned(stack, X, W, primitive="add")
    assert adds == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.breadth(2)
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


def test_a_state_is_f32_and_a_parameter_follows():
    def state(y, w):
        return (y + jnp.tanh(y @ w)) @ w

    assert planned(state, X, W, primitive="add") == ["float32"]
    text = "a state: what is added to it is made of it"
    assert reason_of(state, X, W, operation="add") == text

    def bias(x, w, b):  # of one size with what it is added to, and shared by layers
        for _ in range(3):
            x = jnp.tanh(x @ w + b)
        return x @ w

    b = jnp.ones((8, 16))
    assert planned(bias, X, W, b, primitive="add") == ["bfloat16"] * 3

    def positions(tokens, table, position, w):
        h = table[tokens] + position
        for _ in range(3):
            h = h + jnp.tanh((h + position) @ w)
        return h @ w

    adds = planned(positions, jnp.arange(8), W, b, W, primitive="add")
    # The first two add arguments to one another.
    assert adds[2:] == ["bfloat16"] * 5


def test_a_state_in_a_jitted_sum_is_f32():
    add = jax.jit(lambda y, k: y + k)

    def fn(y, w):
        return add(y, jnp.tanh(y @ w)) @ w

    assert planned(fn, X, W, primitive="add") == ["float32"]
    # Without the sum's other half it is a parameter.
    follows = planned(lambda b, x, w: add(b, x @ w) @ w, X, X, W, primitive="add")
    assert follows == ["bfloat16"]


def test_an_argument_is_subtracted_in_f32_and_a_broadcast_statistic_in_half():
    def difference(x, w, y):
        return (x @ w - y) @ w

    assert planned(difference, X, W, X, primitive="sub") == ["float32"]
    text = "an argument keeps its digits in a difference"
    assert reason_of(difference, X, W, X, operation="sub") == text
    for mean in (jnp.ones(()), jnp.ones((1, 16)), jnp.ones((8, 1))):
        centred = planned(difference, X, W, mean, primitive="sub")
        assert centred == ["bfloat16"], mean.shape

    def spread(x, w, mean):
        return (x @ w - jnp.broadcast_to(mean, x.shape)) @ w

    assert planned(spread, X, W, jnp.ones((1, 16)), primitive="sub") == ["bfloat16"]


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
        found, expected = (jax.jit(f)(X, W) for f in (amp.autocast(fn, F16), fn))
        np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_what_only_comparisons_read_is_f32_and_asks_for_nothing():
    def fn(x, w):
        h = jnp.tanh(x @ w)
        return h @ w, jnp.sum(abs(h * 2.0) < 1.0)

    assert planned(fn, X, W, primitive="tanh") == ["bfloat16"]
    assert planned(fn, X, W, primitive="abs") == ["float32"]


# Indices


@pytest.mark.breadth(2)
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
    assert planned(fn, X, W, primitive="tanh") == ["float32"]
    assert planned(fn, X, W, primitive="mul") == ["float32"]
    assert results_of(policy, X, W, primitive="add")[0] == "float32"
    reasons = [e.reason for e in amp.explain(fn)(X, W).equations]
    assert "becomes an index" in reasons
    np.testing.assert_array_equal(amp.autocast(fn, BF16)(X, W)[1].shape, (8, 16))


def test_a_grid_that_counts_further_than_half_is_added_in_f32():
    def fn(count):
        return lambda x, w: (jnp.linspace(0.0, count, 8)[:, None] + x @ w) @ w

    def adds(count, policy):
        return planned(fn(count), X, W, primitive="add", policy=policy)[-1]

    # Between 256 and 512 there is 2 between two bfloat16, between 2048 and 4096 f16.
    assert adds(255.0, BF16) == "bfloat16"
    assert adds(511.0, BF16) == "float32"
    assert adds(2047.0, F16) == "float16"
    assert adds(4095.0, F16) == "float32"


def test_a_move_of_a_kept_sum_keeps_it():
    def step(x, w):
        h = x @ w
        h = h + jnp.tanh(h)
        return jnp.where(h > 0, h, 0.0).T, jnp.sum((h @ w) ** 2)

    assert planned(step, X, W, primitive="add") == ["float32"]


def test_a_state_behind_a_lookup_is_a_state():
    def fn(y, w, table):
        return (y + (jnp.tanh(y @ w) - table[jnp.arange(8)]) @ w) @ w

    assert planned(fn, X, W, W, primitive="add") == ["float32"]


def test_a_state_that_a_difference_hands_on_is_a_state():
    def fn(y, x, w):
        return (y + (jnp.tanh(x @ w) - y) @ w) @ w

    assert planned(fn, X, X, W, primitive="add") == ["float32"]


# Branches


def test_a_state_that_a_branch_updates_is_f32_in_the_branch():
    def step(flag, state, x, w):
        def updated(state):
            return 0.9 * state + 0.1 * (x.T @ (x @ w))

        state = lax.cond(flag, updated, lambda state: state, state)
        loss = jnp.sum((x @ state) ** 2)
        return updated(state), loss

    adds = planned(step, True, STATE, X, W, primitive="add")
    assert adds == ["float32"] * 2


def test_a_stream_that_a_lookup_in_a_branch_began_is_half():
    def fn(flag, table, other, w):
        rows = jnp.arange(8)
        h = lax.cond(flag, lambda: table[rows], lambda: other[rows])
        layers = jnp.stack([w] * 3)
        return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, layers)[0] @ w

    assert planned(fn, True, W, W, W, primitive="add") == ["bfloat16"]


def test_a_small_array_that_is_closed_over_is_a_state_as_an_argument_is():
    start = np.asarray(X)

    def steps(y, w):
        for _ in range(3):
            y = y + 0.01 * jnp.tanh(y @ w)
        return y @ w

    closed = planned(lambda w: steps(jnp.asarray(start), w), W, primitive="add")
    given = planned(steps, X, W, primitive="add")
    assert closed == given == ["float32"] * 3
    # A bias is none, closed over or not.
    bias = planned(lambda x: (x @ W + start) @ W, X, primitive="add")
    assert bias == ["bfloat16"]


@pytest.mark.breadth(2)
@each_policy
@pytest.mark.parametrize("around", ["cond", "scan"])
def test_a_sentinel_of_a_branch_or_a_loop_saturates_where_products_read_it(
    around, policy
):
    lowest = float(jnp.finfo(jnp.float32).min)

    def fn(x, w):
        def hidden(h):
            return jnp.where(x > 0, jnp.tanh(h), lowest)

        h = x @ w
        if around == "cond":
            h = lax.cond(x[0, 0] < 9, hidden, lambda h: h, h)
        else:
            h = lax.scan(lambda h, _: (hidden(h), None), h, length=2)[0]
        return h == lowest, jnp.max(h @ jnp.zeros((16, 16)))

    is_hidden, product = amp.autocast(fn, policy)(X, W)
    np.testing.assert_array_equal(is_hidden, X <= 0)
    assert product == 0.0  # -inf * 0 would be NaN


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "pieces",
    [lambda h: jnp.split(h, 2), jnp.unstack, lambda h: [h.T], lambda h: [h[:3]]],
    ids="split unstack transpose slice".split(),
)
def test_moves_that_only_comparisons_read_are_compared_as_they_are(pieces):
    def fn(x, w):
        return [piece < 0.0 for piece in pieces(x @ w)]

    for found, expected in zip(amp.autocast(fn)(X, W), fn(X, W), strict=True):
        # Of 128 elements, bf16 may turn the sign of the smallest.
        assert np.mean(np.asarray(found) != expected) < 0.05


def test_a_target_that_is_joined_of_zeros_and_an_argument_keeps_its_digits():
    def loss(x, y):
        target = jnp.concatenate([jnp.zeros((X.shape[0], 4)), y], axis=1)
        return (target - x @ W) @ W

    half = jnp.zeros_like(X)[:, 4:]
    assert planned(loss, X, half, primitive="sub") == ["float32"]
    # Only what is broadcast as a whole is a parameter.
    bias = lambda x, b: (jnp.broadcast_to(b[None], X.shape) - x @ W) @ W  # noqa: E731
    assert planned(bias, X, X[0], primitive="sub") == ["bfloat16"]
