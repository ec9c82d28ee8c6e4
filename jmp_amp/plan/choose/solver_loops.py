"""Which loops are solvers: those that run until a float of their body is small enough.

In half precision a residual never falls below 1e-5, and the loop never ends. A loop
that counts, or that waits for an integer such as a token, is no solver.
"""

from __future__ import annotations

import numpy as np

from jmp_amp.plan.choose.flows import Flow, Step
from jmp_amp.plan.dataflow.values import Origin
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Var, aval_of
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.plan.tables.rules import Rule

SOLVER = Rule(
    OpClass.FULL, "a solver: its condition reads a float of its body", "while"
)
_COMPARES = frozenset("eq ne lt le gt ge eq_to lt_to le_to".split())


def is_solver(step: Step) -> bool:
    """Whether the `while` loop that `step` went through is a solver."""
    (_, condition_operands), (_, body_operands) = step.inner
    condition, body = step.flows
    constants = len(condition_operands) - len(body.outputs)
    (decided,) = condition.body.jaxpr.outvars
    found, inputs = _decisive(condition, [decided])
    seen: set[int] = set()
    # Of the condition's inputs, booleans that the body makes.
    waiting = [i - constants for i in inputs]
    while waiting and not found:
        i = waiting.pop()
        if i < 0 or i in seen:
            continue
        seen.add(i)
        found, inputs = _decisive(body, [body.body.jaxpr.outvars[i]])
        first = len(body_operands) - len(body.outputs)
        waiting += [j - first for j in inputs]
    return found


def _decisive(flow: Flow, atoms: list[Atom]) -> tuple[bool, list[int]]:
    """Returns whether booleans of a body compare floats, and its inputs in them."""
    jaxpr = flow.body.jaxpr
    makers = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    inputs = {v: i for i, v in enumerate(jaxpr.invars)}
    reached: list[int] = []
    seen: set[Var] = set()
    atoms = list(atoms)
    while atoms:
        atom = atoms.pop()
        if isinstance(atom, Literal) or atom in seen or not _is_boolean(atom):
            continue
        seen.add(atom)
        if atom in inputs:
            reached.append(inputs[atom])
        if atom not in makers:
            continue
        eqn, step = jaxpr.eqns[makers[atom]], flow.steps[makers[atom]]
        if step.flows:
            inside = _inside(eqn, step, atom)
            if inside is None:
                return True, []
            atoms += inside
        elif _compares_activations(eqn, step):
            return True, []
        else:
            atoms += eqn.invars
    return False, reached


def _inside(eqn: Eqn, step: Step, result: Var) -> list[Atom] | None:
    """Returns the booleans that a result of a call is made of; None for a float."""
    position = list(eqn.outvars).index(result)
    made_of: list[Atom] = []
    for (_, operands), inner in zip(step.inner, step.flows, strict=True):
        if len(inner.outputs) != len(eqn.outvars):
            continue  # the condition of an inner loop
        found, inputs = _decisive(inner, [inner.body.jaxpr.outvars[position]])
        if found:
            return None
        made_of += [eqn.invars[operands[i]] for i in inputs]
    return made_of


def _compares_activations(eqn: Eqn, step: Step) -> bool:
    left, *others = eqn.invars
    return (
        eqn.primitive.name in _COMPARES
        # `x != x` asks whether it is NaN.
        and others[0] is not left
        and any(
            view.origin != Origin.FREE and np.issubdtype(aval_of(v).dtype, np.floating)
            for v, view in zip(eqn.invars, step.views, strict=True)
        )
    )


def _is_boolean(atom: Atom) -> bool:
    # A token has no dtype.
    return getattr(atom.aval, "dtype", None) == np.bool_
