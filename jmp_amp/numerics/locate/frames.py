"""Which equations of a traced program are sites, and of which direction.

A program is the gradient of a replay with marks. An equation is forward if it is one of
the function's own, or a cast that the plan inserts. What exists only for the derivative
is backward, wherever it runs. What a checkpoint computes again is no site, and neither
are calls, loops and branches themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from jmp_amp.numerics.locate import marks as marking
from jmp_amp.numerics.locate.liveness import Flags, Liveness, whole
from jmp_amp.numerics.locate.marks import Marked, PlanMarks
from jmp_amp.plan.plan import Identity
from jmp_amp.plan.program import jaxprs, scope_text
from jmp_amp.plan.program.jaxprs import Atom, Body, ClosedJaxpr, Eqn, Literal, Var
from jmp_amp.plan.tables.operations import Kind, kind_of
from jmp_amp.policies.fp8 import Fp8

FORWARD, BACKWARD = "forward", "backward"
Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A site of a body: an equation, or all that the rule of a `custom_vjp` computes.

    Attributes:
      identity: of the equation of the plan that it comes from; else of the one around.
      is_marked: whether it comes from that equation itself.
      direction: "forward" or "backward".
      operation: the name of the primitive.
      eqn: the equation; the first one of several.
      index: its place in the body.
      results: the floating results.
      operands: the floating operands, those that come from outside of it.
      scales: whether a loss scale multiplies its results: whether a cotangent leads
        there.
      cast: which inserted cast of the equation it is; None if it is none.
      format: of what becomes 8-bit floats, their format; its results are the values
        before. None for all else.
    """

    identity: Identity
    is_marked: bool
    direction: str
    operation: str
    eqn: Eqn
    index: int
    results: tuple[Var, ...]
    operands: tuple[Atom, ...]
    scales: bool
    cast: str | None = None
    format: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A body of a program, and its sites in their order.

    Attributes:
      repeated: the places of equations that only have an effect, which they had before:
        a checkpoint computes them again.
      turns: how often it runs, as far as the program tells; those of a `while` are one.
    """

    body: Body
    entries: tuple[Entry, ...]
    repeated: frozenset[int] = frozenset()
    turns: int = 1


def frames_of(
    program: ClosedJaxpr, marks: PlanMarks, differentiated: bool
) -> dict[Path, Frame]:
    """Returns the bodies of a replay with marks, or of its gradient."""
    found: dict[Path, Frame] = {}
    reader = _Reader(marks, differentiated, found)
    body = jaxprs.body_of(program)
    reader.read(body, (), _Place((), marks.main), whole(body))
    return found


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a body is.

    Attributes:
      identity: the way to it in the plan.
      number: the number of the body there; None if the plan has no such body.
      owner: the equation that computes in it, if the plan has none of its own for it.
      backward: it belongs to the backward pass.
      again: it is computed again.
      derivative: it exists for the derivative only.
      branch: it is a branch, or in one.
      turns: as in `Frame`.
    """

    identity: Path
    number: int | None
    owner: Marked | None = None
    backward: bool = False
    again: bool = False
    derivative: bool = False
    branch: bool = False
    turns: int = 1


class _Reader:
    """Reads the bodies of a program."""

    def __init__(
        self, marks: PlanMarks, differentiated: bool, found: dict[Path, Frame]
    ):
        self.marks, self.differentiated, self.found = marks, differentiated, found
        self.liveness = Liveness()

    def read(self, body: Body, path: Path, place: _Place, outputs: Flags) -> None:
        """Notes the sites of a body, of which some outputs are read, and all in it."""
        jaxpr = body.jaxpr
        live = self.liveness.of(body, outputs)
        own: set[Identity] = set()
        # A rule is one site, which stands where the first of its equations does.
        rules: dict[tuple[Path, str], list[Eqn]] = {}
        found: list[Entry | tuple[Path, str]] = []
        repeated: set[int] = set()
        filled: set[Var] = set()
        # The frame of a body stands before those of the bodies in it.
        self.found[path] = Frame(body, ())
        for index, eqn in enumerate(jaxpr.eqns):
            scope = jaxprs.scope_text(eqn)
            if not live.eqns[index] or scope_text.is_noted("scaling", scope):
                continue
            chain, identity = self._chain(scope, place)
            here = dataclasses.replace(
                place,
                identity=identity,
                backward=place.backward or _is_more(scope, chain, scope_text.BACKWARD),
                again=place.again or _is_more(scope, chain, scope_text.AGAIN),
                derivative=place.derivative or any(m.is_derivative for m in chain),
            )
            last, cast = chain[-1] if chain else None, marking.cast_of(scope)
            if last is not None and jaxprs.is_custom_vjp(last.eqn) and cast is None:
                rule = identity, BACKWARD if here.backward else FORWARD
                if not here.again:
                    if rule not in rules:
                        found.append(rule)
                    rules.setdefault(rule, []).append(eqn)
                continue
            if inner := jaxprs.inner_bodies(eqn):
                for number, each in enumerate(inner):
                    inside = self._inside(eqn, here, last, number)
                    ends = live.outputs[index][number]
                    self.read(each.body, (*path, index, number), inside, ends)
                continue
            if here.again and eqn.effects and not jaxprs.is_read(eqn):
                repeated.add(index)
            fp8 = None if last is None else _fp8(last)
            if fp8 is not None and _makes_8_bits(eqn, scope, cast):
                entry = _quantised(eqn, index, here, scope, fp8)
                if entry is not None and not here.again:
                    found.append(entry)
                continue
            product = last
            if last is None or cast is not None or not _is_one_product(last):
                product = None
            elif not _is_product(eqn, last):
                continue
            if here.branch and last is None and _fills(eqn, filled):
                filled.update(eqn.outvars)
                continue
            direction = self._direction(eqn, here, last, cast is not None, own)
            if direction is not None:
                entry = _entry(eqn, index, here, last, direction, cast, live.read)
                if product is not None:
                    # Other results of the equations that are solved are none of it.
                    name, results = product.eqn.primitive.name, entry.results[:1]
                    entry = dataclasses.replace(entry, operation=name, results=results)
                found.append(entry)
        entries = [
            each if isinstance(each, Entry) else _rule(rules[each], *each, body)
            for each in found
        ]
        entries = tuple(e for e in entries if e.results)
        self.found[path] = Frame(body, entries, frozenset(repeated), place.turns)

    def _chain(self, scope: str, place: _Place) -> tuple[list[Marked], Path]:
        """Returns the marks of an equation, and its identity."""
        chain = self.marks.chain(scope)
        if not chain:
            return ([] if place.owner is None else [place.owner]), place.identity
        first, *others = chain
        # What a loop computes in every turn alike may stand before it.
        is_here = first.body == place.number
        identity = (*place.identity, first.identity[-1]) if is_here else first.identity
        for each in others:
            identity = (*identity, *each.identity[-2:])
        return chain, identity

    def _inside(
        self, eqn: Eqn, here: _Place, last: Marked | None, number: int
    ) -> _Place:
        """Returns where a body of an equation is."""
        branch = here.branch or jaxprs.is_branch(eqn)
        turns = here.turns * jaxprs.repetitions(eqn)
        here = dataclasses.replace(here, branch=branch, turns=turns)
        if last is None or (here.owner is last and not last.planned.bodies):
            return here
        if not last.planned.bodies:
            return dataclasses.replace(here, number=None, owner=last)
        number = min(number, len(last.planned.bodies) - 1)
        return dataclasses.replace(
            here,
            identity=(*here.identity, number),
            number=self.marks.body_of(last.planned, number),
            owner=None,
        )

    def _direction(
        self,
        eqn: Eqn,
        here: _Place,
        last: Marked | None,
        is_cast: bool,
        own: set[Identity],
    ) -> str | None:
        """Returns the direction of an equation that calls nothing; None for no site."""
        if jaxprs.is_conversion(eqn):
            atoms = *eqn.invars, *eqn.outvars
            if len({jaxprs.aval_of(each).dtype for each in atoms}) == 1:
                return None  # of a weak type alone
        elif is_cast and not here.backward:
            return None  # what a saturating cast does before
        forward = is_cast and not here.derivative
        if last is not None and not is_cast and not here.derivative:
            identity = Identity(here.identity)
            is_own = eqn.primitive is last.eqn.primitive or (
                _is_one_product(last) and eqn.primitive.name == "dot_general"
            )
            if is_own and identity not in own:
                # In a backward body, it is there if it is computed again.
                forward = not here.backward or here.again
                if forward:
                    own.add(identity)
        if is_cast and here.backward and not here.again:
            forward = False
        if forward:
            return None if here.again else FORWARD
        return BACKWARD if self.differentiated else None


def _is_more(scope: str, chain: Sequence[Marked], name: str) -> bool:
    """Whether a name stack has a name more often than the function has it there.

    A function may differentiate another one itself.
    """
    count = scope.count(name)
    return count > 0 and count > sum(
        jaxprs.scope_text(each.eqn).count(name) for each in chain
    )


def _fills(eqn: Eqn, filled: Collection[Var]) -> bool:
    """Whether an equation makes zeros for the residuals of another branch.

    In a sharded map they are made to vary along its axes. `filled` are such zeros.
    """
    name = eqn.primitive.name
    if name == "pvary":
        return eqn.invars[0] in filled
    return name in ("empty2", "empty") or (
        name == "broadcast_in_dim"
        and (not isinstance(eqn.invars[0], Literal) or not np.any(eqn.invars[0].val))
    )


def _entry(
    eqn: Eqn,
    index: int,
    here: _Place,
    last: Marked | None,
    direction: str,
    cast: str | None,
    read: Collection[Var],
) -> Entry:
    results, made_by = eqn.outvars, None if last is None else last.eqn
    if direction == FORWARD and made_by and eqn.primitive is made_by.primitive:
        # Others are for the derivative: that of singular values needs the vectors.
        results = results[: len(made_by.outvars)]
    return Entry(
        Identity(here.identity),
        last is not None,
        direction,
        eqn.primitive.name,
        eqn,
        index,
        tuple(v for v in results if jaxprs.is_floating(v) and v in read),
        tuple(v for v in eqn.invars if jaxprs.is_floating(v)),
        scales=direction == BACKWARD and here.backward and not here.again,
        cast=cast if direction == FORWARD else None,
    )


def _is_one_product(marked: Marked) -> bool:
    """Whether all that an equation binds is one product, and what prepares it."""
    rewrite = marked.planned.rewrite
    if rewrite is not None and rewrite.one_product:
        return True
    is_product = kind_of(marked.eqn.primitive.name) is Kind.PRODUCT
    return is_product and bool(marked.planned.f32_gradients)


def _is_product(eqn: Eqn, marked: Marked) -> bool:
    """Whether an equation is the product itself, see `_is_one_product`."""
    name = eqn.primitive.name
    is_product = kind_of(name) is Kind.PRODUCT or name == marked.eqn.primitive.name
    return is_product or name == "custom_linear_solve"


def _fp8(marked: Marked) -> Fp8 | None:
    """Returns how an equation multiplies 8-bit floats; None if it does not."""
    rewrite = marked.planned.rewrite
    return None if rewrite is None else rewrite.fp8


def _makes_8_bits(eqn: Eqn, scope: str, cast: str | None) -> bool:
    """Whether a part of an fp8 product is neither a product nor a cast of the plan."""
    # A product of a gradient that leaves in f32 is solved for together with another.
    is_solved = eqn.primitive.name == "custom_linear_solve" and len(eqn.outvars) > 1
    if eqn.primitive.name == "dot_general" or is_solved:
        return False
    return cast is None or scope_text.is_noted("quantised", scope)


def _quantised(
    eqn: Eqn, index: int, here: _Place, scope: str, fp8: Fp8
) -> Entry | None:
    """Returns the site of an array that becomes 8-bit floats, where that begins.

    Forward, its gradient is stopped first. Backward, it is what is solved for, see
    `fp8_products`.
    """
    name = eqn.primitive.name
    if name == "stop_gradient" and scope_text.is_noted("quantised", scope):
        direction, values, format = FORWARD, eqn.outvars, fp8.forward
    elif name == "custom_linear_solve" and here.backward:
        direction, values, format = BACKWARD, eqn.invars, fp8.backward
    else:
        return None
    return Entry(
        Identity(here.identity),
        True,
        direction,
        "quantise",
        eqn,
        index,
        tuple(jaxprs.variables(values)),
        tuple(jaxprs.variables(eqn.invars)),
        scales=direction == BACKWARD,
        cast=marking.cast_of(scope) if direction == FORWARD else None,
        format=format,
    )


def _rule(eqns: Sequence[Eqn], identity: Path, direction: str, body: Body) -> Entry:
    """Returns the site of all that a rule of a `custom_vjp` computes in a body."""
    made = {v for eqn in eqns for v in eqn.outvars}
    if direction == FORWARD:
        # What is kept for the backward rule is no result of the function.
        named = [eqn for eqn in eqns if eqn.params.get("name") == marking.RESULT]
        results = [v for eqn in named for v in eqn.outvars]
    else:
        inside = set(map(id, eqns))
        others = [eqn for eqn in body.jaxpr.eqns if id(eqn) not in inside]
        outside = {v for eqn in others for v in jaxprs.variables(eqn.invars)}
        outside.update(jaxprs.variables(body.jaxpr.outvars))
        results = [v for eqn in eqns for v in eqn.outvars if v in outside]
    operands = [v for eqn in eqns for v in eqn.invars if jaxprs.is_floating(v)]
    if direction == BACKWARD:
        # A derivative that is made infinite is made here. A mask may be made so.
        operands = jaxprs.variables(operands)
    return Entry(
        Identity(identity),
        True,
        direction,
        "custom_vjp_call",
        eqns[0],
        next(i for i, eqn in enumerate(body.jaxpr.eqns) if eqn is eqns[0]),
        tuple(v for v in results if jaxprs.is_floating(v)),
        tuple(v for v in operands if isinstance(v, Literal) or v not in made),
        scales=direction == BACKWARD,
    )
