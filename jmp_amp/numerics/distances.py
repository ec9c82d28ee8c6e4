"""Relative distances of arrays in L2, over parts of them that come one by one.

Squares of f32 values may overflow, so a sum of squares has a power of two beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmp_amp.numerics.statistics import (
    F32_LAYOUT,
    Pieces,
    groups_of,
    in_pieces,
    is_new,
    piece_at,
    real_parts,
    side_by_side,
)
from jmp_amp.plan import meshes
from jmp_amp.policies.dtypes import F32

_MANTISSA = F32_LAYOUT.mantissa


class Distance(NamedTuple):
    """Sums of squares; each of shape [n], one for each pair of arrays.

    Attributes:
      exponent: int32: the sums are in units of `4 ** (exponent - 127)`.
      apart: f32: of the differences; infinite if one value alone is not finite.
      size: f32: of the reference, where it is finite.
    """

    exponent: jax.Array
    apart: jax.Array
    size: jax.Array


def distances(
    pairs: Sequence[tuple[jax.Array, jax.Array]], mesh: Mesh | None = None
) -> Distance:
    """Returns the distances of pairs of floating or complex arrays of equal shapes.

    `mesh` is that of the devices that they are on, see `meshes.replicated`.
    """

    def whole(x: jax.Array) -> jax.Array:
        return real_parts(meshes.replicated(x, mesh))

    pairs = [(whole(a), whole(b)) for a, b in pairs]
    zero = jnp.zeros(len(pairs), jnp.float32)
    result = Distance(jnp.zeros(len(pairs), jnp.int32), zero, zero)
    kinds: dict[tuple[np.dtype, np.dtype], dict[int, int]] = {}
    for i, (a, b) in enumerate(pairs):
        if a.size:
            kinds.setdefault((np.dtype(a.dtype), np.dtype(b.dtype)), {})[i] = a.size
    total = sum(a.size for a, _ in pairs)
    for sizes in kinds.values():
        for is_small, group in groups_of(sizes, total):
            flat = jax.lax.optimization_barrier([pairs[i] for i in group])
            measure = _together if is_small else _piecewise
            found = measure([a for a, _ in flat], [b for _, b in flat])
            where = np.asarray(group, np.int32)
            result = Distance(
                *(a.at[where].set(b) for a, b in zip(result, found, strict=True))
            )
    return result


def added(distance: Distance, rows: jax.Array, count: int) -> Distance:
    """Returns the distances of parts [m], added up for the `rows` they belong to."""
    highest = jnp.zeros(count, jnp.int32).at[rows].max(distance.exponent)
    unit = _power(2 * (distance.exponent - highest[rows]))
    # A part that is all zeros has no exponent; its sums are zero.
    return Distance(
        highest,
        jnp.zeros(count, jnp.float32).at[rows].add(_times(distance.apart, unit)),
        jnp.zeros(count, jnp.float32).at[rows].add(_times(distance.size, unit)),
    )


def merged(a: Distance, b: Distance) -> Distance:
    """Returns the distances of the parts of both; of the same shapes."""
    highest = jnp.maximum(a.exponent, b.exponent)
    of_a, of_b = (_power(2 * (each.exponent - highest)) for each in (a, b))
    return Distance(
        highest,
        _times(a.apart, of_a) + _times(b.apart, of_b),
        _times(a.size, of_a) + _times(b.size, of_b),
    )


def across(distance: Distance, axes: Sequence[str]) -> Distance:
    """Returns the distances of all shards over mesh axes, the same on each."""
    highest = jax.lax.pmax(distance.exponent, axes)
    unit = _power(2 * (distance.exponent - highest))
    return Distance(
        highest,
        jax.lax.psum(_times(distance.apart, unit), axes),
        jax.lax.psum(_times(distance.size, unit), axes),
    )


def relative(distance: Distance) -> np.ndarray:
    """Returns the relative distances: 0 for two zeros, infinity from zero alone."""
    apart = np.asarray(distance.apart, np.float64)
    size = np.asarray(distance.size, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.sqrt(apart / size)
    return np.where(apart == 0, 0.0, np.where(size == 0, np.inf, found))


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


def _together(low: Sequence[jax.Array], full: Sequence[jax.Array]) -> Distance:
    """Returns the distances of small arrays, in one pass over all of them."""
    rows = jnp.concatenate(
        [jnp.full(each.size, i, jnp.int32) for i, each in enumerate(low)]
    )
    apart, values = _differences(jnp.concatenate(low), jnp.concatenate(full))
    highest = jnp.zeros(len(low), jnp.int32).at[rows].max(_exponents(apart, values))
    unit = _power(127 - highest)[rows]
    nothing = jnp.zeros(len(low), jnp.float32)
    return Distance(
        highest,
        nothing.at[rows].add(jnp.square(_times(apart, unit))),
        nothing.at[rows].add(jnp.square(values * unit)),
    )


def _piecewise(low: Sequence[jax.Array], full: Sequence[jax.Array]) -> Distance:
    """Returns the distances of large arrays, piece by piece."""
    whole, others = side_by_side(low), side_by_side(full)

    def part(piece: Pieces) -> Distance:
        apart, values = _differences(
            piece_at(whole, piece.starts), piece_at(others, piece.starts)
        )
        new = is_new(piece.known)
        apart, values = (jnp.where(new, x, jnp.float32(0)) for x in (apart, values))
        highest = jnp.max(jnp.max(_exponents(apart, values), axis=0))
        unit = _power(127 - highest)
        squares = (jnp.square(_times(apart, unit)), jnp.square(values * unit))
        return Distance(highest, *(jnp.sum(jnp.sum(x, axis=0)) for x in squares))

    pieces = in_pieces([each.size for each in low])
    return added(jax.lax.map(part, pieces), pieces.rows, len(low))
