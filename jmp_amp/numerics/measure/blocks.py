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
from jax.sharding import Mesh

from jmp_amp.plan.program import meshes

T = TypeVar("T")  # A pytree of arrays.
# Arrays that are read side by side: one, or several of one shape.
Arrays = tuple[jax.Array, ...]

# Large arrays have so many elements at least, as many as a piece, or a block of them.
_PIECE = 1 << 14
# How many elements a block of small arrays has, and a block of a piece.
_BLOCK, _LANES = 1 << 5, 1 << 9
# So many elements at least are copied to be read together. Of small programs copies
# are to be few, for the compiler; of large ones small, for they live together.
_TOGETHER = 1 << 20
_MANY = 1 << 24

_ROWS = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


class Part(NamedTuple):
    """Blocks of arrays, each of one array: [blocks, size].

    Attributes:
      values: of the arrays that are read side by side.
      own: which values are an array's own, and in no part before.
      rows: int32[blocks]: the array that each block is of.
    """

    values: Arrays
    own: jax.Array
    rows: jax.Array


def groups_of(
    kinds: Sequence[Hashable], sizes: Sequence[int]
) -> list[tuple[int, list[int]]]:
    """Returns groups of the arrays that have elements: `sizes`, of each array.

    All arrays of a group have the same kind. The first number of a group is how many
    elements a block of them has, 0 if they are read in pieces; the others are theirs.
    """
    large = _PIECE if jax.default_backend() in ("gpu", "cuda", "rocm") else 0
    by_kind: dict[tuple[Hashable, int], list[int]] = {}
    for number, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if size:
            block = _BLOCK if size < _PIECE else large
            by_kind.setdefault((kind, block), []).append(number)
    total = sum(sizes)
    most = max(_TOGETHER, min(total // 8, _MANY), total // 32)
    groups: list[tuple[int, list[int]]] = []
    for (_, block), numbers in by_kind.items():
        left = 0
        for number in numbers:
            if not left or sizes[number] > left:
                groups.append((block, []))
                left = most
            groups[-1][1].append(number)
            left = max(left - sizes[number], 0)
    return groups


def read_in_parts(
    arrays: Sequence[Arrays],
    nothing: Callable[[int], T],
    add: Callable[[T, Part], T],
    mesh: Mesh | None = None,
) -> T:
    """Returns what is read of floating or complex arrays, a row for each of them.

    Args:
      arrays: the arrays, or several of one shape that are read side by side.
      nothing: count -> what is read of so many arrays without elements.
      add: adds what is read of a part.
      mesh: of the devices that they are on, see `meshes.replicated`.
    """
    flat = [tuple(_real_parts(x, mesh) for x in each) for each in arrays]
    sizes = [each[0].size for each in flat]
    groups = groups_of([tuple(x.dtype for x in each) for each in flat], sizes)
    empty = [i for i, size in enumerate(sizes) if not size]
    parts = [nothing(len(empty))] if empty or not groups else []
    for block, members in groups:
        parts.append(_read([flat[i] for i in members], block, nothing, add))
    order = [*empty, *(i for _, members in groups for i in members)]

    def in_order(*rows: jax.Array) -> jax.Array:
        whole = _side_by_side(rows)
        if order == sorted(order):
            return whole
        return jnp.take(whole, np.argsort(order), axis=0, mode="clip")

    return jax.tree.map(in_order, *parts)


def scattered(
    scatter: Callable[..., jax.Array],
    array: jax.Array,
    rows: jax.Array,
    values: jax.Array,
    columns: jax.Array | None = None,
) -> jax.Array:
    """Returns a matrix with values [m, k] written to its rows [m].

    `scatter` is `jax.lax.scatter_add` or another of its family. `columns` are those of
    the values; by default a value has the column of its own.
    """
    if columns is None:
        columns = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    at = jnp.broadcast_to(rows[:, None] * np.int32(array.shape[1]), values.shape)
    at = jax.lax.expand_dims(at + columns, [2])
    flat = scatter(array.reshape(-1), at, values, _ROWS, mode="promise_in_bounds")
    return flat.reshape(array.shape)


def _read(
    arrays: Sequence[Arrays],
    block: int,
    nothing: Callable[[int], T],
    add: Callable[[T, Part], T],
) -> T:
    """Returns what is read of flat arrays of one kind, in blocks or in pieces."""
    sizes = [each[0].size for each in arrays]
    kinds = list(zip(*arrays, strict=True))
    start = nothing(len(arrays))
    if block:
        counts = [-(-size // block) for size in sizes]
        rows = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
        used = np.full(len(rows), block, np.int32)
        used[np.cumsum(counts) - 1] = np.subtract(sizes, np.subtract(counts, 1) * block)
        values = tuple(_filled_up(each, block) for each in kinds)
        own = jax.lax.broadcast_in_dim(used, values[0].shape, (0,))
        own = jax.lax.broadcasted_iota(jnp.int32, values[0].shape, 1) < own
        return add(start, Part(values, own, jnp.asarray(rows)))
    whole = list(map(_side_by_side, kinds))
    numbers = jnp.arange(_PIECE, dtype=jnp.int32).reshape(-1, _LANES)

    def read(found: T, piece: jax.Array) -> tuple[T, None]:
        begin, row, known = piece
        pieces = (jax.lax.dynamic_slice(x, (begin,), (_PIECE,)) for x in whole)
        values = tuple(x.reshape(-1, _LANES) for x in pieces)
        rows = jnp.broadcast_to(row, len(numbers))
        return add(found, Part(values, numbers >= known, rows)), None

    if axes := tuple(meshes.varying_axes(whole[0])):
        # What a loop carries varies from its start.
        start = jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), start)
    return jax.lax.scan(read, start, jnp.asarray(_pieces(sizes)))[0]


def _pieces(sizes: Sequence[int]) -> np.ndarray:
    """Returns where each piece begins, of which array it is, and how much is known.

    The last piece of an array begins so that it ends with the array: some of its values
    were in the piece before.
    """
    first = np.cumsum([0, *sizes])
    return np.asarray(
        [
            (first[row] + min(start, size - _PIECE), row, max(start - size + _PIECE, 0))
            for row, size in enumerate(sizes)
            for start in range(0, size, _PIECE)
        ],
        np.int32,
    )


def _filled_up(arrays: Sequence[jax.Array], block: int) -> jax.Array:
    """Returns flat arrays in blocks, the last of each filled up: [blocks, block]."""
    parts: list[Any] = []
    for each in arrays:
        parts.append(each)
        if rest := -each.size % block:
            parts.append(np.zeros(rest, each.dtype))
    return _side_by_side(parts).reshape(-1, block)


def _side_by_side(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns arrays next to each other along axis 0; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else jax.lax.concatenate(arrays, 0)


def _real_parts(array: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Returns a flat array; of complex numbers the real and the imaginary parts."""
    array = meshes.replicated(array, mesh)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _side_by_side([array.real.reshape(-1), array.imag.reshape(-1)])
    return array.reshape(-1)
