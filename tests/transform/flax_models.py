"""Models that are written in linen and in nnx, and how both are asked the same.

In both libraries a block gives `up` features, then `down`: the products of a module are
known by their widths. Modules have the same names in both, and so the same paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.programs import equations

F32 = "float32"
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 16))


class Built(NamedTuple):
    """A model as a function of its variables.

    Attributes:
      apply: `apply(variables, *inputs, method="__call__")`, what the model returns.
      writing: `writing(variables, *inputs)`, that and the statistics of its norms.
      variables: their shapes and dtypes.
      of: the classes of the library: `Module`, `Dense`, `Block`, ...
    """

    apply: Callable[..., Any]
    writing: Callable[..., Any]
    variables: Any
    of: SimpleNamespace

    def under(self, policies: Any, method: str = "__call__") -> Callable[..., Any]:
        """The model under autocast, as a function of variables and inputs."""
        transformed = amp.autocast(self.apply, policies)
        return lambda variables, *inputs: transformed(variables, *inputs, method=method)

    def values(self) -> Any:
        """Variables with values; compiling an initialisation takes long."""
        return with_values(self.variables)


def in_linen(net: nn.Module, *inputs: Any, **options: Any) -> Built:
    """A module of linen; `options` are those of its call."""

    def apply(variables: Any, *inputs: Any, method: str = "__call__") -> Any:
        return net.apply(variables, *inputs, method=method, **options)

    def writing(variables: Any, *inputs: Any) -> Any:
        return net.apply(variables, *inputs, mutable=["batch_stats"], **options)

    shapes = jax.eval_shape(lambda: net.init(KEY, *inputs, **options))
    return Built(apply, writing, shapes, LINEN)


def in_nnx(make: Callable[[], nnx.Module], abstract: bool = True) -> Built:
    """A module of nnx, split and merged inside of what is transformed."""
    graphdef, state = nnx.split(nnx.eval_shape(make) if abstract else make())

    def merged(state: Any) -> Any:
        # A copy: what the model writes is not written to `state`.
        return nnx.merge(graphdef, state, copy=True)

    def apply(state: Any, *inputs: Any, method: str = "__call__") -> Any:
        # Flax's own layers mix weak and strong dtypes.
        with jax.numpy_dtype_promotion("standard"):
            return getattr(merged(state), method)(*inputs)

    def writing(state: Any, *inputs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            model = merged(state)
            return model(*inputs), nnx.state(model, nnx.BatchStat)

    return Built(apply, writing, state, NNX)


def with_values(shapes: Any) -> Any:
    """Random weights of a model of either library; caches are zeros."""
    random = np.random.default_rng(0)

    def value(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.integer) or name.startswith("['cache']"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        if re.search(r"(var|scale|sigma)'", name):
            return jnp.asarray(random.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        return jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, shapes)


def by_width(fn: Callable[..., Any], *args: Any) -> dict[int, str]:
    """The dtype of the operands of the matrix products that give so many features."""
    found: dict[int, str] = {}
    for eqn in equations(jax.make_jaxpr(fn)(*args)):
        if eqn.primitive.name == "dot_general":
            a, b = (v.aval.dtype.name for v in eqn.invars)
            width = eqn.outvars[0].aval.shape[-1]
            assert a == b == found.setdefault(width, a)
    return found


def results_in(jaxpr: Any) -> dict[str, list[str]]:
    """The dtypes of the float results of each primitive of a jaxpr."""
    found: dict[str, list[str]] = {}
    for eqn in equations(jaxpr):
        dtype = eqn.outvars[0].aval.dtype if eqn.outvars else None
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            found.setdefault(eqn.primitive.name, []).append(dtype.name)
    return found


def dtypes_in(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


# Two blocks and a head, in linen as both styles have it, and in nnx


class Block(nn.Module):
    up: int
    down: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # A ReLU that flips would move the gradients by more than roundings do.
        x = nn.silu(nn.Dense(self.up, name="up")(x))
        return nn.Dense(self.down, name="down")(x)


class WideBlock(Block):
    pass


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Block(24, 16, name="first")(x)
        x = WideBlock(32, 20, name="second")(x)
        return nn.Dense(5, name="head")(x)


class Setup(nn.Module):
    def setup(self) -> None:
        self.first = Block(24, 16)
        self.second = WideBlock(32, 20)
        self.head = nn.Dense(5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.second(self.encode(x)))

    def encode(self, x: jax.Array) -> jax.Array:
        return self.first(x)


class NnxBlock(nnx.Module):
    def __init__(self, inputs: int, up: int, down: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(inputs, up, rngs=rngs)
        self.down = nnx.Linear(up, down, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.up(x)))


class NnxWideBlock(NnxBlock):
    pass


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = NnxBlock(16, 24, 16, rngs)
        self.second = NnxWideBlock(16, 32, 20, rngs)
        self.head = nnx.Linear(20, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.second(self.encode(x)))

    def encode(self, x: jax.Array) -> jax.Array:
        return self.first(x)


WIDTHS = {24, 16, 32, 20, 5}
LINEN = SimpleNamespace(
    Module=nn.Module,
    Dense=nn.Dense,
    Embed=nn.Embed,
    Block=Block,
    WideBlock=WideBlock,
    norms=nn,
)
NNX = SimpleNamespace(
    Module=nnx.Module,
    Dense=nnx.Linear,
    Embed=nnx.Embed,
    Block=NnxBlock,
    WideBlock=NnxWideBlock,
    norms=nnx,
)
