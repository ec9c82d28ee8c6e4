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
    """Returns the rewrite of a product of half operands with an f32 result."""
    applies = _is_low(at) and is_half(at.half) and jaxprs.sums_half_in_f32(at.eqn)
    return _F32_RESULT if applies else None


def f32_gradient(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a product that makes the gradient of a parameter.

    A program has such a product if its derivative is inside of autocast. What autocast
    is inside of is derived otherwise, see `f32_gradients`.
    """
    of = at.derived_from
    applies = of is not None and of.of_parameter and is_half(at.low) and _is_low(at)
    return _F32_GRADIENT if applies else None


def _is_low(at: Standing) -> bool:
    return at.rule.op_class is OpClass.LOW and not jaxprs.is_fixed(at.eqn)


def _rewrite(
    product: Callable[[Eqn, Sequence[Value]], Sequence[jax.Array]],
    reason: str,
    derivative_only: bool,
) -> Rewrite:
    return Rewrite(
        functools.partial(_bind, product),
        reason=reason,
        result=F32,
        derivative_only=derivative_only,
    )


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


_F32_RESULT = _rewrite(binding.bind, "half operands, f32 result", True)
_F32_GRADIENT = _rewrite(
    product_in_f32, "half operands: the gradient of a parameter is f32", False
)
