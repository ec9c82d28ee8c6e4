"""Equations that are alike: a model repeats its layers, and decides once for them.

Two equations are alike if they compute the same of arrays of the same shapes and
dtypes. They stand alike if their rules, policies and properties of operands are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from jmp_amp.plan.choose.choosing import decide
from jmp_amp.plan.choose.records import Decision
from jmp_amp.plan.dataflow.facts import Fact
from jmp_amp.plan.dataflow.values import Known
from jmp_amp.plan.program.jaxprs import Eqn
from jmp_amp.plan.program.regions import Region
from jmp_amp.plan.tables.rules import Rule


class Decided:
    """Decides for the equations of a plan, once for all that are and stand alike."""

    def __init__(self) -> None:
        self._decisions: dict[Hashable, Decision] = {}

    def of(
        self,
        eqn: Eqn,
        rule: Rule,
        region: Region,
        views: Sequence[Known],
        facts: Sequence[Fact],
        *others: Any,
    ) -> Decision:
        """Returns the decision for `eqn`, see `decide`."""
        key = (
            eqn.primitive,
            tuple(eqn.params.values()),
            # A literal is not a variable.
            tuple([(type(v), v.aval) for v in eqn.invars]),
            tuple([v.aval for v in eqn.outvars]),
            tuple([(view.origin, view.bounds, view.traits) for view in views]),
            # Which value it is, no decision asks.
            tuple([(fact.made, fact.last) for fact in facts]),
            (rule, region.asked, *others),
        )
        try:
            found = self._decisions.get(key)
        except TypeError:  # a parameter that is an array
            return decide(eqn, rule, region, views, facts, *others)
        if found is None:
            found = decide(eqn, rule, region, views, facts, *others)
            self._decisions[key] = found
        return found
