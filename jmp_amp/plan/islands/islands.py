"""Islands: f32 operations between half-precision values, which need not save f32.

A softmax of half-precision scores, a norm of half-precision activations or a loss of
half-precision logits computes in f32. Left alone, differentiation saves its f32 values
for the backward pass. Inside a `jax.checkpoint` it saves the half-precision values that
it began with. XLA sees both passes of a compiled step, and may still keep f32 values
where that is cheaper (`prevent_cse=False`). In a loop it cannot see both, and keeps the
half values.

An island is recomputed in the backward pass, so only cheap operations belong to one,
and none that has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jmp_amp.plan.choose.flows import Flow
from jmp_amp.plan.choose.modes import Dtypes
from jmp_amp.plan.dataflow.values import Origin, may_round
from jmp_amp.plan.plan import EquationPlan, Island
from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.dimensions import is_larger
from jmp_amp.plan.program.jaxprs import Eqn, Jaxpr, Var, aval_of, variables
from jmp_amp.plan.tables.operations import (
    OPERATIONS,
    Kind,
    Role,
    Saves,
    is_cheap,
    kind_of,
    role_of,
)
from jmp_amp.policies.dtypes import F32, is_half


def find_islands(
    flow: Flow,
    equations: Sequence[EquationPlan],
    outputs: Dtypes,
    held: Mapping[Var, np.dtype | None],
) -> tuple[Island, ...]:
    """Returns the islands of a body that save memory.

    Args:
      flow: the forward pass over the body.
      equations: the plan of each of its equations.
      outputs: the dtypes in which its outputs are read.
      held: the dtype of each of its variables.
    """
    body = _Body(flow, equations, outputs, held)
    found = []
    for members in body.clusters():
        island = body.island(members)
        borders = [dtype or held[v] for v, dtype in island.inputs + island.outputs]
        # Between f32 values, as under a policy of f32, the program is left as it is.
        if not any(is_half(dtype) for dtype in borders if dtype is not None):
            continue
        saved, kept = body.saved(members), body.kept(island)
        if is_larger(saved, kept, unless_known=True):
            found.append(island)
    return tuple(found)


def in_order(jaxpr: Jaxpr, islands: Sequence[Island]) -> tuple[int | Island, ...]:
    """Returns the equations of a body, some of them in islands, as they can run.

    An island runs when the first of its results is read, after all that it reads; at
    the end if only the outputs of the body read them. Effects keep their order.
    """
    if not islands:
        return tuple(range(len(jaxpr.eqns)))
    island_of = {i: island for island in islands for i in island.equations}
    maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    effects = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.effects]
    effect_before = dict(zip(effects[1:], effects, strict=False))
    ordered: dict[int | Island, None] = {}

    def needs(node: int | Island) -> Iterator[int | Island]:
        if isinstance(node, Island):
            read = [var for var, _ in node.inputs]
        else:
            read = variables(jaxpr.eqns[node].invars)
            if node in effect_before:
                yield effect_before[node]
        for var in read:
            if var in maker:
                yield island_of.get(maker[var], maker[var])

    outside = [i for i in range(len(jaxpr.eqns)) if i not in island_of]
    for start in (*outside, *islands):
        stack: list[tuple[int | Island, Iterator[int | Island]]] = []
        if start not in ordered:
            stack.append((start, needs(start)))
        while stack:
            node, needed = stack[-1]
            missing = next((n for n in needed if n not in ordered), None)
            if missing is None:
                stack.pop()
                ordered[node] = None
            else:
                assert missing not in (waiting for waiting, _ in stack), "a cycle"
                stack.append((missing, needs(missing)))
    return tuple(ordered)


class _Merged:
    """Numbers in clusters, which can be merged: a union-find."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def add(self, i: int) -> None:
        """Adds a number, in a cluster of its own."""
        self._parent[i] = i

    def merge(self, i: int, j: int) -> None:
        """Merges the clusters of two numbers."""
        self._parent[self._root(i)] = self._root(j)

    def clusters(self) -> list[list[int]]:
        """Returns the numbers of each cluster, in the order that they were added in."""
        found: dict[int, list[int]] = {}
        for i in self._parent:
            found.setdefault(self._root(i), []).append(i)
        return list(found.values())

    def _root(self, i: int) -> int:
        parent = self._parent
        while parent[i] != i:
            # Halves the path: a chain of thousands is gone through once.
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i


class _Body:
    """A body whose dtypes are settled, in which islands are looked for."""

    def __init__(
        self,
        flow: Flow,
        equations: Sequence[EquationPlan],
        outputs: Dtypes,
        held: Mapping[Var, np.dtype | None],
    ):
        self.flow = flow
        self.eqns = flow.body.jaxpr.eqns
        self.equations = equations
        self.outputs = outputs
        self.held = held
        self.cheap_calls = [
            _is_cheap_call(eqn, planned)
            for eqn, planned in zip(self.eqns, equations, strict=True)
        ]
        # Collected once: a body may have hundreds of islands.
        self.readers: dict[Var, list[tuple[int, np.dtype | None]]] = {}
        readings = [
            (e.invars, p.reads) for e, p in zip(self.eqns, equations, strict=True)
        ]
        readings.append((flow.body.jaxpr.outvars, outputs))
        for index, (atoms, dtypes) in enumerate(readings):
            for atom, dtype in zip(atoms, dtypes, strict=True):
                if not isinstance(atom, jaxprs.Literal):
                    self.readers.setdefault(atom, []).append((index, dtype))

    def is_activation(self, var: Var) -> bool:
        return self.flow.known[var].origin != Origin.FREE

    def clusters(self) -> list[list[int]]:
        """Returns the f32 operations that read one another's f32 results.

        Those that read the same half-precision activation in f32 belong together too:
        the gradients of their readings are summed in f32.

        `level[v]` counts how often the path to `v` has left an f32 cluster. Only equal
        levels merge, so a cluster never depends on its own output. An effect depends on
        the effect before it.
        """
        level: dict[Var, int] = {}
        made_by: dict[Var, int] = {}
        merged = _Merged()
        reader: dict[tuple[Var, int], int] = {}
        effects = 0  # the level of the last effect
        for index, eqn in enumerate(self.eqns):
            read = variables(eqn.invars)
            member = self.belongs(index)
            joined = {
                v for v in read if member and v in made_by and not is_half(self.held[v])
            }
            here = max(
                (level.get(v, 0) + (v in made_by and v not in joined) for v in read),
                default=0,
            )
            if eqn.effects:
                here = effects = max(here, effects)
            level.update((v, here) for v in eqn.outvars)
            if not member:
                continue
            merged.add(index)
            made_by.update((v, index) for v in eqn.outvars)
            for v, dtype in zip(eqn.invars, self.equations[index].reads, strict=True):
                if isinstance(v, jaxprs.Literal):
                    continue
                if v in joined:
                    other = made_by[v]
                elif self.is_activation(v) and dtype == F32:
                    other = reader.setdefault((v, here), index)
                else:
                    continue
                if level[self.eqns[other].outvars[0]] == here:
                    merged.merge(other, index)
        return merged.clusters()

    def belongs(self, index: int) -> bool:
        """Whether an equation computes in f32, from activations, and cheaply."""
        eqn, planned = self.eqns[index], self.equations[index]
        name = eqn.primitive.name
        if self.cheap_calls[index]:
            computes = any(self.held[v] == F32 for v in eqn.outvars)
        elif kind_of(name) is Kind.COMPARISON:
            computes = F32 in planned.reads
        else:
            computes = (
                is_cheap(name)
                and planned.dtype == F32
                and any(self.held[v] == F32 for v in eqn.outvars)
            )
        return computes and any(map(self.is_activation, eqn.outvars))

    def island(self, members: Sequence[int]) -> Island:
        """Returns the island of some equations, with the variables at its borders."""
        inside = set(members)
        eqns = [self.eqns[i] for i in members]
        made = {v for eqn in eqns for v in eqn.outvars}
        inputs = dict.fromkeys(
            v for eqn in eqns for v in variables(eqn.invars) if v not in made
        )

        def outside(v: Var) -> set[np.dtype | None]:
            """Returns the dtypes in which a variable is read outside."""
            readers = self.readers.get(v, ())
            return {dtype for index, dtype in readers if index not in inside}

        def entering(v: Var) -> np.dtype | None:
            # The gradients of all that is read in f32 are summed in f32.
            return F32 if self.is_activation(v) and F32 in outside(v) else None

        def leaving(v: Var) -> np.dtype | None:
            dtypes = outside(v)
            if len(dtypes) > 1 or not may_round(self.flow.known[v]):
                return self.held[v]
            return next(iter(dtypes))

        return Island(
            tuple(members),
            tuple((v, entering(v)) for v in inputs),
            tuple((v, leaving(v)) for e in eqns for v in e.outvars if outside(v)),
            _is_softmax_of_function(eqns),
        )

    def saved(self, members: Sequence[int]) -> int:
        """Returns the bytes of f32 that differentiation would save without the island.

        A product saves a factor for the derivative with respect to the other one. The
        values that the operations begin with count too: their f32 casts are saved.
        """
        saved: set[Var] = set()
        made = {v for i in members for v in self.eqns[i].outvars}
        for index in members:
            eqn = self.eqns[index]
            operation = OPERATIONS.get(eqn.primitive.name)
            saves = None if operation is None else operation.row.saves
            if saves is Saves.RESULT or self.cheap_calls[index]:
                saved.update(eqn.outvars)
            if saves is Saves.OPERANDS:
                operands = variables(eqn.invars)
                if len(operands) > 1 or len(eqn.invars) == 1:
                    saved.update(operands)
        return sum(
            aval_of(v).size * F32.itemsize
            for v in saved
            if (v in made and self.held[v] == F32)
            or (v not in made and self.is_activation(v) and is_half(self.held[v]))
        )

    def kept(self, island: Island) -> int:
        """Returns the bytes that the island saves instead: those of its inputs."""
        return sum(
            aval_of(v).size * (dtype or self.held[v] or aval_of(v).dtype).itemsize
            for v, dtype in island.inputs
            if not self.flow.known[v].is_parameter
        )


def _is_cheap_call(eqn: Eqn, planned: EquationPlan) -> bool:
    """Whether an equation is a call that computes in f32, and cheaply."""
    if not planned.bodies or not source_code.is_helper(eqn):
        return False
    (plan,) = planned.bodies
    return all(
        _is_cheap_call(inner, p)
        if p.bodies
        else p.dtype in (F32, None) and is_cheap(inner.primitive.name)
        for inner, p in zip(plan.body.jaxpr.eqns, plan.equations, strict=True)
    )


def _is_softmax_of_function(eqns: Sequence[Eqn]) -> bool:
    """Whether an island takes the largest value of what a dear function made.

    A softmax of `30 * tanh(scores / 30)` reads the `tanh` in several kernels. If the
    backward pass reads it as well, XLA writes it to memory in f32.
    """
    functions: set[Var] = set()
    for eqn in eqns:
        is_made = not functions.isdisjoint(variables(eqn.invars))
        if is_made and eqn.primitive.name == "reduce_max":
            return True
        if is_made or role_of(eqn.primitive.name) is Role.CURVES:
            functions.update(eqn.outvars)
    return False
