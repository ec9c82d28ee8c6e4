"""Which loops are solvers: those that run until a float of their body is small enough.

In half precision a residual never falls below 1e-5, and the loop never ends. A loop
that counts, or that waits for an integer such as a token, is no solver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import numpy as np

from jmp_amp.plan.choose.flows import Flow, Step
from jmp_amp.plan.dataflow.solver import Back, backward, entering, in_any_turn
from jmp_amp.plan.dataflow.values import Origin
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Var, aval_of
from jmp_amp.plan.tables.operations import Kind, OpClass, kind_of
from jmp_amp.plan.tables.rules import Rule

SOLVER = Rule(
    OpClass.FULL, "a solver: its condition reads a float of its body", "while"
)


def is_solver(eqn: Eqn, step: Step) -> bool:
    """Whether the `while` loop that `step` went through is a solver."""
    waits = _Waits()
    waits.inside(eqn, step, [False] * len(eqn.outvars), True)
    return waits.for_float


class _Waits:
    """Goes back from the end of a loop, by the booleans that decide it.

    Attributes:
      for_float: whether one of them compares activations.
    """

    for_float = False

    def inside(
        self, eqn: Eqn, step: Step, results: Sequence[bool], decided: bool = False
    ) -> list[Back[bool]]:
        """Returns which inputs of the bodies of a call are waited for.

        Args:
          eqn: the call, the loop or the branch.
          step: the forward pass over it.
          results: which of its results are waited for.
          decided: whether the boolean is that ends the loop.
        """

        def inputs(number: int, outputs: tuple[bool, ...]) -> list[bool]:
            return self._through(step.flows[number], outputs)

        return backward(eqn, results, inputs, in_any_turn, False, decided)

    def _through(self, flow: Flow, outputs: tuple[bool, ...]) -> list[bool]:
        jaxpr = flow.body.jaxpr
        found = _booleans(compress(jaxpr.outvars, outputs))
        for eqn, step in zip(reversed(jaxpr.eqns), reversed(flow.steps), strict=True):
            if found.isdisjoint(eqn.outvars):
                continue
            if step.flows:
                back = self.inside(eqn, step, [v in found for v in eqn.outvars])
                inside = entering(eqn, back)
                found |= _booleans(eqn.invars[i] for i, waits in inside if waits)
            elif _compares_activations(eqn, step):
                self.for_float = True
            else:
                found |= _booleans(eqn.invars)
        return [v in found for v in jaxpr.invars]


def _booleans(atoms: Iterable[Atom]) -> set[Var]:
    # A token has no dtype.
    found = jaxprs.variables([*atoms])
    return {v for v in found if getattr(v.aval, "dtype", None) == np.bool_}


def _compares_activations(eqn: Eqn, step: Step) -> bool:
    left, *others = eqn.invars
    return (
        kind_of(eqn.primitive.name) is Kind.COMPARISON
        # `x != x` asks whether it is NaN, as `is_finite(x)` does.
        and others not in ([], [left])
        and any(
            view.origin != Origin.FREE and np.issubdtype(aval_of(v).dtype, np.floating)
            for v, view in zip(eqn.invars, step.views, strict=True)
        )
    )
