"""Islands: f32 operations between half-precision values, which need not save f32.

A softmax of half-precision scores, a norm of half-precision activations or a loss of
half-precision logits computes in f32. Left alone, differentiation saves its f32 values
for the backward pass. Inside a `jax.checkpoint` it saves the half-precision values that
it began with, and XLA, which sees both passes of a compiled step, still keeps what is
cheapest to keep (`prevent_cse=False`). In a loop it cannot see both, and the half
values are what is kept.

An island is recomputed in the backward pass, so only cheap operations belong to one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jmp_amp.plan import jaxprs
from jmp_amp.plan.rules import COMPARISONS, RECOMPUTED, SAVES_OPERANDS, SAVES_RESULT
from jmp_amp.policies.dtypes import F32, is_half


@dataclasses.dataclass(frozen=True)
class Island:
    """Equations that are differentiated as one.

    Attributes:
      equations: their indices, in the order of the body.
      inputs: the variables that they read from outside, and the dtype to read them in;
        None is that which they are held in.
      outputs: the variables that are read outside, with the dtype of the readers.
    """

    equations: tuple[int, ...]
    inputs: tuple[tuple[Any, np.dtype | None], ...]
    outputs: tuple[tuple[Any, np.dtype | None], ...]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What finding the islands of a body takes.

    Attributes:
      jaxpr: the body.
      dtypes: the dtype that each equation computes in.
      reads: the dtypes in which each equation reads its operands.
      recomputed: whether each equation, if it is a call, calls cheap operations only.
      outputs: the dtypes in which the outputs of the body are read.
      held: the dtype of each variable.
      is_activation: whether a variable depends on the activations.
      is_parameter: whether it is a parameter or an input, which live anyway.
    """

    jaxpr: Any
    dtypes: Sequence[np.dtype | None]
    reads: Sequence[Sequence[np.dtype | None]]
    recomputed: Sequence[bool]
    outputs: Sequence[np.dtype | None]
    held: Mapping[Any, np.dtype | None]
    is_activation: Callable[[Any], bool]
    is_parameter: Callable[[Any], bool]


def find_islands(seen: Seen) -> tuple[Island, ...]:
    """Returns the islands of a planned body that save memory."""
    if any(eqn.effects for eqn in seen.jaxpr.eqns):
        return ()  # their order is the program's
    found = []
    for members in _clusters(seen):
        island = _island(seen, members)
        borders = [dtype or seen.held[v] for v, dtype in island.inputs + island.outputs]
        # Between f32 values, as under a policy of f32, the program is left as it is.
        if not any(is_half(dtype) for dtype in borders if dtype is not None):
            continue
        if _saved(seen, members) > _kept(seen, island):
            found.append(island)
    return tuple(found)


def in_order(jaxpr: Any, islands: Sequence[Island]) -> tuple[int | Island, ...]:
    """Returns the equations of a body, some of them in islands, as they can run."""
    if not islands:
        return tuple(range(len(jaxpr.eqns)))
    island_of = {i: island for island in islands for i in island.equations}
    maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    ordered: dict[int | Island, None] = {}

    def needs(node: int | Island) -> Iterator[int | Island]:
        if isinstance(node, Island):
            atoms = [atom for atom, _ in node.inputs]
        else:
            atoms = jaxpr.eqns[node].invars
        for atom in atoms:
            if not isinstance(atom, jaxprs.Literal) and atom in maker:
                yield island_of.get(maker[atom], maker[atom])

    # An island runs when the first of its results is read, after all that it reads; at
    # the end if only the outputs of the body read them.
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


def _clusters(seen: Seen) -> list[list[int]]:
    """The f32 operations that read one another's f32 results, as sets of equations.

    Those that read the same half-precision activation in f32 belong together too: the
    gradients of their readings are summed in f32. A value that leaves the f32
    operations and comes back has a higher level, and the operations of one cluster have
    one level: so no cluster waits for itself.
    """
    level: dict[Any, int] = {}
    made_by: dict[Any, int] = {}
    parent: dict[int, int] = {}
    reader: dict[Any, int] = {}

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for index, eqn in enumerate(seen.jaxpr.eqns):
        atoms = [v for v in eqn.invars if not isinstance(v, jaxprs.Literal)]
        member = _belongs(seen, index, eqn)
        joined = [
            v for v in atoms if member and v in made_by and not is_half(seen.held[v])
        ]
        here = max(
            (level.get(v, 0) + (v in made_by and v not in joined) for v in atoms),
            default=0,
        )
        level.update((v, here) for v in eqn.outvars)
        if member:
            parent[index] = index
            made_by.update((v, index) for v in eqn.outvars)
            for v, dtype in zip(eqn.invars, seen.reads[index], strict=True):
                if isinstance(v, jaxprs.Literal):
                    continue
                if v in joined:
                    other = made_by[v]
                elif seen.is_activation(v) and dtype == F32:
                    other = reader.setdefault((v, here), index)
                else:
                    continue
                if level[seen.jaxpr.eqns[other].outvars[0]] == here:
                    parent[root(other)] = root(index)
    clusters: dict[int, list[int]] = {}
    for index in parent:
        clusters.setdefault(root(index), []).append(index)
    return list(clusters.values())


def _belongs(seen: Seen, index: int, eqn: Any) -> bool:
    """Whether an equation computes in f32, from activations, and cheaply."""
    if seen.recomputed[index]:
        computes = any(seen.held[v] == F32 for v in eqn.outvars)
    elif eqn.primitive.name in COMPARISONS:
        computes = F32 in seen.reads[index]
    else:
        computes = (
            eqn.primitive.name in RECOMPUTED
            and seen.dtypes[index] == F32
            and any(seen.held[v] == F32 for v in eqn.outvars)
        )
    return computes and any(seen.is_activation(v) for v in eqn.outvars)


def _island(seen: Seen, members: Sequence[int]) -> Island:
    inside = set(members)
    eqns = [seen.jaxpr.eqns[i] for i in members]
    made = {v for eqn in eqns for v in eqn.outvars}
    outside: dict[Any, set[np.dtype | None]] = {}
    for index, (eqn, dtypes) in enumerate(
        zip(seen.jaxpr.eqns, seen.reads, strict=True)
    ):
        if index not in inside:
            for atom, dtype in zip(eqn.invars, dtypes, strict=True):
                if not isinstance(atom, jaxprs.Literal):
                    outside.setdefault(atom, set()).add(dtype)
    for atom, dtype in zip(seen.jaxpr.outvars, seen.outputs, strict=True):
        if not isinstance(atom, jaxprs.Literal):
            outside.setdefault(atom, set()).add(dtype)
    inputs = dict.fromkeys(
        atom
        for eqn in eqns
        for atom in eqn.invars
        if not isinstance(atom, jaxprs.Literal) and atom not in made
    )
    return Island(
        tuple(members),
        # The gradients of all that is read in f32 are summed in f32.
        tuple(
            (
                v,
                F32 if seen.is_activation(v) and F32 in outside.get(v, ()) else None,
            )
            for v in inputs
        ),
        tuple(
            (v, next(iter(outside[v])) if len(outside[v]) == 1 else seen.held[v])
            for eqn in eqns
            for v in eqn.outvars
            if v in outside
        ),
    )


def _saved(seen: Seen, members: Sequence[int]) -> int:
    """The bytes of f32 values that differentiation would save, were it no island.

    A product saves a factor for the derivative with respect to the other one. What the
    operations begin with counts too, as the f32 cast of it is what is saved.
    """
    saved = set()
    made = {v for i in members for v in seen.jaxpr.eqns[i].outvars}
    for index in members:
        eqn = seen.jaxpr.eqns[index]
        name = eqn.primitive.name
        if name in SAVES_RESULT or seen.recomputed[index]:
            saved.update(eqn.outvars)
        if name in SAVES_OPERANDS:
            operands = [v for v in eqn.invars if not isinstance(v, jaxprs.Literal)]
            if len(operands) > 1 or len(eqn.invars) == 1:
                saved.update(operands)
    return sum(
        v.aval.size * F32.itemsize
        for v in saved
        if (v in made and seen.held[v] == F32)
        or (v not in made and seen.is_activation(v) and is_half(seen.held[v]))
    )


def _kept(seen: Seen, island: Island) -> int:
    """The bytes that the island saves instead: what it begins with."""
    return sum(
        v.aval.size * (dtype or seen.held[v] or v.aval.dtype).itemsize
        for v, dtype in island.inputs
        if not seen.is_parameter(v)
    )
