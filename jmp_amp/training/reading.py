"""Which gradients an optimizer reads, found by tracing its update.

A frozen part, such as that of `optax.set_to_zero`, may have gradients that are not
finite: nothing that the update returns depends on them.
"""

import numbers
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from jmp_amp.plan.dataflow.dead_code import inputs_read
from jmp_amp.plan.program import binding
from jmp_amp.policies.dtypes import PyTree

_ARRAYS = jax.Array | np.ndarray | np.generic | numbers.Number
# How many types are known. A function that is made in every step is another type each.
_MOST = 16
# (gradients, all other arguments) -> (updates, state)
Update = Callable[..., tuple[PyTree, PyTree]]


class Reading(NamedTuple):
    """What an update does with gradients of one structure.

    Attributes:
      is_read: for each leaf of the gradients, whether anything depends on it.
      shapes: of the updates, None for what is no array; () if the update cannot be
        traced.
    """

    is_read: tuple[bool, ...]
    shapes: tuple[tuple[int, ...] | None, ...]


class Reader:
    """Tells how an update reads gradients; it traces the update once for each type."""

    def __init__(self, update: Update):
        self._update = update
        self._found: dict[Hashable, Reading] = {}

    def __call__(self, gradients: PyTree, *others: PyTree) -> Reading:
        """Returns how the update reads gradients; `others` are its other arguments."""
        leaves, structure = jax.tree.flatten((gradients, others))
        key = structure, tuple(map(_type_of, leaves))
        try:
            hash(key)
        except TypeError:  # an argument that is no array and has no hash
            return self._reading(gradients, others)
        if key not in self._found:
            if len(self._found) == _MOST:
                self._found.clear()
            self._found[key] = self._reading(gradients, others)
        return self._found[key]

    def _reading(self, gradients: PyTree, others: Sequence[PyTree]) -> Reading:
        leaves, structure = jax.tree.flatten(gradients)
        shapes: list[tuple[int, ...] | None] = []

        def run(*leaves: ArrayLike) -> list[Any]:
            given = structure.unflatten(leaves)
            updates, new = self._update(given, *others)
            shapes[:] = [_shape_of(leaf) for leaf in jax.tree.leaves(updates)]
            both = jax.tree.leaves((updates, new))
            return [leaf for leaf in both if isinstance(leaf, _ARRAYS)]

        try:
            read = inputs_read(binding.trace(run, leaves))
        except Exception:
            # It may ask for the values of a gradient. Another error is told when the
            # update runs.
            return Reading((True,) * len(leaves), ())
        return Reading(read, tuple(shapes))


def only_read(gradients: PyTree, reading: Reading) -> PyTree:
    """Returns gradients with those that nothing reads masked."""
    leaves, structure = jax.tree.flatten(gradients)
    pairs = zip(leaves, reading.is_read, strict=True)
    return structure.unflatten(
        leaf if is_read else optax.MaskedNode() for leaf, is_read in pairs
    )


def _shape_of(leaf: object) -> tuple[int, ...] | None:
    return () if isinstance(leaf, numbers.Number) else getattr(leaf, "shape", None)


def _type_of(leaf: object) -> Hashable:
    if isinstance(leaf, numbers.Number):
        return type(leaf)
    return jax.typeof(leaf) if isinstance(leaf, _ARRAYS) else leaf
