"""Why one equation has its dtype: the facts and the uses that decided, in words.

A report keeps the plan that it was read from. The text is written when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from jmp_amp.plan.dataflow.values import Origin
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.policies.dtypes import F32, short_name
from jmp_amp.reports.causes import carry_words, causes_of, pin_id
from jmp_amp.reports.overruling import how_to_overrule
from jmp_amp.reports.rows import Equation
from jmp_amp.reports.tables import shape_text
from jmp_amp.reports.ways import (
    Frame,
    Loop,
    Place,
    Reader,
    Returned,
    made_by,
    makers,
    readers,
)

_ORIGINS = {
    Origin.FREE: "made of arguments and constants alone",
    Origin.LOW: "made in half",
    Origin.FULL: "made in f32",
}
# The steps of a chain; a longer one ends in dots.
_MOST_STEPS = 8


class Why:
    """Tells of the equations of a report, one at a time.

    Attributes:
      program: the plan that the report was read from.
      rows: the equations of the report, by their identity.
    """

    def __init__(self, program: Frame, rows: Mapping[str, Equation]) -> None:
        self.program, self.rows = program, rows

    def text(self, row: Equation) -> str:
        """Returns what decided an equation, line by line."""
        at = self.program.place(row.identity)
        shapes = " ".join(map(shape_text, row.shapes)) or "no result"
        where = [f"shape {shapes}"] + [f"module {row.module}"] * bool(row.module)
        where += [f"at {row.source}"] * bool(row.source)
        head = f"Equation {at.label}: {', '.join(where)}."
        told = self._of_call if at.planned.bodies else self._of_equation
        return "\n".join([head, *told(at, row), how_to_overrule(row, at.eqn)])

    # One equation.

    def _of_equation(self, at: Place, row: Equation) -> Iterator[str]:
        eqn, planned = at.eqn, at.planned
        yield f"It is {self._what(at)}."
        read = " and ".join(map(_dtype, planned.reads, eqn.invars)) or "nothing"
        kept = " and ".join(map(_dtype, planned.writes, eqn.outvars)) or "nothing"
        yield f"It reads {read}, computes in {row.dtype or 'no float'}, keeps {kept}."
        yield _class_of(at)
        for i in range(len(eqn.invars)):
            yield self._operand(at, i)
        yield from self._results(at)
        yield _decided(at)
        yield from self._chain(at)

    def _operand(self, at: Place, i: int) -> str:
        atom, standing = at.eqn.invars[i], at.standing
        held = _dtype(at.frame.held(atom), atom)
        text = f"Operand {i}: {_maker(at.frame, atom)}, held in {held}"
        origin = "" if standing is None else f", {_ORIGINS[standing.views[i].origin]}"
        return f"{text}{origin}."

    def _results(self, at: Place) -> Iterator[str]:
        several = len(at.eqn.outvars) > 1
        for i, var in enumerate(at.eqn.outvars):
            name = f"Result {i}" if several else "Its result"
            found = [self._reader(each) for each in readers(at.frame, var)]
            found = list(dict.fromkeys(found))
            if len(found) > _MOST_STEPS:
                more = len(found) - _MOST_STEPS
                found = [*found[:_MOST_STEPS], f"{more} more read it"]
            held = _dtype(at.frame.held(var), var)
            yield f"{name} is held in {held}: {'; '.join(found) or 'nothing reads it'}."

    # A call, a loop, or a branch.

    def _of_call(self, at: Place, row: Equation) -> Iterator[str]:
        eqn = at.eqn
        kind = "loop" if at.carried else "branch" if jaxprs.is_branch(eqn) else "call"
        bodies = [f"{row.identity}.{number}" for number in range(len(at.inner))]
        plural = "bodies are" if len(bodies) > 1 else "body is"
        yield (
            f"It is a {kind}: its {plural} planned, each equation for itself "
            f"({', '.join(f'{each}.0, ...' for each in bodies)})."
        )
        if at.planned.rule.op_class is not OpClass.FOLLOW:
            yield f"{_class_of(at)} What is inside has this class."
        for i, atom in enumerate(eqn.invars):
            held, read = at.frame.held(atom), at.planned.reads[i]
            text = f"Operand {i}: {_maker(at.frame, atom)}, held in"
            text += f" {_dtype(held, atom)}"
            if i in at.carried:
                text += f", carried in {_dtype(read, atom)}: {carry_words(Loop(at, i))}"
            elif read == held:
                text += ", handed in as it is"
            else:
                text += f", handed in in {_dtype(read, atom)}: {_border_words(at, i)}"
            yield f"{text}."
        yield from self._results(at)

    # The chain.

    def _chain(self, at: Place) -> Iterator[str]:
        yield "The chain of causes:"
        yield f"  {at.label} is {self._what(at)}."
        seen, steps = {at}, causes_of(at)
        while steps:
            step, *steps = steps
            if step.place is None:
                yield f"  {step.words}."
                return
            if step.place in seen:
                return
            if len(seen) == _MOST_STEPS:
                yield "  ..."
                return
            seen.add(step.place)
            label = step.place.label
            yield f"  {step.words} {label}, which is {self._what(step.place)}."
            if not steps:
                steps = causes_of(step.place)

    # Names of equations, makers and readers.

    def _what(self, at: Place) -> str:
        """Returns the dtype of an equation and its reason."""
        row = self.rows.get(str(at.identity))
        if row is None:
            return f"not in the report: {at.planned.reason}"
        return f"{row.dtype or 'not of floats'}: {row.reason}"

    def _reader(self, each: Reader) -> str:
        if isinstance(each, Returned):
            dtype = self.program.plan.outputs[each.number]
            read = f" in {short_name(dtype)}" if dtype else ""
            return f"the program returns it{read}"
        if isinstance(each, Loop):
            return f"the loop {each.place.label} carries it"
        read = each.place.planned.reads[each.position]
        atom = each.place.eqn.invars[each.position]
        return f"{each.place.label} reads it in {_dtype(read, atom)}"


def _maker(frame: Frame, atom: Atom) -> str:
    """Returns what made an operand: the equation beside it, or what is outside."""
    made = frame.maker(atom)
    return made_by(made[0] if made else next(makers(frame, atom)))


def _dtype(dtype: np.dtype | None, atom: Atom) -> str:
    """Returns the name of a dtype; of that it was traced in if it is never cast."""
    traced = getattr(atom.aval, "dtype", None)
    found = traced if dtype is None else dtype
    return "no dtype" if found is None else short_name(found)


def _class_of(at: Place) -> str:
    """Returns the class of an equation, and what gave it."""
    rule, name = at.planned.rule, at.eqn.primitive.name
    text = f"Its class is {rule.op_class.value}"
    if rule.from_user:
        which = f"{rule.op_class.value} operations"
        return f"{text}: the policy names {rule.decided_by!r} among its {which}."
    if rule.group is not None:
        source = f"source: {rule.group.source}"
        return f"{text}: the table of operations gives it, {rule.reason} ({source})."
    if rule.decided_by == name:
        return f"{text}: its parameters and dtypes give it, {rule.reason}."
    if rule.decided_by == "precision":
        return f"{text}: the program gives it, {rule.reason}."
    return f"{text}: {rule.decided_by}, around it, gives it, {rule.reason}."


def _decided(at: Place) -> str:
    planned = at.planned
    if planned.option is not None:
        return f"Its readers decided: {planned.reason}."
    if pin := pin_id(at):
        return f'The pin "{pin}" decided: {planned.reason}.'
    by = "operands" if planned.rule.op_class is OpClass.FOLLOW else "class"
    return f"No pin and no reader decided; its {by} did: {planned.reason}."


def _border_words(at: Place, i: int) -> str:
    """Returns why an operand is cast before a call."""
    if at.planned.reads[i] != F32:
        return "its bodies read it in half alone"
    if i in jaxprs.read_every_turn(at.eqn):
        return "the gradients of its turns are added up in f32"
    return "its bodies read it in f32 alone"
