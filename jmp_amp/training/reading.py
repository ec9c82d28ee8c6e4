"""Which gradients an optimizer reads, found by tracing its update.

A frozen part, such as that of `optax.set_to_zero`, may have gradients that are not
finite: nothing that the update returns depends on them. Nothing is remembered: what is
frozen may hang on a number of Python, which the types of the arguments do not show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.typing import ArrayLike

from jmp_amp.plan.dataflow.dead_code import inputs_read
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.policies.dtypes import PyTree

# gradients -> (updates, state)
Update = Callable[[PyTree], tuple[PyTree, PyTree]]


class TracedUpdate(NamedTuple):
    """An update as a function of the gradients, traced once.

    Attributes:
      body: what it computes.
      results: the updates and the state, with an atom of `body` for each array.
      gradients: the inputs of `body`.
      is_read: for each leaf of the gradients, whether anything depends on it.
    """

    body: jaxprs.Body
    results: tuple[PyTree, PyTree]
    gradients: list[ArrayLike]
    is_read: tuple[bool, ...]


def traced_update(update: Update, gradients: PyTree) -> TracedUpdate:
    """Traces an update; one that asks for the values of gradients reads all of them.

    Raises:
      Exception: what `update` raises.
    """
    traced = _of_gradients(update, gradients)
    if traced is not None:
        return traced
    is_read = (True,) * len(jax.tree.leaves(gradients))
    return _traced(lambda _: update(gradients), [])._replace(is_read=is_read)


def gradients_read(update: Update, gradients: PyTree) -> tuple[bool, ...]:
    """Returns for each leaf whether an update reads it; all if it cannot be traced."""
    traced = _of_gradients(update, gradients)
    if traced is None:
        return (True,) * len(jax.tree.leaves(gradients))
    return traced.is_read


def _of_gradients(update: Update, gradients: PyTree) -> TracedUpdate | None:
    leaves, structure = jax.tree.flatten(gradients)
    try:
        return _traced(lambda leaves: update(structure.unflatten(leaves)), leaves)
    except Exception:
        # It may ask for the values of a gradient. Another error is told when it runs.
        return None


def _traced(
    update: Callable[[list[ArrayLike]], tuple[PyTree, PyTree]], leaves: list[ArrayLike]
) -> TracedUpdate:
    traced: list[PyTree] = []

    def arrays(*leaves: ArrayLike) -> list[jax.Array]:
        results, structure = jax.tree.flatten(update([*leaves]))
        others = [None if isinstance(leaf, jax.Array) else leaf for leaf in results]
        traced.extend((structure, others))
        return [leaf for leaf in results if isinstance(leaf, jax.Array)]

    program = binding.trace(arrays, leaves)
    body = jaxprs.body_of(program)
    structure, others = traced
    atoms = iter(body.jaxpr.outvars)
    results = structure.unflatten(
        next(atoms) if leaf is None else leaf for leaf in others
    )
    return TracedUpdate(body, results, leaves, inputs_read(program))


def only_read(gradients: PyTree, is_read: tuple[bool, ...]) -> PyTree:
    """Returns gradients with those that nothing reads masked."""
    leaves, structure = jax.tree.flatten(gradients)
    pairs = zip(leaves, is_read, strict=True)
    return structure.unflatten(
        leaf if is_read else optax.MaskedNode() for leaf, is_read in pairs
    )
