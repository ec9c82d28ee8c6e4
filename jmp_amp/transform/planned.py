"""A call of a function, traced and planned; nothing is executed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from jmp_amp.plan.plan import Plan
from jmp_amp.plan.planner import plan_program
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.transform.calls import TracedCall, traced_call
from jmp_amp.transform.scopes import norm_policy
from jmp_amp.transform.unused_names import warn_of_unused_names


class PlannedCall(NamedTuple):
    """A call of a function, traced and planned.

    Attributes:
      plan: its plan.
      traced: the call as it was traced.
      policies: the map that it was planned with.
      cpu: the CPU that the plan is for; None for a GPU or a TPU.
    """

    plan: Plan
    traced: TracedCall
    policies: PolicyMap
    cpu: Cpu | None = None


@contextmanager
def planned_call(
    fn: AnyFn,
    policies: PolicyMap,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    call: str,
    cpu: Cpu | None = None,
    notes_modules: bool = False,
) -> Iterator[PlannedCall]:
    """Traces and plans `fn(*args, **kwargs)`, see `calls.traced_call`.

    `cpu` is the CPU that the plan is for; None for a GPU or a TPU.
    """
    with traced_call(fn, policies, args, kwargs, call, notes_modules, cpu) as traced:
        yield PlannedCall(plan_of(traced, policies, cpu), traced, policies, cpu)


def plan_of(traced: TracedCall, policies: PolicyMap, cpu: Cpu | None) -> Plan:
    """Returns the plan of a call; warns of names in the policies that do nothing."""
    plan = plan_program(
        traced.jaxpr,
        policies.default,
        traced.stored,
        traced.states,
        cpu,
        traced.entries,
        _norms(policies),
    )
    warn_of_unused_names(plan, policies)
    return plan


def _norms(policies: PolicyMap) -> frozenset[Policy]:
    """Returns the policies of norms that the map gives to no other module."""
    chosen = {policies.default, *(policy for _, policy in policies.entries)}
    return frozenset(map(norm_policy, chosen)) - chosen
