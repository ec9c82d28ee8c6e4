"""The derivative of a planned `custom_jvp` function: its rule, planned as well."""

from __future__ import annotations

from collections.abc import Sequence

from jmp_amp.plan.plan import EquationPlan, Plan, plan_as_traced
from jmp_amp.plan.planner import plan_derivative_rule
from jmp_amp.plan.program.jaxprs import Eqn
from jmp_amp.policies.dtypes import is_half
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.transform import linen_modules, scopes
from jmp_amp.transform.custom_jvp_rules import (
    trace_derivative_rule,
    trace_rule_for_half,
)


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
