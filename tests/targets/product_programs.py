"""Random programs around one product, for the compiler to change if it can."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_amp.plan.program import cpu_target
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.rewrites import cpu

MODES = (
    *("forward", "gradient", "jvp", "gradient of jvp", "vmap", "vmap of gradient"),
    *("gradient of vmap", "vmap of the last", "scan", "checkpoint", "cond"),
    "shard_map",
)


def multiply_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes products of every size those of a CPU with instructions for bf16."""
    monkeypatch.setattr(cpu_target, "this_cpu", lambda: Cpu(native=True))
    monkeypatch.setattr(cpu, "_SMALLEST", (1, 0, 0))


class Program(NamedTuple):
    """A function of two arrays with one product in it.

    Attributes:
      fn: the function.
      shapes: of the arrays.
      text: what it is, for messages.
    """

    fn: Callable[[jax.Array, jax.Array], jax.Array]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    text: str


def program(rng: random.Random) -> Program:
    """A product of random dimensions, between operations that move its operands."""
    shapes, numbers = half_product(rng)
    (left, make_left, l_name), (right, make_right, r_name) = (
        _producer(rng, shape) for shape in shapes
    )
    rank = sum(map(len, shapes)) - 2 * len(numbers[0][0]) - len(numbers[1][0])
    read, name = _consumer(rng, rank)

    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return read(lax.dot_general(make_left(x), make_right(y), numbers))

    text = f"{shapes} {numbers} of {l_name} and {r_name}, read by {name}"
    return Program(fn, (left, right), text)


def half_product(rng: random.Random) -> tuple[Any, Any]:
    batch = rng.choice([0, 0, 0, 1, 2])
    free = [0, 1, 1, 2] if batch else [1, 1, 2]
    counts = {"b": batch, "t": rng.choice([1, 1, 1, 2])}
    counts |= {"l": rng.choice(free), "r": rng.choice(free)}
    names = {key: [f"{key}{i}" for i in range(n)] for key, n in counts.items()}
    size = {
        name: rng.choice([1, 2, 3] if name[0] == "b" else [1, 2, 4, 8, 17, 32])
        for group in names.values()
        for name in group
    }
    sides = [names["b"] + names["t"] + names[side] for side in "lr"]
    for side in sides:
        rng.shuffle(side)
    terms, both = (
        tuple(tuple(side.index(n) for n in names[key]) for side in sides)
        for key in "tb"
    )
    shapes = tuple(tuple(size[n] for n in side) for side in sides)
    return shapes, (terms, both)


def _producer(
    rng: random.Random, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], Callable[[jax.Array], jax.Array], str]:
    """The shape of an array, and what makes one of `shape` of it."""
    order = rng.sample(range(len(shape)), len(shape))
    before = tuple(shape[i] for i in np.argsort(order))
    size = int(np.prod(shape))
    pads = [(1, 2)] * len(shape)
    ends = [1 + n for n in shape]
    kinds: dict[str, tuple[tuple[int, ...], Callable[[jax.Array], jax.Array]]] = {
        "itself": (shape, lambda x: x),
        "relu": (shape, jax.nn.relu),
        "a transpose": (before, lambda x: x.transpose(order)),
        "relu of a transpose": (before, lambda x: jax.nn.relu(x.transpose(order))),
        "a transpose of relu": (before, lambda x: jax.nn.relu(x).transpose(order)),
        "a slice of a pad": (
            shape,
            lambda x: lax.slice(jnp.pad(x, pads), [1] * len(shape), ends),
        ),
        "a concatenation": (
            shape,
            lambda x: jnp.concatenate([x[..., 1:], x[..., :1]], -1),
        ),
        "a reshape": ((size,), lambda x: x.reshape(shape)),
        "a reverse": (shape, lambda x: lax.rev(x, (len(shape) - 1,))),
        "a broadcast": (shape[1:], lambda x: jnp.broadcast_to(x[None], shape)),
        "a slice of one": (shape, lambda x: (2 * x[None])[0]),
        "a lookup": (shape, lambda x: x[jnp.arange(shape[0])[::-1]]),
    }
    name = rng.choice(list(kinds))
    return *kinds[name], name


def _consumer(
    rng: random.Random, rank: int
) -> tuple[Callable[[jax.Array], jax.Array], str]:
    order = rng.sample(range(rank), rank)
    kinds: dict[str, Callable[[jax.Array], jax.Array]] = {
        "nothing": lambda y: y,
        "relu": jax.nn.relu,
        "a transpose": lambda y: y.transpose(order),
        "tanh of a transpose": lambda y: jnp.tanh(y.transpose(order) / 64),
        "a swap": lambda y: jnp.swapaxes(y, -1, -2) if rank > 1 else y,
        "a sum": jnp.sum,
        "a reshape": lambda y: y.reshape(-1),
        "a reshape of a transpose": lambda y: 2 * y.transpose(order).reshape(-1),
        "a slice": lambda y: y[:1] if rank else y,
    }
    name = rng.choice(list(kinds))
    return kinds[name], name


def transformed(
    fn: Callable[..., jax.Array], x: jax.Array, y: jax.Array, mode: str
) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """A function under a transformation of JAX, and its arguments."""

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(fn(x, y) / 8))

    left, right = np.asarray(x), np.asarray(y)
    xs, ys = np.stack([left, left + 1]), np.stack([right, right - 1], -1)
    both = (0, 1)
    gradient = jax.grad(loss, both)
    if mode == "forward":
        return fn, (x, y)
    if mode == "gradient":
        return gradient, (x, y)
    if mode == "jvp":
        return lambda x, y: jax.jvp(fn, (x, y), (x, y)), (x, y)
    if mode == "gradient of jvp":
        return lambda x, y: jax.jvp(gradient, (x, y), (x, y)), (x, y)
    if mode == "vmap":
        return jax.vmap(fn, (0, -1)), (xs, ys)
    if mode == "vmap of the last":
        return jax.vmap(fn, (0, None), out_axes=-1), (xs, y)
    if mode == "vmap of gradient":
        return jax.vmap(gradient, (None, -1)), (x, ys)
    if mode == "gradient of vmap":
        mapped = jax.vmap(loss, (0, -1))
        return jax.grad(lambda x, y: jnp.sum(mapped(x, y)), both), (xs, ys)
    if mode == "scan":

        def turns(xs: jax.Array, y: jax.Array) -> jax.Array:
            return lax.scan(lambda c, x: (c + loss(x, y), None), jnp.zeros(()), xs)[0]

        return jax.grad(turns, both), (xs, y)
    if mode == "checkpoint":
        return jax.grad(jax.checkpoint(loss), both), (x, y)
    if mode == "cond":

        def branch(x: jax.Array, y: jax.Array) -> jax.Array:
            return lax.cond(x.ravel()[0] > 0, loss, lambda x, y: 2 * loss(x, y), x, y)

        return jax.grad(branch, both), (x, y)
    assert mode == "shard_map"
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = jax.sharding.PartitionSpec

    def shards(xs: jax.Array, y: jax.Array) -> jax.Array:
        each = jax.shard_map(
            lambda x, y: jnp.sin(fn(x[0], y) / 8)[None],
            mesh=mesh,
            in_specs=(spec("x"), spec()),
            out_specs=spec("x"),
        )
        return jnp.sum(each(xs, y))

    return jax.grad(shards, both), (xs, y)
