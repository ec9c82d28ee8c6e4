"""The terms of values: what two sums have in common cancels in their difference."""

from __future__ import annotations

from collections.abc import Sequence

from jmp_amp.plan.dataflow.made import (
    Fact,
    Facts,
    Made,
    is_broadcast,
    is_linear,
    scales,
    squares,
)
from jmp_amp.plan.dataflow.values import castable
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Eqn, Literal
from jmp_amp.plan.tables.operations import OPERATIONS, Kind, Role, Saves, role_of

# What has the terms of both operands: what it chooses or limits is one of them.
_EITHER = (Role.CHOOSES, Role.LIMITS)
_FUNCTIONS = frozenset(
    name
    for name, each in OPERATIONS.items()
    if each.kind in (Kind.FUNCTION, Kind.ARITHMETIC)
    and each.row.saves is not Saves.NOTHING
)
# So many terms of a sum are known at most.
_TERMS = 256


def terms_of(eqn: Eqn, facts: Sequence[Fact]) -> frozenset[int]:
    """Returns the terms of the results of an equation that calls nothing."""
    name = eqn.primitive.name
    pairs = zip(facts, eqn.invars, strict=True)
    arrays = [f for f, v in pairs if castable(v) and not isinstance(v, Literal)]
    if role_of(name) in (Role.MULTIPLIES, Role.DIVIDES) and not scales(eqn):
        arrays = scaled(eqn, facts)
    elif not (
        is_linear(name) or role_of(name) in _EITHER or scales(eqn) or is_curve(eqn)
    ):
        arrays = []
    return most(frozenset().union(*(each.summed for each in arrays)))


def related(eqn: Eqn, facts: Sequence[Fact]) -> int:
    """Returns `Made.RELATED` of a join of values that have a term in common."""
    seen: dict[int, frozenset[int]] = {}
    for fact, v in zip(facts, eqn.invars, strict=True):
        if castable(v) and not isinstance(v, Literal) and fact.whole not in seen:
            if not all(map(fact.summed.isdisjoint, seen.values())):
                return Made.RELATED
            seen[fact.whole] = fact.summed
    return Made.NOTHING


def of_all_turns(
    eqn: Eqn, given: Facts, outputs: Sequence[Fact], results: Sequence[Fact]
) -> list[Fact]:
    """Returns the facts of the results of a scan.

    A result may stack a value of each turn. Its parts are related if the value has a
    carry as a term, and the carry of the next turn has this carry as a term.

    Args:
      eqn: the scan.
      given: the facts of the inputs of a turn.
      outputs: those of its outputs.
      results: those of its results outside.
    """
    carried = jaxprs.carried(eqn)
    before, after = given[carried.start : carried.stop], outputs[: len(carried)]
    pairs = zip(before, after, strict=True)
    handed_on = {old.value for old, new in pairs if old.value in new.summed}
    found = list(results)
    for i, each in enumerate(outputs[len(carried) :], len(carried)):
        if not handed_on.isdisjoint(each.summed):
            found[i] = found[i]._replace(made=found[i].made | Made.RELATED)
    return found


def scaled(eqn: Eqn, facts: Sequence[Fact]) -> list[Fact]:
    """Returns the factors whose terms an elementwise product has, or a quotient.

    An argument scales the other factor, and so does a number for each row. The result
    has the terms of that factor, and none of what scales it. A square has the terms of
    what is squared. A product of two other activations has no terms.
    """
    factors = [
        fact
        for i, fact in enumerate(facts)
        if not (fact.made & Made.GIVEN or is_broadcast(eqn, i, fact))
    ]
    return factors if len(factors) < len(facts) or squares(eqn, facts) else []


def is_curve(eqn: Eqn) -> bool:
    """Whether an operation is a smooth function of one array."""
    if eqn.primitive.name not in _FUNCTIONS:
        return False
    return sum(not isinstance(v, Literal) for v in eqn.invars) == 1


def shared(facts: Sequence[Fact]) -> frozenset[int]:
    """Returns terms that several values have, one for each set of values.

    More of them would tell nothing: who has a term in common with whom.
    """
    seen, twice = set[int](), set[int]()
    for each in facts:
        twice |= seen & each.summed
        seen |= each.summed
    values = {each.value for each in facts}
    first: dict[tuple[bool, ...], int] = {}
    for term in sorted(twice, key=lambda n: (n not in values, n)):
        first.setdefault(tuple([term in each.summed for each in facts]), term)
    return frozenset(first.values())


def most(terms: frozenset[int]) -> frozenset[int]:
    """Returns terms, of very many the last: a long chain of sums has all of them."""
    return terms if len(terms) <= _TERMS else frozenset(sorted(terms)[-_TERMS:])
