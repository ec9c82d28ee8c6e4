"""Which digits a loop keeps from turn to turn: a state is f32, a stream half.

The spellings of one integration are in `test_same_program`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs import F32, HALF, check_plan, each_plan, plans
from tests.rounding import W, X

LAYERS = jnp.stack([W] * 3)
NUMBERS = jnp.zeros((3, X.shape[0]), int)


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


def feeding_each_other(x, w):
    # The velocity reaches a product in the next turn, through the position.
    def turn(carry, w):
        h, v = carry
        return (h + v, v + h @ w), None

    return lax.scan(turn, (x @ w, x @ w.T), jnp.stack([w] * 3))[0][0] @ w


def place(x, w):
    def turn(place, _):
        moved = place * 0.9 + jnp.tanh(place @ w)
        return moved, jnp.floor(place)

    return lax.scan(turn, x @ w, length=3)


def recurrence(x, w):
    def turn(h, row):
        h = jnp.tanh(row @ w + h @ w)
        return h, h

    return lax.scan(turn, jnp.zeros(16), x)[1] @ w


def depths(loop, place, ways, w):
    def turn(depth, _):
        here = place + depth * ways
        return depth + jnp.tanh(here @ w), None

    return loop(turn, jnp.zeros_like(X @ W))


def written_out(turn, depth):
    for _ in range(3):
        depth, _ = turn(depth, None)
    return depth


def rows_added(place, table, numbers, w):
    def turn(place, number):
        moved = (place + jnp.tanh(place @ w)) @ w
        return place + table[number], moved

    return lax.scan(turn, place, numbers)


# Layers, and steps, whose weights are taken in several ways


def block(h, w):
    return h + h @ w


def in_a_scan(weight=lambda w: w, how=lambda step: step):
    """Each turn takes a slice of the weights."""

    def fn(x, layers):
        step = how(lambda h, w: (block(h, weight(w)), None))
        return lax.scan(step, x @ W, layers)[0]

    return fn


def by(weight):
    """Each turn takes its weights by its number, and by what it carries."""

    def fn(x, layers):
        return lax.fori_loop(0, 3, lambda i, h: block(h, weight(layers, i, h)), x @ W)

    return fn


def at_a_time(x, layers):
    times = jnp.linspace(0.0, 1.0, 3)
    step = lambda h, t: (h + t * jnp.tanh(h @ layers[0]), None)  # noqa: E731
    return lax.scan(step, x @ W, times)[0]


def number_one(layers, i, h):
    return lax.dynamic_index_in_dim(layers, 1, keepdims=False)


OF_LAYERS = {
    "in slices": in_a_scan(),
    "by number": by(lambda layers, i, h: layers[i]),
    "in checkpoints of a helper": in_a_scan(how=lambda f: jax.checkpoint(jax.jit(f))),
    "chosen": by(lambda layers, i, h: layers[(h[0, 0] > 0).astype(int)]),
    "one or the other": by(
        lambda layers, i, h: jnp.where(i % 2 == 0, layers[0], layers[1])
    ),
}
OF_STEPS = {
    "always the first": by(lambda layers, i, h: layers[0]),
    "always number one": by(number_one),
    "at a time": at_a_time,
}
PLANNED = {
    "a carry that no layer reads is f32": plans(
        total, add=[F32], why={"add": "kept over the turns of a loop"}
    ),
    "the scores of a best path are f32": plans(best_path, add=[F32, F32]),
    "steps of one matrix are a state": plans(steps, add=[F32]),
    "two carries that feed each other are a stream": plans(
        feeding_each_other, add={HALF}
    ),
    "a place that a loop carries to an index is f32": plans(
        place, add={F32}, tanh={F32}
    ),
    "the state of a recurrence is made in f32 although products read it": plans(
        recurrence, tanh=[F32], dot_general={HALF}
    ),
    # A depth is made of the places of the turns before.
    "a carry is made of what its updates are made of": plans(
        functools.partial(depths, lambda *turns: lax.scan(*turns, None, length=3)[0]),
        *(X, X, W),
        add={F32},
    ),
    "and so it is if the turns are written out": plans(
        functools.partial(depths, written_out), X, X, W, add=[..., *[F32] * 4]
    ),
    "a state to which rows of a table are added is no stream": plans(
        rows_added, X, X, NUMBERS, W, add={F32}
    ),
    **{
        f"weights of layers are taken {how}": plans(fn, X, LAYERS, add=[HALF])
        for how, fn in OF_LAYERS.items()
    },
    "weights of layers are adapted": plans(
        in_a_scan(lambda w: w + w[:, :1] @ w[:1]), X, LAYERS, add=[..., HALF]
    ),
    **{
        f"weights of steps are taken {how}": plans(fn, X, LAYERS, add=[..., F32])
        for how, fn in OF_STEPS.items()
    },
}


@each_plan(PLANNED)
def test_planned(row, half):
    check_plan(row, half)
