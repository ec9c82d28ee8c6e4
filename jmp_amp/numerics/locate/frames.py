"""Which equations of a traced program are sites, and of which direction.

A program is the gradient of a replay with marks. An equation is forward if it is one of
the function's own, or a cast that the plan inserts. What exists only for the derivative
is backward, wherever it runs. What a checkpoint computes again is no site, and neither
are calls, loops and branches themselves.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from jmp_amp.numerics.locate import marks as marking
from jmp_amp.numerics.locate.liveness import Flags, Liveness
from jmp_amp.numerics.locate.marks import Marked, PlanMarks
from jmp_amp.plan.plan import Identity
from jmp_amp.plan.program import jaxprs, scope_text
from jmp_amp.plan.program.jaxprs import Atom, Body, ClosedJaxpr, Eqn, Literal, Var
from jmp_amp.plan.tables.operations import Kind, kind_of
from jmp_amp.policies.fp8 import Fp8

FORWARD, BACKWARD = "forward", "backward"
Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a body is, or an equation.

    Attributes:
      identity: the way to it in the plan.
      number: the number of the body there; None if the plan has no such body.
      owner: the equation that computes in it, if the plan has none of its own for it.
      backward: it belongs to the backward pass.
      again: it is computed again.
      derivative: it exists for the derivative only.
      branch: it is a branch, or in one.
      turns: how often it runs, as far as the program tells; those of a `while` are one.
      in_loop: whether it runs in the turns of a loop.
    """

    identity: Path
    number: int | None
    owner: Marked | None = None
    backward: bool = False
    again: bool = False
    derivative: bool = False
    branch: bool = False
    turns: int = 1
    in_loop: bool = False

    @property
    def direction(self) -> str:
        return BACKWARD if self.backward else FORWARD

    @property
    def is_cotangent(self) -> bool:
        """Whether what is computed there leads to a gradient, and runs once."""
        return self.backward and not self.again


@dataclasses.dataclass(frozen=True, eq=False)
class At:
    """An equation of a body.

    Attributes:
      eqn, index: the equation, and its place in the body.
      scope: its name stack.
      marked: the equation of the plan that it comes from; None if it has no mark.
      cast: which inserted cast of that equation it is; None if it is none.
    """

    eqn: Eqn
    index: int
    scope: str
    place: Place
    marked: Marked | None
    cast: str | None

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def fp8(self) -> Fp8 | None:
        """How the equation of the plan multiplies 8-bit floats, if it does."""
        rewrite = None if self.marked is None else self.marked.planned.rewrite
        return None if rewrite is None else rewrite.fp8


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A site of a body: an equation, or all that the rule of a `custom_vjp` computes.

    Attributes:
      at: the equation; the first one of several.
      operation: the name of the primitive.
      results: the floating results.
      operands: the floating operands, those that come from outside of it.
      format: of what becomes 8-bit floats, their format; its results are the values
        before. None for all else.
    """

    at: At
    direction: str
    operation: str
    results: Sequence[Var]
    operands: Sequence[Atom]
    format: str | None = None

    @property
    def identity(self) -> Identity:
        """Of the equation of the plan that it comes from; else of the one around."""
        return Identity(self.at.place.identity)

    @property
    def scales(self) -> bool:
        """Whether a loss scale multiplies it: whether a cotangent leads there."""
        return self.direction == BACKWARD and self.at.place.is_cotangent


@dataclasses.dataclass(eq=False)
class Frame:
    """A body of a program, where it is, and its sites in their order.

    Attributes:
      repeated: the places of equations that only have an effect, which they had before:
        a checkpoint computes them again.
    """

    body: Body
    place: Place
    entries: Sequence[Entry] = ()
    repeated: set[int] = dataclasses.field(default_factory=set)


def frames_of(
    program: ClosedJaxpr, marks: PlanMarks, differentiated: bool
) -> dict[Path, Frame]:
    """Returns the bodies of a replay with marks, or of its gradient."""
    reader = _Reader(marks, differentiated)
    body = jaxprs.body_of(program)
    reader.read(body, (), Place((), marks.main), (True,) * len(body.jaxpr.outvars))
    return reader.found


@dataclasses.dataclass
class _Reader:
    """Reads the bodies of a program."""

    marks: PlanMarks
    differentiated: bool
    found: dict[Path, Frame] = dataclasses.field(default_factory=dict)
    liveness: Liveness = dataclasses.field(default_factory=Liveness)

    def read(self, body: Body, path: Path, place: Place, outputs: Flags) -> None:
        """Notes the sites of a body, of which some outputs are read, and all in it."""
        live = self.liveness.of(body, outputs)
        found: list[Entry] = []
        # A rule is one site, which stands where the first of its equations does.
        rules: defaultdict[tuple[Path, str], list[At]] = defaultdict(list)
        own, filled = set[Path](), set[Var]()
        # The frame of a body stands before those of the bodies in it.
        frame = self.found[path] = Frame(body, place)
        for index, eqn in enumerate(body.jaxpr.eqns):
            scope = jaxprs.scope_text(eqn)
            if not live.eqns[index] or scope_text.is_noted("scaling", scope):
                continue
            at = self._at(eqn, index, scope, place)
            last, here = at.marked, at.place
            if last is not None and jaxprs.is_custom_vjp(last.eqn) and at.cast is None:
                if not here.again:
                    rules[here.identity, here.direction].append(at)
            elif inner := jaxprs.inner_bodies(eqn):
                for number, each in enumerate(inner):
                    inside = self._inside(at, number)
                    ends = live.outputs[index][number]
                    self.read(each.body, (*path, index, number), inside, ends)
            elif here.branch and last is None and _fills(eqn, filled):
                filled.update(eqn.outvars)
            else:
                if here.again and eqn.effects and not jaxprs.is_read(eqn):
                    frame.repeated.add(index)
                if (entry := self._entry(at, own, live.read)) is not None:
                    found.append(entry)
        found += [_rule(those, body) for those in rules.values()]
        sites = (each for each in found if each.results)
        frame.entries = sorted(sites, key=lambda each: each.at.index)

    def _at(self, eqn: Eqn, index: int, scope: str, place: Place) -> At:
        """Returns an equation of a body, which is at `place`."""
        chain, identity = self.marks.chain(scope), place.identity
        if chain:
            first, *others = chain
            # What a loop computes in every turn alike may stand before it.
            is_here = first.body == place.number
            identity = (*identity, first.identity[-1]) if is_here else first.identity
            for each in others:
                identity = (*identity, *each.identity[-2:])
        elif place.owner is not None:
            chain = [place.owner]
        here = dataclasses.replace(
            place,
            identity=identity,
            backward=place.backward or _is_more(scope, chain, scope_text.BACKWARD),
            again=place.again or _is_more(scope, chain, scope_text.AGAIN),
            derivative=place.derivative or any(m.is_derivative for m in chain),
        )
        marked = chain[-1] if chain else None
        return At(eqn, index, scope, here, marked, marking.cast_of(scope))

    def _inside(self, at: At, number: int) -> Place:
        """Returns where a body of an equation is."""
        last = at.marked
        here = dataclasses.replace(
            at.place,
            branch=at.place.branch or jaxprs.is_branch(at.eqn),
            turns=at.place.turns * jaxprs.repetitions(at.eqn),
            in_loop=at.place.in_loop or jaxprs.is_loop(at.eqn),
        )
        if last is None:
            return here
        if not last.planned.bodies:
            return dataclasses.replace(here, number=None, owner=last)
        number = min(number, len(last.planned.bodies) - 1)
        return dataclasses.replace(
            here,
            identity=(*here.identity, number),
            number=self.marks.bodies[last.planned.bodies[number]],
            owner=None,
        )

    def _entry(self, at: At, own: set[Path], read: Collection[Var]) -> Entry | None:
        """Returns the site of an equation that calls nothing; None if it is none.

        `own` are the identities of those that the body had as the function has them;
        `read` is what anybody reads.
        """
        last = at.marked
        if at.fp8 is not None and _makes_8_bits(at):
            return None if at.place.again else _quantised(at, at.fp8)
        product = None
        if last is not None and at.cast is None and _is_one_product(last):
            product = last.eqn.primitive.name
            names = product, "custom_linear_solve"
            if kind_of(at.name) is not Kind.PRODUCT and at.name not in names:
                return None
        direction = self._direction(at, own)
        if direction is None:
            return None
        operation, results = at.name, at.eqn.outvars
        if last is not None and direction == FORWARD:
            if at.eqn.primitive is last.eqn.primitive:
                # Others are for the derivative: that of singular values needs vectors.
                results = results[: len(last.eqn.outvars)]
        results = [v for v in results if jaxprs.is_floating(v) and v in read]
        if product is not None:
            # Other results of the equations that are solved are none of it.
            operation, results = product, results[:1]
        operands = [v for v in at.eqn.invars if jaxprs.is_floating(v)]
        return Entry(at, direction, operation, results, operands)

    def _direction(self, at: At, own: set[Path]) -> str | None:
        """Returns the direction of an equation that calls nothing; None for no site."""
        eqn, here, last = at.eqn, at.place, at.marked
        is_cast = at.cast is not None
        if jaxprs.is_conversion(eqn):
            atoms = *eqn.invars, *eqn.outvars
            if len({jaxprs.aval_of(each).dtype for each in atoms}) == 1:
                return None  # of a weak type alone
        elif is_cast and not here.backward:
            return None  # what a saturating cast does before
        is_own = is_cast
        if last is not None and not is_cast and here.identity not in own:
            is_own = eqn.primitive is last.eqn.primitive or (
                _is_one_product(last) and at.name == "dot_general"
            )
        # What is computed again is of the function, in the backward pass too.
        if is_own and not here.derivative and not here.is_cotangent:
            if not is_cast:
                own.add(here.identity)
            return None if here.again else FORWARD
        return BACKWARD if self.differentiated else None


def _is_more(scope: str, chain: Sequence[Marked], name: str) -> bool:
    """Whether a name stack has a name more often than the function has it there.

    A function may differentiate another one itself.
    """
    count = scope.count(name)
    own = (jaxprs.scope_text(each.eqn).count(name) for each in chain)
    return count > 0 and count > sum(own)


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


def _is_one_product(marked: Marked) -> bool:
    """Whether all that an equation binds is one product, and what prepares it."""
    rewrite = marked.planned.rewrite
    if rewrite is not None and rewrite.one_product:
        return True
    is_product = kind_of(marked.eqn.primitive.name) is Kind.PRODUCT
    return is_product and bool(marked.planned.f32_gradients)


def _makes_8_bits(at: At) -> bool:
    """Whether a part of an fp8 product is neither a product nor a cast of the plan."""
    # A product of a gradient that leaves in f32 is solved for together with another.
    is_solved = at.name == "custom_linear_solve" and len(at.eqn.outvars) > 1
    if at.name == "dot_general" or is_solved:
        return False
    return at.cast is None or scope_text.is_noted("quantised", at.scope)


def _quantised(at: At, fp8: Fp8) -> Entry | None:
    """Returns the site of an array that becomes 8-bit floats, where that begins.

    Forward, its gradient is stopped first. Backward, it is what is solved for, see
    `rewrites.fp8`.
    """
    eqn = at.eqn
    if at.name == "stop_gradient" and scope_text.is_noted("quantised", at.scope):
        direction, values, format = FORWARD, eqn.outvars, fp8.forward
    elif at.name == "custom_linear_solve" and at.place.backward:
        direction, values, format = BACKWARD, eqn.invars, fp8.backward
    else:
        return None
    results, operands = jaxprs.variables(values), jaxprs.variables(eqn.invars)
    return Entry(at, direction, "quantise", results, operands, format)


def _rule(rule: Sequence[At], body: Body) -> Entry:
    """Returns the site of all that a rule of a `custom_vjp` computes in a body."""
    eqns, first = [at.eqn for at in rule], rule[0]
    made = {v for eqn in eqns for v in eqn.outvars}
    operands = [v for eqn in eqns for v in eqn.invars if jaxprs.is_floating(v)]
    if first.place.backward:
        inside = {at.index for at in rule}
        others = [e for i, e in enumerate(body.jaxpr.eqns) if i not in inside]
        outside = {v for eqn in others for v in jaxprs.variables(eqn.invars)}
        outside.update(jaxprs.variables(body.jaxpr.outvars))
        results = [v for eqn in eqns for v in eqn.outvars if v in outside]
        # A derivative that is made infinite is made here. A mask may be made so.
        operands = jaxprs.variables(operands)
    else:
        # What is kept for the backward rule is no result of the function.
        named = [eqn for eqn in eqns if eqn.params.get("name") == marking.RESULT]
        results = [v for eqn in named for v in eqn.outvars]
    return Entry(
        first,
        first.place.direction,
        "custom_vjp_call",
        [v for v in results if jaxprs.is_floating(v)],
        [v for v in operands if isinstance(v, Literal) or v not in made],
    )
