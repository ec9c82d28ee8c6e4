"""Which digits a loop keeps from turn to turn: a state is f32, a stream half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from tests.programs import equations, planned, products, reason_of
from tests.rounding import POLICIES, W, X, half_of

each_policy = pytest.mark.parametrize("policy", POLICIES)


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


@pytest.mark.slow
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


@each_policy
def test_a_carry_that_no_layer_reads_is_f32(policy):
    def total(x, w):
        h = x @ w
        return lax.scan(lambda t, _: (t + jnp.tanh(h), None), h, length=3)[0] @ w

    def best_path(x, w):
        scores = x @ w

        def turn(c, e):
            return jnp.max(c[:, None] + w, 0) + e, None

        return lax.scan(turn, scores[0], scores[1:])[0]

    def steps(x, w):
        return lax.scan(lambda h, _: (h + jnp.tanh(h @ w), None), x @ w, length=3)[0]

    def stream(x, w):
        layers = jnp.stack([w] * 3)
        return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ w, layers)[0]

    def carried(fn):
        jaxpr = jax.make_jaxpr(amp.autocast(fn, policy))(X, W)
        (loop,) = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
        return loop.outvars[0].aval.dtype.name

    assert carried(total) == carried(best_path) == carried(steps) == "float32"
    assert carried(stream) == half_of(policy)
    body = reason_of(total, X, W, operation="add")
    assert body == "kept over the turns of a loop"


def test_two_carries_that_feed_each_other_are_a_stream():
    # The velocity reaches a product in the next turn, through the position.
    def fn(x, w):
        def turn(carry, w):
            h, v = carry
            return (h + v, v + jnp.tanh(h @ w)), None

        layers = jnp.stack([w] * 3)
        return lax.scan(turn, (x @ w, jnp.tanh(x @ w)), layers)[0][0] @ w

    assert set(planned(fn, X, W, primitive="add")) == {"bfloat16"}


def test_a_place_that_a_loop_carries_to_an_index_is_f32():
    def fn(x, w):
        def turn(place, _):
            moved = place * 0.9 + jnp.tanh(place @ w)
            return moved, jnp.floor(place)

        return lax.scan(turn, x @ w, length=3)

    assert set(planned(fn, X, W, primitive="add")) == {"float32"}
    assert set(planned(fn, X, W, primitive="tanh")) == {"float32"}


def test_the_state_of_a_recurrence_is_made_in_f32_although_products_read_it():
    def fn(x, w):
        def turn(h, row):
            h = jnp.tanh(row @ w + h @ w)
            return h, h

        return lax.scan(turn, jnp.zeros(16), x)[1] @ w

    assert planned(fn, X, W, primitive="tanh") == ["float32"]
    assert set(products(amp.autocast(fn), X, W)) == {"bfloat16"}


@each_policy
def test_layers_are_told_from_steps_however_their_weights_are_taken(policy):
    layers = jnp.stack([W] * 3)

    def block(h, w):
        return h + jnp.tanh(h @ w)

    def in_slices(x, layers):
        return lax.scan(lambda h, w: (block(h, w), None), x @ W, layers)[0]

    def by_number(x, layers):
        return lax.fori_loop(0, 3, lambda i, h: block(h, layers[i]), x @ W)

    def in_checkpoints(x, layers):
        step = jax.checkpoint(lambda h, w: (jax.jit(block)(h, w), None))
        return lax.scan(step, x @ W, layers)[0]

    def adapted(x, layers):
        def turn(h, w):
            return block(h, w + w[:, :1] @ w[:1]), None

        return lax.scan(turn, x @ W, layers)[0]

    def chosen(x, layers):
        def turn(i, h):
            return block(h, layers[(h[0, 0] > 0).astype(int)])

        return lax.fori_loop(0, 3, turn, x @ W)

    def one_or_the_other(x, layers):
        def turn(i, h):
            return block(h, jnp.where(i % 2 == 0, layers[0], layers[1]))

        return lax.fori_loop(0, 3, turn, x @ W)

    def always_the_first(x, layers):
        return lax.fori_loop(0, 3, lambda i, h: block(h, layers[0]), x @ W)

    def always_number_one(x, layers):
        take = lambda: lax.dynamic_index_in_dim(layers, 1, keepdims=False)  # noqa: E731
        return lax.fori_loop(0, 3, lambda i, h: block(h, take()), x @ W)

    def at_a_time(x, layers):
        times = jnp.linspace(0.0, 1.0, 3)
        step = lambda h, t: (h + t * jnp.tanh(h @ layers[0]), None)  # noqa: E731
        return lax.scan(step, x @ W, times)[0]

    def sums(fn):
        shape = (X @ W).shape
        jaxpr = jax.make_jaxpr(amp.autocast(fn, policy))(X, layers)
        adds = [e for e in equations(jaxpr) if e.primitive.name == "add"]
        return {
            e.outvars[0].aval.dtype.name
            for e in adds
            if e.outvars[0].aval.shape == shape
        }

    for fn in (in_slices, by_number, in_checkpoints, adapted, chosen, one_or_the_other):
        assert sums(fn) == {half_of(policy)}, fn
    for fn in (always_the_first, always_number_one, at_a_time):
        assert sums(fn) == {"float32"}, fn


def test_a_carry_is_made_of_what_its_updates_are_made_of():
    def steps(loop):
        def fn(place, ways, w):
            def turn(depth, _):
                here = place + depth * ways
                return depth + jnp.tanh(here @ w), None

            return loop(turn, jnp.zeros_like(X @ W))

        return planned(fn, X, X, W, primitive="add")[0::2]

    def written_out(turn, depth):
        for _ in range(3):
            depth, _ = turn(depth, None)
        return depth

    looped = steps(lambda turn, depth: lax.scan(turn, depth, None, length=3)[0])
    # A depth is made of the places of the turns before.
    assert set(looped) == {"float32"} == set(steps(written_out)[1:])


def test_a_state_to_which_rows_of_a_table_are_added_is_no_stream():
    def steps(place, table, numbers, w):
        def turn(place, number):
            moved = (place + jnp.tanh(place @ w)) @ w
            return place + table[number], moved

        return lax.scan(turn, place, numbers)

    numbers = jnp.zeros((3, X.shape[0]), int)
    adds = planned(steps, X, X, numbers, W, primitive="add")
    assert "bfloat16" not in adds, adds
