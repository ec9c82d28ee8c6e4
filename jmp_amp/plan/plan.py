"""The plan: a dtype for every equation of a program, and the reason, as plain data.

`planner` makes it, `interpreter` replays it, a report can read it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jmp_amp.plan.decisions import Known
from jmp_amp.plan.islands import Island
from jmp_amp.plan.jaxprs import Body
from jmp_amp.plan.regions import Region
from jmp_amp.plan.rules import Rule


@dataclasses.dataclass(frozen=True, eq=False)
class EquationPlan:
    """How one equation runs.

    Attributes:
      rule: the class of the operation, and the name that decided it.
      dtype: the dtype of the computation; None if it runs as traced or is a call.
      reason: why, in words.
      reads: the dtype in which each operand is read; None for one left as it is.
      writes: the dtype of each result; None for results that are never cast.
      saturate: constants that overflow `dtype` become its largest finite value.
      f32_result: half-precision operands, f32 result (`preferred_element_type`).
      picks: takes one element of each row, with a derivative that is no scatter.
      bodies: the plans of its bodies: of calls, loops and branches.
      rule_context: what planning the derivative rule of a `custom_jvp` needs.
    """

    rule: Rule
    dtype: np.dtype | None
    reason: str
    reads: tuple[np.dtype | None, ...]
    writes: tuple[np.dtype | None, ...]
    saturate: bool = False
    f32_result: bool = False
    picks: bool = False
    bodies: tuple[Plan, ...] = ()
    rule_context: RuleContext | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How one body runs.

    Attributes:
      body: the traced body.
      equations: one `EquationPlan` for each equation of the body.
      outputs: the dtype of each output; None for one that is never cast.
      cast_per_use: the variables whose casts are not shared between their uses.
      order: the indices of the equations as they run; islands are differentiated as
        one.
    """

    body: Body
    equations: tuple[EquationPlan, ...]
    outputs: tuple[np.dtype | None, ...]
    cast_per_use: frozenset[Any]
    order: tuple[int | Island, ...]

    @property
    def islands(self) -> tuple[Island, ...]:
        return tuple(step for step in self.order if isinstance(step, Island))


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """What is known where a `custom_jvp` is called, for planning its rule later."""

    known: tuple[Known, ...]
    region: Region
    inherited: Rule | None
