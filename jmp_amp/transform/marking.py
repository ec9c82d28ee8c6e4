"""Marks that a replay leaves on what it computes; a plain replay leaves none.

Whoever measures a program has to know which equation of the plan an equation of the
program, or of its derivative, comes from. A mark is a name scope, so it survives every
transformation, and nothing of the computation changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.plan.program.jaxprs import Eqn, Value

_Scope = contextlib.AbstractContextManager[object]
_NONE = contextlib.nullcontext()


class Marks:
    """The marks of a plain replay: none."""

    # Whether every equation has marks of its own.
    tells_equations = False

    def equation(self, planned: EquationPlan) -> _Scope:
        """Returns the scope of an equation and of the casts around it."""
        return _NONE

    def body(self) -> _Scope:
        """Returns the scope of a body that is traced apart from those around it."""
        return _NONE

    def cast(self) -> _Scope:
        """Returns the scope of a cast that the plan inserts."""
        return _NONE

    def results(self, eqn: Eqn, results: Sequence[Value]) -> Sequence[Value]:
        """Returns the results of an equation, marked."""
        return results

    def derivative(self, rule: Plan, eqn: Eqn, planned: EquationPlan) -> None:
        """Is told the plan of the derivative rule of a `custom_jvp` equation."""
