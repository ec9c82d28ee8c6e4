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
from collections.abc import Iterator, Sequence
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
    union,
)
from jmp_amp.plan.dataflow.solver import backward, entering, once
from jmp_amp.plan.dataflow.values import is_inexact
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
      carries: the carries that its result returns to: (depth of the loop, number).
      surely: whether no activation that begins a carry makes the loop a network's: it
        divides by what the product made, or the carry is in both of its factors.
    """

    carries: frozenset[tuple[int, int]]
    surely: bool


class Cycles(NamedTuple):
    """The recursive products of a body.

    Attributes:
      products: (number of the equation, why).
      inner: (number of an equation, the recursive products of each of its bodies).
      depth: of the body of a loop, how many loops are around that loop.
    """

    products: tuple[tuple[int, Cycle], ...] = ()
    inner: tuple[tuple[int, tuple[Cycles, ...]], ...] = ()
    depth: int = 0

    def in_stream(self, begun: Sequence[int]) -> Cycles:
        """Returns those of the body of a loop, if activations begin some carries."""
        return self._without(frozenset((self.depth, number) for number in begun))

    def _without(self, begun: frozenset[tuple[int, int]]) -> Cycles:
        products = [
            (i, cycle)
            for i, cycle in self.products
            if cycle.surely or not cycle.carries & begun
        ]
        inner = [
            (i, tuple([each._without(begun) for each in bodies]))
            for i, bodies in self.inner
        ]
        return Cycles(tuple(products), tuple(inner), self.depth)


NONE = Cycles()


def recursions_of(body: Body) -> Cycles:
    """Returns the recursive products of a program."""
    uses = _Uses()
    if not uses.multiply_in_turns(body, False):
        return NONE
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
        products: dict[int, Cycle] = {}
        inner: dict[int, tuple[Cycles, ...]] = {}
        for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
            results = [uses.get(v, Use()) for v in eqn.outvars]
            if index in traced.inner:
                bodies, loop = traced.inner[index]
                operands, cycles = self._inside(eqn, results, bodies, loop, loops)
                _add(uses, eqn.invars, operands)
                if any(each.products or each.inner for each in cycles):
                    inner[index] = cycles
                continue
            use = functools.reduce(_read, results, Use())
            if not any(use):
                continue
            if eqn.primitive.name in PRODUCTS:
                cycle = _cycle(eqn, use, traced, loops)
                if cycle is not None:
                    products[index] = cycle
                    _add(uses, eqn.invars[:2], _matrices(eqn, traced))
            _add(uses, eqn.invars, _operands(eqn, use, traced, loops))
        found = [uses.get(v, Use()) for v in jaxpr.invars]
        cycles = Cycles(tuple(products.items()), tuple(inner.items()))
        matrices = {v for v, use in uses.items() if use.is_matrix}
        return found, _with_first_steps(cycles, traced, matrices)

    def _inside(
        self,
        eqn: Eqn,
        results: Sequence[Use],
        bodies: Sequence[Traced],
        loop: Loop | None,
        loops: tuple[Loop, ...],
    ) -> tuple[list[Use], tuple[Cycles, ...]]:
        own = 0
        if loop is not None:
            own = loop.mask
            loop = loop._replace(divided=union(each.divided for each in bodies) & own)
            loops = (*loops, loop)
        cycles: dict[int, Cycles] = {}

        def inputs(number: int, outputs: tuple[Use, ...]) -> list[Use]:
            found, cycles[number] = self.through(bodies[number], outputs, loops)
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
        numbered = [cycles[number] for number in range(len(bodies))]
        if loop is not None:
            numbered = [
                each._replace(depth=loop.depth)
                for each in _with_companions(numbered, bodies)
            ]
        return operands, tuple(numbered)


def _read(one: Use, other: Use) -> Use:
    return Use(
        one.added | other.added,
        one.otherwise | other.otherwise,
        one.is_matrix or other.is_matrix,
    )


def _add(uses: dict[Var, Use], atoms: Sequence[Atom], found: Sequence[Use]) -> None:
    for atom, use in zip(atoms, found, strict=True):
        if any(use) and not isinstance(atom, Literal) and is_inexact(atom):
            uses[atom] = _read(uses.get(atom, Use()), use)


def _cycle(eqn: Eqn, use: Use, traced: Traced, loops: Sequence[Loop]) -> Cycle | None:
    """Returns why a product is recursive; None if it is not."""
    both = traced.paths[eqn.outvars[0]].plain & use.all
    if not both & ~ANYTHING:
        return None
    lhs, rhs = (traced.of(atom).plain for atom in eqn.invars[:2])
    carries = frozenset(
        (loop.depth, number)
        for loop in loops
        for number in range((both & loop.mask).bit_length() - loop.first)
        if both >> loop.first + number & 1
    )
    surely = lhs & rhs | union(loop.divided for loop in loops)
    return Cycle(carries, bool(both & ~ANYTHING & surely))


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


def _with_companions(
    cycles: Sequence[Cycles], bodies: Sequence[Traced]
) -> list[Cycles]:
    """Adds the other products of a method, of values that no activation made.

    They are computed in the same dtype: an energy before a step, and after it.
    """
    found = list(_all_cycles(cycles))
    if not found:
        return list(cycles)
    carries = frozenset[tuple[int, int]]().union(*(each.carries for each in found))
    cycle = Cycle(carries, any(each.surely for each in found))
    return [
        _completed(each, body, cycle) for each, body in zip(cycles, bodies, strict=True)
    ]


def _all_cycles(cycles: Sequence[Cycles]) -> Iterator[Cycle]:
    for each in cycles:
        yield from (cycle for _, cycle in each.products)
        for _, inner in each.inner:
            yield from _all_cycles(inner)


def _completed(cycles: Cycles, traced: Traced, cycle: Cycle) -> Cycles:
    products, inner = dict(cycles.products), dict(cycles.inner)
    for index, eqn in enumerate(traced.body.jaxpr.eqns):
        if index in traced.inner:
            bodies, _ = traced.inner[index]
            before = inner.get(index, (NONE,) * len(bodies))
            inner[index] = tuple(
                [_completed(*each, cycle) for each in zip(before, bodies, strict=True)]
            )
        elif eqn.primitive.name in PRODUCTS and not any(
            traced.of(atom).crossed for atom in eqn.invars[:2]
        ):
            products.setdefault(index, cycle)
    return cycles._replace(products=tuple(products.items()), inner=tuple(inner.items()))


def _with_first_steps(cycles: Cycles, traced: Traced, matrices: set[Var]) -> Cycles:
    """Adds the products outside of a loop with a matrix that its recursion has.

    The first residual of a solver, the last term of a series: they are of the method.

    Args:
      cycles: the recursive products of a body.
      traced: its paths.
      matrices: its variables that recursive products multiply by.
    """
    if not matrices:
        return cycles
    products, inner = dict(cycles.products), dict(cycles.inner)
    for index, eqn in enumerate(traced.body.jaxpr.eqns):
        has = [v in matrices for v in eqn.invars if not isinstance(v, Literal)]
        if not any(has):
            continue
        if index in traced.inner:
            bodies, loop = traced.inner[index]
            if loop is None:
                before = inner.get(index, (NONE,) * len(bodies))
                inside = _inputs_among(eqn, matrices)
                of_bodies = zip(before, bodies, inside, strict=True)
                inner[index] = tuple([_with_first_steps(*each) for each in of_bodies])
        elif eqn.primitive.name in PRODUCTS:
            others = [v for v in eqn.invars[:2] if v not in matrices]
            if not any(traced.of(atom).crossed for atom in others):
                products.setdefault(index, Cycle(frozenset(), True))
        elif kind_of(eqn.primitive.name) is Kind.MOVE and len(eqn.invars) == 1:
            matrices = matrices.union(eqn.outvars)
    return cycles._replace(products=tuple(products.items()), inner=tuple(inner.items()))


def _inputs_among(eqn: Eqn, matrices: set[Var]) -> list[set[Var]]:
    """Returns which inputs of each body of a call are one of some variables."""
    found = []
    for body, positions in jaxprs.inner_bodies(eqn):
        inputs = zip(positions, body.jaxpr.invars, strict=True)
        atoms = [(eqn.invars[i], var) for i, var in inputs]
        found.append(
            {v for a, v in atoms if not isinstance(a, Literal) and a in matrices}
        )
    return found
