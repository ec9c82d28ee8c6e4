"""A term that two sums have in common cancels in their difference."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.plan.rules import BF16, F32, W, X, array, planned


def layer(h, w):
    return h + 0.1 * jnp.tanh(h @ w)


def after_layers(h, w):
    return layer(layer(h, w), w)


def after_a_scan(h, w):
    weights = jnp.stack([w, w.T])
    return lax.scan(lambda h, each: (layer(h, each), None), h, weights)[0]


def chosen(h, w):
    return lax.cond(w[0, 0] > 9, after_layers, layer, h, w)


def handed_through_a_scan(h, w):
    same = lax.scan(lambda h, each: (h, None), h, w)[0]
    return layer(same, w)


def of_slices(h, w):
    return lax.map(lambda row: layer(row[None], w)[0], h)


def masked(h, w):
    return jnp.where(h > 0, layer(h, w), h)


def weighed(h, w):
    return 0.9 * h + 0.1 * jnp.tanh(h @ w)


WAYS = {
    "layer": layer,
    "jit": jax.jit(layer),
    "checkpoint": jax.checkpoint(layer),
    "layers": after_layers,
    "scan": after_a_scan,
    "handed through": handed_through_a_scan,
    "of slices": of_slices,
    "cond": chosen,
    "where": masked,
    "weighed": weighed,
    "clipped": lambda h, w: jnp.maximum(layer(h, w), -h),
    "scaled": lambda h, w: layer(h, w) * jnp.exp(w[:1]),
    "part": lambda h, w: layer(h, w)[:4],
}


def change(way):
    def fn(x, w):
        h = x @ w
        changed = way(h, w)
        return jnp.tanh((changed - h[: len(changed)]) @ w)

    return fn


@pytest.mark.parametrize("name", WAYS)
def test_change(name):
    fn = change(WAYS[name])
    assert {*planned(fn, X, W, of="add")} == {F32}
    assert {*planned(fn, X, W, of="add", without="change")} == {BF16}


CURVES = {
    "tanh": jnp.tanh,
    "softmax": jax.nn.softmax,
    "square": lambda h: h * h,
    "unit": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
    "norm": lambda h: h * lax.rsqrt(jnp.sum(h**2, -1, keepdims=True)),
}


@pytest.mark.parametrize("name", CURVES)
def test_one_curve_of_two_sums_differs_by_a_change(name):
    def fn(x, w):
        h = x @ w
        return (CURVES[name](layer(h, w)) - CURVES[name](h)) @ w

    assert F32 in planned(fn, X, W, of="add")
    assert F32 not in planned(fn, X, W, of="add", without="change")


def stacked(h, w):
    return jnp.stack([h, layer(h, w)])


def updated(h, w):
    return jnp.zeros((2, *h.shape)).at[0].set(h).at[1].set(layer(h, w))


def scanned(h, w):
    def turn(h, each):
        after = layer(h, each)
        return after, after

    return lax.scan(turn, h, jnp.stack([w, w.T]))[1]


STEPS = {
    "from part to part": lambda path, h: jnp.diff(path, axis=0),
    "from the beginning": lambda path, h: path - h[None],
    "to the end": lambda path, h: path[1:] - h[None],
}


@pytest.mark.parametrize("joined", [stacked, updated, scanned, jax.jit(stacked)])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_parts_of_a_join_of_sums_differ_by_changes(joined, steps):
    def fn(x, w):
        h = x @ w
        path = joined(h, w)
        return jnp.tanh(steps(path, h) @ w), jnp.tanh(path @ w)

    assert {*planned(fn, X, W, of="add")} == {F32}
    assert {*planned(fn, X, W, of="add", without="change")} == {BF16}


def less_row_by_row(a, b):
    return jnp.tanh(lax.map(lambda rows: rows[0] - rows[1], (a, b)))


def less_a_carry(a, b):
    begun = jnp.zeros_like(a)
    told = lax.scan(lambda _, __: (jax.nn.softmax(a), None), begun, None, 1)[0]
    return told - jax.nn.softmax(b)


@pytest.mark.parametrize("less", [less_row_by_row, less_a_carry])
def test_a_loop_keeps_what_two_sums_have_in_common(less):
    def fn(x, w):
        h = x @ w
        changed = layer(h, w)
        return less(changed, h) @ w, jnp.tanh(changed @ w)

    assert planned(fn, X, W, of="add") == [F32]
    assert planned(fn, X, W, of="add", without="change") == [BF16]


@jax.jit
def swapped(a, b):
    return b, a


def test_what_has_no_term_in_common_is_no_change():
    def of_two_networks(x, w):
        return jnp.tanh((layer(x @ w, w) - layer(x @ w.T, w)) @ w)

    def normalized(x, w):
        h = layer(x @ w, w)
        return jnp.tanh((h - h.mean(-1, keepdims=True)) @ w)

    def neighbours(x, w):
        h = layer(x @ w, w)
        return jnp.tanh((h[1:] - h[:-1]) @ w)

    def neighbours_of_a_change(x, w):
        h = x @ w
        return jnp.tanh((layer(h, w)[1:] - h[:-1]) @ w)

    def of_two_stacks(x, w):
        stacked = jnp.stack([layer(x @ w, w), layer(x @ w.T, w)])
        return jnp.tanh(jnp.diff(stacked, axis=0) @ w)

    def of_other_states_each_turn(x, w):
        def turn(h, each):
            return jnp.tanh(h @ each), layer(h, each)

        path = lax.scan(turn, x @ w, jnp.stack([w, w.T]))[1]
        return jnp.tanh(jnp.diff(path, axis=0) @ w)

    def turned_by_an_angle(x, w):
        a, b = jnp.split(layer(x @ w, w), 2, -1)
        cos, sin = jnp.cos(w[:1, :8]), jnp.sin(w[:1, :8])
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1) @ w

    def scaled_alike(x, w):
        scale = jnp.exp(w[:1])
        return jnp.tanh((layer(x @ w, w) * scale - layer(x @ w.T, w) * scale) @ w)

    def gated(x, w):
        h = x @ w
        return jnp.tanh((h * jnp.sin(h @ w) + jnp.tanh(h @ w) - h) @ w)

    def scores_less_their_maximum(x, w):
        return jax.nn.softmax(x @ w + x @ w.T) @ w

    def beside_the_beginning(x, w):
        begun = x @ w

        def turn(h, each):
            return jnp.tanh(h @ each), jnp.tanh((layer(h, each) - begun) @ each)

        return lax.scan(turn, begun, jnp.stack([w, w.T]))[1]

    def handed_back(x, w):
        h, change = x @ w, jnp.tanh(x @ w.T)
        same, other = swapped(h + change, h)
        return jnp.tanh((same - (x @ w.T + change)) @ w + other @ w) @ w

    nearest = (of_two_networks, normalized, neighbours, scaled_alike, gated)
    others = (scores_less_their_maximum, beside_the_beginning, handed_back)
    parts = (neighbours_of_a_change, turned_by_an_angle)
    joins = (of_two_stacks, of_other_states_each_turn)
    for fn in (*nearest, *others, *parts, *joins):
        assert {*planned(fn, X, W, of="add")} == {BF16}, fn.__name__


def test_two_sums_of_one_term_differ_by_a_change():
    def consistency(x, w):
        h = x @ w
        return (layer(h, w) - (h + 0.1 * jnp.sin(h @ w))) @ w

    assert planned(consistency, X, W, of="add") == [F32, F32]


@jax.jit
def squared(a, b):
    return (a - b) ** 2


def test_a_helper_knows_which_of_its_arguments_have_a_term_in_common():
    def fn(x, w):
        h = x @ w
        return squared(layer(h, w), h) @ w

    def nearest(x, w):
        return squared(layer(x @ w, w), x @ w.T) @ w

    assert planned(fn, X, W, of="add") == [F32]
    assert planned(nearest, X, W, of="add") == [BF16]


def test_a_bias_is_no_change():
    def fn(x, w, bias):
        h = x @ w
        return (h + bias - h) @ w

    assert planned(fn, X, W, array(1, 16), of="add") == [BF16]
