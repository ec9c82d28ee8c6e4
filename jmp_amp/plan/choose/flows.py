"""The records of the first pass of the plan, see `choices`."""

from __future__ import annotations

import dataclasses

import numpy as np

from jmp_amp.plan.choose.records import Decision
from jmp_amp.plan.dataflow.sources import Sources
from jmp_amp.plan.dataflow.values import Known, Origin, castable
from jmp_amp.plan.program.jaxprs import Atom, Body, Inner, Literal, Var, aval_of
from jmp_amp.plan.program.regions import Region
from jmp_amp.plan.tables.rules import Rule
from jmp_amp.policies.dtypes import F32, is_half


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The forward pass over one equation: a decision, or flows through its bodies.

    Attributes:
      region: the policy scope that it is in.
      views: what it sees of its operands; of a loop's carry, what holds in every turn.
      results: what is known of its results.
      decision: the decision; None for a call, a loop or a branch.
      inner: its bodies.
      flows: the flow through each of them.
      inherited: the rule that its name gives to its bodies.
    """

    region: Region
    views: tuple[Known, ...]
    results: tuple[Known, ...]
    decision: Decision | None = None
    inner: tuple[Inner, ...] = ()
    flows: tuple[Flow, ...] = ()
    inherited: Rule | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Flow:
    """The forward pass over one body.

    Attributes:
      body: the body.
      region: the policy scope that it is called in.
      known: what is known of each of its variables.
      steps: one for each of its equations.
      outputs: what its caller sees of its outputs.
      sources: the inputs that each of its values is computed from.
    """

    body: Body
    region: Region
    known: dict[Var, Known]
    steps: tuple[Step, ...]
    outputs: tuple[Known, ...]
    sources: Sources

    def of(self, atom: Atom) -> Known | None:
        """Returns what is known of a variable; None of a literal."""
        return None if isinstance(atom, Literal) else self.known[atom]


def carry_dtype(known: Known, atom: Atom) -> np.dtype | None:
    """Returns the dtype that a loop carries a value in; None if it is never cast."""
    if not castable(atom):
        return None
    if known.origin == Origin.FULL:
        return F32
    traced, low = aval_of(atom).dtype, known.region.policy.compute_dtype
    if known.origin == Origin.LOW and traced == F32 and is_half(low):
        return low
    return traced
