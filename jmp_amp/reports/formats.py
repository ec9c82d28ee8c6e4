"""Reasons in the words of the half format that a policy asks for.

The tables give each reason once, for both formats. Where f16 has no range, bf16 has no
digits: a report of a plan in bf16 says that. And it tells a norm, which is f32 under
every policy, from a module whose policy says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from jmp_amp.plan.plan import Identity, Plan
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.regions import Region, outermost, region_of
from jmp_amp.policies.dtypes import BF16
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports.rows import Equation
from jmp_amp.transform.scopes import norm_policy

IN_BF16 = {
    "grows or shrinks faster than its argument: f16 has no range for it": (
        "grows or shrinks faster than its argument: bf16 has no digits for it"
    ),
    "its derivative squares its argument: above 255.9 the square overflows f16": (
        "its derivative squares its argument and divides: bf16 has no digits for it"
    ),
    "a sum or product of many terms loses digits, and overflows above 65504 in f16": (
        "a sum or product of many terms loses digits, and bf16 has three"
    ),
    "squares and sums: above 255.9 the square overflows f16": (
        "squares and sums lose digits, and bf16 has three"
    ),
    "a loss is where f16 gradients begin: in f32 it cannot overflow": (
        "a loss is a sum of small differences: bf16 has three digits for it"
    ),
}
_BY_POLICY = "the policy computes in f32"
_NORM = "a norm computes in f32, whatever the policy around it"


def in_words_of(
    rows: Iterable[Equation], plan: Plan, policies: PolicyMap
) -> tuple[Equation, ...]:
    """Returns the rows of a plan with reasons that know the format and norms."""
    chosen = {policies.default, *(policy for _, policy in policies.entries)}
    norms = {norm_policy(each) for each in chosen} - chosen
    where = dict(_regions(plan, outermost(policies.default, None, plan.entries)))
    return tuple(_reworded(row, where.get(row.identity), norms) for row in rows)


def _reworded(row: Equation, region: Region | None, norms: set[Policy]) -> Equation:
    reason = row.reason
    if region is None:
        return row
    if reason == _BY_POLICY and region.asked in norms:
        reason = _NORM
    # A norm hands on the half dtype of the policy around it.
    asked = region.asked
    if BF16 in (asked.compute_dtype, asked.output_dtype):
        reason = IN_BF16.get(reason, reason)
    return row if reason is row.reason else dataclasses.replace(row, reason=reason)


def _regions(
    plan: Plan, outer: Region, above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Region]]:
    """Yields the identity of each equation of a plan, and its region."""
    for eqn, planned in zip(plan.body.jaxpr.eqns, plan.equations, strict=True):
        here = region_of(jaxprs.scope_text(eqn), outer)
        identity = (*above, planned.index)
        yield str(Identity(identity)), here
        for number, body in enumerate(planned.bodies):
            yield from _regions(body, here, (*identity, number))


def forms_of(reason: str) -> tuple[str, ...]:
    """Returns what a report may say in place of a reason of the plan."""
    found = [IN_BF16.get(reason), _NORM if reason == _BY_POLICY else None]
    return tuple(each for each in found if each)
