"""A product of half operands with an f32 result, whose derivative is half too.

JAX differentiates a dot of half operands with an f32 result to dots of f32 and half
operands, which are f32 gemms, and refuses the convolution. A `custom_vjp` would lose
forward mode and derivatives of derivatives: this is a `custom_jvp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.plan.program.jaxprs import Eqn, Value
from jmp_amp.plan.rewrites.f32_gradients import product_in_f32
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.policies.dtypes import F32, is_half


def f32_result(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a product of half operands with an f32 result.

    So the program asks, or the product makes the gradient of a parameter: the
    derivative is inside of autocast then. What autocast is inside of is derived
    otherwise, see `f32_gradients`.
    """
    if at.rule.op_class is not OpClass.LOW or jaxprs.is_fixed(at.eqn):
        return None
    if is_half(at.half) and jaxprs.sums_half_in_f32(at.eqn):
        return _F32_RESULT
    of = at.derived_from
    applies = of is not None and of.of_parameter and is_half(at.low)
    return _F32_GRADIENT if applies else None


def _bind(
    product: Callable[[Eqn, Sequence[Value]], Sequence[jax.Array]],
    eqn: Eqn,
    dtype: np.dtype | None,
    operands: Sequence[Value],
) -> Sequence[jax.Array]:
    @jax.custom_jvp
    def multiplied(*operands: jax.Array) -> jax.Array:
        (result,) = product(eqn, operands)
        return result

    @multiplied.defjvp
    def derivative(
        operands: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        def in_half(*operands: jax.Array) -> jax.Array:
            assert dtype is not None
            (result,) = binding.bind(eqn, operands, **jaxprs.retyped(eqn, dtype))
            return result

        _, tangent = jax.jvp(in_half, operands, tangents)
        return multiplied(*operands), tangent.astype(F32)

    return [multiplied(*operands)]


_F32_RESULT = Rewrite(
    functools.partial(_bind, binding.bind),
    reason="half operands, f32 result",
    result=F32,
    derivative_only=True,
)
_F32_GRADIENT = Rewrite(
    functools.partial(_bind, product_in_f32),
    reason="half operands: the gradient of a parameter is f32",
    result=F32,
)
