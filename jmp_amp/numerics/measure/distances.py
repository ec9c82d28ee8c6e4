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

from jmp_amp.numerics.measure.blocks import Part, read_in_parts, scattered
from jmp_amp.numerics.measure.statistics import F32_LAYOUT
from jmp_amp.policies.dtypes import F32

_MANTISSA = F32_LAYOUT.mantissa


class Distance(NamedTuple):
    """Sums of squares, a row for each pair of arrays.

    Attributes:
      exponent: int32[n, 1]: the sums are in units of `4 ** (exponent - 127)`.
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
    # So that nothing is computed again for each that reads it.
    pairs = [jax.lax.optimization_barrier((a, b)) for a, b in pairs]
    return read_in_parts(pairs, nothing, _add, mesh)


def nothing(count: int) -> Distance:
    """Returns the distances of so many pairs without elements."""
    sums = jnp.zeros((count, 2), jnp.float32)
    return Distance(jnp.zeros((count, 1), jnp.int32), sums)


def _add(found: Distance, part: Part) -> Distance:
    """Returns distances with those of a part, each in the unit of its row."""
    apart, values = _differences(*part.values)
    apart, values = (jnp.where(part.own, x, jnp.float32(0)) for x in (apart, values))
    here = _exponents(apart, values).max(1, keepdims=True)
    unit = _power(127 - here)
    sums = [jnp.square(x).sum(1) for x in (_times(apart, unit), values * unit)]
    blocks = Distance(here, jnp.stack(sums, -1))
    none = nothing(len(found.exponent))
    highest = scattered(jax.lax.scatter_max, none.exponent, part.rows, here)
    # A block that is all zeros has no exponent; its sums are zero.
    of_row = jnp.take(highest, part.rows, axis=0, mode="clip")
    sums = _in_units_of(of_row, blocks)
    added = scattered(jax.lax.scatter_add, none.sums, part.rows, sums)
    return merged(found, Distance(highest, added))


def merged(a: Distance, b: Distance) -> Distance:
    """Returns the distances of the parts of both; of the same shapes."""
    highest = jnp.maximum(a.exponent, b.exponent)
    return Distance(highest, _in_units_of(highest, a) + _in_units_of(highest, b))


def across(distance: Distance, axes: Sequence[str]) -> Distance:
    """Returns the distances of all shards over mesh axes, the same on each."""
    highest = jax.lax.pmax(distance.exponent, axes)
    return Distance(highest, jax.lax.psum(_in_units_of(highest, distance), axes))


def relative(distance: Distance) -> np.ndarray:
    """Returns the relative distances: 0 for two zeros, infinity from zero alone."""
    apart, size = np.moveaxis(np.asarray(distance.sums, np.float64), -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.sqrt(apart / size)
    return np.where(apart == 0, 0.0, np.where(size == 0, np.inf, found))


def _in_units_of(highest: jax.Array, distance: Distance) -> jax.Array:
    """Returns the sums of a distance in units of higher exponents."""
    return _times(distance.sums, _power(2 * (distance.exponent - highest)))


def _times(sums: jax.Array, unit: jax.Array) -> jax.Array:
    # An infinite sum stays one, also where the unit is as good as zero.
    return jnp.where(jnp.isinf(sums), sums, sums * unit)


def _power(exponent: jax.Array) -> jax.Array:
    """Returns two to an int32 power in [-126, 127]; zero below."""
    bits = (jnp.clip(exponent, -126, 127) + 127) << _MANTISSA
    power = jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)
    return jnp.where(exponent < -126, jnp.float32(0), power)


def _differences(low: jax.Array, full: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the differences of values, and the reference, both finite or infinite.

    Values that are not finite in both are alike.
    """
    dtypes = np.dtype(low.dtype), np.dtype(full.dtype), F32
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
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
