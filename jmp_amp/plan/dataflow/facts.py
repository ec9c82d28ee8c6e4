"""What values are made of, moves aside: solutions, squares, sums, second moments.

A fact is known of a value wherever its program is cut: it goes into the bodies of calls
and comes out of them. Two operands of a call may be one value; inside they are one too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from jmp_amp.plan.dataflow.made import (
    Fact,
    Facts,
    Made,
    any_of,
    is_linear,
    scales,
    squares,
)
from jmp_amp.plan.dataflow.solver import forward, once
from jmp_amp.plan.dataflow.values import castable
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import (
    is_elementwise_product,
    is_larger,
    is_sum_of_products,
)
from jmp_amp.plan.program.jaxprs import Atom, Body, Eqn, Literal, aval_of
from jmp_amp.plan.tables.operations import (
    OPERATIONS,
    PRODUCTS,
    Also,
    Kind,
    Role,
    kind_of,
    named,
    role_of,
)

# The key of a number: another number, or a pair of them.
K = TypeVar("K", bound=Hashable)

_SCALED = ~(Made.SOLUTION | Made.LAST)
_SUMMED = Made.SQUARES | Made.TOTAL | Made.MOMENT | Made.MIXED_MOMENT
# What returns the solution of a linear system.
_SOLUTIONS = named(Also.SOLUTION) | {"custom_linear_solve"}


def makes_solutions(name: str) -> bool:
    """Whether a primitive returns the solution of a linear system."""
    return name in _SOLUTIONS


def of_arguments(body: Body) -> Facts:
    """Returns what is known of the arguments of a program: they are all different."""
    return tuple(Fact(Made.NOTHING, i) for i in range(len(body.jaxpr.invars)))


class BodyFacts:
    """What is known of the variables of a body.

    Attributes:
      numbers: those that no value has.
      known: by variable.
      inner: what is known of the inputs of the bodies of each call in it.
    """

    def __init__(self, body: Body, inputs: Facts) -> None:
        given = [n for each in inputs for n in (each.value, *each.factors)]
        self.numbers = itertools.count(1 + max(given, default=-1))
        self.known = dict(zip(body.jaxpr.invars, inputs, strict=True))
        self.inner: dict[int, list[Facts]] = {}

    def of(self, atom: Atom) -> Fact:
        if isinstance(atom, Literal) or atom not in self.known:
            return self.new(Made.NOTHING)
        return self.known[atom]

    def new(self, made: int, factors: tuple[int, ...] = ()) -> Fact:
        """Returns a fact of a value that is no other one."""
        return Fact(made, next(self.numbers), factors)


class FactFinder:
    """Finds the facts of a program, in each body once for those of its inputs."""

    @once
    def of(self, body: Body, inputs: Facts) -> BodyFacts:
        """Returns the facts of the variables of a body, given those of its inputs."""
        found = BodyFacts(body, inputs)
        for var in body.jaxpr.constvars:
            found.known[var] = found.new(Made.NOTHING)
        for index, eqn in enumerate(body.jaxpr.eqns):
            results = self._results(index, eqn, found)
            found.known.update(zip(eqn.outvars, results, strict=True))
        return found

    def _results(self, index: int, eqn: Eqn, found: BodyFacts) -> Sequence[Fact]:
        operands = [found.of(atom) for atom in eqn.invars]
        inner = () if eqn.primitive.name in OPERATIONS else jaxprs.inner_bodies(eqn)
        if inner:
            return self._through_bodies(index, eqn, operands, inner, found)
        if _is_moved(eqn):
            return [_moved(eqn, operands[0])]
        factors = ()
        if eqn.primitive.name in PRODUCTS:
            factors = tuple(each.value for each in operands[:2])
        made = made_from(eqn, operands)
        return [found.new(made, factors) for _ in eqn.outvars]

    def _through_bodies(
        self,
        index: int,
        eqn: Eqn,
        operands: Sequence[Fact],
        inner: Sequence[jaxprs.Inner],
        found: BodyFacts,
    ) -> Sequence[Fact]:
        if jaxprs.is_loop(eqn):
            # Another turn reads other values.
            operands = list(operands)
            for i in range(jaxprs.carried(eqn).start, len(operands)):
                operands[i] = found.new(operands[i].made)
        inputs: dict[int, Facts] = {}

        def outputs(number: int, operands: Sequence[Fact]) -> list[Fact]:
            given = inputs[number] = _numbered(operands)
            body = inner[number].body
            facts = self.of(body, given)
            outputs = [facts.of(v) for v in body.jaxpr.outvars]
            results = _handed_back(outputs, given, operands, found)
            if jaxprs.is_loop(eqn):
                return [found.new(each.made) for each in results]
            return results

        def turned(operand: int, now: Fact, update: Fact) -> Fact:
            return now._replace(made=_made_either(now, update))

        joined = functools.partial(_joined, _Numbers[tuple[int, int]](found.numbers))
        results = list(forward(eqn, operands, outputs, turned, joined).results)
        found.inner[index] = [inputs[number] for number in range(len(inner))]
        return results


def _joined(pairs: _Numbers[tuple[int, int]], one: Fact, other: Fact) -> Fact:
    """Returns the fact of what is one value or another; `pairs` has its numbers."""

    def either(a: int, b: int) -> int:
        return a if a == b else pairs[a, b]

    return Fact(
        _made_either(one, other),
        either(one.value, other.value),
        one.factors if one.factors == other.factors else (),
        one.last if one.last == other.last else -1,
    )


def _handed_back(
    outputs: Sequence[Fact], given: Facts, operands: Sequence[Fact], found: BodyFacts
) -> list[Fact]:
    """Returns the facts of results of a call: one may be an operand, or a part of one.

    Args:
      outputs: the facts of the outputs inside.
      given: those of the inputs inside.
      operands: those of the inputs outside.
      found: those of the body around.
    """
    values = _Numbers[int](found.numbers)
    for inside, outside in zip(given, operands, strict=True):
        values[inside.value] = outside.value
        values.update(zip(inside.factors, outside.factors, strict=True))
    return [_renumbered(each, values) for each in outputs]


class _Numbers(dict[K, int]):
    """Numbers of values by other numbers; those that have none get new ones."""

    def __init__(self, new: Iterator[int]) -> None:
        self._new = new

    def __missing__(self, key: K) -> int:
        self[key] = next(self._new)
        return self[key]


def _numbered(facts: Sequence[Fact]) -> Facts:
    """Returns the facts of the inputs of a body: the numbers say who is who."""
    values = _Numbers[int](itertools.count())
    return tuple([_renumbered(each, values) for each in facts])


def _renumbered(fact: Fact, values: _Numbers[int]) -> Fact:
    return fact._replace(
        value=values[fact.value],
        factors=tuple([values[each] for each in fact.factors]),
    )


def _made_either(one: Fact, other: Fact) -> int:
    """Returns what a value is made of that is one of two."""
    a, b = one.made, other.made
    return (a | b) & ~Made.LAST | (a & b)


def _moved(eqn: Eqn, fact: Fact) -> Fact:
    """Returns the fact of a value that is another one, moved or repeated."""
    (source,), (result,) = eqn.invars, eqn.outvars
    if eqn.primitive.name == "transpose":
        rank = aval_of(result).ndim
        order = tuple(eqn.params["permutation"])
        return fact._replace(last=order.index(rank + fact.last) - rank)
    if is_larger(aval_of(result).size, aval_of(source).size, unless_known=True):
        made = fact.made & ~Made.SUM_OR_TERM | Made.BROADCAST
        return fact._replace(made=made, last=-1)
    return fact if fact.last == -1 else fact._replace(last=-1)


def _is_moved(eqn: Eqn) -> bool:
    """Whether the result is the first operand, in another order or repeated."""
    if jaxprs.is_conversion(eqn):
        return aval_of(eqn.invars[0]).dtype == eqn.params["new_dtype"]
    moves = kind_of(eqn.primitive.name) is Kind.MOVE
    moves = moves and len(eqn.invars) == 1 == len(eqn.outvars)
    sizes = [aval_of(v).size for v in (*eqn.invars, *eqn.outvars)]
    return moves and not is_larger(sizes[0], sizes[-1], unless_known=True)


def made_from(eqn: Eqn, facts: Sequence[Fact]) -> int:
    """Returns what the results of an equation are that calls nothing."""
    name, either = eqn.primitive.name, any_of(facts)
    if name in PRODUCTS:
        return _made_by_product(eqn, facts)
    if makes_solutions(name):
        return Made.SOLUTION
    if kind_of(name) is Kind.MOVE:
        moved = [f for f, v in zip(facts, eqn.invars, strict=True) if castable(v)]
        last = functools.reduce(int.__and__, [f.made for f in moved], Made.LAST)
        return (either & ~Made.LAST | last & Made.LAST) & ~Made.SUM_OR_TERM
    if is_linear(name):
        is_term = role_of(name) is Role.ADDS and either & Made.REDUCED
        is_sum = Made.SUM_OR_TERM if is_term else Made.NOTHING
        return either & _SUMMED | is_sum
    if role_of(name) is Role.SUMS:
        made = Made.REDUCED | Made.SUM_OR_TERM
        if name == "reduce_sum":
            made |= Made.SUM | (Made.SQUARES if either & Made.SQUARE else Made.NOTHING)
        return made
    if role_of(name) is Role.NORMALIZES:
        return Made.NORMALIZER
    normalized = Made.NOTHING
    if role_of(name) is Role.MULTIPLIES and either & Made.NORMALIZER:
        normalized = Made.NORMALIZED
    if squares(eqn, facts):
        if not either & Made.TOTAL:
            return Made.SQUARE | normalized
        # `m[:, None] * m`: of one value, moved in two ways.
        is_outer = eqn.invars[0] is not eqn.invars[-1]
        means = Made.SQUARED_MEAN | is_outer * Made.TWO_TOTALS
        return Made.SQUARE | means | normalized
    if scales(eqn):
        return either & _SCALED | normalized
    if role_of(name) is Role.MULTIPLIES:
        return Made.TIMES | _of_two(facts) | normalized
    return Made.NOTHING


def _of_two(facts: Sequence[Fact]) -> int:
    """Returns what two sums are that are multiplied by each other."""
    both = facts[0].made & facts[1].made
    if both & Made.SUM:
        return Made.TWO_SUMS
    return Made.TWO_TOTALS if all(f.made & Made.TOTAL for f in facts) else Made.NOTHING


def _made_by_product(eqn: Eqn, facts: Sequence[Fact]) -> int:
    lhs, rhs = facts[:2]
    if is_elementwise_product(eqn):
        is_square = lhs.value == rhs.value and lhs.made & Made.TOTAL
        return Made.SQUARED_MEAN if is_square else _of_two(facts)
    made = Made.PRODUCT
    if lhs.value == rhs.value or (lhs.made | rhs.made) & Made.SQUARE:
        made |= Made.MOMENT
    if (lhs.made | rhs.made) & Made.TIMES:
        made |= Made.MIXED_MOMENT
    if weighs_solution(eqn, facts):
        made |= Made.SOLUTION
    if lhs.value == rhs.value and is_sum_of_products(eqn):
        made |= Made.SQUARES
    return made


def weighs(eqn: Eqn, lhs: bool, rhs: bool) -> bool:
    """Whether a product adds up a solution: `gain @ x`, or `x @ weights` of a vector.

    Not that of `x @ w`, where a weight of a network may be an inverse.

    Args:
      eqn: the product.
      lhs, rhs: whether its factors are solutions.
    """
    return lhs or (rhs and aval_of(eqn.invars[1]).ndim < 2)


def weighs_solution(eqn: Eqn, facts: Sequence[Fact]) -> bool:
    """As `weighs`, told by the facts of the operands of a product."""
    return weighs(eqn, *(bool(each.made & Made.SOLUTION) for each in facts[:2]))
