"""What is stored across a product, and which sums have digits that cancel.

A kernel computes in registers, where f32 costs nothing. A value that is read again
behind a product, by what depends on it through that product, waits in memory: the
stream of a residual network does. Two sums that have a term in common, and are
subtracted, leave what differs: `(h + f(h)) - h`. Such sums keep their digits, and so
does what is cut in parts that are subtracted from each other.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jmp_amp.plan.dataflow.solver import once, union
from jmp_amp.plan.dataflow.values import is_exact, is_move
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Body, Eqn, Jaxpr, Var
from jmp_amp.plan.program.scope_text import backward_depth
from jmp_amp.plan.tables.operations import PRODUCTS, Role, role_of

_SUMS = (Role.ADDS, Role.SUBTRACTS, Role.NEGATES, Role.CHOOSES)


class Store(enum.IntEnum):
    """How a value is stored."""

    NOWHERE = 0
    ACROSS = 1  # across a product
    CHANGE = 2  # a term of it cancels later: with all its digits


class Storage(NamedTuple):
    """How the values of a body are stored, and those of the calls in it.

    Attributes:
      found: of its variables, in the order of `variables_of`.
      calls: by the position of a call or a branch, of each of its bodies. A loop is
        entered by itself.
    """

    found: tuple[Store, ...]
    calls: tuple[tuple[int, tuple[Storage, ...]], ...]


def variables_of(jaxpr: Jaxpr) -> list[Var]:
    """Returns all variables of a body, in their order."""
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
    return [*jaxpr.constvars, *jaxpr.invars, *made]


@dataclasses.dataclass(eq=False)
class _Value:
    """A value. Sets of values are integers, with a bit for each of them.

    Attributes:
      bit: its own; of a value that is moved, that of the other one; of a branch, also
        those of the outputs of its bodies.
      on: what it depends on, itself included.
      through: what it depends on through a product.
      terms: what is added up in it, itself included.
      depth: how many backward passes it is computed in.
      maker: the equation that makes it; None for an input.
      operands: those of the equation; of a branch, the outputs of all bodies.
      root: the value that it is, moved.
      is_call: it is the output of one of the bodies of a branch.
    """

    bit: int
    on: int
    through: int = 0
    terms: int = 0
    depth: int = 0
    maker: Eqn | None = None
    operands: Sequence[_Value] = ()
    root: _Value | None = None
    is_call: bool = False


@dataclasses.dataclass(eq=False)
class _Body:
    """A body where it is called: its values, and the bodies of the calls in it."""

    jaxpr: Jaxpr
    values: dict[Var, _Value] = dataclasses.field(default_factory=dict)
    calls: dict[int, list[_Body]] = dataclasses.field(default_factory=dict)

    def of(self, atom: Atom) -> _Value | None:
        return self.values[atom] if isinstance(atom, Var) else None


class StorageFinder:
    """Finds what is stored, in each body once for what becomes of its outputs."""

    @once
    def of(self, body: Body, outputs: tuple[Store, ...]) -> Storage:
        """Returns how the values of a body are stored, given its outputs outside."""
        pass_ = _Pass(self)
        entered = pass_.enter(body, [None] * len(body.jaxpr.invars), 0)
        for var, store in zip(body.jaxpr.outvars, outputs, strict=True):
            if isinstance(var, Var) and store > Store.NOWHERE:
                pass_.kept |= entered.values[var].bit
                if store is Store.CHANGE:
                    pass_.cancels.append((entered.values[var], 0))
        return pass_.storage(entered)

    def crosses(self, eqn: Eqn) -> bool:
        """Whether an equation reads and writes memory: a product, or what holds one."""
        name = eqn.primitive.name
        if name in PRODUCTS or jaxprs.is_loop(eqn):
            return True
        inner = jaxprs.inner_bodies(eqn)
        if not inner:
            opaque = name in ("custom_vjp_call", "pallas_call")
            return opaque and bool(jaxprs.owned_bodies(eqn))
        return any(self._crosses(each.body.jaxpr) for each in inner)

    @once
    def _crosses(self, jaxpr: Jaxpr) -> bool:
        return any(map(self.crosses, jaxpr.eqns))


class _Pass:
    """One pass over a body, and over the bodies of the calls in it.

    Attributes:
      made: all values that an equation makes, in their order.
      kept: the values that are stored across a product.
      cancels: values, and the terms of each that cancel later; none of a value whose
        parts differ.
    """

    def __init__(self, finder: StorageFinder) -> None:
        self.finder = finder
        self.made: list[_Value] = []
        self.kept = 0
        self.cancels: list[tuple[_Value, int]] = []
        self._bits = itertools.count()

    def enter(self, body: Body, given: Sequence[_Value | None], depth: int) -> _Body:
        """Returns a body with its values, given those of its inputs."""
        entered = _Body(body.jaxpr)
        inputs = zip(body.jaxpr.invars, given, strict=True)
        for var, value in (*((v, None) for v in body.jaxpr.constvars), *inputs):
            entered.values[var] = value or self._new()
        for index, eqn in enumerate(body.jaxpr.eqns):
            here = depth + backward_depth(jaxprs.scope_text(eqn))
            if jaxprs.inner_bodies(eqn) and not jaxprs.is_loop(eqn):
                results = self._call(index, eqn, entered, here)
            else:
                results = self._equation(eqn, entered, here)
            entered.values.update(zip(eqn.outvars, results, strict=True))
        return entered

    def _new(self) -> _Value:
        bit = 1 << next(self._bits)
        return _Value(bit, bit, terms=bit)

    def _call(
        self, index: int, eqn: Eqn, around: _Body, depth: int
    ) -> Iterator[_Value]:
        """Yields the results of a call or a branch: those of its bodies."""
        bodies = around.calls[index] = [
            self.enter(body, [around.of(eqn.invars[i]) for i in operands], depth)
            for body, operands in jaxprs.inner_bodies(eqn)
        ]
        outputs = [
            [each.of(v) or self._new() for v in each.jaxpr.outvars] for each in bodies
        ]
        for results in zip(*outputs, strict=True):
            one = len(results) == 1
            yield results[0] if one else self._made(eqn, results, depth, is_call=True)

    def _equation(self, eqn: Eqn, around: _Body, depth: int) -> Iterator[_Value]:
        read = [around.values[v] for v in dict.fromkeys(jaxprs.variables(eqn.invars))]
        # A backward pass reads what it needs as it is.
        direct = union(v.bit for v in read if v.depth >= depth)
        self.kept |= direct & union(v.through for v in read)
        if role_of(eqn.primitive.name) is Role.SUBTRACTS and len(read) == 2:
            one, other = read
            if one.bit == other.bit:
                self.cancels.append((one.root or one, 0))
            elif common := one.terms & other.terms:
                self.cancels += [(one, common), (other, common)]
        for _ in eqn.outvars:
            yield self._made(eqn, read, depth)

    def _made(
        self, eqn: Eqn, operands: Sequence[_Value], depth: int, is_call: bool = False
    ) -> _Value:
        value = self._new()
        value.is_call = is_call
        if is_move(eqn) and len(operands) == len(eqn.outvars) == 1:
            value.root = operands[0].root or operands[0]
            value.bit = value.root.bit
        if is_call:
            value.bit |= union(v.bit for v in operands)
        value.on = value.bit | union(v.on for v in operands)
        crosses = not is_call and self.finder.crosses(eqn)
        value.through = value.on if crosses else union(v.through for v in operands)
        sums = is_call or _adds(eqn)
        value.terms = value.bit | (union(v.terms for v in operands) if sums else 0)
        value.depth, value.maker, value.operands = depth, eqn, operands
        self.made.append(value)
        return value

    def storage(self, entered: _Body) -> Storage:
        """Returns how the values of a body are stored."""
        for value in reversed(self.made):
            assert value.maker is not None
            if self.kept & value.bit and is_exact(value.maker):
                self.kept |= union(v.bit for v in value.operands)
        changes = _spread(self.cancels)

        def store(var: Var, value: _Value) -> Store:
            if not jaxprs.is_floating(var):
                return Store.NOWHERE
            if value in changes:
                return Store.CHANGE
            return Store.ACROSS if self.kept & value.bit else Store.NOWHERE

        def of(body: _Body) -> Storage:
            found = [store(v, body.values[v]) for v in variables_of(body.jaxpr)]
            calls = [(i, tuple(map(of, bodies))) for i, bodies in body.calls.items()]
            return Storage(tuple(found), tuple(calls))

        return of(entered)


def _spread(cancels: list[tuple[_Value, int]]) -> set[_Value]:
    """Returns all sums of which something cancels: those given, and their terms."""
    found = set[_Value]()
    while cancels:
        value, common = cancels.pop()
        maker = value.maker
        if value in found or maker is None or common & value.bit:
            continue
        calls = value.is_call or jaxprs.is_loop(maker)
        if not (calls or _adds(maker)):
            continue
        if not common and is_move(maker) and len(maker.invars) > 1:
            # A join: what its parts have in common cancels.
            for v in value.operands:
                others = union(each.terms for each in value.operands if each is not v)
                shared = v.terms & others & ~v.bit
                cancels += [(v.root or v, shared)] * bool(shared)
            continue
        found.add(value)
        if value.is_call or (not calls and (common or is_move(maker))):
            cancels += [(v, common) for v in value.operands]
    return found


def _adds(eqn: Eqn) -> bool:
    """Whether the terms of the operands of an equation are those of its results."""
    return role_of(eqn.primitive.name) in _SUMS or is_move(eqn)
