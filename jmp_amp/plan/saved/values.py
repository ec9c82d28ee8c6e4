"""The values of a planned body as a graph: what each is made of, and what needs it.

A node is a value in one dtype: a result, or a cast of one. Calls of helpers are written
out. Other calls, loops and branches are entered by themselves, and so they end a
section here: what one section makes, another one cannot make again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_amp.plan.choose.flows import Flow, Step
from jmp_amp.plan.choose.held import Held
from jmp_amp.plan.dataflow.values import Origin, Trait
from jmp_amp.plan.plan import EquationPlan, Key, Plan
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import elements_of
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Var, aval_of
from jmp_amp.plan.saved.needs import (
    Needs,
    Part,
    is_cheap,
    is_of_result,
    needs_of,
    part_of,
)
from jmp_amp.policies.dtypes import F32, is_half

Path = tuple[int, ...]
# A use by the derivative; any other use is the node that is made of the value.
NEEDED = -1


@dataclasses.dataclass(eq=False)
class Node:
    """A value in one dtype.

    Attributes:
      size: its bytes.
      dtype: its dtype; None of what has none.
      made_of: the nodes that it is made of.
      path: the equation that makes it, or reads it in this dtype first; empty for an
        argument or a constant.
      key: what it is in the body of that equation.
      operation: the name of the primitive that makes it; "" for a cast of the plan.
      is_free: it is an argument or a constant, or made of these alone.
      is_slice: it is another one in each turn of a loop, or made of such.
      is_active: a derivative may be taken with respect to it.
      again: it can be made again in the backward pass.
      anyway: it is kept whatever the cut says.
      is_operand: the derivative of what cannot be made again needs it.
      is_written: the forward pass writes it to memory anyway: what cannot be made again
        reads it, or more than one equation.
      keeps_result: the derivative of the operation that makes it reads it.
      crosses: it could be made again, but another section reads it.
      may_round: it may be stored in half, see `Decision.may_round`.
      uses: where it is read, among the equations at the top, and for what.
    """

    size: int
    dtype: np.dtype | None
    made_of: Sequence[int]
    path: Path
    key: Key
    operation: str = ""
    is_free: bool = True
    is_slice: bool = False
    is_active: bool = False
    again: bool = False
    anyway: bool = False
    is_operand: bool = False
    is_written: bool = False
    keeps_result: bool = False
    crosses: bool = False
    may_round: bool = False
    uses: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @property
    def position(self) -> int:
        """Where it is made among the equations at the top; -1 for an argument."""
        return self.path[0] if self.path else -1

    @property
    def is_needed(self) -> bool:
        return any(use == NEEDED for _, use in self.uses)


class _Call(NamedTuple):
    """An equation, its place and its plan, and the nodes of its operands."""

    eqn: Eqn
    step: Step
    planned: EquationPlan
    path: Path
    read: Sequence[int | None]


class _Body(NamedTuple):
    """A body that is written out, with its nodes so far."""

    flow: Flow
    plan: Plan
    path: Path
    held: dict[Var, int]
    casts: dict[tuple[Var, np.dtype], int]


class Values:
    """The nodes of a body, and of the helpers that it calls.

    Attributes:
      nodes: all of them, each after those that it is made of.
      inputs: the nodes of the inputs of the body.
      ends: the equations at the top that end a section.
      derived: the equations at the top whose derivative keeps a function of what it
        needs, so that it has to be made again.
    """

    def __init__(self, flow: Flow, plan: Plan, held: Held, in_loop: bool):
        """Makes the nodes of a body, see `find_blocks`."""
        self.nodes: list[Node] = []
        self.ends: list[int] = []
        self.derived: list[int] = []
        self._in_loop = in_loop
        self._read_at: dict[int, int] = {}  # where each was read first
        body = _Body(flow, plan, (), {}, {})
        jaxpr = flow.body.jaxpr
        for var in jaxpr.invars:
            known = flow.known[var]
            is_slice = Trait.SLICE in known.traits
            # Another array is kept for its slices.
            is_free = known.origin == Origin.FREE and (
                held.is_alive(var) or not (in_loop and is_slice)
            )
            body.held[var] = self._given(
                *(var, held.of(var)),
                is_free=is_free,
                is_slice=is_slice,
                is_active=jaxprs.is_floating(var),
            )
        self.inputs = [body.held[var] for var in jaxpr.invars]
        self._through(body)
        for atom, dtype in zip(jaxpr.outvars, plan.outputs, strict=True):
            self._read(body, atom, dtype, (len(jaxpr.eqns),))

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        for made_of in set(node.made_of):
            self.nodes[made_of].uses.append((node.path[0], len(self.nodes) - 1))
        return len(self.nodes) - 1

    def _given(self, var: Var, dtype: np.dtype | None = None, **known: Any) -> int:
        """Returns the node of an argument, or of a constant."""
        size, dtype = _size(var, dtype)
        return self._add(Node(size, dtype, (), (), (var, dtype), **known))

    def _through(self, body: _Body) -> None:
        """Adds the nodes of the equations of a body."""
        jaxpr = body.flow.body.jaxpr
        for var in jaxpr.constvars:
            body.held[var] = self._given(var)
        for eqn, step, planned in zip(
            jaxpr.eqns, body.flow.steps, body.plan.equations, strict=True
        ):
            if not jaxprs.runs(eqn):
                continue
            path = (*body.path, planned.index)
            read = [
                self._read(body, atom, dtype, path, planned.saturate)
                for atom, dtype in zip(eqn.invars, planned.reads, strict=True)
            ]
            call, part = _Call(eqn, step, planned, path, read), part_of(eqn)
            if part is Part.HELPER:
                results = self._helper(call)
            else:
                results = self._equation(call, part)
            body.held.update(zip(eqn.outvars, results, strict=True))

    def _helper(self, call: _Call) -> list[int]:
        """Returns the results of a call that is written out."""
        eqn, step, planned, path, read = call
        (plan,), (flow,) = planned.bodies, step.flows
        body = _Body(flow, plan, (*path, 0), {}, {})
        jaxpr = plan.body.jaxpr
        for var, node in zip(jaxpr.invars, read, strict=True):
            body.held[var] = self._given(var) if node is None else node
        self._through(body)
        found = []
        for var, atom, dtype in zip(
            eqn.outvars, jaxpr.outvars, plan.outputs, strict=True
        ):
            node = self._read(body, atom, dtype, (*path, 0, len(jaxpr.eqns)))
            found.append(self._given(var, dtype) if node is None else node)
        return found

    def _equation(self, call: _Call, part: Part) -> list[int]:
        """Returns the results of an equation that is not written out."""
        eqn, step, planned, path, read = call
        word, top = step.region.saved, path[0]
        active = [n is not None and self.nodes[n].is_active for n in read]
        moves = any(active) and eqn.primitive.name != "stop_gradient"
        needs = _needs(call, active, part) if moves else Needs()
        again = part is not Part.END and word != "all" and is_cheap(eqn)
        keeps = word == "all" or part is Part.END
        # What a product reads is written, and kept for its derivative.
        keeps = keeps or (word == "auto" and not again and not self._in_loop)
        if part is Part.END:
            self.ends.append(top)
        needed = [n for i in needs.operands if (n := read[i]) is not None]
        if needs.derives and word != "all" and (needed or needs.results):
            self.derived.append(top)
        for n in needed:
            self.nodes[n].uses.append((top, NEEDED))
            self.nodes[n].anyway |= keeps
            self.nodes[n].is_operand |= not again
        operands = [n for n in read if n is not None]
        for n in operands:
            self._is_read(n, top, not again)
        may_round = step.decision is not None and step.decision.may_round
        node = functools.partial(
            Node,
            made_of=operands,
            path=path,
            operation=eqn.primitive.name,
            is_free=again and all(self.nodes[n].is_free for n in operands),
            is_slice=any(self.nodes[n].is_slice for n in operands),
            again=again,
            may_round=may_round and planned.dtype == F32 and moves,
        )
        results = [
            self._result(node, moves, var, made, kept)
            for var, made, kept in zip(
                eqn.outvars, planned.yields, planned.writes, strict=True
            )
        ]
        if needs.results:
            for made, _ in results:
                self.nodes[made].uses.append((top, NEEDED))
                self.nodes[made].anyway |= keeps
                self.nodes[made].keeps_result = again
        return [kept for _, kept in results]

    def _result(
        self,
        node: Callable[..., Node],
        moves: bool,
        var: Var,
        made: np.dtype | None,
        kept: np.dtype | None,
    ) -> tuple[int, int]:
        """Returns the nodes of a result as it is made and as it is kept."""
        size, dtype = _size(var, made)
        converted = None not in (made, kept) and made != kept
        key = var, None if converted else dtype
        is_active = moves and jaxprs.is_floating(var)
        n = self._add(node(size=size, dtype=dtype, key=key, is_active=is_active))
        return n, self._cast(n, var, kept, self.nodes[n].path) if converted else n

    def _read(
        self,
        body: _Body,
        atom: Atom,
        dtype: np.dtype | None,
        path: Path,
        saturate: bool = False,
    ) -> int | None:
        """Returns the node of an operand in the dtype that it is read in."""
        if isinstance(atom, Literal):
            return None
        held = body.held[atom]
        if dtype is None or self.nodes[held].dtype in (None, dtype):
            return held
        if saturate or atom in body.plan.cast_per_use:
            return self._cast(held, atom, dtype, path)
        if (atom, dtype) not in body.casts:
            body.casts[atom, dtype] = self._cast(held, atom, dtype, path)
        return body.casts[atom, dtype]

    def _is_read(self, n: int, at: int, by_dear: bool) -> None:
        """Notes that an equation at the top reads a value, or a cast of it."""
        while True:
            node = self.nodes[n]
            node.is_written |= by_dear or self._read_at.setdefault(n, at) != at
            if node.operation or not node.made_of:
                return
            (n,) = node.made_of

    def _cast(self, n: int, var: Var, dtype: np.dtype | None, path: Path) -> int:
        """Returns the node of a cast."""
        size, _ = _size(var, dtype)
        source = self.nodes[n]
        return self._add(
            Node(
                *(size, dtype, (n,), path, (var, dtype)),
                is_free=source.is_free,
                is_slice=source.is_slice,
                is_active=source.is_active,
                again=True,
            )
        )


def _needs(call: _Call, active: Sequence[bool], part: Part) -> Needs:
    """Returns what the derivative of an equation, or of a call, needs."""
    eqn, step, planned, *_ = call
    if part is Part.OPERATION:
        return needs_of(eqn, planned, active)
    runs_half = is_half(step.region.policy.compute_dtype)
    if part is Part.RULE and runs_half and is_of_result(eqn):
        return Needs(results=True, derives=True)
    if part is Part.RULE:
        # Its rule makes what it needs of the operands.
        return Needs([i for i, each in enumerate(active) if each], derives=True)
    needed = [True] * len(active)
    inner = jaxprs.inner_bodies(eqn)
    if jaxprs.saves_residuals(eqn) and inner:
        needed = [False] * len(active)
        for (_, operands), plan in zip(inner, planned.bodies, strict=True):
            for i, each in zip(operands, plan.needs or (), strict=False):
                needed[i] |= each
    return Needs([i for i, each in enumerate(needed) if each])


def _size(atom: Atom, dtype: np.dtype | None) -> tuple[int, np.dtype | None]:
    """Returns the bytes of a value in a dtype; None is the one it was traced in."""
    aval = aval_of(atom)
    if not hasattr(aval, "size"):
        return 0, None
    dtype = dtype or aval.dtype
    return elements_of(aval.shape) * getattr(dtype, "itemsize", 4), dtype
