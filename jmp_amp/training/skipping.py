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

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.policies.dtypes import PyTree
from jmp_amp.training.finite import choose


def update_or_keep(
    finite: jax.Array,
    update: Callable[[PyTree], tuple[PyTree, PyTree]],
    state: PyTree,
    call: str,
) -> tuple[PyTree, PyTree]:
    """Returns `update(state)`: updates, and the new state if `finite`, else the old.

    Args:
      finite: bool[].
      update: a function of the state alone, called once.
      state: any pytree.
      call: what errors begin with.

    Raises:
      ValueError, TypeError: if the new state is not of the type of the old one.
    """
    names = "the new state", "the old one"
    if not isinstance(finite, Tracer):
        # Not compiled: every operation is a program of its own.
        proposed, new = update(state)
        return proposed, choose(finite, new, state, call, names)
    traced: list[PyTree] = []

    def arrays() -> list[jax.Array]:
        leaves, structure = jax.tree.flatten(update(state))
        others = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        traced.extend((structure, others))
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    body = jaxprs.body_of(jax.make_jaxpr(arrays)())
    structure, leaves = traced
    atoms = iter(body.jaxpr.outvars)
    proposed, new = structure.unflatten(
        next(atoms) if leaf is None else leaf for leaf in leaves
    )
    olds, stored = jax.tree.flatten(state)
    old_of: dict[jaxprs.Var, ArrayLike] = {}
    news = jax.tree.leaves(new)
    if jax.tree.structure(new) == stored:
        for atom, old in zip(news, olds, strict=True):
            if isinstance(atom, jaxprs.Var) and isinstance(old, jax.Array | np.ndarray):
                old_of[atom] = old
    values, chosen = _run(body, finite, old_of)

    def value(leaf: PyTree) -> PyTree:
        if isinstance(leaf, jaxprs.Literal):
            return binding.as_output(leaf.val, jaxprs.aval_of(leaf))
        return values[leaf] if isinstance(leaf, jaxprs.Var) else leaf

    # Below, what is chosen already is not chosen once more.
    for index, (atom, old) in enumerate(zip(news, olds, strict=False)):
        if isinstance(atom, jaxprs.Var) and atom in chosen and old_of[atom] is old:
            olds[index] = values[atom]
    new = jax.tree.map(value, new)
    kept = choose(finite, new, stored.unflatten(olds), call, names)
    return jax.tree.map(value, proposed), kept


def _run(
    body: jaxprs.Body, finite: jax.Array, old_of: dict[jaxprs.Var, ArrayLike]
) -> tuple[dict[jaxprs.Var, jax.Array], set[jaxprs.Var]]:
    """Runs a body as it was traced, but keeps old values if not `finite`.

    Args:
      body: a jaxpr without inputs.
      finite: bool[].
      old_of: the old values of some of its results.

    Returns:
      All values, and the results that were chosen: those that an equation makes, and
      whose type remains what it was.
    """
    values = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
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
