"""Paths: from which carries of the loops around it a value comes, and how.

By *arithmetic* alone: sums, products, quotients, roots, moves, linear algebra. Or
across an *activation*, which is everything else: a curve, a comparison, `max(x, 0)`.
What is multiplied by a value that crossed an activation has crossed it too: attention,
a gate. A single number crosses nothing: it is the size of a step, the end of one, or a
coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from jmp_amp.plan.dataflow.constants import Bounds, bounds_of_constant, bounds_of_result
from jmp_amp.plan.dataflow.facts import makes_solutions
from jmp_amp.plan.dataflow.solver import forward, once, union
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import as_number, is_larger
from jmp_amp.plan.program.jaxprs import Atom, Body, Eqn, Literal, Var, aval_of
from jmp_amp.plan.tables.operations import (
    OPERATIONS,
    PRODUCTS,
    Kind,
    Operation,
    Role,
    kind_of,
    role_of,
)

# The kinds whose operations are arithmetic where their row does not say, if they are no
# curve and no place.
_ARITHMETIC = (
    *(Kind.PRODUCT, Kind.ARITHMETIC, Kind.REDUCTION, Kind.ALGEBRA),
    *(Kind.MOVE, Kind.SELECTION),
)


def _is_rational(operation: Operation) -> bool:
    """Whether an operation is a sum, a product, a quotient, a root or a move."""
    row, kind = operation.row, operation.kind
    if row.rational is not None:
        return row.rational
    return kind in _ARITHMETIC and row.role not in (Role.CURVES, Role.COUNTS)


# Asked several times for each equation.
_RATIONAL = frozenset(name for name, op in OPERATIONS.items() if _is_rational(op))
# A set of carries has a bit for each of them; this is the bit of all other values.
ANYTHING: Final = 1


class Path(NamedTuple):
    """From which carries a value comes.

    Attributes:
      plain: those that lead to it by arithmetic alone.
      crossed: those that lead to it across an activation.
      multiplied: those of `plain` that lead to it through a product.
      number: the bounds of a number that the program is written with; else None.
    """

    plain: int = 0
    crossed: int = 0
    multiplied: int = 0
    number: Bounds = None


class Loop(NamedTuple):
    """A loop around an equation.

    Attributes:
      first: the bit of its first carry.
      mask: the bits of all its carries.
      turns: how often it runs; infinite where the program does not tell.
      divided: the carries that it divides by, through a product.
    """

    first: int
    mask: int
    turns: float
    divided: int = 0


class Traced(NamedTuple):
    """The paths of a body.

    Attributes:
      body: the body.
      paths: by variable.
      inner: by equation, its bodies and the loop that it is, if it is one.
      divided: the carries that something is divided by, through a product.
    """

    body: Body
    paths: dict[Var, Path]
    inner: dict[int, tuple[list[Traced], Loop | None]]
    divided: int

    def of(self, atom: Atom) -> Path:
        return _path_of(atom, self.paths)


class Paths:
    """Follows paths through bodies, each body once for those of its inputs."""

    @once
    def through(
        self, body: Body, inputs: tuple[Path, ...], loops: tuple[Loop, ...]
    ) -> Traced:
        """Returns the paths of a body, given those of its inputs and what is around."""
        paths = dict(zip(body.jaxpr.invars, inputs, strict=True))
        for var, const in zip(body.jaxpr.constvars, body.consts, strict=True):
            paths[var] = Path(ANYTHING, number=bounds_of_constant(const))
        inner: dict[int, tuple[list[Traced], Loop | None]] = {}
        divided = 0
        for index, eqn in enumerate(body.jaxpr.eqns):
            operands = [_path_of(atom, paths) for atom in eqn.invars]
            if eqn.primitive.name not in OPERATIONS and jaxprs.inner_bodies(eqn):
                results, traces, loop = self._inside(eqn, operands, loops)
                inner[index] = traces, loop
                own = loop.mask if loop else 0
                divided |= union(each.divided for each in traces) & ~own
            else:
                results = _results(eqn, operands)
                divided |= _divisors(eqn, operands)
            paths.update(zip(eqn.outvars, results, strict=True))
        return Traced(body, paths, inner, divided)

    def _inside(
        self, eqn: Eqn, operands: list[Path], loops: tuple[Loop, ...]
    ) -> tuple[list[Path], list[Traced], Loop | None]:
        inner, own = jaxprs.inner_bodies(eqn), 0
        loop = _loop(eqn, operands, loops)
        if loop is not None:
            if not loops:
                # What was made before the loop is data of the method.
                operands = [Path(ANYTHING, number=each.number) for each in operands]
            for number, i in enumerate(jaxprs.carried(eqn)):
                plain = operands[i].plain | 1 << loop.first + number
                operands[i] = operands[i]._replace(plain=plain, number=None)
            loops, own = (*loops, loop), loop.mask
        traces: dict[int, Traced] = {}

        def outputs(number: int, given: Sequence[Path]) -> list[Path]:
            traced = self.through(inner[number].body, tuple(given), loops)
            traces[number] = traced
            return [traced.of(v) for v in traced.body.jaxpr.outvars]

        def turned(operand: int, now: Path, update: Path) -> Path:
            return _either(now, update)

        through = forward(eqn, operands, outputs, turned, _either)
        results = [_without(each, own) for each in through.results]
        return results, [traces[number] for number in range(len(inner))], loop


def _loop(eqn: Eqn, operands: Sequence[Path], loops: tuple[Loop, ...]) -> Loop | None:
    """Returns the loop that an equation is; None if it is none, or has one turn."""
    turns: float = as_number(jaxprs.repetitions(eqn))
    if jaxprs.is_while(eqn):
        turns = _most_turns(eqn, operands)
    if not jaxprs.is_loop(eqn) or turns <= 1:
        return None
    first = (loops[-1].mask if loops else ANYTHING).bit_length()
    # One that carries nothing has a bit that no carry has.
    count = max(len(jaxprs.carried(eqn)), 1)
    return Loop(first, ((1 << count) - 1) << first, turns)


def _most_turns(eqn: Eqn, operands: Sequence[Path]) -> float:
    """Returns how often a `while` runs at most, if it counts to a known number.

    What it counts to is no carry, or one that each turn hands on.
    """
    (condition, positions), (body, inside) = jaxprs.inner_bodies(eqn)
    updates = zip(jaxprs.carried(eqn), body.jaxpr.outvars, strict=True)
    kept = dict(zip(inside, body.jaxpr.invars, strict=True))
    changed = {i for i, update in updates if kept[i] is not update}
    jaxpr = condition.jaxpr
    if [each.primitive.name for each in jaxpr.eqns] != ["lt"]:
        return math.inf
    counter, limit = jaxpr.eqns[0].invars
    if any(
        i in changed and var is limit
        for i, var in zip(positions, jaxpr.invars, strict=True)
    ):
        return math.inf
    inputs = dict(zip(jaxpr.invars, [operands[i] for i in positions], strict=True))
    start, end = (_path_of(atom, inputs).number for atom in (counter, limit))
    if jaxprs.is_floating(counter) or start is None or end is None:
        return math.inf
    return end[1] - start[0]


def _path_of(atom: Atom, paths: Mapping[Var, Path]) -> Path:
    if isinstance(atom, Literal):
        return Path(number=bounds_of_constant(atom.val))
    return paths[atom]


def _without(path: Path, own: int) -> Path:
    plain, crossed, multiplied, number = path
    return Path(plain & ~own, crossed & ~own, multiplied & ~own, number)


def _either(one: Path, other: Path) -> Path:
    return Path(
        one.plain | other.plain,
        one.crossed | other.crossed,
        one.multiplied | other.multiplied,
        one.number if one.number == other.number else None,
    )


def _results(eqn: Eqn, operands: Sequence[Path]) -> list[Path]:
    """Returns the paths of the results of an equation that calls nothing."""
    path = _result(eqn, operands)
    # The order of pivots is part of the arithmetic.
    decides = kind_of(eqn.primitive.name) is not Kind.ALGEBRA
    crossed = (path.plain | path.crossed) * decides
    decided = Path(0, crossed, number=path.number)
    found = []
    for var in eqn.outvars:
        of_var = path if jaxprs.is_floating(var) else decided
        is_array = is_larger(aval_of(var).size, 1, unless_known=True)
        found.append(of_var if is_array else of_var._replace(crossed=0))
    return found


def _result(eqn: Eqn, operands: Sequence[Path]) -> Path:
    name, number = eqn.primitive.name, None
    if operands and all(each.number is not None for each in operands):
        number = bounds_of_result(eqn, [each.number for each in operands])
    plain = union(each.plain for each in operands)
    crossed = union(each.crossed for each in operands)
    if is_activation(eqn, operands):
        return Path(0, plain | crossed, 0, number)
    factors = factors_of(eqn)
    if factors:
        passing = [operands[i].plain & ~gates_of(eqn, i, operands) for i in factors]
        plain = union(passing)
    if name in PRODUCTS:
        return Path(plain, crossed, plain)
    multiplied = union(each.multiplied for each in operands)
    return Path(plain, crossed, multiplied & plain, number)


def is_activation(eqn: Eqn, operands: Sequence[Path]) -> bool:
    """Whether an operation is no arithmetic: what a network has between two products.

    Args:
      eqn: an equation that calls nothing.
      operands: the paths of its operands.
    """
    name = eqn.primitive.name
    if role_of(name) is Role.LIMITS:
        # `max(x, 0)`. Of several values the largest is one of them.
        return any(each.number is not None for each in operands)
    return not (name in _RATIONAL or makes_solutions(name))


def factors_of(eqn: Eqn) -> range:
    """Returns the operands that an operation multiplies, or chooses from."""
    name = eqn.primitive.name
    if name in PRODUCTS or role_of(name) in (Role.MULTIPLIES, Role.DIVIDES):
        return range(2)
    return range(1, len(eqn.invars)) if role_of(name) is Role.CHOOSES else range(0)


def gates_of(eqn: Eqn, factor: int, operands: Sequence[Path]) -> int:
    """Returns the carries that crossed an activation to what multiplies a factor.

    Softmax times values, gates of a recurrence, a boolean of each element.

    Args:
      eqn: an equation that has factors.
      factor: the number of an operand, one of `factors_of`.
      operands: the paths of its operands.
    """
    gate = 0 if role_of(eqn.primitive.name) is Role.CHOOSES else 1 - factor
    return operands[gate].crossed


def _divisors(eqn: Eqn, operands: Sequence[Path]) -> int:
    """Returns the carries that an equation divides by, through a product."""
    name = eqn.primitive.name
    if role_of(name) is Role.DIVIDES:
        return operands[1].multiplied
    is_power = name == "integer_pow" and eqn.params["y"] < 0
    if is_power or makes_solutions(name) or kind_of(name) is Kind.ALGEBRA:
        return union(each.multiplied for each in operands)
    return 0
