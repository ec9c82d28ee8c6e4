"""The statistic of arrays: magnitudes, zeros, and how many values have which exponent.

Everything is read from the bits of the values. A device may take a subnormal for zero
in arithmetic and in comparisons; integers have no subnormals.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmp_amp.plan import meshes

# Arrays of fewer elements are counted together, in one pass. Larger ones are counted in
# pieces of so many.
_PIECE = 1 << 14
_LANES = 1 << 9
# So many elements at least are copied to be counted together. Of small programs copies
# are to be few, for the compiler; of large ones small, for they live together.
_TOGETHER = 1 << 20
_MANY = 1 << 24

_IN_BOUNDS = "promise_in_bounds"


class Layout(NamedTuple):
    """How floating-point numbers are kept in bits.

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

    # After the exponents come zeros, values that are not finite, and NaN among them.
    @property
    def zeros(self) -> int:
        return self.bins

    @property
    def nonfinite(self) -> int:
        return self.bins + 1

    @property
    def nans(self) -> int:
        return self.bins + 2

    @property
    def width(self) -> int:
        return self.bins + 3

    @property
    def fields(self) -> int:
        """How many values the bits above the mantissa may have, with padding."""
        return 1 << (self.dtype.itemsize * 8 - self.mantissa)

    @property
    def places(self) -> int:
        """How many places the bits of a magnitude, or of padding, may be counted at."""
        return self.fields + self.mantissa + 1

    @property
    def infinity(self) -> Any:
        """The bits of infinity; those of a NaN are larger."""
        return self.dtype.type((self.fields // 2 - 1) << self.mantissa)

    @property
    def padding(self) -> Any:
        """Bits that no magnitude has."""
        return self.dtype.type(np.iinfo(self.dtype).max)

    @property
    def signed(self) -> np.dtype:
        return np.dtype(f"int{self.dtype.itemsize * 8}")


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

    Attributes:
      bins: int32[n, width]: how many values have each exponent, see `Layout`.
      amax: the bits of the largest finite magnitude, 0 if there is none; [n].
      amin: the bits of the smallest one that is not zero; `padding` if there is none.
    """

    bins: jax.Array
    amax: jax.Array
    amin: jax.Array


def counted(
    arrays: Sequence[jax.Array], layout: Layout, mesh: Mesh | None = None
) -> Counted:
    """Returns the statistic of floating or complex arrays of any shape.

    Arrays are copied next to each other and counted in one pass: a kernel for each of
    them would take longer to compile than the program that makes them.

    Args:
      arrays: of dtypes of the same `layout`.
      layout: that of their values.
      mesh: of the devices that they are on, see `meshes.replicated`.
    """
    arrays = [real_parts(meshes.replicated(each, mesh)) for each in arrays]
    result = Counted(
        jnp.zeros((len(arrays), layout.width), jnp.int32),
        jnp.zeros(len(arrays), layout.dtype),
        jnp.full(len(arrays), layout.padding, layout.dtype),
    )
    kinds: dict[np.dtype, dict[int, int]] = {}
    for i, each in enumerate(arrays):
        if each.size:
            kinds.setdefault(np.dtype(each.dtype), {})[i] = each.size
    total = sum(each.size for each in arrays)
    for sizes in kinds.values():
        for is_small, group in groups_of(sizes, total):
            flat = [arrays[i] for i in group]
            found = (_count_together if is_small else _count_in_pieces)(flat, layout)
            where = np.asarray(group, np.int32)
            result = Counted(
                *(a.at[where].set(b) for a, b in zip(result, found, strict=True))
            )
    return result


class Worst(enum.IntEnum):
    """The worst value of an array."""

    FINITE = 0
    INFINITE = 1
    NAN = 2


def worst_of(arrays: Sequence[jax.Array], mesh: Mesh | None = None) -> jax.Array:
    """Returns the `Worst` of each array: int32[n]. See `counted`."""
    arrays = [real_parts(meshes.replicated(each, mesh)) for each in arrays]
    result = jnp.zeros(len(arrays), jnp.int32)
    small: dict[np.dtype, list[int]] = {}
    for i, each in enumerate(arrays):
        if each.size < _PIECE:
            small.setdefault(np.dtype(each.dtype), []).append(i)
        else:
            result = result.at[i].set(jnp.max(_badness(each)))
    for group in small.values():
        flat = [arrays[i] for i in group]
        bad = _badness(side_by_side(flat))
        rows = jnp.asarray(np.repeat(group, [each.size for each in flat]), jnp.int32)
        result = result.at[rows].max(bad, mode=_IN_BOUNDS)
    return result


def worst_counted(bins: jax.Array, layout: Layout) -> jax.Array:
    """Returns the `Worst` of arrays whose bins were counted: int32[n]."""
    bad, nan = (bins[:, at] > 0 for at in (layout.nonfinite, layout.nans))
    return bad.astype(jnp.int32) + nan.astype(jnp.int32)


def _badness(array: jax.Array) -> jax.Array:
    layout = layout_of(array.dtype)
    bits = _bits(array, layout)
    bad, nan = bits >= layout.infinity, bits > layout.infinity
    return bad.astype(jnp.int32) + nan.astype(jnp.int32)


def _together(total: int) -> int:
    """Returns how many elements are copied together in a program of `total`."""
    return max(_TOGETHER, min(total // 8, _MANY), total // 32)


def groups_of(sizes: dict[int, int], total: int) -> Iterator[tuple[bool, list[int]]]:
    """Yields groups of arrays to copy next to each other, and whether they are small.

    Args:
      sizes: of the arrays, by their number.
      total: how many elements the program has.
    """
    for is_small in (True, False):
        group: list[int] = []
        left = most = _together(total)
        for index, size in sizes.items():
            if (size < _PIECE) != is_small:
                continue
            if group and size > left:
                yield is_small, group
                group, left = [], most
            group.append(index)
            left -= size
        if group:
            yield is_small, group


class Pieces(NamedTuple):
    """How arrays that lie next to each other are cut into pieces of one size.

    The last piece of an array begins so that it ends with the array: some of its values
    were in the piece before.

    Attributes:
      starts: int32: where each piece begins.
      rows: int32: the array that it is cut from.
      known: int32: how many of its values were in the piece before.
    """

    starts: jax.Array
    rows: jax.Array
    known: jax.Array


def in_pieces(sizes: Sequence[int]) -> Pieces:
    """Returns the pieces of arrays of these sizes; none is smaller than a piece."""
    starts, rows, known, first = [], [], [], 0
    for row, size in enumerate(sizes):
        for start in range(0, size, _PIECE):
            here = min(start, size - _PIECE)
            starts.append(first + here)
            rows.append(row)
            known.append(start - here)
        first += size
    return Pieces(*(jnp.asarray(each, jnp.int32) for each in (starts, rows, known)))


def side_by_side(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns flat arrays next to each other; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def piece_at(array: jax.Array, start: jax.Array) -> jax.Array:
    """Returns a piece of a flat array; XLA vectorises reductions over its rows."""
    piece = jax.lax.dynamic_slice(array, (start,), (_PIECE,))
    return piece.reshape(-1, _LANES)


def is_new(known: jax.Array) -> jax.Array:
    """Returns which values of a piece were not in the piece before."""
    return jnp.arange(_PIECE, dtype=jnp.int32).reshape(-1, _LANES) >= known


def real_parts(array: jax.Array) -> jax.Array:
    """Returns a flat array; of complex numbers the real and the imaginary parts."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.concatenate([array.real.reshape(-1), array.imag.reshape(-1)])
    return array.reshape(-1)


def _bits(array: jax.Array, layout: Layout) -> jax.Array:
    """Returns the magnitudes of an array as integers."""
    wide = jnp.float64 if layout.mantissa == 52 else jnp.float32
    bits = jax.lax.bitcast_convert_type(array.astype(wide), layout.dtype)
    largest = layout.dtype.type(np.iinfo(layout.signed).max)
    return bits & largest


def _place(bits: jax.Array, layout: Layout) -> jax.Array:
    """Returns where magnitudes are counted, see `_Found`."""
    field = (bits >> layout.dtype.type(layout.mantissa)).astype(jnp.int32)
    # The highest bit of a subnormal tells its exponent; a zero has none.
    width = jnp.int32(layout.dtype.itemsize * 8)
    subnormal = width - jax.lax.clz(bits).astype(jnp.int32)
    place = jnp.where(field == 0, subnormal, field + jnp.int32(layout.mantissa))
    return place + (bits > layout.infinity).astype(jnp.int32)


def _largest(bits: jax.Array, layout: Layout) -> jax.Array:
    return jnp.where(bits < layout.infinity, bits, layout.dtype.type(0))


def _before(bits: jax.Array, layout: Layout) -> jax.Array:
    """Returns the bits of the next smaller magnitudes; those of a zero are the largest.

    The smallest of them tells of the smallest magnitude that is not zero.
    """
    return bits - layout.dtype.type(1)


def _after(before: jax.Array, layout: Layout) -> jax.Array:
    """Returns the bits whose next smaller ones are `before`, if they are finite."""
    bits = before + layout.dtype.type(1)
    return jnp.where((bits > 0) & (bits < layout.infinity), bits, layout.padding)


class _Found(NamedTuple):
    """What is counted while values are read.

    Attributes:
      places: int32[n * places]: for each array zeros, the exponents in their order,
        infinities, NaN, and padding, which nothing reads.
      amax, amin: as in `Counted`.
    """

    places: jax.Array
    amax: jax.Array
    amin: jax.Array


def _none(count: int, layout: Layout, like: jax.Array) -> _Found:
    """Returns the counts of no values; they vary over shards as `like` does."""
    zero = (like.ravel()[0] & 0).astype(jnp.int32)
    none = zero.astype(layout.dtype)
    return _Found(
        jnp.zeros(count * layout.places, jnp.int32) + zero,
        jnp.zeros(count, layout.dtype) + none,
        jnp.full(count, layout.padding, layout.dtype) - none,
    )


def _in_bins(found: _Found, layout: Layout) -> Counted:
    places = found.places.reshape(-1, layout.places)
    zeros, rest = places[:, :1], places[:, 1 : layout.width]
    exponents, infinite = rest[:, : layout.bins], rest[:, layout.bins : -1]
    nans = rest[:, -1:]
    bins = jnp.concatenate([exponents, zeros, infinite + nans, nans], axis=1)
    return Counted(bins, found.amax, found.amin)


def _count_together(arrays: Sequence[jax.Array], layout: Layout) -> Counted:
    """Counts small arrays in one pass over all of them."""
    count = len(arrays)
    bits = _bits(side_by_side(arrays), layout)
    rows = jnp.concatenate(
        [jnp.full(each.size, i, jnp.int32) for i, each in enumerate(arrays)]
    )
    none = _none(count, layout, bits)
    at = rows * jnp.int32(layout.places) + _place(bits, layout)
    before = none.amin.at[rows].min(_before(bits, layout), mode=_IN_BOUNDS)
    found = _Found(
        none.places.at[at].add(jnp.int32(1), mode=_IN_BOUNDS),
        none.amax.at[rows].max(_largest(bits, layout), mode=_IN_BOUNDS),
        _after(before, layout),
    )
    return _in_bins(found, layout)


def _count_in_pieces(arrays: Sequence[jax.Array], layout: Layout) -> Counted:
    """Counts large arrays piece by piece, so that nothing grows with their size."""
    whole = side_by_side(arrays)

    def add(found: _Found, piece: Pieces) -> tuple[_Found, None]:
        bits = _bits(piece_at(whole, piece.starts), layout)
        bits = jnp.where(is_new(piece.known), bits, layout.padding)
        row = piece.rows
        at = row * jnp.int32(layout.places) + _place(bits, layout)
        amax = jnp.max(jnp.max(_largest(bits, layout), axis=0))
        amin = jnp.min(jnp.min(_before(bits, layout), axis=0))
        return _Found(
            found.places.at[at].add(jnp.int32(1), mode=_IN_BOUNDS),
            found.amax.at[row].max(amax),
            found.amin.at[row].min(_after(amin, layout)),
        ), None

    start = _none(len(arrays), layout, _bits(whole[:1], layout))
    pieces = in_pieces([each.size for each in arrays])
    found, _ = jax.lax.scan(add, start, pieces)
    return _in_bins(found, layout)
