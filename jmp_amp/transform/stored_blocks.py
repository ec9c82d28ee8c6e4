"""Running a block whose kept values are in 8 bits, see `Policy.saved`.

The block runs as it is, and so does forward mode. Its transpose is that of the same
block where the values that are kept are read from 8 bits. What is made of them is made
again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jmp_amp.plan.plan import Key
from jmp_amp.plan.program.jaxprs import Value
from jmp_amp.plan.rewrites.linear import linear_function
from jmp_amp.plan.saved.needs import KEPT, KEPT_IN_8_BITS
from jmp_amp.policies.dtypes import F32

# What is kept: the path to the body that makes it, and what it is there.
Place = tuple[tuple[int, ...], Key]
Keeper = Callable[[Place, Value], Value]
# (what keeps values, what goes through the barrier, what goes around it) -> what comes
# out
Compute = Callable[[Keeper, list[Any], list[Any]], list[list[Any]]]

_BLOCK = 128
_DTYPE = {"int8": jnp.dtype(jnp.int8), "e4m3": jnp.dtype(jnp.float8_e4m3fn)}
_LARGEST = {"int8": 127, "e4m3": 448}


def named(place: Place, value: Value) -> Value:
    """Gives a value the name that the policy of a block keeps."""
    return checkpoint_name(value, KEPT)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("q", "scale"),
    meta_fields=("shape", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class EightBits:
    """An array in 8 bits.

    Attributes:
      q: int8, the last axis split into blocks, and filled up to whole ones; or e4m3 of
        the shape of the array.
      scale: f32, one for each block, or for each row. NaN if a number of it is not
        finite.
      shape, dtype: of the array.
    """

    q: jax.Array
    scale: jax.Array
    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, x: jax.Array, format: str) -> EightBits:
        """Returns an array in 8 bits, rounded to nearest even.

        Args:
          x: floating, of one dimension at least.
          format: "int8", by blocks of 128 of the last axis; or "e4m3", by row.

        Example:
          >>> x = jnp.array([[-254.0, 4.0, 1.0]])
          >>> EightBits.of(x, "int8").q.tolist()
          [[[-127, 2, 0]]]
        """
        x = jax.lax.stop_gradient(x)
        rows = _in_blocks(x) if format == "int8" else x
        largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True).astype(F32)
        scale = largest / np.float32(_LARGEST[format])
        divided = rows.astype(F32) / jnp.where(scale > 0, scale, jnp.ones_like(scale))
        q = jnp.round(divided).astype(jnp.int8) if format == "int8" else divided
        # A gradient shows a number that is not finite.
        scale = jnp.where(jnp.isfinite(largest), scale, jnp.full_like(scale, jnp.nan))
        q = checkpoint_name(q.astype(_DTYPE[format]), KEPT_IN_8_BITS)
        scale = checkpoint_name(scale, KEPT_IN_8_BITS)
        return cls(q, scale, x.shape, x.dtype)

    def restored(self) -> jax.Array:
        """Returns the array.

        Example:
          >>> x = jnp.array([[-254.0, 4.0, 1.0]])
          >>> EightBits.of(x, "int8").restored().tolist()
          [[-254.0, 4.0, 0.0]]
        """
        x = (self.q.astype(F32) * self.scale).astype(self.dtype)
        if x.shape == self.shape:
            return x
        x = x.reshape(*self.shape[:-1], -1)
        return jax.lax.slice_in_dim(x, 0, self.shape[-1], axis=-1)


def _in_blocks(x: jax.Array) -> jax.Array:
    """Returns an array whose last axis is one of blocks and one of their elements."""
    size = min(_BLOCK, x.shape[-1])
    missing = -x.shape[-1] % size
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], -1, size)


class _Kept(NamedTuple):
    """What a block keeps: of what goes in, and of what it makes.

    Of what goes in None is what is read as it is. If nothing reads it, XLA leaves it
    out.
    """

    entering: list[EightBits | None]
    made: list[Any]


def stored_block(
    compute: Compute,
    made: Mapping[tuple[int, ...], Mapping[Key, str | None]],
    entering: Sequence[str | None],
    apart: bool,
) -> Callable[[list[Any], list[Any]], list[list[Any]]]:
    """Returns what runs a block of which something is kept in 8 bits.

    Args:
      compute: what it computes.
      made: what is kept of what it makes, and in which format, see `Stored`.
      entering: the format in which each of what goes in is kept; None is as it is.
      apart: whether XLA is kept from merging both computations.
    """
    formats: dict[Place, str | None] = {
        (path, key): format
        for path, kept in made.items()
        for key, format in kept.items()
    }
    block = _StoredBlock(compute, formats, entering, apart)
    run = jax.custom_jvp(functools.partial(compute, _as_it_is))
    # Traced once for all blocks that are alike.
    linear = jax.jit(block.linear, static_argnums=(0, 1))
    run.defjvp(functools.partial(block.derivative, linear), symbolic_zeros=True)
    return run


class _StoredBlock(NamedTuple):
    """See `stored_block`."""

    compute: Compute
    formats: Mapping[Place, str | None]
    entering: Sequence[str | None]
    apart: bool

    def derivative(
        self,
        linear: Callable[..., list[jax.Array]],
        primals: Sequence[list[Any]],
        tangents: Sequence[list[Any]],
    ) -> tuple[list[list[Value]], list[list[Any]]]:
        """Returns what comes out, and its tangent."""
        leaves, structure = jax.tree.flatten(tuple(primals))
        slopes = jax.tree.leaves(
            tuple(tangents), is_leaf=lambda t: isinstance(t, SymbolicZero)
        )
        moving = {
            i: slope
            for i, slope in enumerate(slopes)
            if _is_inexact(leaves[i]) and not isinstance(slope, SymbolicZero)
        }
        results, kept = self.keeping(*primals)
        found = iter(
            linear(structure, tuple(moving), list(moving.values()), leaves, kept)
        )
        flat, of_results = jax.tree.flatten(results)
        slopes = [
            next(found) if _is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)
            for x in flat
        ]
        return results, jax.tree.unflatten(of_results, slopes)

    def keeping(
        self, apart: list[Any], around: list[Any]
    ) -> tuple[list[list[Any]], _Kept]:
        """Returns what comes out, and what is kept."""
        found: dict[Place, Value] = {}

        def keeper(place: Place, value: Value) -> Value:
            found[place] = value
            return value

        results = self.compute(keeper, apart, around)
        if found.keys() != self.formats.keys():
            raise AssertionError("a block does not make what its plan keeps")
        kept = _Kept(
            [
                EightBits.of(x, format) if format else None
                for x, format in zip([*apart, *around], self.entering, strict=True)
            ],
            [
                EightBits.of(found[place], format) if format else found[place]
                for place, format in self.formats.items()
            ],
        )
        # Else XLA makes the 8 bits late, and keeps the array until then. What is only
        # handed on goes around the barrier: a parameter would be copied.
        entered = {id(x) for x in jax.tree.leaves((apart, around))}
        flat, structure = jax.tree.flatten(results)
        made = [i for i, x in enumerate(flat) if id(x) not in entered]
        apart_now, kept = _together(self.apart, ([flat[i] for i in made], kept))
        for i, x in zip(made, apart_now, strict=True):
            flat[i] = x
        return jax.tree.unflatten(structure, flat), kept

    def linear(
        self,
        structure: Any,
        positions: tuple[int, ...],
        moving: list[jax.Array],
        leaves: list[Value],
        kept: _Kept,
    ) -> list[jax.Array]:
        """Returns the tangents of what comes out, where it is floating.

        Args:
          structure: of what goes in.
          positions: those of what moves among its leaves.
          moving: the tangents.
          leaves: what goes in.
          kept: what is kept.
        """

        def computed(keeper: Keeper, leaves: list[Value], *moved: Value) -> list[Value]:
            leaves = list(leaves)
            for i, x in zip(positions, moved, strict=True):
                leaves[i] = x
            results = self.compute(keeper, *jax.tree.unflatten(structure, leaves))
            return [x for x in jax.tree.leaves(results) if _is_inexact(x)]

        def function(tangents: list[jax.Array]) -> list[jax.Array]:
            of = functools.partial(computed, _as_it_is, leaves)
            _, found = jax.jvp(of, [leaves[i] for i in positions], tangents)
            return found

        def transpose(cotangents: list[jax.Array]) -> list[jax.Array]:
            again, cotangents = _together(self.apart, (kept, cotangents))
            made = map(_restored, again.made)
            places = dict(zip(self.formats, made, strict=True))

            def keeper(place: Place, value: Value) -> Value:
                return _in_place_of(value, places[place])

            entered, around = jax.tree.unflatten(structure, leaves)
            both = zip([*entered, *around], again.entering, strict=True)
            points = jax.tree.leaves(
                [x if stored is None else stored.restored() for x, stored in both]
            )
            of = functools.partial(computed, keeper, points)
            _, pull = jax.vjp(of, *(points[i] for i in positions))
            return list(pull(cotangents))

        others = [x for x in leaves if _is_inexact(x)]
        return linear_function(function, transpose, moving, others)


@jax.custom_jvp
def _in_place_of(value: Value, stored: Value) -> Value:
    """Returns what is kept of a value; its cotangent is that of the value."""
    return stored


@_in_place_of.defjvp
def _tangent_in_place_of(
    primals: tuple[Value, Value], tangents: tuple[Any, Any]
) -> tuple[Value, Any]:
    return primals[1], tangents[0]


def _as_it_is(place: Place, value: Value) -> Value:
    return value


def _restored(kept: EightBits | Value) -> Value:
    return kept.restored() if isinstance(kept, EightBits) else kept


def _is_inexact(x: Value) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _together(apart: bool, tree: Any) -> Any:
    """Returns a tree of arrays; if `apart`, XLA makes all before it reads one."""
    return jax.lax.optimization_barrier(tree) if apart else tree
