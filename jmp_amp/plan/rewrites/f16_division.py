"""A quotient in f16, whose derivative squares nothing.

JAX differentiates `x / y` with respect to `y` to `-x * y**-2`. In f16 the square of 256
is infinite, and the gradient of all larger denominators was zero, which no check of
finite gradients sees. `-(x / y) / y` has the range of its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.program import binding
from jmp_amp.plan.program.jaxprs import Eqn, Value
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.policies.dtypes import F16


def quotient(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a quotient that may run in f16, by what is no constant."""
    applies = (
        at.name == "div"
        and at.rule.op_class is OpClass.FOLLOW
        and at.low == F16
        and not at.views[1].is_constant
    )
    return _QUOTIENT if applies else None


def _bind(
    eqn: Eqn, dtype: np.dtype | None, operands: Sequence[Value]
) -> Sequence[jax.Array]:
    if dtype != F16:
        return binding.bind(eqn, operands)

    @jax.custom_jvp
    def divided(x: jax.Array, y: jax.Array) -> jax.Array:
        (result,) = binding.bind(eqn, (x, y))
        return result

    def derivative(
        operands: Sequence[jax.Array], tangents: Sequence[jax.Array | SymbolicZero]
    ) -> tuple[jax.Array, jax.Array]:
        (x, y), (moving, dividing) = operands, tangents
        result = divided(x, y)
        if not isinstance(dividing, SymbolicZero):
            change = -(result * dividing)
            fixed = isinstance(moving, SymbolicZero)
            return result, (change if fixed else moving + change) / y
        if isinstance(moving, SymbolicZero):
            return result, jnp.zeros_like(result)
        return result, moving / y

    divided.defjvp(derivative, symbolic_zeros=True)
    return [divided(*operands)]


_QUOTIENT = Rewrite(_bind, derivative_only=True)
