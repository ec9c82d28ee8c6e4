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
    """A part of the results that has the structure and the shapes of an argument.

    Attributes:
      start: the position of its first leaf among those of the results.
      dtypes: those of the leaves of the argument; None where it is no array.
    """

    start: int
    dtypes: tuple[np.dtype | None, ...]


def successors(
    arguments: Sequence[PyTree],
    results: PyTree,
    is_leaf: Callable[[object], bool],
) -> list[Successor]:
    """Returns the parts of `results` that may take the place of a half argument.

    A part is all of the results, or an item of a tuple or a list in them. The argument
    is a whole one, in the dtypes in which it was given.

    Args:
      arguments: pytrees; leaves are arrays, their shapes and dtypes, or anything.
      results: a pytree.
      is_leaf: says which objects are leaves besides those of JAX.
    """
    found: dict[Successor, None] = {}
    for given in arguments:
        leaves, structure = jax.tree.flatten(given, is_leaf)
        dtypes = tuple(x.dtype if _is_array(x) else None for x in leaves)
        if not any(map(is_half, dtypes)):
            continue
        for part, start in _parts(results, is_leaf, 0):
            others, same = jax.tree.flatten(part, is_leaf)
            if same == structure and list(map(_shape, others)) == [
                *map(_shape, leaves)
            ]:
                found[Successor(start, dtypes)] = None
    return list(found)


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
