"""Blocks that are alike: a model repeats its layers, and each has the same blocks.

Blocks of one key compute the same function of what goes in, from the same lines of
Python. Their name scopes are the same too, but for the outer ones: all equations of a
block are in these, and they name its layer. So one function may run in place of all
blocks of a key. JAX traces and differentiates it once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jmp_amp.plan.plan import Block, Key, Plan
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, NameStack, Var


class Likeness(NamedTuple):
    """What a block has in common with those that are alike.

    Attributes:
      key: it is equal for blocks that are alike; None if a parameter of an equation
        has no hash.
      scopes: the outer name scopes, which all of its equations are in.
      variables: those of the block in the order in which they are read or made: alike
        blocks have as many, and the first of one stands for the first of the other.
    """

    key: Hashable | None
    scopes: NameStack
    variables: Sequence[Var]


def likeness(plan: Plan, block: Block) -> Likeness:
    """Returns the likeness of a block of a planned body."""
    span = slice(block.start, block.stop)
    eqns = plan.body.jaxpr.eqns[span]
    scopes = _common_scopes(eqns)
    numbers: dict[Var, int] = {}

    def numbered(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return _constant(atom)
        return numbers.setdefault(atom, len(numbers))

    parts: list[Hashable] = [block.results, block.apart]
    for eqn, planned in zip(eqns, plan.equations[span], strict=True):
        info = eqn.source_info
        parts += (
            (eqn.primitive, eqn.ctx, *eqn.params.items()),
            (*map(numbered, eqn.invars), -1, *map(numbered, eqn.outvars)),
            jaxprs.runs(eqn),
            (info.traceback, info.name_stack[len(scopes) :]),
            (planned.dtype, planned.reads, planned.writes, planned.saturate),
            (planned.rewrite, planned.bodies, planned.rule_context),
        )
    # What a helper keeps is told by its plan, which alike blocks share.
    for path, keys in block.kept.items():
        at = (path[0] - block.start, *path[1:]) if path else ()
        parts.append((at, frozenset((numbers.get(v, v), dtype) for v, dtype in keys)))
    if block.stored is not None:
        for path, row in block.stored.made.items():
            at = (path[0] - block.start, *path[1:]) if path else ()
            parts.append((at, _renamed(row, numbers)))
        parts.append((True, _renamed(block.stored.entering, numbers)))
    for var, number in numbers.items():
        parts.append((var in plan.cast_per_use, var in block.around, number, var.aval))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:  # a parameter that is an array
        return Likeness(None, scopes, list(numbers))
    return Likeness(key, scopes, list(numbers))


def _renamed(row: Mapping[Key, str | None], numbers: Mapping[Var, int]) -> Hashable:
    """Returns formats by the numbers of variables; a helper's are told by its plan."""
    named = ((numbers.get(v, v), dtype, format) for (v, dtype), format in row.items())
    return frozenset(named)


def inside(scopes: NameStack, eqn: Eqn) -> Eqn:
    """Returns an equation without the outer scopes of its block."""
    info = eqn.source_info
    return eqn.replace(
        source_info=info.replace(name_stack=info.name_stack[len(scopes) :])
    )


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
