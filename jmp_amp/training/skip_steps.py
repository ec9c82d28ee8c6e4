"""One run of an optimizer's update, and whether the gradients that it reads are finite.

A frozen part, such as that of `optax.set_to_zero`, may have gradients that are not
finite: nothing that the update returns depends on them. The traced update shows which
these are, anew in each trace, because a number of Python may decide what is frozen.
"""

import contextlib
from collections.abc import Callable, Sequence

import jax
import optax
from jax.core import Tracer

from jmp_amp.plan.dataflow.dead_code import inputs_read
from jmp_amp.policies.dtypes import PyTree
from jmp_amp.training.finite import all_finite

# The updates and the state.
Results = tuple[PyTree, PyTree]


def update_and_finite(
    update: Callable[[PyTree], Results],
    gradients: PyTree,
    axis_name: str | Sequence[str] | None,
) -> tuple[Results, jax.Array]:
    """Returns `update(gradients)`, and whether all gradients that it reads are finite.

    While JAX traces, `update` is called once. Else it runs as it is, one operation
    after the other; if a gradient is not finite, it is traced before.

    Args:
      update: a function of the gradients; its results may hold leaves of any type.
      gradients: any pytree.
      axis_name: mapped axes to agree over.

    Returns:
      The results; and bool[].
    """
    finite = all_finite(gradients, axis_name)
    if isinstance(finite, Tracer):
        run, read = _traced(update, gradients)
        if read is not gradients:
            finite = all_finite(read, axis_name)
        return run(), finite
    if not finite:
        # An update that asks for the values of gradients reads all of them.
        with contextlib.suppress(Exception):
            finite = all_finite(_traced(update, gradients)[1])
    return update(gradients), finite


def _traced(
    update: Callable[[PyTree], Results], gradients: PyTree
) -> tuple[Callable[[], Results], PyTree]:
    """Returns what runs the traced update, and the gradients that it reads."""
    leaves, structure = jax.tree.flatten(gradients)
    traced: list[PyTree] = []

    def arrays_of(leaves: list[jax.Array]) -> list[jax.Array]:
        results, tree = jax.tree.flatten(update(structure.unflatten(leaves)))
        others = [None if isinstance(leaf, jax.Array) else leaf for leaf in results]
        traced[:] = tree, others
        return [leaf for leaf in results if isinstance(leaf, jax.Array)]

    arrays_of.__name__ = "update"
    compiled = jax.jit(arrays_of)
    program = compiled.trace(leaves).jaxpr
    # Arrays that `update` closes over come before its argument.
    closed_over = len(program.in_avals) - len(leaves)
    is_read = inputs_read(program)[closed_over:]

    def run() -> Results:
        arrays = iter(compiled(leaves))
        tree, others = traced
        return tree.unflatten(next(arrays) if x is None else x for x in others)

    if all(is_read):
        return run, gradients
    pairs = zip(leaves, is_read, strict=True)
    read = (leaf if is_read else optax.MaskedNode() for leaf, is_read in pairs)
    return run, structure.unflatten(read)
