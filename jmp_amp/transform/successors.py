"""Results that take the place of an argument, as the carry of a loop does.

A recipe may store half precision: then half arguments are traced in f32, and results
come back in the policy's output dtype. A state that goes in half has to come out half,
or no loop can carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeGuard

import jax
import numpy as np

from jmp_amp.policies.dtypes import PyTree, is_half


class Successor(NamedTuple):
    """A result that may take the place of a half array.

    Attributes:
      dtypes: that of the array, or of several that it may be.
      is_state: whether both are one variable of linen or nnx.
    """

    dtypes: frozenset[np.dtype]
    is_state: bool


def successors(
    arguments: Sequence[PyTree],
    results: PyTree,
    is_leaf: Callable[[object], bool],
) -> dict[int, Successor]:
    """Returns the leaves of `results` that may take the place of a half argument.

    By their positions. They are in a part that has the structure and the shapes of a
    whole argument; a part is all of the results, or an item of a tuple or a list there.

    Args:
      arguments: pytrees; leaves are arrays, their shapes and dtypes, or anything, in
        the dtypes in which they were given.
      results: a pytree.
      is_leaf: says which objects are leaves besides those of JAX.
    """
    found: dict[int, Successor] = {}
    for given in arguments:
        leaves, structure = jax.tree.flatten(given, is_leaf)
        halves = {
            i: x.dtype
            for i, x in enumerate(leaves)
            if _is_array(x) and is_half(x.dtype)
        }
        for part, start in _parts(results, is_leaf, 0) if halves else ():
            others, same = jax.tree.flatten(part, is_leaf)
            if same == structure and list(map(_shape, others)) == [
                *map(_shape, leaves)
            ]:
                for i, dtype in halves.items():
                    before = found.get(start + i, Successor(frozenset(), False))
                    dtypes = before.dtypes | {dtype}
                    found[start + i] = before._replace(dtypes=dtypes)
    return found


def _parts(
    tree: PyTree, is_leaf: Callable[[object], bool], start: int
) -> Iterator[tuple[PyTree, int]]:
    """Yields parts of a tree, each with the position of its first leaf."""
    yield tree, start
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from _parts(item, is_leaf, start)
            start += len(jax.tree.leaves(item, is_leaf))


def _is_array(leaf: object) -> TypeGuard[jax.Array]:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _shape(leaf: object) -> tuple[int, ...] | None:
    return leaf.shape if _is_array(leaf) else None
