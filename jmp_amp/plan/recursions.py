"""Products of a loop that are a numerical method: their results return by arithmetic.

Between its products a network has activations; a numerical method has arithmetic. A
product of a loop is *recursive* if arithmetic alone leads from a carry to it, and from
its result back to that carry, in one turn or over several. An error of its result is
then an error of the state, which the next turns add to or multiply.

Two analyses tell: a `Path` of each value says from which carries it comes, a `Use` to
which carries it leads. What tells a network from a method is in neither its names, nor
its shapes, nor the length of its loops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jmp_amp.plan import jaxprs
from jmp_amp.plan.constants import Bounds, bounds_of_constant, bounds_of_result
from jmp_amp.plan.dataflow import backward, forward
from jmp_amp.plan.facts import makes_solutions
from jmp_amp.plan.jaxprs import Atom, Body, Eqn, Jaxpr, Literal, Var, aval_of
from jmp_amp.plan.operations import (
    OPERATIONS,
    PRODUCTS,
    Kind,
    Role,
    is_rational,
    kind_of,
    role_of,
)
from jmp_amp.plan.values import is_inexact

# A step that is so small in all turns together rounds less than what it is added to.
_SMALL_STEPS = 1.0
# The bit of what is no carry.
_ANYTHING = 1


class Path(NamedTuple):
    """From which carries a value comes. A set has a bit for each carry of the loops.

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


class Use(NamedTuple):
    """To which carries a value leads, by arithmetic alone.

    Attributes:
      added: those to which it leads as a term of a sum, but for numbers times it.
      otherwise: those to which it leads in another way.
    """

    added: int = 0
    otherwise: int = 0

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


class Loop(NamedTuple):
    """A loop around an equation.

    Attributes:
      depth: how many loops are around it.
      first: the bit of its first carry.
      mask: the bits of all its carries.
      turns: how often it runs; infinite where the program does not tell.
      divided: the carries that it divides by, through a product.
    """

    depth: int
    first: int
    mask: int
    turns: float
    divided: int = 0


class _Traced(NamedTuple):
    """The paths of a body.

    Attributes:
      body: the body.
      paths: by variable.
      inner: by equation, its bodies and the loop that it is, if it is one.
      divided: the carries that something is divided by, through a product.
    """

    body: Body
    paths: dict[Var, Path]
    inner: dict[int, tuple[list[_Traced], Loop | None]]
    divided: int

    def of(self, atom: Atom) -> Path:
        return _path_of(atom, self.paths)


def recursions_of(body: Body) -> Cycles:
    """Returns the recursive products of a program."""
    if not _multiplies_in_turns(body.jaxpr, False, {}):
        return NONE
    traced = _Paths().through(body, (Path(),) * len(body.jaxpr.invars), ())
    return _Uses().through(traced, (Use(),) * len(body.jaxpr.outvars), ())[1]


def _multiplies_in_turns(
    jaxpr: Jaxpr, in_loop: bool, found: dict[tuple[int, bool], bool]
) -> bool:
    """Whether a loop of a program has a product."""
    key = id(jaxpr), in_loop
    if key not in found:
        found[key] = any(
            (in_loop and eqn.primitive.name in PRODUCTS)
            or any(
                _multiplies_in_turns(
                    inner.body.jaxpr, in_loop or jaxprs.is_loop(eqn), found
                )
                for inner in jaxprs.inner_bodies(eqn)
            )
            for eqn in jaxpr.eqns
        )
    return found[key]


class _Paths:
    """Follows paths through bodies, each body once for those of its inputs."""

    def __init__(self) -> None:
        self._found: dict[object, _Traced] = {}

    def through(
        self, body: Body, inputs: tuple[Path, ...], loops: tuple[Loop, ...]
    ) -> _Traced:
        key = id(body.jaxpr), inputs, loops
        if key in self._found:
            return self._found[key]
        paths = dict(zip(body.jaxpr.invars, inputs, strict=True))
        for var, const in zip(body.jaxpr.constvars, body.consts, strict=True):
            paths[var] = Path(number=bounds_of_constant(const))
        inner: dict[int, tuple[list[_Traced], Loop | None]] = {}
        divided = 0
        for index, eqn in enumerate(body.jaxpr.eqns):
            operands = [_path_of(atom, paths) for atom in eqn.invars]
            if eqn.primitive.name not in OPERATIONS and jaxprs.inner_bodies(eqn):
                results, traces, loop = self._inside(eqn, operands, loops)
                inner[index] = traces, loop
                own = loop.mask if loop else 0
                divided |= _union(each.divided for each in traces) & ~own
            else:
                results = _results(eqn, operands)
                divided |= _divisors(eqn, operands)
            paths.update(zip(eqn.outvars, results, strict=True))
        self._found[key] = _Traced(body, paths, inner, divided)
        return self._found[key]

    def _inside(
        self, eqn: Eqn, operands: list[Path], loops: tuple[Loop, ...]
    ) -> tuple[list[Path], list[_Traced], Loop | None]:
        inner, carried = jaxprs.inner_bodies(eqn), jaxprs.carried(eqn)
        loop = _loop(eqn, loops) if jaxprs.is_loop(eqn) else None
        if loop is not None:
            if not loops:
                operands = [Path(_ANYTHING, number=each.number) for each in operands]
            for number, i in enumerate(carried):
                plain = operands[i].plain | 1 << loop.first + number
                operands[i] = operands[i]._replace(plain=plain, number=None)
            loops = (*loops, loop)
        traces: dict[int, _Traced] = {}

        def outputs(number: int, given: Sequence[Path]) -> list[Path]:
            traced = self.through(inner[number].body, tuple(given), loops)
            traces[number] = traced
            return [traced.of(v) for v in traced.body.jaxpr.outvars]

        def turned(operand: int, now: Path, update: Path) -> Path:
            return _either(now, update)

        results = list(forward(eqn, operands, outputs, turned, _either).results)
        if loop is not None:
            outside = ~loop.mask if len(loops) > 1 else 0
            results = [_masked(each, outside) for each in results]
        return results, [traces[number] for number in range(len(inner))], loop


def _loop(eqn: Eqn, loops: tuple[Loop, ...]) -> Loop:
    first = loops[-1].mask.bit_length() if loops else _ANYTHING.bit_length()
    mask = ((1 << len(jaxprs.carried(eqn))) - 1) << first
    turns = math.inf if jaxprs.is_while(eqn) else jaxprs.repetitions(eqn)
    # A loop that carries nothing has the bit of no other one.
    return Loop(len(loops), first, mask or 1 << first, turns)


def _union(sets: Iterable[int]) -> int:
    return functools.reduce(int.__or__, sets, 0)


def _path_of(atom: Atom, paths: Mapping[Var, Path]) -> Path:
    if isinstance(atom, Literal):
        return Path(number=bounds_of_constant(atom.val))
    return paths[atom]


def _masked(path: Path, mask: int) -> Path:
    return Path(path.plain & mask, path.crossed & mask, path.multiplied & mask)


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
    crossed = path.plain | path.crossed
    if crossed and _repeats(eqn):
        # One boolean chooses for all elements: an activation is a function of each.
        crossed = 0
    return [path if is_inexact(v) else Path(0, crossed) for v in eqn.outvars]


def _result(eqn: Eqn, operands: Sequence[Path]) -> Path:
    name = eqn.primitive.name
    plain = _union(each.plain for each in operands)
    crossed = _union(each.crossed for each in operands)
    number = None
    if operands and all(each.number is not None for each in operands):
        number = bounds_of_result(eqn, [each.number for each in operands])
    if not plain:
        return Path(0, crossed, 0, number)
    if _is_activation(eqn, operands):
        return Path(0, plain | crossed)
    factors = _factors(eqn)
    if role_of(name) is Role.CHOOSES and not _gates(eqn, 1, operands):
        crossed = _union(each.crossed for each in operands[1:])
    if factors:
        plain = 0
        for i in factors:
            plain |= operands[i].plain & ~_gates(eqn, i, operands)
    if name in PRODUCTS:
        return Path(plain, crossed, plain)
    multiplied = _union(each.multiplied for each in operands)
    return Path(plain, crossed, multiplied & plain)


def _is_activation(eqn: Eqn, operands: Sequence[Path]) -> bool:
    """Whether an operation is no arithmetic: a network's, between two products."""
    name = eqn.primitive.name
    if role_of(name) is Role.LIMITS:
        # `max(x, 0)`; of several values the largest is one of them.
        return any(each.number is not None for each in operands)
    return not (is_rational(name) or makes_solutions(name))


def _factors(eqn: Eqn) -> range:
    """Returns the operands that an operation multiplies, or chooses from."""
    name = eqn.primitive.name
    if name in PRODUCTS or role_of(name) in (Role.MULTIPLIES, Role.DIVIDES):
        return range(2)
    return range(1, len(eqn.invars)) if role_of(name) is Role.CHOOSES else range(0)


def _gates(eqn: Eqn, factor: int, operands: Sequence[Path]) -> int:
    """Returns the carries that crossed an activation to what a factor is multiplied by.

    Softmax times values, gates of a recurrence, what a boolean of each element chooses.
    """
    if role_of(eqn.primitive.name) is not Role.CHOOSES:
        return operands[1 - factor].crossed
    sizes = [aval_of(v).size for v in (eqn.invars[0], eqn.invars[factor])]
    return operands[0].crossed if sizes[0] == sizes[1] else 0


def _repeats(eqn: Eqn) -> bool:
    """Whether the result is an operand, repeated."""
    if kind_of(eqn.primitive.name) is not Kind.MOVE or len(eqn.invars) != 1:
        return False
    shapes = [aval_of(v).shape for v in (*eqn.invars, *eqn.outvars)]
    return len(shapes[0]) < len(shapes[1]) and not math.prod(shapes[0]) > 1


def _divisors(eqn: Eqn, operands: Sequence[Path]) -> int:
    """Returns the carries that an equation divides by, through a product."""
    name = eqn.primitive.name
    if role_of(name) is Role.DIVIDES:
        return operands[1].multiplied
    is_power = name == "integer_pow" and eqn.params["y"] < 0
    if is_power or makes_solutions(name) or kind_of(name) is Kind.ALGEBRA:
        return _union(each.multiplied for each in operands)
    return 0


class _Uses:
    """Goes back from what is read, in each body once for what reads its outputs."""

    def __init__(self) -> None:
        self._found: dict[object, tuple[list[Use], Cycles]] = {}

    def through(
        self, traced: _Traced, outputs: tuple[Use, ...], loops: tuple[Loop, ...]
    ) -> tuple[list[Use], Cycles]:
        """Returns the uses of the inputs of a body, and its recursive products."""
        key = id(traced), outputs, loops
        if key in self._found:
            return self._found[key]
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
            use = functools.reduce(_read, results)
            if not any(use):
                continue
            if eqn.primitive.name in PRODUCTS:
                cycle = _cycle(eqn, use, traced, loops)
                if cycle is not None:
                    products[index] = cycle
            _add(uses, eqn.invars, _operands(eqn, use, traced, loops))
        found = [uses.get(v, Use()) for v in jaxpr.invars]
        cycles = Cycles(tuple(products.items()), tuple(inner.items()))
        self._found[key] = found, cycles
        return self._found[key]

    def _inside(
        self,
        eqn: Eqn,
        results: Sequence[Use],
        bodies: Sequence[_Traced],
        loop: Loop | None,
        loops: tuple[Loop, ...],
    ) -> tuple[list[Use], tuple[Cycles, ...]]:
        own = 0
        if loop is not None:
            own = loop.mask
            loop = loop._replace(divided=_union(each.divided for each in bodies) & own)
            loops = (*loops, loop)
        cycles: dict[int, Cycles] = {}

        def inputs(number: int, outputs: tuple[Use, ...]) -> list[Use]:
            found, cycles[number] = self.through(bodies[number], outputs, loops)
            return found

        def turned(carry: int, now: Use, read: Use) -> Use:
            assert loop is not None
            added, otherwise = _read(now, read)
            return Use(added, otherwise | 1 << loop.first + carry)

        operands = [Use()] * len(eqn.invars)
        found = backward(eqn, results, inputs, turned, Use(), Use())
        for (_, positions), back in zip(jaxprs.inner_bodies(eqn), found, strict=True):
            for i, use in zip(positions, back.inputs, strict=True):
                use = Use(use.added & ~own, use.otherwise & ~own)
                operands[i] = _read(operands[i], use)
        numbered = [cycles[number] for number in range(len(bodies))]
        if loop is not None:
            numbered = [
                each._replace(depth=loop.depth)
                for each in _with_companions(numbered, bodies)
            ]
        return operands, tuple(numbered)


def _read(one: Use, other: Use) -> Use:
    return Use(one.added | other.added, one.otherwise | other.otherwise)


def _add(uses: dict[Var, Use], atoms: Sequence[Atom], found: Sequence[Use]) -> None:
    for atom, use in zip(atoms, found, strict=True):
        if any(use) and not isinstance(atom, Literal) and is_inexact(atom):
            uses[atom] = _read(uses.get(atom, Use()), use)


def _cycle(eqn: Eqn, use: Use, traced: _Traced, loops: Sequence[Loop]) -> Cycle | None:
    """Returns why a product is recursive; None if it is not."""
    both = traced.paths[eqn.outvars[0]].plain & use.all
    if not both & ~_ANYTHING:
        return None
    lhs, rhs = (traced.of(atom).plain for atom in eqn.invars[:2])
    carries = frozenset(
        (loop.depth, number)
        for loop in loops
        for number in range((both & loop.mask).bit_length() - loop.first)
        if both >> loop.first + number & 1
    )
    surely = lhs & rhs | _union(loop.divided for loop in loops)
    return Cycle(carries, bool(both & ~_ANYTHING & surely))


def _operands(eqn: Eqn, use: Use, traced: _Traced, loops: Sequence[Loop]) -> list[Use]:
    """Returns the uses of the operands of an equation that calls nothing."""
    name, paths = eqn.primitive.name, list(map(traced.of, eqn.invars))
    if _is_activation(eqn, paths):
        return [Use()] * len(paths)
    if role_of(name) in (Role.ADDS, Role.SUBTRACTS) or name == "add_any":
        return [Use(use.all)] * len(paths)
    factors = _factors(eqn)
    if not factors:
        is_linear = name == "neg" or name == "reduce_sum" or kind_of(name) is Kind.MOVE
        is_linear = is_linear or jaxprs.is_conversion(eqn)
        return [use if is_linear else Use(0, use.all)] * len(paths)
    found = [Use()] * len(paths)
    for i in factors:
        passed = ~_gates(eqn, i, paths)
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
        if size * turns <= _SMALL_STEPS:
            found |= loop.mask
    return found


def _with_companions(
    cycles: Sequence[Cycles], bodies: Sequence[_Traced]
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


def _completed(cycles: Cycles, traced: _Traced, cycle: Cycle) -> Cycles:
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
