"""The records of a decision for one equation: what is known, and what is decided.

A decision lists its `options`; the first one whose condition holds on the consumers is
taken. `deciding` makes decisions, `trade_offs` their options; `consumers` takes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jmp_amp.plan.destinations import End
from jmp_amp.plan.facts import Fact
from jmp_amp.plan.jaxprs import Eqn, aval_of
from jmp_amp.plan.modes import Demand, Demands, Mode
from jmp_amp.plan.regions import Region
from jmp_amp.plan.rewriting import Rewrite
from jmp_amp.plan.rules import Rule
from jmp_amp.plan.values import Known, Origin, castable
from jmp_amp.policies.dtypes import F32, is_half


@dataclasses.dataclass(frozen=True)
class Option:
    """How an equation runs instead, if a condition on its consumers holds.

    Attributes:
      readers: the condition: consumers read the results in exactly these dtypes. With
        `Demands.AS_IS`: only comparisons read them.
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
        if self.readers != Demands.AS_IS:
            readers &= Demands.DTYPES
        return readers == self.readers and (once or not self.once)


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What the forward pass decides for one equation, or for several that are alike.

    Attributes:
      rule: the class of the operation, and the name that decided it.
      mode: how it treats the dtypes of its operands.
      dtype: the dtype of the computation; None if the mode says all.
      reason: why, in words.
      result: what is known of the results, but for the region that they are made in.
      options: alternatives; the first whose condition on the consumers holds is taken.
      of: for each operand, whether the results count as made of it; a parameter that
        is added to an activation does not.
      rewrite: how it is bound, if not as traced.
      saturate: constants that overflow become the largest finite value.
      standing: what it was made from.
      pin: the pin that decided, if one did.
    """

    rule: Rule
    mode: Mode
    dtype: np.dtype | None
    reason: str
    result: Known
    options: tuple[Option, ...] = ()
    of: tuple[bool, ...] = ()
    rewrite: Rewrite | None = None
    saturate: bool = False
    standing: Standing | None = None
    pin: Pin | None = None

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


class Pin(NamedTuple):
    """A reason to compute in f32 what would be half.

    Attributes:
      id: its name, which does not change when the words do.
      words: the reason; `{half}` is the half dtype.
      holds: whether it holds for a product.
      holds_beside: whether it holds for an operation that follows half operands.
      makes: the origin of the result. A low one is half where it is stored.
    """

    id: str
    words: str
    holds: Callable[[Standing], bool]
    holds_beside: Callable[[Standing], bool]
    makes: Origin = Origin.FULL


@dataclasses.dataclass(eq=False)
class Standing:
    """An equation, and what is known where it stands.

    Attributes:
      eqn: the equation.
      rule: its rule.
      region: the policy scope that it is in.
      operands: what is known of its floating operands, and of a fill value.
      views: what is known of all its operands.
      facts: what its operands are made of.
      is_related: whether its first two operands are made of one input.
      end: what becomes of the results, far on.
      is_recursive: whether it is a product of a loop that is a numerical method.
      name: that of the operation.
      origin: the greatest one of the operands'.
      pin: what pins it to f32, if anything does.
    """

    eqn: Eqn
    rule: Rule
    region: Region
    operands: tuple[Known, ...]
    views: Sequence[Known]
    facts: Sequence[Fact]
    is_related: bool
    end: End
    is_recursive: bool
    name: str = dataclasses.field(init=False)
    origin: Origin = dataclasses.field(init=False)
    pin: Pin | None = None

    def __post_init__(self) -> None:
        # Both are asked for many times.
        self.name = self.eqn.primitive.name
        self.origin = max((v.origin for v in self.operands), default=Origin.FREE)

    @property
    def activations(self) -> list[Known]:
        return [v for v in self.operands if v.origin != Origin.FREE]

    @property
    def half(self) -> np.dtype:
        """The dtype that the policy computes in."""
        return self.region.policy.compute_dtype

    @property
    def low(self) -> np.dtype:
        """The dtype of a low result: a program's own half dtype before the policy's."""
        traced = {aval_of(v).dtype for v in self.eqn.invars if castable(v)}
        if len(traced) == 1 and is_half(*traced):
            return traced.pop()
        return self.half

    def decision(
        self,
        mode: Mode,
        dtype: np.dtype | None,
        reason: str,
        origin: Origin,
        saturate: bool = False,
    ) -> Decision:
        known = Known(origin, None, self.region)
        return Decision(
            self.rule, mode, dtype, reason, known, saturate=saturate, standing=self
        )
