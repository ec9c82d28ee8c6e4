"""Equations that are alike: a model repeats its layers, and decides once for them.

Two equations are alike if they compute the same of arrays of the same shapes and
dtypes. They stand alike if their rules, policies and properties of operands are equal.
"""

from __future__ import annotations

from collections.abc import Hashable

from jmp_amp.plan.choose.choosing import decide
from jmp_amp.plan.choose.records import Decision
from jmp_amp.plan.dataflow.standing import Standing


class Decided:
    """Decides for the equations of a plan, once for all that are and stand alike."""

    def __init__(self) -> None:
        self._decisions: dict[Hashable, Decision] = {}

    def of(self, at: Standing) -> Decision:
        """Returns the decision for an equation, see `decide`."""
        eqn = at.eqn
        key = (
            eqn.primitive,
            tuple(eqn.params.values()),
            # A literal is not a variable.
            tuple([(type(v), v.aval) for v in eqn.invars]),
            tuple([v.aval for v in eqn.outvars]),
            tuple([(view.origin, view.bounds, view.traits) for view in at.views]),
            # Which value it is, no decision asks.
            tuple([(fact.made, fact.last) for fact in at.facts]),
            (at.rule, at.region.asked, at.is_related, at.end),
            (at.is_recursive, at.derived_from, at.store),
        )
        try:
            found = self._decisions.get(key)
        except TypeError:  # a parameter that is an array
            return decide(at)
        if found is None:
            found = self._decisions[key] = decide(at)
        return found
