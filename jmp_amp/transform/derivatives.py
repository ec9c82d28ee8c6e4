"""The derivative of a planned `custom_jvp` function: its rule, planned as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jmp_amp.plan.plan import EquationPlan, Plan, plan_as_traced
from jmp_amp.plan.planner import plan_derivative_rule
from jmp_amp.plan.program.jaxprs import Eqn, Value, aval_of, is_floating
from jmp_amp.policies.dtypes import is_half
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.transform import linen_modules, scopes
from jmp_amp.transform.custom_jvp_rules import (
    trace_derivative_rule,
    trace_rule_for_half,
)


def with_planned_rule(
    primal: Callable[..., list[Value]],
    eqn: Eqn,
    planned: EquationPlan,
    run_rule: Callable[[Plan, Sequence[Value], Sequence[int]], Sequence[Value]],
) -> Callable[..., list[Value]]:
    """Returns a function that has the derivative of a `custom_jvp` equation, planned.

    Args:
      primal: a function of the operands of the equation, and of others after them,
        which are not differentiated.
      eqn: the equation.
      planned: its plan.
      run_rule: (the planned rule, all operands and the tangents that are not zero, the
        operands that these are of) -> results, and tangents of the inexact ones.
    """
    inexact = [jnp.issubdtype(aval_of(v).dtype, jnp.inexact) for v in eqn.outvars]
    rewritten = jax.custom_jvp(primal)

    def derivative(
        operands: Sequence[Value], tangents: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        # The user's rule may ask which of the tangents are zero.
        moving = [
            i
            for i, (v, t) in enumerate(zip(eqn.invars, tangents, strict=False))
            if is_floating(v) and not isinstance(t, SymbolicZero)
        ]
        rule = planned_rule(eqn, planned, moving)
        both = run_rule(rule, [*operands, *(tangents[i] for i in moving)], moving)
        results, found = [*both[: len(inexact)]], iter(both[len(inexact) :])
        return results, [
            next(found) if is_float else np.zeros(aval_of(v).shape, jax.dtypes.float0)
            for is_float, v in zip(inexact, eqn.outvars, strict=True)
        ]

    rewritten.defjvp(derivative, symbolic_zeros=True)
    return rewritten


def planned_rule(
    eqn: Eqn, planned: EquationPlan, differentiated: Sequence[int]
) -> Plan:
    """Traces and plans the derivative rule of a `custom_jvp` equation.

    JAX asks for the rule when it differentiates, maybe long after it traced the
    function around the rule, and only then knows which tangents are zero.
    """
    if planned.rule_context is None:
        return plan_as_traced(trace_derivative_rule(eqn, differentiated))
    region = planned.rule_context.region
    active = scopes.Active(region.asked, PolicyMap(region.asked), cpu=region.cpu)
    runs_half = is_half(region.policy.compute_dtype)
    trace = trace_rule_for_half if runs_half else trace_derivative_rule
    with scopes.activate(active), linen_modules.intercepted():
        traced = trace(eqn, differentiated)
    return plan_derivative_rule(traced, eqn, planned, differentiated)
