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

from jmp_amp.numerics.measure import blocks
from jmp_amp.numerics.measure.blocks import Group, Pieces, scattered
from jmp_amp.plan.program import meshes


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
        fields = 1 << (self.dtype.itemsize * 8 - 1 - self.mantissa)
        return self.dtype.type((fields - 1) << self.mantissa)

    @property
    def padding(self) -> Any:
        """Bits that no magnitude has."""
        return self.dtype.type(np.iinfo(self.dtype).max)

    @property
    def signed(self) -> np.dtype:
        return np.dtype(f"int{self.dtype.itemsize * 8}")

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

    Of several runs, counts are added and extremes are the largest.

    `Figures` reads a row.

    Attributes:
      counts: int32[n, width]: how many values are at each place of the `Layout`.
      extremes: [n, 2]: the bits of the largest finite magnitude, and the inverted bits
        of the number below the smallest magnitude that is not zero. 0 if there is none.
    """

    counts: jax.Array
    extremes: jax.Array


class Figures:
    """The statistic of one array, as numbers of Python.

    Attributes:
      amax: the largest finite magnitude; 0.0 if there is none.
      amin: the smallest magnitude that is not zero; 0.0 if there is none.
      zeros, nonfinite, nans: how many values are zero, not finite, NaN.
      exponents: how many finite values have each exponent.
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


def counted(
    arrays: Sequence[jax.Array], layout: Layout, mesh: Mesh | None = None
) -> Counted:
    """Returns the statistic of floating or complex arrays of any shape.

    Args:
      arrays: of dtypes of the same `layout`. In the order of `blocks.order_of` they are
        counted with fewer kernels.
      layout: that of their values.
      mesh: of the devices that they are on, see `meshes.replicated`.
    """
    flat, kinds, sizes = _flat(arrays, mesh)

    def count(group: Group) -> Counted:
        members = [flat[i] for i in group.members]
        if group.block:
            return _count_in_blocks(members, layout, group.block)
        return _count_in_pieces(members, layout)

    nothing = functools.partial(_nothing, layout=layout)
    return blocks.read_in_groups(kinds, sizes, count, nothing)


def _flat(
    arrays: Sequence[jax.Array], mesh: Mesh | None
) -> tuple[list[jax.Array], list[np.dtype], list[int]]:
    """Returns flat arrays that each device has whole, their dtypes and their sizes."""
    flat = [blocks.real_parts(meshes.replicated(each, mesh)) for each in arrays]
    return flat, [np.dtype(x.dtype) for x in flat], [x.size for x in flat]


class Worst(enum.IntEnum):
    """The worst value of an array."""

    FINITE = 0
    INFINITE = 1
    NAN = 2


def worst_of(arrays: Sequence[jax.Array], mesh: Mesh | None = None) -> jax.Array:
    """Returns the `Worst` of each array: int32[n]. See `counted`."""
    flat, kinds, sizes = _flat(arrays, mesh)

    def nothing(count: int) -> jax.Array:
        return jnp.full(count, Worst.FINITE, jnp.int32)

    def worst(group: Group) -> jax.Array:
        members = [flat[i] for i in group.members]
        lengths = [each.size for each in members]
        if group.block:
            rows = blocks.in_blocks(lengths, group.block).rows
            found = _badness(blocks.filled_up(members, group.block)).max(1)
        else:
            pieces = blocks.in_pieces(lengths)
            rows = pieces.rows
            found = _worst_in_pieces(blocks.side_by_side(members), pieces)
        return scattered(jax.lax.scatter_max, nothing(len(members)), rows, found)

    return blocks.read_in_groups(kinds, sizes, worst, nothing)


def _worst_in_pieces(whole: jax.Array, pieces: Pieces) -> jax.Array:
    def worst(start: jax.Array) -> jax.Array:
        return _badness(blocks.piece_at(whole, start)).max(0).max()

    return jax.lax.map(worst, pieces.starts)


def worst_counted(counts: jax.Array, layout: Layout) -> jax.Array:
    """Returns the `Worst` of arrays whose values were counted: int32[n]."""
    bad, nan = (counts[:, at] > 0 for at in (layout.infinities, layout.nans))
    return jnp.maximum(
        bad.astype(jnp.int32), nan.astype(jnp.int32) * jnp.int32(Worst.NAN)
    )


def _badness(array: jax.Array) -> jax.Array:
    layout = layout_of(array.dtype)
    bits = _bits(array, layout)
    bad, nan = bits >= layout.infinity, bits > layout.infinity
    return bad.astype(jnp.int32) + nan.astype(jnp.int32)


def _bits(array: jax.Array, layout: Layout) -> jax.Array:
    """Returns the magnitudes of an array as integers."""
    wide = jnp.float64 if layout.mantissa == 52 else jnp.float32
    bits = jax.lax.bitcast_convert_type(array.astype(wide), layout.dtype)
    largest = layout.dtype.type(np.iinfo(layout.signed).max)
    return bits & largest


def _place(bits: jax.Array, layout: Layout) -> jax.Array:
    """Returns where magnitudes are counted, see `Layout`."""
    field = (bits >> layout.dtype.type(layout.mantissa)).astype(jnp.int32)
    # The highest bit of a subnormal tells its exponent; a zero has none.
    width = jnp.int32(layout.dtype.itemsize * 8)
    subnormal = width - jax.lax.clz(bits).astype(jnp.int32)
    place = jax.lax.select(field == 0, subnormal, field + jnp.int32(layout.mantissa))
    place += (bits > layout.infinity).astype(jnp.int32)
    return jnp.minimum(place, jnp.int32(layout.width - 1))


def _chosen(own: jax.Array, bits: jax.Array, layout: Layout) -> jax.Array:
    """Returns magnitudes, and padding where they are not an array's own."""
    return jax.lax.select(own, bits, jnp.full_like(bits, layout.padding))


def _extremes(bits: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Returns two numbers for each magnitude; the largest ones are the extremes."""
    finite = jax.lax.select(bits < layout.infinity, bits, jnp.zeros_like(bits))
    # The number below zero is the largest of all, and inverted the smallest.
    return finite, ~(bits - layout.dtype.type(1))


def _nothing(count: int, layout: Layout, like: jax.Array | None = None) -> Counted:
    """Returns the statistic of no values; it varies over shards as `like` does."""
    found = Counted(
        jnp.zeros((count, layout.width), jnp.int32),
        jnp.zeros((count, 2), layout.dtype),
    )
    if like is None:
        return found
    zero = jax.lax.slice_in_dim(like.reshape(-1), 0, 1)[None] & 0
    return Counted(*(x + zero.astype(x.dtype) for x in found))


def _places(rows: Any, bits: jax.Array, layout: Layout) -> jax.Array:
    """Returns where magnitudes of the arrays `rows` are, in counts that are flat."""
    first = jnp.broadcast_to(rows * np.int32(layout.width), bits.shape)
    return first + _place(bits, layout)


def _added(counts: jax.Array, places: jax.Array) -> jax.Array:
    """Returns counts [n, width] with one more at each of the places."""
    ones = jnp.ones(places.shape, jnp.int32)
    flat = scattered(jax.lax.scatter_add, counts.reshape(-1), places, ones)
    return flat.reshape(counts.shape)


def _largest(extremes: jax.Array, rows: Any, found: Sequence[jax.Array]) -> jax.Array:
    """Returns the larger of extremes [n, 2] and of those that were found.

    They were found in m parts, each of the array that `rows` [m] tells.
    """
    at = 2 * rows[:, None] + np.arange(2, dtype=np.int32)[None]
    largest = jnp.stack(found, axis=-1)
    flat = scattered(jax.lax.scatter_max, extremes.reshape(-1), at, largest)
    return flat.reshape(extremes.shape)


def _count_in_blocks(
    arrays: Sequence[jax.Array], layout: Layout, block: int
) -> Counted:
    """Counts arrays in one pass over all of them."""
    parts = blocks.in_blocks([each.size for each in arrays], block)
    bits = _bits(blocks.filled_up(arrays, block), layout)
    nothing = _nothing(len(arrays), layout, bits)
    bits = _chosen(parts.own(), bits, layout)
    found = [each.max(1) for each in _extremes(bits, layout)]
    return Counted(
        _added(nothing.counts, _places(parts.rows[:, None], bits, layout)),
        _largest(nothing.extremes, parts.rows, found),
    )


def _count_in_pieces(arrays: Sequence[jax.Array], layout: Layout) -> Counted:
    """Counts large arrays piece by piece, so that nothing grows with their size."""
    whole = blocks.side_by_side(arrays)

    def add(counts: jax.Array, piece: Pieces) -> tuple[jax.Array, list[jax.Array]]:
        bits = _bits(blocks.piece_at(whole, piece.starts), layout)
        bits = _chosen(blocks.is_new(piece.known), bits, layout)
        counts = _added(counts, _places(piece.rows.reshape(1, 1), bits, layout))
        # XLA vectorises the first of the two.
        return counts, [each.max(0).max() for each in _extremes(bits, layout)]

    nothing = _nothing(len(arrays), layout, _bits(whole[:1], layout))
    pieces = blocks.in_pieces([each.size for each in arrays])
    counts, found = jax.lax.scan(add, nothing.counts, pieces)
    return Counted(counts, _largest(nothing.extremes, pieces.rows, found))
