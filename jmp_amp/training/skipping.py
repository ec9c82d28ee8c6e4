"""Running an optimizer's update so that a bad step leaves its state as it was.

Every array of the state is chosen, the new one or the old one, where the update makes
it and not after it. What the update computes from it then reads what is stored. On a
good step nothing else is computed; on a bad one all that is computed is thrown away.

It matters to XLA's CPU, which makes one loop for each result: an update that reads an
array that is not stored is computed from the old arrays once more, beside the loop that
writes the new one in their place. So XLA copies the old arrays first: moments, masters
and parameters, in every step. A training step of a multilayer perceptron with AdamW
takes 1.02x of the time without a loss scale, and 1.21x with flax's `DynamicScale`,
which chooses after the update (`examples/benchmarks/results/weights_on_cpu.json`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.policies.dtypes import PyTree
from jmp_amp.training.finite import all_finite, choose
from jmp_amp.training.reading import (
    TracedUpdate,
    Update,
    gradients_read,
    only_read,
    traced_update,
)

_NAMES = "the new state", "the old one"


def update_if_finite(
    update: Update,
    gradients: PyTree,
    state: PyTree,
    axis_name: str | Sequence[str] | None,
    call: str,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Returns whether gradients are finite, the updates, and the state after them.

    Only gradients that the update reads are looked at. A bad step keeps the old state.

    Args:
      update: an update of `state`; compiled, it is traced once.
      gradients: any pytree.
      state: any pytree.
      axis_name: mapped axes to agree over.
      call: what errors begin with.

    Raises:
      ValueError, TypeError: if the new state is not of the type of the old one.
    """
    leaves = jax.tree.leaves(gradients)
    compiled = bool(axis_name) or any(isinstance(leaf, Tracer) for leaf in leaves)
    if not compiled and not isinstance(finite := all_finite(gradients), Tracer):
        # Every operation is a program of its own.
        if not finite:
            finite = all_finite(only_read(gradients, gradients_read(update, gradients)))
        proposed, new = update(gradients)
        return finite, proposed, choose(finite, new, state, call, _NAMES)
    traced = traced_update(update, gradients)
    finite = all_finite(only_read(gradients, traced.is_read), axis_name)
    return finite, *_update_or_keep(finite, traced, state, call)


def _update_or_keep(
    finite: jax.Array, update: TracedUpdate, state: PyTree, call: str
) -> tuple[PyTree, PyTree]:
    """Returns the updates, and the new state if `finite`, else the old one.

    Args:
      finite: bool[].
      update: the update of `state`.
      state: any pytree.
      call: what errors begin with.

    Raises:
      ValueError, TypeError: if the new state is not of the type of the old one.
    """
    proposed, new = update.results
    olds, stored = jax.tree.flatten(state)
    old_of: dict[jaxprs.Var, ArrayLike] = {}
    news = jax.tree.leaves(new)
    if jax.tree.structure(new) == stored:
        for atom, old in zip(news, olds, strict=True):
            if isinstance(atom, jaxprs.Var) and isinstance(old, jax.Array | np.ndarray):
                old_of[atom] = old
    values, chosen = _run(update, finite, old_of)

    def value(leaf: PyTree) -> PyTree:
        if isinstance(leaf, jaxprs.Literal):
            return binding.as_output(leaf.val, jaxprs.aval_of(leaf))
        return values[leaf] if isinstance(leaf, jaxprs.Var) else leaf

    # Below, what is chosen already is not chosen once more.
    for index, (atom, old) in enumerate(zip(news, olds, strict=False)):
        if isinstance(atom, jaxprs.Var) and atom in chosen and old_of[atom] is old:
            olds[index] = values[atom]
    new = jax.tree.map(value, new)
    kept = choose(finite, new, stored.unflatten(olds), call, _NAMES)
    return jax.tree.map(value, proposed), kept


def _run(
    update: TracedUpdate, finite: jax.Array, old_of: dict[jaxprs.Var, ArrayLike]
) -> tuple[dict[jaxprs.Var, jax.Array], set[jaxprs.Var]]:
    """Runs an update as it was traced, but keeps old values if not `finite`.

    Args:
      update: what is run.
      finite: bool[].
      old_of: the old values of some of its results.

    Returns:
      All values, and the results that were chosen: those that an equation makes, and
      whose type remains what it was.
    """
    body = update.body
    values = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
    values.update(zip(body.jaxpr.invars, update.gradients, strict=True))
    chosen = set()
    for eqn in body.jaxpr.eqns:
        operands = [
            atom.val if isinstance(atom, jaxprs.Literal) else values[atom]
            for atom in eqn.invars
        ]
        with binding.source_of(eqn):
            results = binding.bind(eqn, operands)
        for var, result in zip(eqn.outvars, results, strict=True):
            values[var] = result
            old = old_of.get(var)
            if old is None or np.shape(old) != result.shape:
                continue
            if jnp.result_type(old) == result.dtype:
                either = jnp.where(finite, result, old)
                if jax.typeof(either) == jax.typeof(result):
                    values[var] = either
                    chosen.add(var)
    return values, chosen
