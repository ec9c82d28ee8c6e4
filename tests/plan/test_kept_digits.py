"""What a program keeps, keeps its digits: dtypes, and the bits that nobody wrote.

A program that needs a rule, and its nearest, stand in `tests/plan/rules`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from tests.programs import F32, HALF, check_plan, each_plan, plans
from tests.rounding import F16 as MIXED_F16
from tests.rounding import POLICIES, W, X

STATE = jax.random.normal(jax.random.key(2), (16, 16))
each_policy = pytest.mark.parametrize("policy", POLICIES)
ROWS = jnp.arange(8)


def step(state, x, w):
    state = 0.999 * state + 0.001 * (x.T @ (x @ w))
    return state, jnp.sum((x @ state) ** 2)


def state(y, w):
    return (y + jnp.tanh(y @ w)) @ w


def biased(x, w, b):
    for _ in range(3):
        x = jnp.tanh(x @ w + b)
    return x @ w


def positions(tokens, table, position, w):
    h = table[tokens] + position
    for _ in range(3):
        h = h + jnp.tanh((h + position) @ w)
    return h @ w


def difference(x, w, y):
    return (x @ w - y) @ w


def spread(x, w, mean):
    return (x @ w - jnp.broadcast_to(mean, x.shape)) @ w


def moved(x, w):
    h = x @ w
    h = h + jnp.tanh(h)
    return jnp.where(h > 0, h, 0.0).T, jnp.sum((h @ w) ** 2)


def in_a_branch(flag, state, x, w):
    def updated(state):
        return 0.9 * state + 0.1 * (x.T @ (x @ w))

    state = lax.cond(flag, updated, lambda state: state, state)
    return updated(state), jnp.sum((x @ state) ** 2)


def begun_by_a_lookup_in_a_branch(flag, table, other, w):
    h = lax.cond(flag, lambda: table[ROWS], lambda: other[ROWS])
    layers = jnp.stack([w] * 3)
    return lax.scan(lambda h, w: (h + h @ w, None), h, layers)[0] @ w


def steps(y, w):
    for _ in range(3):
        y = y + 0.01 * jnp.tanh(y @ w)
    return y @ w


def joined(x, y):
    target = jnp.concatenate([jnp.zeros((X.shape[0], 4)), y], axis=1)
    return (target - x @ W) @ W


def indexed(index):
    def fn(x, w):
        place = jnp.tanh(x @ w) * 3.7 + 511.0
        return x @ w + place.T[:8, :8] @ x, index(place)

    return plans(
        fn,
        dot_general=[HALF] * 3,
        tanh=[F32],
        mul=[F32],
        add=[F32, F32],
        why={"tanh": "becomes an index"},
    )


ONES = {shape: jnp.ones(shape) for shape in ((), (1, 16), (8, 1), (8, 16))}
PLANNED = {
    # Outputs
    "a state that is returned is made in f32 whatever reads it": plans(
        *(step, STATE, X, W),
        add=[F32],
        dot_general=[HALF] * 3,
        why={"add": "an operand is f32"},
    ),
    "a move of a sum that is kept keeps it": plans(moved, add=[F32]),
    # Arguments: states and parameters
    "a state is f32": plans(state, add=[F32], why={"add": "an operand is f32"}),
    # Of one size with what it is added to, and shared by layers.
    "a parameter is added in f32": plans(biased, X, W, ONES[8, 16], add=[F32] * 3),
    # The first two add arguments to one another.
    "so are positions that each layer adds": plans(
        *(positions, ROWS, W, ONES[8, 16], W), add=[..., *[F32] * 5]
    ),
    "a state behind a lookup is a state": plans(
        lambda y, w, table: (y + (jnp.tanh(y @ w) - table[ROWS]) @ w) @ w,
        *(X, W, W),
        add=[F32],
    ),
    "a state that a difference hands on is a state": plans(
        lambda y, x, w: (y + (jnp.tanh(x @ w) - y) @ w) @ w, X, X, W, add=[F32]
    ),
    "an argument is subtracted in f32": plans(
        *(difference, X, W, X),
        sub=[F32],
        why={"sub": "f32 between products"},
    ),
    **{
        f"a statistic of shape {shape} is subtracted in f32": plans(
            difference, X, W, ONES[shape], sub=[F32]
        )
        for shape in ((), (1, 16), (8, 1))
    },
    "one that is broadcast before, too": plans(spread, X, W, ONES[1, 16], sub=[F32]),
    "a target that is joined of zeros and an argument keeps its digits": plans(
        joined, X, X[:, 4:], sub=[F32]
    ),
    "a small array that is closed over is a state": plans(
        lambda w: steps(jnp.asarray(np.asarray(X)), w), W, add=[F32] * 3
    ),
    "as an argument is": plans(steps, add=[F32] * 3),
    "so is an array that is closed over and added": plans(
        lambda x: (x @ W + np.asarray(X)) @ W, X, add=[F32]
    ),
    # Indices
    "what is rounded down becomes an index": indexed(jnp.floor),
    "what is rounded up becomes an index": indexed(jnp.ceil),
    "what is rounded becomes an index": indexed(jnp.round),
    "what is cast to integers becomes an index": indexed(lambda x: x.astype(jnp.int32)),
    "a grid is added in f32": plans(
        lambda x, w: (jnp.linspace(0.0, 511.0, 8)[:, None] + x @ w) @ w,
        add=[..., F32],
    ),
    # Branches
    "a state that a branch updates is f32 in the branch": plans(
        in_a_branch, True, STATE, X, W, add=[F32, F32]
    ),
    "a stream that a lookup in a branch began is half": plans(
        begun_by_a_lookup_in_a_branch, True, W, W, W, add=[HALF]
    ),
}


@each_plan(PLANNED)
def test_planned(row, half):
    check_plan(row, half)


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
        found, expected = (jax.jit(f)(X, W) for f in (amp.autocast(fn, MIXED_F16), fn))
        np.testing.assert_allclose(found, expected, rtol=1e-3)


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
