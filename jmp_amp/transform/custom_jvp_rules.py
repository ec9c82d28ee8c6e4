"""The derivative rules of `custom_jvp` functions, as jaxprs.

A rule is that of the function. A few functions of JAX have another one here, which lets
a call in half precision save half-precision values.

JAX's rule of `logaddexp`, which is `softplus` and `log_sigmoid` too, reads the result:
`exp(x - logaddexp(x, y))`. It needs the result in f32: rounded to bf16, a result of 20
is off by .06, and the derivative by 6 %. So XLA keeps f32 activations for the backward
pass. `logistic(x - y)` is the same number, made of the operands alone.

JAX's rule of `relu` reads the argument: it is positive where the result is. The result
is what the next product reads and keeps, so there is nothing else to keep.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jmp_amp.plan.dataflow.dead_code import without_dead_code
from jmp_amp.plan.program import binding, source_code
from jmp_amp.plan.program.jaxprs import ClosedJaxpr, Eqn, Value, aval_of
from jmp_amp.plan.saved.needs import KEPT, is_of_result
from jmp_amp.policies.dtypes import F32


def trace_derivative_rule(eqn: Eqn, differentiated: Sequence[int]) -> ClosedJaxpr:
    """Returns the jaxpr of the user's rule of a `custom_jvp` equation, as traced.

    Its inputs are the operands of `eqn` and then the tangents of the operands at the
    positions `differentiated`; its outputs are the results and then the tangents of
    the floating results.
    """

    def rule(operands: Sequence[Value], tangents: Sequence[Value]) -> object:
        def call(*moving: Value) -> list[Value]:
            given = dict(zip(differentiated, moving, strict=True))
            return binding.bind(eqn, [given.get(i, x) for i, x in enumerate(operands)])

        moving = tuple(operands[i] for i in differentiated)
        results, result_tangents = jax.jvp(call, moving, tangents)
        return results, [t for t in result_tangents if t.dtype != jax.dtypes.float0]

    return _traced(eqn, differentiated, rule)


def trace_rule_for_half(eqn: Eqn, differentiated: Sequence[int]) -> ClosedJaxpr:
    """Returns the rule for a call in half precision, see `trace_derivative_rule`."""
    if is_of_result(eqn):
        return _traced(eqn, differentiated, functools.partial(_relu, eqn))
    factor = _FACTORS.get(source_code.function_name(eqn) or "")
    dtypes = {aval_of(v).dtype for v in (*eqn.invars, *eqn.outvars)}
    if factor is None or not source_code.is_of_library(eqn) or dtypes != {F32}:
        return trace_derivative_rule(eqn, differentiated)

    def rule(
        operands: Sequence[Value], tangents: Sequence[Value]
    ) -> tuple[Sequence[Value], Sequence[Value]]:
        terms = [
            factor(operands[i], operands[1 - i]) * tangent
            for i, tangent in zip(differentiated, tangents, strict=True)
        ]
        return binding.bind(eqn, operands), [functools.reduce(jnp.add, terms)]

    return _traced(eqn, differentiated, rule)


def _traced(
    eqn: Eqn, differentiated: Sequence[int], rule: Callable[..., object]
) -> ClosedJaxpr:
    """Returns the jaxpr of a rule: (operands, tangents) -> (results, tangents)."""
    avals = tuple(v.aval for v in eqn.invars)
    traced = jax.make_jaxpr(rule)(avals, tuple(avals[i] for i in differentiated))
    return without_dead_code(traced)


def _relu(
    eqn: Eqn, operands: Sequence[Value], tangents: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value]]:
    """The rule of `relu`, made of the result alone."""
    (result,), (tangent,) = binding.bind(eqn, operands), tangents
    result = checkpoint_name(result, KEPT)
    return [result], [jnp.where(result > 0, tangent, jnp.zeros_like(tangent))]


def _of_logaddexp(own: jax.Array, other: jax.Array) -> jax.Array:
    return jax.lax.logistic(own - other)


def _of_logaddexp2(own: jax.Array, other: jax.Array) -> jax.Array:
    return jax.lax.logistic((own - other) * F32.type(math.log(2)))


# For functions of two operands, what the tangent of one is multiplied by.
_FACTORS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "logaddexp": _of_logaddexp,
    "logaddexp2": _of_logaddexp2,
}
