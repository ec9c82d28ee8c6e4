"""Relative distances of arrays in L2, over parts of them that come one by one.

Squares of f32 values may overflow, so a sum of squares has a power of two beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmp_amp.numerics.measure import blocks
from jmp_amp.numerics.measure.blocks import Group, Pieces, scattered
from jmp_amp.numerics.measure.statistics import F32_LAYOUT
from jmp_amp.plan.program import meshes
from jmp_amp.policies.dtypes import F32

_MANTISSA = F32_LAYOUT.mantissa


class Distance(NamedTuple):
    """Sums of squares, a row for each pair of arrays.

    Attributes:
      exponent: int32[n]: the sums are in units of `4 ** (exponent - 127)`.
      sums: f32[n, 2]: of the squares of the differences, infinite if one value alone
        is not finite; and of the reference, where it is finite.
    """

    exponent: jax.Array
    sums: jax.Array


def distances(
    pairs: Sequence[tuple[jax.Array, jax.Array]], mesh: Mesh | None = None
) -> Distance:
    """Returns the distances of pairs of floating or complex arrays of equal shapes.

    `mesh` is that of the devices that they are on, see `meshes.replicated`.
    """

    def whole(x: jax.Array) -> jax.Array:
        return blocks.real_parts(meshes.replicated(x, mesh))

    pairs = [(whole(a), whole(b)) for a, b in pairs]

    def measure(group: Group) -> Distance:
        flat = jax.lax.optimization_barrier([pairs[i] for i in group.members])
        low, full = zip(*flat, strict=True)
        if group.block:
            return _in_blocks(low, full, group.block)
        return _piecewise(low, full)

    return blocks.read_in_groups(*_kinds_and_sizes(pairs), measure, _nothing)


def order_of(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> list[int]:
    """Returns the order of pairs in which `distances` finds each at its place."""
    return blocks.order_of(*_kinds_and_sizes(pairs))


def _kinds_and_sizes(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
) -> tuple[list[Hashable], list[int]]:
    kinds = [(np.dtype(a.dtype), np.dtype(b.dtype)) for a, b in pairs]
    return [*kinds], [a.size for a, _ in pairs]


def _nothing(count: int) -> Distance:
    return Distance(jnp.zeros(count, jnp.int32), jnp.zeros((count, 2), jnp.float32))


def added(distance: Distance, rows: np.ndarray | jax.Array, count: int) -> Distance:
    """Returns the distances of parts [m], added up for the `rows` they belong to."""
    none, zero = _nothing(count)
    highest = scattered(jax.lax.scatter_max, none, rows, distance.exponent)
    # A part that is all zeros has no exponent; its sums are zero.
    scaled = _times(distance.sums, _unit(distance, blocks.taken(highest, rows)))
    at = 2 * rows[:, None] + np.arange(2, dtype=np.int32)[None]
    sums = scattered(jax.lax.scatter_add, zero.reshape(-1), at, scaled)
    return Distance(highest, sums.reshape(zero.shape))


def merged(a: Distance, b: Distance) -> Distance:
    """Returns the distances of the parts of both; of the same shapes."""
    highest = jnp.maximum(a.exponent, b.exponent)
    of_a, of_b = (_times(each.sums, _unit(each, highest)) for each in (a, b))
    return Distance(highest, of_a + of_b)


def across(distance: Distance, axes: Sequence[str]) -> Distance:
    """Returns the distances of all shards over mesh axes, the same on each."""
    highest = jax.lax.pmax(distance.exponent, axes)
    scaled = _times(distance.sums, _unit(distance, highest))
    return Distance(highest, jax.lax.psum(scaled, axes))


def relative(distance: Distance) -> np.ndarray:
    """Returns the relative distances: 0 for two zeros, infinity from zero alone."""
    apart, size = np.moveaxis(np.asarray(distance.sums, np.float64), -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.sqrt(apart / size)
    return np.where(apart == 0, 0.0, np.where(size == 0, np.inf, found))


def _unit(distance: Distance, highest: jax.Array) -> jax.Array:
    """Returns what the sums of a distance are in units of higher exponents: [n, 1]."""
    return _power(2 * (distance.exponent - highest))[:, None]


def _times(sums: jax.Array, unit: jax.Array) -> jax.Array:
    # An infinite sum stays one, also where the unit is as good as zero.
    return jnp.where(jnp.isinf(sums), sums, sums * unit)


def _power(exponent: jax.Array) -> jax.Array:
    """Returns two to an int32 power in [-126, 127]; zero below."""
    bits = (jnp.clip(exponent, -126, 127) + 127) << _MANTISSA
    power = jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)
    return jnp.where(exponent < -126, jnp.float32(0), power)


def _itemsize(dtype: np.dtype) -> int:
    return dtype.itemsize


def _differences(low: jax.Array, full: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the differences of values, and the reference, both finite or infinite.

    Values that are not finite in both are alike.
    """
    wide = max(np.dtype(low.dtype), np.dtype(full.dtype), F32, key=_itemsize)
    low, full = low.astype(wide), full.astype(wide)
    finite = jnp.isfinite(full)
    alike = (low == full) | ~(finite | jnp.isfinite(low))
    apart = jnp.where(alike, jnp.zeros((), wide), low - full).astype(jnp.float32)
    apart = jnp.where(jnp.isfinite(apart), apart, jnp.float32(jnp.inf))
    return apart, jnp.where(finite, full, jnp.zeros((), wide)).astype(jnp.float32)


def _exponents(apart: jax.Array, full: jax.Array) -> jax.Array:
    """Returns the biased exponent of the larger of two magnitudes, if it is finite."""
    largest = jnp.maximum(jnp.where(jnp.isinf(apart), 0, jnp.abs(apart)), jnp.abs(full))
    bits = jax.lax.bitcast_convert_type(largest, jnp.uint32)
    return (bits >> jnp.uint32(_MANTISSA)).astype(jnp.int32)


def _in_blocks(
    low: Sequence[jax.Array], full: Sequence[jax.Array], block: int
) -> Distance:
    """Returns the distances of arrays, in one pass over all of them."""
    # What fills the blocks up is alike in both.
    apart, values = _differences(
        blocks.filled_up(low, block), blocks.filled_up(full, block)
    )
    rows = blocks.in_blocks([each.size for each in low], block).rows
    return added(_summed(apart, values, axes=(1,)), rows, len(low))


def _piecewise(low: Sequence[jax.Array], full: Sequence[jax.Array]) -> Distance:
    """Returns the distances of large arrays, piece by piece."""
    whole, others = blocks.side_by_side(low), blocks.side_by_side(full)

    def part(piece: Pieces) -> Distance:
        apart, values = _differences(
            blocks.piece_at(whole, piece.starts), blocks.piece_at(others, piece.starts)
        )
        new = blocks.is_new(piece.known)
        apart, values = (jnp.where(new, x, jnp.float32(0)) for x in (apart, values))
        return _summed(apart, values, axes=(0, 1))

    pieces = blocks.in_pieces([each.size for each in low])
    return added(jax.lax.map(part, pieces), pieces.rows, len(low))


def _summed(apart: jax.Array, values: jax.Array, axes: tuple[int, ...]) -> Distance:
    """Returns the distances of values along axes, from their differences."""

    # XLA vectorises what goes along one axis at a time.
    def along(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return functools.reduce(lambda x, axis: reduce(x, axis, keepdims=True), axes, x)

    highest = along(jnp.max, _exponents(apart, values))
    unit = _power(127 - highest)
    squares = jnp.square(_times(apart, unit)), jnp.square(values * unit)
    sums = [along(jnp.sum, each).squeeze(axes) for each in squares]
    return Distance(highest.squeeze(axes), jnp.stack(sums, axis=-1))
