"""A lookup of half-precision rows, whose gradient is summed in f32.

JAX differentiates a lookup to a scatter that adds up the cotangents of a row in the
dtype of the rows. A row that is looked up a thousand times loses all but the first few
hundred of them in half precision. The sum in f32 takes little memory beside what is
looked up if there are many lookups for each row. If there are few, as of the nodes of a
graph, XLA writes all sums of a program at once, which would cost up to 1.8 times the
memory of a step: they stay half, and `explain` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.values import castable
from jmp_amp.plan.program import binding
from jmp_amp.plan.program.dimensions import is_larger
from jmp_amp.plan.program.jaxprs import Eqn, Value, aval_of
from jmp_amp.plan.rewrites.pick_rewrite import looked_up
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import Role, role_of
from jmp_amp.policies.dtypes import F32, is_half

# The lookups of a row in the mean, from which on its gradient is summed in f32.
_MANY = 16


def summed_lookup(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a lookup that may read a row more than once."""
    applies = (
        role_of(at.name) is Role.LOOKS_UP
        and is_half(at.half)
        and castable(at.eqn.invars[0])
        and _repeats(at.eqn, _MANY)
    )
    return _SUMMED if applies else None


def _repeats(eqn: Eqn, times: int) -> bool:
    """Whether a lookup reads each element so many times in the mean."""
    read, rows = aval_of(eqn.outvars[0]).size, aval_of(eqn.invars[0]).size
    return is_larger(read, rows * times - 1, unless_known=True)


def _bind(
    eqn: Eqn, dtype: np.dtype | None, operands: Sequence[Value]
) -> Sequence[jax.Array]:
    rows, indices = operands
    if not is_half(rows.dtype):
        return binding.bind(eqn, operands)

    def in_f32(tangent: jax.Array, indices: jax.Array) -> jax.Array:
        def lookup(rows: jax.Array) -> jax.Array:
            (result,) = binding.bind(eqn, (rows, indices))
            return result

        wide = tangent.astype(F32)
        _, moved = jax.jvp(lookup, (wide,), (wide,))
        return moved.astype(tangent.dtype)

    return [looked_up(eqn, rows, indices, in_f32)]


_SUMMED = Rewrite(_bind, derivative_only=True)
