"""Ways of values through a planned program: what made a value, and what reads it.

A body is planned once for all of its calls. A `Frame` is a body in one place of the
program: it knows what calls it, so that a way leads into bodies and out of them again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jmp_amp.plan.choose.modes import Dtypes
from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.values import traced_dtype
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

    def __deepcopy__(self, memo: object) -> Frame:
        # A copy of a report has the same plan.
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A program of JAX is not pickled: what is read back is None.
        return type(None), ()

    @functools.cached_property
    def places(self) -> list[Place]:
        """The equations of the body."""
        return [Place(self, index) for index in range(len(self.plan.equations))]

    @functools.cached_property
    def _makers(self) -> dict[Var, tuple[Place, int]]:
        return {
            var: (place, result)
            for place in self.places
            for result, var in enumerate(place.eqn.outvars)
        }

    @property
    def operands(self) -> Sequence[int]:
        """For each input, the position of the operand of the caller that it is."""
        assert self.caller is not None
        return jaxprs.inner_bodies(self.caller.eqn)[self.number].operands

    def input_carried(self, turn: int) -> Var:
        """Returns the input that is a carry of a loop, by the number of the carry."""
        assert self.caller is not None
        position = self.operands.index(self.caller.carried[turn])
        return self.plan.body.jaxpr.invars[position]

    def place(self, identity: str) -> Place:
        """Returns the equation of an identity that is told from this body."""
        first, *way = map(int, identity.split("."))
        at = self.places[first]
        for number, index in zip(way[::2], way[1::2], strict=True):
            at = at.inner[number].places[index]
        return at

    def all_places(self) -> Iterator[Place]:
        """Yields the equations of the body, each before those of its bodies."""
        for place in self.places:
            yield place
            for inner in place.inner:
                yield from inner.all_places()

    def maker(self, atom: Atom) -> tuple[Place, int] | None:
        """Returns the equation of the body that makes a value, and as which result."""
        return None if isinstance(atom, Literal) else self._makers.get(atom)

    def input_of(self, atom: Atom) -> int | None:
        """Returns which input of the body a value is; None if it is none."""
        inputs = self.plan.body.jaxpr.invars
        return inputs.index(atom) if atom in inputs else None

    def held(self, atom: Atom) -> np.dtype | None:
        """Returns the dtype that a value is held in; None if it is never cast."""
        if made := self.maker(atom):
            place, result = made
            return place.planned.writes[result]
        position = self.input_of(atom)
        return traced_dtype(atom) if position is None else self.inputs[position]


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """An equation of a program, where it stands: in a body, at an index."""

    frame: Frame
    index: int

    @property
    def eqn(self) -> Eqn:
        return self.frame.plan.body.jaxpr.eqns[self.index]

    @property
    def planned(self) -> EquationPlan:
        return self.frame.plan.equations[self.index]

    @property
    def carried(self) -> range:
        return jaxprs.carried(self.eqn)

    @property
    def identity(self) -> Identity:
        above = self.frame.caller
        way = () if above is None else (*above.identity, self.frame.number)
        return Identity((*way, self.index))

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

    @functools.cached_property
    def inner(self) -> list[Frame]:
        """The bodies that are planned."""
        bodies = zip(self.planned.bodies, jaxprs.inner_bodies(self.eqn), strict=False)
        return [
            Frame(plan, tuple(self.planned.reads[i] for i in body.operands), self, n)
            for n, (plan, body) in enumerate(bodies)
        ]

    @property
    def inner_results(self) -> list[Frame]:
        """The bodies that return the results: not the condition of a `while`."""
        return self.inner[jaxprs.is_while(self.eqn) :]

    def readers(self) -> Iterator[Reader]:
        """Yields what reads the results, see `readers`."""
        for var in self.eqn.outvars:
            yield from readers(self.frame, var)


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
    if made := frame.maker(atom):
        place, result = made
        if result < len(place.carried):
            yield Loop(place, place.carried[result])
        elif not place.planned.bodies:
            yield place
        else:
            for inner in place.inner_results:
                yield from makers(inner, inner.plan.body.jaxpr.outvars[result])
        return
    position, caller = frame.input_of(atom), frame.caller
    if position is None or caller is None:
        yield Argument(position)
    elif (operand := frame.operands[position]) in caller.carried:
        yield Loop(caller, operand)
    else:
        yield from makers(caller.frame, caller.eqn.invars[operand])


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
        place = frame.places[index]
        for position, atom in enumerate(place.eqn.invars):
            if atom is not var or not jaxprs.runs(place.eqn):
                continue
            if not place.planned.bodies:
                yield Use(place, position)
                continue
            if position in place.carried:
                yield Loop(place, position)
            for inner in place.inner:
                inputs = inner.plan.body.jaxpr.invars
                for inside, operand in zip(inputs, inner.operands, strict=True):
                    if operand == position:
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
            yield from readers(frame, frame.input_carried(number), seen)
        yield from readers(above.frame, above.eqn.outvars[number], seen)
