"""The record of a rewrite, see `rewrites`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jmp_amp.plan.jaxprs import Eqn, Value
from jmp_amp.plan.rules import Rule

# (equation, dtype of the computation, operands) -> results
Bind = Callable[[Eqn, np.dtype | None, Sequence[Value]], Sequence[jax.Array]]
# (equation, rule, the policy's compute dtype) -> whether the rewrite takes it over
Applies = Callable[[Eqn, Rule, np.dtype], bool]


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """How an equation is bound, if not as traced.

    Attributes:
      applies: whether it takes over an equation; one of parameters, inputs and
        constants alone is bound as traced.
      bind: runs the equation on operands in the dtypes that the plan gave them.
      reason: why, in words, if it decides the dtype of a product; None if it leaves the
        decision as it is.
      result: the dtype of the results; None for that of the computation.
      derivative_only: it changes nothing but the derivative, and is left out where
        nothing is differentiated.
    """

    applies: Applies
    bind: Bind
    reason: str | None = None
    result: np.dtype | None = None
    derivative_only: bool = False
