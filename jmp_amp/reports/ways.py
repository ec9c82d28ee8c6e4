"""Ways of values through a planned program: what made a value, and what reads it.

A body is planned once for all of its calls. A `Frame` is a body in one place of the
program: it knows what calls it, so that a way leads into bodies and out of them again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from jmp_amp.plan.choose.modes import Dtypes
from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.values import Known, traced_dtype
from jmp_amp.plan.plan import EquationPlan, Identity, Plan
from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Var


class Frame:
    """A planned body in one place of a program.

    Attributes:
      plan: the plan of the body.
      inputs: the dtypes in which its inputs come; None for one that is never cast.
      caller: the equation that calls it; None of the program.
      number: which of the bodies of its caller it is.
    """

    def __init__(
        self, plan: Plan, inputs: Dtypes, caller: Place | None = None, number: int = 0
    ) -> None:
        self.plan, self.inputs = plan, inputs
        self.caller, self.number = caller, number
        self._inner: dict[tuple[int, int], Frame] = {}

    def __deepcopy__(self, memo: object) -> Frame:
        # A copy of a report has the same plan.
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A program of JAX is not pickled: what is read back is None.
        return type(None), ()

    @functools.cached_property
    def made(self) -> dict[Var, int]:
        """The index of the equation that makes each variable."""
        eqns = enumerate(self.plan.body.jaxpr.eqns)
        return {var: index for index, eqn in eqns for var in eqn.outvars}

    @property
    def operands(self) -> list[Atom]:
        """The operands of the caller that the inputs come from."""
        assert self.caller is not None
        eqn = self.caller.eqn
        return [eqn.invars[i] for i in jaxprs.inner_bodies(eqn)[self.number].operands]

    @property
    def carried(self) -> range:
        """Which inputs the caller carries from turn to turn."""
        if self.caller is None or not jaxprs.is_loop(self.caller.eqn):
            return range(0)
        operands = jaxprs.inner_bodies(self.caller.eqn)[self.number].operands
        carried = [i for i, at in enumerate(operands) if at in self.caller.carried]
        return range(carried[0], carried[-1] + 1) if carried else range(0)

    def place(self, identity: str) -> Place:
        """Returns the equation of an identity that is told from this body."""
        first, *way = map(int, identity.split("."))
        at = Place(self, first)
        for number, index in zip(way[::2], way[1::2], strict=True):
            at = Place(at.inner[number], index)
        return at

    def places(self) -> Iterator[Place]:
        """Yields the equations of the body, each before those of its bodies."""
        for index in range(len(self.plan.equations)):
            place = Place(self, index)
            yield place
            for inner in place.inner:
                yield from inner.places()

    def input_of(self, atom: Atom) -> int | None:
        """Returns which input of the body a value is; None if it is none."""
        inputs = self.plan.body.jaxpr.invars
        return inputs.index(atom) if atom in inputs else None

    def held(self, atom: Atom) -> np.dtype | None:
        """Returns the dtype that a value is held in; None if it is never cast."""
        if isinstance(atom, Literal):
            return traced_dtype(atom)
        if atom in self.made:
            place = Place(self, self.made[atom])
            return place.planned.writes[place.eqn.outvars.index(atom)]
        position = self.input_of(atom)
        return traced_dtype(atom) if position is None else self.inputs[position]


class Place(NamedTuple):
    """An equation of a program, where it stands: in a body, at an index."""

    frame: Frame
    at: int

    @property
    def eqn(self) -> Eqn:
        return self.frame.plan.body.jaxpr.eqns[self.at]

    @property
    def planned(self) -> EquationPlan:
        return self.frame.plan.equations[self.at]

    @property
    def carried(self) -> range:
        return jaxprs.carried(self.eqn)

    @property
    def identity(self) -> Identity:
        above = self.frame.caller
        way = () if above is None else (*above.identity, self.frame.number)
        return Identity((*way, self.at))

    @property
    def label(self) -> str:
        """Its identity, its operation, and the function that it calls."""
        name = source_code.function_name(self.eqn)
        return f"{self.identity} {self.eqn.primitive.name}{f' {name}' if name else ''}"

    @property
    def standing(self) -> Standing | None:
        """What was known when it was decided for; None of a call."""
        decision = self.planned.decision
        return None if decision is None else decision.standing

    @property
    def inner(self) -> list[Frame]:
        """The bodies that are planned."""
        found = []
        for number, plan in enumerate(self.planned.bodies):
            key = self.at, number
            if key not in self.frame._inner:
                operands = jaxprs.inner_bodies(self.eqn)[number].operands
                inputs = tuple(self.planned.reads[i] for i in operands)
                self.frame._inner[key] = Frame(plan, inputs, self, number)
            found.append(self.frame._inner[key])
        return found

    @property
    def inner_results(self) -> list[Frame]:
        """The bodies that return the results: not the condition of a `while`."""
        return self.inner[jaxprs.is_while(self.eqn) :]


class Argument(NamedTuple):
    """An argument of the program: which one; None for a constant."""

    number: int | None


class Loop(NamedTuple):
    """A value that a loop carries from turn to turn, and which operand it begins as."""

    place: Place
    position: int


def made_by(maker: Maker) -> str:
    """Returns what made a value, in words."""
    if isinstance(maker, Loop):
        return f"the loop {maker.place.label} carries it"
    if isinstance(maker, Argument):
        return "a constant" if maker.number is None else f"argument {maker.number}"
    return f"{maker.label} makes it"


class Use(NamedTuple):
    """An equation that reads a value, and the position at which it does."""

    place: Place
    position: int


class Returned(NamedTuple):
    """The program returns a value, as the output of a number."""

    number: int


Maker: TypeAlias = Place | Argument | Loop
Reader: TypeAlias = Use | Loop | Returned


def makers(frame: Frame, atom: Atom) -> Iterator[Maker]:
    """Yields what made a value, in whatever body; several if branches may have."""
    if isinstance(atom, Literal):
        yield Argument(None)
    elif atom in frame.made:
        place = Place(frame, frame.made[atom])
        result = place.eqn.outvars.index(atom)
        if result < len(place.carried):
            yield Loop(place, place.carried[result])
        elif not place.planned.bodies:
            yield place
        else:
            for inner in place.inner_results:
                yield from makers(inner, inner.plan.body.jaxpr.outvars[result])
    elif (position := frame.input_of(atom)) is None:
        yield Argument(None)
    elif frame.caller is None:
        yield Argument(position)
    elif position in frame.carried:
        first = frame.caller.carried.start - frame.carried.start
        yield Loop(frame.caller, first + position)
    else:
        yield from makers(frame.caller.frame, frame.operands[position])


def readers(
    frame: Frame, var: Atom, seen: set[tuple[Frame, Atom]] | None = None
) -> Iterator[Reader]:
    """Yields what reads a value, in whatever body, each once; calls do not read.

    After a loop that carries it come the readers of the carry, in its body and after.
    """
    seen = set() if seen is None else seen
    if (frame, var) in seen or isinstance(var, Literal):
        return
    seen.add((frame, var))
    for index in frame.plan.readers.get(var, ()):
        place = Place(frame, index)
        for position, atom in enumerate(place.eqn.invars):
            if atom is not var or not jaxprs.runs(place.eqn):
                continue
            if not place.planned.bodies:
                yield Use(place, position)
                continue
            if position in place.carried:
                yield Loop(place, position)
            for number, inner in enumerate(place.inner):
                operands = jaxprs.inner_bodies(place.eqn)[number].operands
                for inside, i in zip(
                    inner.plan.body.jaxpr.invars, operands, strict=True
                ):
                    if i == position:
                        yield from readers(inner, inside, seen)
    above = frame.caller
    for number, atom in enumerate(frame.plan.body.jaxpr.outvars):
        if atom is not var:
            continue
        if above is None:
            yield Returned(number)
            continue
        if frame not in above.inner_results:
            continue  # the condition of a loop
        if number < len(above.carried):
            yield Loop(above, above.carried[number])
            inside = frame.plan.body.jaxpr.invars[frame.carried[number]]
            yield from readers(frame, inside, seen)
        yield from readers(above.frame, above.eqn.outvars[number], seen)


def known_inside(frame: Frame, var: Atom) -> Known | None:
    """Returns what the readers of an input of a body know of it; None without any."""
    for each in readers(frame, var):
        if isinstance(each, Use) and each.place.standing is not None:
            return each.place.standing.views[each.position]
    return None
