"""Islands that are alike: a model repeats its layers, and each has the same islands.

Islands of one key compute the same function of their inputs, from the same lines of
Python. Their name scopes are the same too, but for the outer ones: all equations of an
island are in these, and they name its layer. So one function may run in place of all
islands of a key. JAX traces and differentiates it once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jmp_amp.plan.plan import Island, Plan
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, NameStack, Var


class Likeness(NamedTuple):
    """What an island has in common with those that are alike.

    Attributes:
      key: it is equal for islands that are alike; None if a parameter of an equation
        has no hash.
      scopes: the outer name scopes, which all of its equations are in.
    """

    key: Hashable | None
    scopes: NameStack

    def inside(self, eqn: Eqn) -> Eqn:
        """Returns an equation of the island without its outer scopes."""
        info = eqn.source_info
        return eqn.replace(
            source_info=info.replace(name_stack=info.name_stack[len(self.scopes) :])
        )


NO_LIKENESS = Likeness(None, NameStack())


def likeness(plan: Plan, island: Island) -> Likeness:
    """Returns the likeness of an island of a planned body."""
    eqns = [plan.body.jaxpr.eqns[i] for i in island.equations]
    scopes = _common_scopes(eqns)
    numbers: dict[Var, int] = {}

    def numbered(variables: list[Var]) -> tuple[Hashable, ...]:
        for var in variables:
            numbers[var] = len(numbers)
        return tuple(var in plan.cast_per_use for var in variables)

    def read(atom: Atom) -> Hashable:
        return _constant(atom) if isinstance(atom, Literal) else numbers[atom]

    parts: list[Hashable] = [numbered([var for var, _ in island.inputs])]
    for index, eqn in zip(island.equations, eqns, strict=True):
        info, planned = eqn.source_info, plan.equations[index]
        parts += (
            (eqn.primitive, eqn.ctx, *eqn.params.items()),
            tuple(map(read, eqn.invars)),
            numbered(eqn.outvars),
            jaxprs.runs(eqn),
            (info.traceback, info.name_stack[len(scopes) :]),
            (planned.dtype, planned.reads, planned.writes, planned.saturate),
            (planned.rewrite, planned.bodies, planned.rule_context),
        )
    parts.append(tuple((numbers[var], dtype) for var, dtype in island.outputs))
    parts.append(tuple(dtype for _, dtype in island.inputs))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:  # a parameter that is an array
        return Likeness(None, scopes)
    return Likeness(key, scopes)


def _common_scopes(eqns: Sequence[Eqn]) -> NameStack:
    """Returns the name scopes, outermost first, that all of some equations are in."""
    stacks = {id(stack): stack for stack in (e.source_info.name_stack for e in eqns)}
    common = eqns[0].source_info.name_stack
    for stack in stacks.values():
        common = common[: len(stack)]
        while common != stack[: len(common)]:
            common = common[: len(common) - 1]
    return common


def _constant(atom: Literal) -> Hashable:
    """Returns a key of the value of a literal: -0.0 is not 0.0."""
    value, weak = atom.val, jaxprs.aval_of(atom).weak_type
    if isinstance(value, jax.Array):
        return id(value), weak
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes(), weak
