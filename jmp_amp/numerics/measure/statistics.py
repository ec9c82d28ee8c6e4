"""The statistic of arrays: magnitudes, zeros, and how many values have which exponent.

Everything is read from the bits of the values. A device may take a subnormal for zero
in arithmetic and in comparisons; integers have no subnormals.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmp_amp.numerics.measure.blocks import Part, read_in_parts, scattered


class Layout(NamedTuple):
    """How floating-point numbers are kept in bits, and where they are counted.

    Zeros are counted first, then the values of each exponent, infinities and NaN, and
    last what is padding and no value.

    Attributes:
      dtype: the unsigned integer that holds one.
      mantissa: the number of bits of the mantissa.
      lowest: the exponent of the smallest subnormal.
      bins: how many exponents there are, those of subnormals included.
    """

    dtype: np.dtype
    mantissa: int
    lowest: int
    bins: int

    @property
    def infinities(self) -> int:
        return self.bins + 1

    @property
    def nans(self) -> int:
        return self.bins + 2

    @property
    def width(self) -> int:
        return self.bins + 4

    @property
    def infinity(self) -> Any:
        """The bits of infinity; those of a NaN are larger."""
        return np.asarray(np.inf, self.floating).view(self.dtype)[()]

    @property
    def padding(self) -> Any:
        """Bits that no magnitude has."""
        return self.dtype.type(np.iinfo(self.dtype).max)

    @property
    def floating(self) -> np.dtype:
        return np.dtype(f"f{self.dtype.itemsize}")


# 254 normal exponents from -126 and 23 subnormal ones; 2046 from -1022 and 52.
F32_LAYOUT = Layout(np.dtype(np.uint32), 23, -149, 277)
F64_LAYOUT = Layout(np.dtype(np.uint64), 52, -1074, 2098)


def layout_of(dtype: np.dtype) -> Layout:
    """Returns the layout in which values of a floating or complex dtype are counted.

    f32 holds every value of the smaller dtypes.
    """
    return F64_LAYOUT if np.dtype(dtype).itemsize >= 8 and dtype != "c8" else F32_LAYOUT


class Counted(NamedTuple):
    """The statistic of some arrays, one row for each.

    Of several runs, counts are added and extremes are the largest. `Figures` reads a
    row.

    Attributes:
      counts: int32[n, width]: how many values are at each place of the `Layout`.
      extremes: [n, 2]: the bits of the largest finite magnitude, and the inverted bits
        of the number below the smallest magnitude that is not zero. 0 if there is none.
    """

    counts: jax.Array
    extremes: jax.Array


class Figures:
    """The statistic of one array, as numbers of Python; the attributes are a `Site`'s.

    They are amax, amin, zeros, nonfinite, nans and exponents.
    """

    def __init__(self, counts: np.ndarray, extremes: np.ndarray, layout: Layout):
        amax, below = extremes
        amin = ~below + layout.dtype.type(1) if below else below
        amin = amin if amin < layout.infinity else below & 0
        self.amax, self.amin = (
            float(np.asarray(bits).view(layout.floating)) for bits in (amax, amin)
        )
        finite = counts[1 : layout.infinities]
        self.zeros = int(counts[0])
        self.nans = int(counts[layout.nans])
        self.nonfinite = self.nans + int(counts[layout.infinities])
        self.exponents = {
            int(i) + layout.lowest: int(finite[i]) for i in np.flatnonzero(finite)
        }


def none_counted(count: int, layout: Layout) -> Counted:
    """Returns the statistic of arrays without elements."""
    counts = jnp.zeros((count, layout.width), jnp.int32)
    return Counted(counts, jnp.zeros((count, 2), layout.dtype))


def counted(
    arrays: Sequence[jax.Array], layout: Layout, mesh: Mesh | None = None
) -> Counted:
    """Returns the statistic of floating or complex arrays of any shape.

    Their dtypes are of one layout; `mesh` is that of the devices that they are on, see
    `meshes.replicated`.
    """

    def add(found: Counted, part: Part) -> Counted:
        bits = _bits(part.values[0], layout)
        bits = jax.lax.select(part.own, bits, jnp.full_like(bits, layout.padding))
        ones = jnp.ones(bits.shape, jnp.int32)
        extremes = jnp.stack([each.max(1) for each in _extremes(bits, layout)], -1)
        add, largest = jax.lax.scatter_add, jax.lax.scatter_max
        return Counted(
            scattered(add, found.counts, part.rows, ones, _place(bits, layout)),
            scattered(largest, found.extremes, part.rows, extremes),
        )

    nothing = functools.partial(none_counted, layout=layout)
    return read_in_parts([(x,) for x in arrays], nothing, add, mesh)


class Worst(enum.IntEnum):
    """The worst value of an array."""

    FINITE = 0
    INFINITE = 1
    NAN = 2


def worst_of(arrays: Sequence[jax.Array], mesh: Mesh | None = None) -> jax.Array:
    """Returns the `Worst` of each array: int32[n]. See `counted`."""

    def add(worst: jax.Array, part: Part) -> jax.Array:
        (values,) = part.values
        layout = layout_of(values.dtype)
        bits = _bits(values, layout)
        bad = (bits >= layout.infinity).astype(jnp.int32)
        bad += (bits > layout.infinity).astype(jnp.int32)
        here = bad.max(1, keepdims=True)
        return scattered(jax.lax.scatter_max, worst, part.rows, here)

    def finite(count: int) -> jax.Array:
        return jnp.zeros((count, 1), jnp.int32)

    return read_in_parts([(x,) for x in arrays], finite, add, mesh)[:, 0]


def worst_counted(counts: jax.Array, layout: Layout) -> jax.Array:
    """Returns the `Worst` of arrays whose values were counted: int32[n]."""
    bad, nan = (counts[:, at] > 0 for at in (layout.infinities, layout.nans))
    return jnp.maximum(
        bad.astype(jnp.int32), nan.astype(jnp.int32) * jnp.int32(Worst.NAN)
    )


def _bits(array: jax.Array, layout: Layout) -> jax.Array:
    """Returns the magnitudes of an array as integers."""
    wide = array.astype(layout.floating)
    # Without the sign.
    return jax.lax.bitcast_convert_type(wide, layout.dtype) & (layout.padding >> 1)


def _place(bits: jax.Array, layout: Layout) -> jax.Array:
    """Returns where magnitudes are counted, see `Layout`."""
    field = (bits >> layout.dtype.type(layout.mantissa)).astype(jnp.int32)
    # The highest bit of a subnormal tells its exponent; a zero has none.
    width = jnp.int32(layout.dtype.itemsize * 8)
    subnormal = width - jax.lax.clz(bits).astype(jnp.int32)
    place = jax.lax.select(field == 0, subnormal, field + jnp.int32(layout.mantissa))
    place += (bits > layout.infinity).astype(jnp.int32)
    return jnp.minimum(place, jnp.int32(layout.width - 1))


def _extremes(bits: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Returns two numbers for each magnitude; the largest ones are the extremes."""
    finite = jax.lax.select(bits < layout.infinity, bits, jnp.zeros_like(bits))
    # The number below zero is the largest of all, and inverted the smallest.
    return finite, ~(bits - layout.dtype.type(1))
