"""Arrays of any shape next to each other, so that one pass reads all of them.

A kernel for each array would take longer to compile than the program that makes them.
Arrays are filled up to whole blocks, and a block belongs to one array. Large arrays are
read in pieces, one after the other, so that little else grows with their size. On a GPU
little does in blocks too: XLA fuses what it computes of the values into what reads it,
and a piece would take longer to begin with than to read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")  # A pytree of arrays.

# Large arrays have so many elements at least, as many as a piece, or a block of them.
_PIECE = 1 << 14
_LANES = 1 << 9
# How many elements a block of small arrays has.
_BLOCK = 1 << 5
# So many elements at least are copied to be read together. Of small programs copies
# are to be few, for the compiler; of large ones small, for they live together.
_TOGETHER = 1 << 20
_MANY = 1 << 24

_ROWS = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)

_TAKEN = jax.lax.GatherDimensionNumbers(
    offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,)
)


class Group(NamedTuple):
    """Arrays of one kind that are read together.

    Attributes:
      block: how many elements a block of them has; 0 if they are read in pieces.
      members: their numbers.
    """

    block: int
    members: list[int]


def groups_of(kinds: Sequence[Hashable], sizes: Sequence[int]) -> list[Group]:
    """Returns groups of the arrays that have elements.

    Args:
      kinds: of each array, what all of a group have alike.
      sizes: how many elements each has.
    """
    large = _PIECE if jax.default_backend() in ("gpu", "cuda", "rocm") else 0
    by_kind: dict[tuple[Hashable, int], list[int]] = {}
    for number, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if size:
            block = _BLOCK if size < _PIECE else large
            by_kind.setdefault((kind, block), []).append(number)
    total = sum(sizes)
    most = max(_TOGETHER, min(total // 8, _MANY), total // 32)
    groups = []
    for (_, block), numbers in by_kind.items():
        left = 0
        for number in numbers:
            if not left or sizes[number] > left:
                groups.append(Group(block, []))
                left = most
            groups[-1].members.append(number)
            left = max(left - sizes[number], 0)
    return groups


def order_of(kinds: Sequence[Hashable], sizes: Sequence[int]) -> list[int]:
    """Returns the numbers of arrays in the order in which groups read them.

    Rows of arrays that are given in this order are moved nowhere by `read_in_groups`.
    """
    grouped = [n for group in groups_of(kinds, sizes) for n in group.members]
    return grouped + [number for number, size in enumerate(sizes) if not size]


def read_in_groups(
    kinds: Sequence[Hashable],
    sizes: Sequence[int],
    read: Callable[[Group], T],
    nothing: Callable[[int], T],
) -> T:
    """Returns what is read of arrays, a row for each of them.

    Args:
      kinds, sizes: of the arrays, see `groups_of`.
      read: group -> pytree of arrays with a row for each member.
      nothing: count -> the same of so many arrays without elements.
    """
    parts = [read(group) for group in groups_of(kinds, sizes)]
    if 0 in sizes or not parts:
        parts.append(nothing(list(sizes).count(0)))
    order = order_of(kinds, sizes)

    def in_order(*rows: jax.Array) -> jax.Array:
        whole = side_by_side(rows)
        if order == sorted(order):
            return whole
        return jnp.take(whole, np.argsort(order), axis=0, mode="clip")

    return jax.tree.map(in_order, *parts)


def side_by_side(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns arrays next to each other along axis 0; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else jax.lax.concatenate(arrays, 0)


def real_parts(array: jax.Array) -> jax.Array:
    """Returns a flat array; of complex numbers the real and the imaginary parts."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return side_by_side([array.real.reshape(-1), array.imag.reshape(-1)])
    return array.reshape(-1)


def scattered(
    scatter: Callable[..., jax.Array],
    array: jax.Array,
    at: Any,
    values: jax.Array,
) -> jax.Array:
    """Returns a flat array with values written to the indices `at`, of their shape.

    `scatter` is `jax.lax.scatter_add` or another of its family.
    """
    at = jax.lax.expand_dims(jnp.asarray(at), [np.ndim(at)])
    return scatter(array, at, values, _ROWS, mode="promise_in_bounds")


def taken(array: jax.Array, at: Any) -> jax.Array:
    """Returns the values of a flat array at indices, of their shape."""
    at = jax.lax.expand_dims(jnp.asarray(at), [np.ndim(at)])
    return jax.lax.gather(array, at, _TAKEN, (1,), mode="promise_in_bounds")


class Blocks(NamedTuple):
    """Arrays next to each other, each filled up to whole blocks.

    Attributes:
      size: how many elements a block has.
      rows: int32[blocks]: the array that each block is of.
      used: int32[blocks]: how many values of it are of the array.
    """

    size: int
    rows: np.ndarray
    used: np.ndarray

    def own(self) -> jax.Array:
        """Returns which values are of the arrays: bool[blocks, size]."""
        shape = (len(self.used), self.size)
        used = jax.lax.broadcast_in_dim(self.used, shape, (0,))
        return jax.lax.broadcasted_iota(jnp.int32, shape, 1) < used


def in_blocks(sizes: Sequence[int], block: int) -> Blocks:
    """Returns the blocks of arrays of these sizes."""
    counts = [-(-size // block) for size in sizes]
    rows = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    used = np.full(len(rows), block, np.int32)
    for last, size, count in zip(np.cumsum(counts), sizes, counts, strict=True):
        used[last - 1] = size - (count - 1) * block
    return Blocks(block, rows, used)


def filled_up(arrays: Sequence[jax.Array], block: int) -> jax.Array:
    """Returns flat arrays as the blocks of `in_blocks`: [blocks, block]."""
    parts: list[Any] = []
    for each in arrays:
        parts.append(each)
        if rest := -each.size % block:
            parts.append(np.zeros(rest, each.dtype))
    return side_by_side(parts).reshape(-1, block)


class Pieces(NamedTuple):
    """How large arrays that lie next to each other are cut into pieces of one size.

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


def piece_at(array: jax.Array, start: jax.Array) -> jax.Array:
    """Returns a piece of a flat array; XLA vectorises reductions over its rows."""
    piece = jax.lax.dynamic_slice(array, (start,), (_PIECE,))
    return piece.reshape(-1, _LANES)


def is_new(known: jax.Array) -> jax.Array:
    """Returns which values of a piece were not in the piece before."""
    return jnp.arange(_PIECE, dtype=jnp.int32).reshape(-1, _LANES) >= known
