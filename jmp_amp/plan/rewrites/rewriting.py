"""The record of a rewrite, see `rewrite_table`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import jax
import numpy as np

from jmp_amp.plan.program.jaxprs import Atom, Eqn, Jaxpr, Literal, Value, Var, variables
from jmp_amp.policies.fp8 import Fp8

# (equation, dtype of the computation, operands) -> results
Bind = Callable[[Eqn, np.dtype | None, Sequence[Value]], Sequence[jax.Array]]
# One for each operand or result of an equation; None for a value that is never cast.
Dtypes = tuple[np.dtype | None, ...]


class Reader(NamedTuple):
    """An equation that reads a value, and the dtype in which it reads each operand."""

    eqn: Eqn
    reads: Dtypes


class Readers:
    """What reads the values of a body; made once for all of its equations.

    Attributes:
      before_tanh: the variables from which elementwise operations lead to a `tanh`.
    """

    def __init__(
        self, jaxpr: Jaxpr, reads: Sequence[Dtypes], before_tanh: Set[Var]
    ) -> None:
        """Collects the readers; `reads` are the dtypes that each equation reads in."""
        self.before_tanh = before_tanh
        self._of: dict[Var, list[Reader]] = {}
        for eqn, dtypes in zip(jaxpr.eqns, reads, strict=True):
            for var in dict.fromkeys(variables(eqn.invars)):
                self._of.setdefault(var, []).append(Reader(eqn, dtypes))

    def of(self, atom: Atom) -> Sequence[Reader]:
        """Returns the equations that read a value, in their order."""
        return () if isinstance(atom, Literal) else self._of.get(atom, ())


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """How an equation is bound, if not as traced.

    Attributes:
      bind: runs the equation on operands in the dtypes that the plan gave them.
      reason: why, in words, if it decides the dtype of a product; None if it leaves the
        decision as it is.
      dtype: the dtype of the computation; None for that of the policy.
      result: the dtype of the results; None for that of the computation.
      derivative_only: it changes nothing but the derivative, and is left out where
        nothing is differentiated.
      fp8: how it multiplies 8-bit floats, if it does.
      one_product: whether it binds one `dot_general`, and all else that it binds
        prepares that or, for the derivative, is one `custom_linear_solve`.
      beside: returns the rewrite to take in its place, if any, by what reads the
        results; None if that makes no difference.
      takes_held: whether `bind` takes operands whose gradients leave in f32 as they
        are held, and casts them itself; see `f32_gradients` for what others do.
      measured: the rewrite to take where `diagnose` reads what it binds; None for this
        one.
    """

    bind: Bind
    reason: str | None = None
    dtype: np.dtype | None = None
    result: np.dtype | None = None
    derivative_only: bool = False
    fp8: Fp8 | None = None
    one_product: bool = False
    beside: Callable[[Eqn, Readers], Rewrite | None] | None = None
    takes_held: bool = False
    measured: Rewrite | None = None
