"""Which equation of a plan an equation of a traced program comes from.

A replay with `PlanMarks` opens a name scope for every equation of its plan. The scopes
survive differentiation, loops and checkpoints; `chain` finds them in a name stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from jax.ad_checkpoint import checkpoint_name

from jmp_amp.plan.plan import EquationPlan, Identity, Plan
from jmp_amp.plan.program import jaxprs, scope_text, source_code
from jmp_amp.plan.program.jaxprs import Eqn, Value
from jmp_amp.transform.marking import Marks

# The name that the results of a `custom_vjp` get: its call is gone in the gradient.
RESULT = "amp_result"


class Marked(NamedTuple):
    """An equation of a plan.

    Attributes:
      identity: which one; that of the first call, if its body is called several times.
      body: the number of its body.
      eqn: the equation as it was traced.
      is_derivative: whether it exists for a derivative only.
    """

    identity: Identity
    body: int
    eqn: Eqn
    planned: EquationPlan
    is_derivative: bool = False


class PlanMarks(Marks):
    """The marks of one plan, which `chain` reads back.

    Attributes:
      equations: the marked equations, by the number of their body and their index.
      bodies: the number of each body.
    """

    tells_equations = True

    def __init__(self, plan: Plan):
        self.equations: dict[tuple[int, int], Marked] = {}
        self._names: dict[EquationPlan, tuple[int, int]] = {}
        self.bodies: dict[Plan, int] = {}
        self._here: tuple[str, int] = ("out", 0)
        self.main = self._add(plan, ())

    def _add(
        self, plan: Plan, path: tuple[int, ...], derivative: Collection[int] = ()
    ) -> int:
        """Numbers a body and all that is in it; returns its number.

        `derivative` are the equations of it that exist for a derivative only.
        """
        if plan in self.bodies:
            return self.bodies[plan]
        number = self.bodies[plan] = len(self.bodies)
        for index, planned in enumerate(plan.equations):
            here = Identity((*path, index))
            eqn = plan.body.jaxpr.eqns[index]
            marked = Marked(here, number, eqn, planned, index in derivative)
            self._names[planned] = number, index
            self.equations[number, index] = marked
            for inner, body in enumerate(planned.bodies):
                self._add(body, (*here, inner))
        return number

    @contextlib.contextmanager
    def _at(self, place: str) -> Iterator[None]:
        before, self._here = self._here, (place, 0)
        try:
            yield
        finally:
            self._here = before

    def body(self) -> contextlib.AbstractContextManager[None]:
        return self._at("out")

    @contextlib.contextmanager
    def equation(self, planned: EquationPlan) -> Iterator[None]:
        with self._at("own"), scope_text.noted("eqn", *self._names[planned]):
            yield

    def cast(self) -> contextlib.AbstractContextManager[object]:
        place, count = self._here
        self._here = place, count + 1
        return scope_text.noted("cast", f"{place}{count}")

    def results(self, eqn: Eqn, results: Sequence[Value]) -> Sequence[Value]:
        if not jaxprs.is_custom_vjp(eqn):
            return results
        return [
            checkpoint_name(x, RESULT) if jaxprs.is_floating(v) else x
            for x, v in zip(results, eqn.outvars, strict=True)
        ]

    def derivative(self, rule: Plan, eqn: Eqn, planned: EquationPlan) -> None:
        body, index = self._names[planned]
        path = *self.equations[body, index].identity, len(planned.bodies)
        self._add(rule, path, _unneeded(rule, len(eqn.outvars)))
        for each, inner in zip(rule.equations, rule.body.jaxpr.eqns, strict=True):
            if jaxprs.is_custom_jvp(inner) and _same_function(inner, eqn):
                # The rule calls the function itself: that is the call of the program.
                self._take_for(each, planned)

    def _take_for(self, planned: EquationPlan, original: EquationPlan) -> None:
        """Gives an equation and all in it the marks of another one like it."""
        self._names[planned] = self._names[original]
        for body, like in zip(planned.bodies, original.bodies, strict=True):
            self.bodies[body] = self.bodies[like]
            for each, other in zip(body.equations, like.equations, strict=True):
                self._take_for(each, other)

    def chain(self, scope: str) -> list[Marked]:
        """Returns the equations that a name stack tells, the outermost first."""
        found: list[Marked] = []
        for body, index in scope_text.notes("eqn", scope):
            each = self.equations[int(body), int(index)]
            if not found or found[-1] is not each:
                found.append(each)
        return found


def cast_of(scope: str) -> str | None:
    """Returns which inserted cast of its equation a name stack tells, or None."""
    found = [*scope_text.notes("cast", scope)]
    found += [("quantised" + i,) for (i,) in scope_text.notes("quantised", scope)]
    return found[-1][0] if found else None


def _unneeded(rule: Plan, count: int) -> set[int]:
    """Returns which equations of a derivative rule its first outputs do not need."""
    jaxpr = rule.body.jaxpr
    wanted, found = set(jaxprs.variables(jaxpr.outvars[:count])), set[int]()
    for index, eqn in reversed([*enumerate(jaxpr.eqns)]):
        if wanted.isdisjoint(eqn.outvars):
            found.add(index)
        else:
            wanted.update(jaxprs.variables(eqn.invars))
    return found


def _same_function(eqn: Eqn, other: Eqn) -> bool:
    (a,), (b,) = jaxprs.inner_bodies(eqn), jaxprs.inner_bodies(other)
    return source_code.function_name(eqn) == source_code.function_name(other) and str(
        a.body.jaxpr
    ) == str(b.body.jaxpr)
