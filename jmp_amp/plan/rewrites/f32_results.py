"""A product of half operands with an f32 result, whose derivative is half too.

JAX differentiates a dot of half operands with an f32 result to dots of f32 and half
operands, which are f32 gemms, and refuses the convolution. A `custom_vjp` would lose
forward mode and derivatives of derivatives: this is a `custom_jvp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.plan.program.jaxprs import Eqn, Value
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.policies.dtypes import F32, is_half


def f32_result(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a product of half operands with an f32 result."""
    applies = (
        at.rule.op_class is OpClass.LOW
        and is_half(at.half)
        and jaxprs.sums_half_in_f32(at.eqn)
        and not jaxprs.is_fixed(at.eqn)
    )
    return _F32_RESULT if applies else None


def _bind(
    eqn: Eqn, dtype: np.dtype | None, operands: Sequence[Value]
) -> Sequence[jax.Array]:
    @jax.custom_jvp
    def product(*operands: jax.Array) -> jax.Array:
        (result,) = binding.bind(eqn, operands)
        return result

    @product.defjvp
    def derivative(
        operands: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        def in_half(*operands: jax.Array) -> jax.Array:
            assert dtype is not None
            (result,) = binding.bind(eqn, operands, **jaxprs.retyped(eqn, dtype))
            return result

        _, tangent = jax.jvp(in_half, operands, tangents)
        return product(*operands), tangent.astype(F32)

    return [product(*operands)]


_F32_RESULT = Rewrite(
    _bind,
    reason="half operands, f32 result",
    result=F32,
    derivative_only=True,
)
