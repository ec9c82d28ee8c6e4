"""Islands: f32 operations between half-precision values, which need not save f32.

A softmax of half-precision scores computes in f32 and hands on half precision. Left
alone, differentiation saves its f32 exponentials for the backward pass. Inside a
`jax.checkpoint` it saves the half-precision scores, and XLA, which sees both passes of
a compiled step, still keeps what is cheapest to keep (`prevent_cse=False`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jmp_amp import jaxprs
from jmp_amp.dtypes import is_half
from jmp_amp.rules import ISLANDS, Rule


@dataclasses.dataclass(frozen=True)
class Island:
    """Consecutive equations that are differentiated as one.

    Attributes:
      start: the index of the first equation.
      stop: the index after the last one.
      inputs: the variables that they read from outside.
      outputs: the variables that are read outside, with the dtype of the readers.
    """

    start: int
    stop: int
    inputs: tuple[Any, ...]
    outputs: tuple[tuple[Any, np.dtype | None], ...]


def find_islands(
    jaxpr: Any,
    rules: Sequence[Rule],
    reads: Sequence[Sequence[np.dtype | None]],
    outputs: Sequence[np.dtype | None],
    held: Mapping[Any, np.dtype | None],
    is_activation: Callable[[Any], bool],
) -> tuple[Island, ...]:
    """Returns the islands of a planned body whose inputs and outputs are half.

    Args:
      jaxpr: the body.
      rules: the rule of each equation.
      reads: the dtypes in which each equation reads its operands.
      outputs: the dtypes in which the outputs of the body are read.
      held: the dtype of each variable.
      is_activation: whether a variable depends on the activations.
    """
    readers: dict[Any, list[tuple[int, np.dtype | None]]] = {}
    for index, (eqn, dtypes) in enumerate(zip(jaxpr.eqns, reads, strict=True)):
        for atom, dtype in zip(eqn.invars, dtypes, strict=True):
            if not isinstance(atom, jaxprs.Literal):
                readers.setdefault(atom, []).append((index, dtype))
    for atom, dtype in zip(jaxpr.outvars, outputs, strict=True):
        if not isinstance(atom, jaxprs.Literal):
            readers.setdefault(atom, []).append((len(jaxpr.eqns), dtype))

    found = []
    for start, stop in _runs(jaxpr, rules):
        made = {v for eqn in jaxpr.eqns[start:stop] for v in eqn.outvars}
        inputs = tuple(
            dict.fromkeys(
                atom
                for eqn in jaxpr.eqns[start:stop]
                for atom in eqn.invars
                if not isinstance(atom, jaxprs.Literal) and atom not in made
            )
        )
        results = []
        for var in made:
            outside = {
                dtype
                for index, dtype in readers.get(var, ())
                if not start <= index < stop
            }
            results += [(var, dtype) for dtype in outside]
        activations = [var for var in inputs if is_activation(var)]
        castable = [held[v] for v in activations if held[v] is not None]
        if (
            castable
            and all(is_half(dtype) for dtype in castable)
            and len({var for var, _ in results}) == len(results)
            and all(held[var] is None or is_half(dtype) for var, dtype in results)
        ):
            # In the order of the program: a set has none.
            order = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
            results.sort(key=lambda result: order[result[0]])
            found.append(Island(start, stop, inputs, tuple(results)))
    return tuple(found)


def _runs(jaxpr: Any, rules: Sequence[Rule]) -> list[tuple[int, int]]:
    """The runs of equations of one function that makes islands."""
    runs, start = [], 0
    for index, (eqn, rule) in enumerate(zip(jaxpr.eqns, rules, strict=True)):
        belongs = rule.decided_by in ISLANDS and not rule.from_user
        if not belongs or eqn.effects:
            if index > start:
                runs.append((start, index))
            start = index + 1
    if len(jaxpr.eqns) > start:
        runs.append((start, len(jaxpr.eqns)))
    return runs
