"""The records of a decision for one equation.

A decision lists its `options`; the first one whose condition holds on the consumers is
taken. `choosing` makes decisions, `trade_offs` their options; `demands` takes one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jmp_amp.plan.choose.modes import Demand, Demands, Mode
from jmp_amp.plan.dataflow.standing import Criterion, Standing
from jmp_amp.plan.dataflow.values import Known, Origin
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.rules import Rule
from jmp_amp.policies.dtypes import F32


@dataclasses.dataclass(frozen=True)
class Option:
    """How an equation runs instead, if a condition on its consumers holds.

    Attributes:
      readers: the condition: consumers read the results in exactly these dtypes.
      reason: why, in words.
      dtype: the dtype to compute in; None leaves the computation as decided.
      store: the dtype to keep the results in; None keeps that of the computation.
      once: the condition as well: the results are read at most once.
      some: the condition is that one of the consumers reads, or keeps, them so.
    """

    readers: Demand
    reason: str
    dtype: np.dtype | None = None
    store: np.dtype | None = None
    once: bool = False
    some: bool = False

    def holds(self, readers: Demand, once: bool) -> bool:
        """Whether the condition holds, see `Decision.option`."""
        if self.some:
            return bool(self.readers & readers)
        return readers & Demands.DTYPES == self.readers and (once or not self.once)


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What the forward pass decides for one equation, or for several that are alike.

    Attributes:
      rule: the class of the operation, and the name that decided it.
      mode: how it treats the dtypes of its operands.
      dtype: the dtype of the computation; None if the mode says all.
      words: why, in words; None if the rule says it.
      result: what is known of the results, but for the region that they are made in.
      options: alternatives; the first whose condition on the consumers holds is taken.
      rewrite: how it is bound, if not as traced.
      saturate: constants that overflow become the largest finite value.
      standing: what it was made from.
      pin: the pin that decided, if one did.
      is_between: it is one f32 operation on half values, between products.
      may_round: half would be the same number, rounded: for half readers, and where
        the backward pass of a loop keeps it.
    """

    rule: Rule
    mode: Mode
    dtype: np.dtype | None
    words: str | None
    result: Known
    options: tuple[Option, ...] = ()
    rewrite: Rewrite | None = None
    saturate: bool = False
    standing: Standing | None = None
    pin: Criterion | None = None
    is_between: bool = False
    may_round: bool = False

    @property
    def reason(self) -> str:
        """Why, in words."""
        return self.rule.reason if self.words is None else self.words

    def option(self, readers: Demand, once: bool) -> Option | None:
        """Returns the first option whose condition holds.

        Args:
          readers: the dtypes in which the results are read.
          once: whether each of them is read at most once.
        """
        for option in self.options:
            # A comparison may look for the constant.
            saturates = self.saturate and option.dtype not in (None, F32)
            if option.holds(readers, once) and not (
                saturates and readers & Demands.AS_IS
            ):
                return option
        return None


def decided(
    at: Standing,
    mode: Mode,
    dtype: np.dtype | None,
    words: str | None,
    origin: Origin,
    saturate: bool = False,
) -> Decision:
    """Returns a decision for an equation where it stands."""
    known = Known(origin, None, at.region)
    return Decision(at.rule, mode, dtype, words, known, saturate=saturate, standing=at)
