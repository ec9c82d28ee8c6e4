"""Products of a loop that are a numerical method: their results return by arithmetic.

Between its products a network has activations; a numerical method has arithmetic. A
product of a loop is *recursive* if arithmetic alone leads from a carry to it, and from
its result back to that carry, in one turn or over several. An error of its result is
then an error of the state, which the next turns add to or multiply.

Two analyses tell: a `Path` of each value says from which carries it comes, a `Use` to
which carries it leads. Neither asks for names, shapes, weights or the form of a loop.

Steps that are written out, without a loop, have no carry, and stay half. "A matrix that
multiplies again what it made, by arithmetic alone" would find them. But so does a
gradient, by the weights: of the 75 networks of `tests/loops`, written out, 20 have such
products, and 11 of these train.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jmp_amp.plan.dataflow.paths import (
    ANYTHING,
    Loop,
    Path,
    Paths,
    Traced,
    factors_of,
    gates_of,
    is_activation,
)
from jmp_amp.plan.dataflow.solver import backward, entering, once, union
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Body, Eqn, Literal, Var
from jmp_amp.plan.tables.operations import PRODUCTS, Kind, Role, kind_of, role_of

# A number of a step, times all turns. Smaller ones scale the rounding of a product
# below that of what it is added to.
_SMALL_STEPS = 1.0


class Use(NamedTuple):
    """To which carries a value leads, by arithmetic alone.

    Attributes:
      added: those to which it leads as a term of a sum, but for numbers times it.
      otherwise: those to which it leads in another way.
      is_matrix: whether it is no carry's, and a recursive product multiplies by it.
    """

    added: int = 0
    otherwise: int = 0
    is_matrix: bool = False

    @property
    def all(self) -> int:
        return self.added | self.otherwise


class Cycle(NamedTuple):
    """Why a product is recursive.

    Attributes:
      carries: those that its result returns to.
      surely: whether no activation that begins a carry makes the loop a network's: it
        divides by what the product made, or the carry is in both of its factors.
    """

    carries: int
    surely: bool


class Waypoint(NamedTuple):
    """An equation of a body, or one of its bodies.

    Attributes:
      equation: its number.
      body: that of its body; None of the equation itself.
      first: of the body of a loop, the bit of its first carry.
    """

    equation: int
    body: int | None = None
    first: int | None = None


# The way to a product, through the bodies that it is inside of.
Way = tuple[Waypoint, ...]
# The recursive products of a body, and of the bodies in it.
Cycles = dict[Way, Cycle]


def is_in_stream(way: Way, cycle: Cycle, begun: Sequence[int]) -> bool:
    """Whether a product of the body of a loop returns to what activations begin.

    Args:
      way: the way to the product, from the loop.
      cycle: why it is recursive.
      begun: the numbers of the carries that activations begin.
    """
    first = way[0].first
    if first is None or cycle.surely:
        return False
    return any(cycle.carries >> first + number & 1 for number in begun)


def recursions_of(body: Body) -> Cycles:
    """Returns the recursive products of a program."""
    uses = _Uses()
    if not uses.multiply_in_turns(body, False):
        return {}
    traced = Paths().through(body, (Path(ANYTHING),) * len(body.jaxpr.invars), ())
    return uses.through(traced, (Use(),) * len(body.jaxpr.outvars), ())[1]


class _Uses:
    """Goes back from what is read, in each body once for what reads its outputs."""

    @once
    def multiply_in_turns(self, body: Body, in_loop: bool) -> bool:
        """Whether a loop of a program has a product."""
        return any(
            (in_loop and eqn.primitive.name in PRODUCTS)
            or any(
                self.multiply_in_turns(inner.body, in_loop or jaxprs.is_loop(eqn))
                for inner in jaxprs.inner_bodies(eqn)
            )
            for eqn in body.jaxpr.eqns
        )

    @once
    def through(
        self, traced: Traced, outputs: tuple[Use, ...], loops: tuple[Loop, ...]
    ) -> tuple[list[Use], Cycles]:
        """Returns the uses of the inputs of a body, and its recursive products."""
        jaxpr = traced.body.jaxpr
        uses: dict[Var, Use] = {}
        _add(uses, jaxpr.outvars, outputs)
        cycles: Cycles = {}
        for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
            results = [uses.get(v, Use()) for v in eqn.outvars]
            if index in traced.inner:
                operands, inside = self._inside(index, eqn, results, traced, loops)
                _add(uses, eqn.invars, operands)
                cycles |= inside
                continue
            use = functools.reduce(_read, results, Use())
            if not any(use):
                continue
            if eqn.primitive.name in PRODUCTS:
                cycle = _cycle(eqn, use, traced, loops)
                if cycle is not None:
                    cycles[Waypoint(index),] = cycle
                    _add(uses, eqn.invars[:2], _matrices(eqn, traced))
            _add(uses, eqn.invars, _operands(eqn, use, traced, loops))
        found = [uses.get(v, Use()) for v in jaxpr.invars]
        matrices = {v for v, use in uses.items() if use.is_matrix}
        return found, _with_first_steps(cycles, traced, matrices)

    def _inside(
        self,
        index: int,
        eqn: Eqn,
        results: Sequence[Use],
        traced: Traced,
        loops: tuple[Loop, ...],
    ) -> tuple[list[Use], Cycles]:
        """Returns the uses of the operands of a call, and its recursive products."""
        bodies, loop = traced.inner[index]
        own = 0
        if loop is not None:
            own = loop.mask
            loop = loop._replace(divided=union(each.divided for each in bodies) & own)
            loops = (*loops, loop)
        inside: dict[int, Cycles] = {}

        def inputs(number: int, outputs: tuple[Use, ...]) -> list[Use]:
            found, inside[number] = self.through(bodies[number], outputs, loops)
            return found

        def turned(carry: int, now: Use, read: Use) -> Use:
            if loop is None:  # It has one turn.
                return now
            own = Use(otherwise=1 << loop.first + carry)
            return functools.reduce(_read, (now, read._replace(is_matrix=False), own))

        operands, whole = [Use()] * len(eqn.invars), jaxprs.read_every_turn(eqn)
        found = backward(eqn, results, inputs, turned, Use(), Use())
        for i, (added, otherwise, is_matrix) in entering(eqn, found):
            is_matrix = is_matrix and (loop is None or i in whole)
            outside = Use(added & ~own, otherwise & ~own, is_matrix)
            operands[i] = _read(operands[i], outside)
        cycles: Cycles = {}
        for number, found in inside.items():
            waypoint = Waypoint(index, number, loop and loop.first)
            cycles |= {(waypoint, *way): cycle for way, cycle in found.items()}
        if loop is not None and cycles:
            cycles = _with_companions(cycles, _companions(index, traced))
        return operands, cycles


def _read(one: Use, other: Use) -> Use:
    return Use(
        one.added | other.added,
        one.otherwise | other.otherwise,
        one.is_matrix or other.is_matrix,
    )


def _add(uses: dict[Var, Use], atoms: Sequence[Atom], found: Sequence[Use]) -> None:
    for atom, use in zip(atoms, found, strict=True):
        if any(use) and not isinstance(atom, Literal) and jaxprs.is_floating(atom):
            uses[atom] = _read(uses.get(atom, Use()), use)


def _cycle(eqn: Eqn, use: Use, traced: Traced, loops: Sequence[Loop]) -> Cycle | None:
    """Returns why a product is recursive; None if it is not."""
    both = traced.paths[eqn.outvars[0]].plain & use.all
    if not both & ~ANYTHING:
        return None
    lhs, rhs = (traced.of(atom).plain for atom in eqn.invars[:2])
    surely = lhs & rhs | union(loop.divided for loop in loops)
    return Cycle(both & ~ANYTHING, bool(both & ~ANYTHING & surely))


def _matrices(eqn: Eqn, traced: Traced) -> list[Use]:
    """Returns which factors of a recursive product no carry leads to."""
    paths = map(traced.of, eqn.invars[:2])
    return [Use(is_matrix=not (p.plain | p.crossed) & ~ANYTHING) for p in paths]


def _operands(eqn: Eqn, use: Use, traced: Traced, loops: Sequence[Loop]) -> list[Use]:
    """Returns the uses of the operands of an equation that calls nothing."""
    name, paths = eqn.primitive.name, list(map(traced.of, eqn.invars))
    if is_activation(eqn, paths):
        return [Use()] * len(paths)
    if role_of(name) in (Role.ADDS, Role.SUBTRACTS):
        return [Use(use.all)] * len(paths)
    factors = factors_of(eqn)
    if not factors:
        moves = kind_of(name) is Kind.MOVE or jaxprs.is_conversion(eqn)
        if moves or role_of(name) is Role.NEGATES or name == "reduce_sum":
            return [use._replace(is_matrix=use.is_matrix and moves)] * len(paths)
        return [Use(0, use.all)] * len(paths)
    found = [Use()] * len(paths)
    for i in factors:
        passed = ~gates_of(eqn, i, paths)
        added, otherwise = use.added & passed, use.otherwise & passed
        if name in PRODUCTS:
            found[i] = Use(0, added | otherwise)
        else:
            found[i] = Use(added & ~_too_small(eqn, i, paths, loops), otherwise)
    return found


def _too_small(
    eqn: Eqn, factor: int, paths: Sequence[Path], loops: Sequence[Loop]
) -> int:
    """Returns the carries of the loops in which a number makes steps of a factor."""
    role, other = role_of(eqn.primitive.name), paths[1 - factor].number
    if other is None or role is Role.CHOOSES:
        return 0
    size = max(map(abs, other))
    if role is Role.DIVIDES:
        if factor != 0 or not all(other):
            return 0
        size = 1 / min(map(abs, other))
    found, turns = 0, 1.0
    for loop in reversed(loops):
        # The turns of a loop are taken again in each turn of the loop around it.
        turns *= loop.turns
        # A number of f32, 0.01, is not quite that number.
        if round(size * turns, 6) < _SMALL_STEPS:
            found |= loop.mask
    return found


def _with_companions(cycles: Cycles, companions: Iterable[Way]) -> Cycles:
    """Adds the other products of a method, of values that no activation made.

    They are computed in the same dtype: an energy before a step, and after it.
    """
    carries = union(each.carries for each in cycles.values())
    cycle = Cycle(carries, any(each.surely for each in cycles.values()))
    return {**dict.fromkeys(companions, cycle), **cycles}


def _companions(index: int, traced: Traced) -> Iterator[Way]:
    """Yields the products inside of a call of which no factor crossed an activation."""
    bodies, loop = traced.inner[index]
    for number, body in enumerate(bodies):
        waypoint = Waypoint(index, number, loop and loop.first)
        for i, eqn in enumerate(body.body.jaxpr.eqns):
            if i in body.inner:
                yield from ((waypoint, *way) for way in _companions(i, body))
            elif eqn.primitive.name in PRODUCTS:
                if not any(body.of(atom).crossed for atom in eqn.invars[:2]):
                    yield waypoint, Waypoint(i)


def _with_first_steps(cycles: Cycles, traced: Traced, matrices: set[Var]) -> Cycles:
    """Adds the products outside of a loop with a matrix that its recursion has.

    The first residual of a solver, the last term of a series: they are of the method.

    Args:
      cycles: the recursive products of a body.
      traced: its paths.
      matrices: its variables that recursive products multiply by.
    """
    first_steps = dict.fromkeys(_multiplied_by(matrices, traced), Cycle(0, True))
    return {**first_steps, **cycles}


def _multiplied_by(matrices: set[Var], traced: Traced) -> Iterator[Way]:
    """Yields the products outside of a loop with some variables of a body."""
    for index, eqn in enumerate(traced.body.jaxpr.eqns):
        if matrices.isdisjoint(jaxprs.variables(eqn.invars)):
            continue
        if index in traced.inner:
            bodies, loop = traced.inner[index]
            inputs = [] if loop is not None else _inputs_among(eqn, matrices)
            for number, inside in enumerate(inputs):
                ways = _multiplied_by(inside, bodies[number])
                yield from ((Waypoint(index, number), *way) for way in ways)
        elif eqn.primitive.name in PRODUCTS:
            others = [v for v in eqn.invars[:2] if v not in matrices]
            if not any(traced.of(atom).crossed for atom in others):
                yield (Waypoint(index),)
        elif kind_of(eqn.primitive.name) is Kind.MOVE and len(eqn.invars) == 1:
            matrices = matrices.union(eqn.outvars)


def _inputs_among(eqn: Eqn, matrices: set[Var]) -> list[set[Var]]:
    """Returns which inputs of each body of a call are one of some variables."""
    has = [isinstance(v, Var) and v in matrices for v in eqn.invars]
    return [
        {v for i, v in zip(operands, body.jaxpr.invars, strict=True) if has[i]}
        for body, operands in jaxprs.inner_bodies(eqn)
    ]
