"""What values are made of, moves aside: solutions, squares, sums, second moments.

A fact is known of a value wherever its program is cut: it goes into the bodies of calls
and comes out of them. Two operands of a call may be one value; inside they are one too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from jmp_amp.plan.dataflow.made import (
    Fact,
    Facts,
    Made,
    any_of,
    is_linear,
    scales,
    squares,
)
from jmp_amp.plan.dataflow.signs import sign_of, signs
from jmp_amp.plan.dataflow.solver import forward, once
from jmp_amp.plan.dataflow.terms import most, of_all_turns, related, shared, terms_of
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
_MOMENTS = Made.MOMENT | Made.MIXED_MOMENT
_SUMMED = Made.SQUARES | Made.TOTAL | _MOMENTS | Made.RELATED
# What returns the solution of a linear system.
_SOLUTIONS = named(Also.SOLUTION) | {"custom_linear_solve"}


def makes_solutions(name: str) -> bool:
    """Whether a primitive returns the solution of a linear system."""
    return name in _SOLUTIONS


def of_arguments(body: Body) -> Facts:
    """Returns what is known of the arguments of a program: they are all different."""
    arguments = enumerate(body.jaxpr.invars)
    return tuple(Fact(sign_of(v) | Made.GIVEN, i, i) for i, v in arguments)


class BodyFacts:
    """What is known of the variables of a body.

    Attributes:
      known: by variable.
      inner: what is known of the inputs of the bodies of each call in it.
    """

    def __init__(self, body: Body, inputs: Facts) -> None:
        given = [
            n
            for each in inputs
            for n in (each.value, each.whole, *each.factors, *each.terms)
        ]
        self._numbers = itertools.count(1 + max(given, default=-1))
        self.known = dict(zip(body.jaxpr.invars, inputs, strict=True))
        self.inner: dict[int, list[Facts]] = {}
        self._parts = _Numbers(self.number)

    def of(self, atom: Atom) -> Fact:
        if isinstance(atom, Literal):
            return self.new(sign_of(atom) | _offset(atom))
        if atom not in self.known:
            return self.new(Made.NOTHING)
        return self.known[atom]

    def new(
        self,
        made: int,
        whole: int | None = None,
        factors: tuple[int, ...] = (),
        terms: frozenset[int] = frozenset(),
    ) -> Fact:
        """Returns a fact of a value that is no other one, but may be a part of one."""
        value = next(self._numbers)
        whole = value if whole is None else whole
        return Fact(made, value, whole, factors, terms=terms)

    def part(self, fact: Fact, made: int, place: Hashable) -> Fact:
        """Returns the fact of a part of a value: what is cut alike is one value."""
        value = self._parts[fact.value, place]
        terms = frozenset([self._parts[term, place] for term in sorted(fact.terms)])
        return Fact(made, value, fact.whole, terms=terms)

    def turned(self, fact: Fact, slices: dict[int, int]) -> Fact:
        """Returns the fact of a result of a loop, which has its slices of all turns.

        `slices` has, by the number of a slice, the number of the value that it is of.
        """
        terms = frozenset([slices.get(term, term) for term in fact.terms])
        return self.new(fact.made, fact.whole, terms=terms)

    def number(self) -> int:
        """Returns a number that no value has."""
        return next(self._numbers)


class FactFinder:
    """Finds the facts of a program, in each body once for those of its inputs."""

    @once
    def of(self, body: Body, inputs: Facts) -> BodyFacts:
        """Returns the facts of the variables of a body, given those of its inputs."""
        found = BodyFacts(body, inputs)
        for var in body.jaxpr.constvars:
            found.known[var] = found.new(sign_of(var) | Made.GIVEN)
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
        made = made_from(eqn, operands) | signs(eqn, operands)
        made = made & ~Made.GIVEN | _given(eqn, operands)
        is_move = kind_of(eqn.primitive.name) is Kind.MOVE
        if is_move:
            made |= related(eqn, operands)
        if is_move and len(operands) == 1 and not made & Made.RELATED:
            # Parts that stand where the program says: no index does.
            places = [(str(eqn.params), i) for i in range(len(eqn.outvars))]
            return [found.part(operands[0], made, each) for each in places]
        whole = _whole(eqn, operands)
        factors = ()
        if eqn.primitive.name in PRODUCTS:
            factors = tuple(each.value for each in operands[:2])
        terms = terms_of(eqn, operands)
        return [found.new(made, whole, factors, terms) for _ in eqn.outvars]

    def _through_bodies(
        self,
        index: int,
        eqn: Eqn,
        operands: Sequence[Fact],
        inner: Sequence[jaxprs.Inner],
        found: BodyFacts,
    ) -> Sequence[Fact]:
        slices: dict[int, int] = {}
        if jaxprs.is_loop(eqn):
            operands, slices = _of_turns(eqn, operands, found)
        inputs: dict[int, Facts] = {}

        def outputs(number: int, operands: Sequence[Fact]) -> list[Fact]:
            given = inputs[number] = _numbered(operands)
            body = inner[number].body
            facts = self.of(body, given)
            outputs = [facts.of(v) for v in body.jaxpr.outvars]
            results = _handed_back(outputs, given, operands, found)
            if jaxprs.is_loop(eqn):
                if not jaxprs.is_while(eqn):
                    results = of_all_turns(eqn, given, outputs, results)
                # Each turn makes another value, but perhaps of parts of the same one.
                return [found.turned(each, slices) for each in results]
            return results

        updates: dict[int, Fact] = {}

        def turned(operand: int, now: Fact, update: Fact) -> Fact:
            updates[operand] = update
            terms = now.terms & update.summed
            return now._replace(made=_made_either(now, update), terms=terms)

        joined = functools.partial(_joined, _Numbers[tuple[int, int]](found.number))
        results = list(forward(eqn, operands, outputs, turned, joined).results)
        for i, update in enumerate(updates.values()):
            # The result is the update of the last turn: it has its terms.
            results[i] = results[i]._replace(terms=update.terms)
        found.inner[index] = [inputs[number] for number in range(len(inner))]
        return results


def _joined(pairs: _Numbers[tuple[int, int]], one: Fact, other: Fact) -> Fact:
    """Returns the fact of what is one value or another; `pairs` has its numbers."""

    def either(a: int, b: int) -> int:
        return a if a == b else pairs[a, b]

    return Fact(
        _made_either(one, other),
        either(one.value, other.value),
        either(one.whole, other.whole),
        one.factors if one.factors == other.factors else (),
        one.last if one.last == other.last else -1,
        most(one.summed | other.summed) if one != other else one.terms,
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
    values, wholes = _Numbers[int](found.number), _Numbers[int](found.number)
    around: dict[int, frozenset[int]] = {}
    for inside, outside in zip(given, operands, strict=True):
        wholes[inside.whole] = outside.whole
        values[inside.value] = outside.value
        values.update(zip(inside.factors, outside.factors, strict=True))
        for n in inside.summed:
            around[n] = around.get(n, outside.summed) & outside.summed
    results = []
    for each in outputs:
        result = _renumbered(each, values, wholes)
        terms = result.terms.union(*(around[n] for n in each.summed if n in around))
        results.append(result._replace(terms=most(terms - {result.value})))
    return results


def _of_turns(
    eqn: Eqn, operands: Sequence[Fact], found: BodyFacts
) -> tuple[list[Fact], dict[int, int]]:
    """Returns the facts of what one turn of a loop reads, and the numbers of slices.

    Another turn reads other values. The numbers tell of which value each slice is.
    """
    carried, operands = jaxprs.carried(eqn), list(operands)
    for i in carried:
        operands[i] = found.new(operands[i].made, terms=operands[i].summed)
    slices: _Numbers[int] = _Numbers(found.number)
    if not jaxprs.is_while(eqn):
        for i in range(carried.stop, len(operands)):
            made, value, whole = operands[i][:3]
            terms = frozenset([slices[each] for each in sorted(operands[i].terms)])
            operands[i] = Fact(made, slices[value], whole, terms=terms)
    return operands, {part: value for value, part in slices.items()}


class _Numbers(dict[K, int]):
    """Numbers of values by other numbers; those that have none get new ones."""

    def __init__(self, new: Callable[[], int]) -> None:
        self._new = new

    def __missing__(self, key: K) -> int:
        self[key] = self._new()
        return self[key]


def _numbered(facts: Sequence[Fact]) -> Facts:
    """Returns the facts of the inputs of a body: the numbers say who is who."""
    values = _Numbers[int](itertools.count().__next__)
    wholes = _Numbers[int](itertools.count().__next__)
    common = shared(facts)
    return tuple(
        [
            _renumbered(each._replace(terms=each.terms & common), values, wholes)
            for each in facts
        ]
    )


def _renumbered(fact: Fact, values: _Numbers[int], wholes: _Numbers[int]) -> Fact:
    return fact._replace(
        value=values[fact.value],
        whole=wholes[fact.whole],
        factors=tuple([values[each] for each in fact.factors]),
        terms=frozenset([values[each] for each in sorted(fact.terms)]),
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


def _whole(eqn: Eqn, facts: Sequence[Fact]) -> int | None:
    """Returns the number of the value that all elements of the results come from.

    That of a lookup, a slice, a negative, or a join of slices; None if they come from
    several.
    """
    name = eqn.primitive.name
    if kind_of(name) is not Kind.MOVE and role_of(name) is not Role.NEGATES:
        return None
    wholes = {
        fact.whole for fact, v in zip(facts, eqn.invars, strict=True) if castable(v)
    }
    return wholes.pop() if len(wholes) == 1 else None


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
        negated = Made.NEGATED if role_of(name) is Role.NEGATES else Made.NOTHING
        is_sum = Made.SUM_OR_TERM if is_term else Made.NOTHING
        return either & _SUMMED | is_sum | negated
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


def _offset(number: Literal) -> int:
    """Returns `Made.OFFSET` of a large number. Beside -1e9 f32 has no digits either."""
    # A number in f16 is compared with one that f16 does not hold.
    size = np.abs(number.val).astype(np.float64)
    is_large = np.all((size > 8) & (size < 2**20))
    return Made.OFFSET if is_large else Made.NOTHING


def _given(eqn: Eqn, facts: Sequence[Fact]) -> int:
    """Returns `Made.GIVEN` of what is made of arguments alone, and of no product."""
    if eqn.primitive.name in PRODUCTS:
        return Made.NOTHING
    pairs = zip(facts, eqn.invars, strict=True)
    arrays = [f.made for f, v in pairs if castable(v) and not isinstance(v, Literal)]
    return functools.reduce(int.__and__, arrays, Made.GIVEN)


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
