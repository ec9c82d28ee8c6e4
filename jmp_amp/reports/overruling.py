"""How a user overrules what was decided for an equation, in one line."""

from __future__ import annotations

import re

from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.jaxprs import Eqn
from jmp_amp.plan.tables.operations import Kind, kind_of
from jmp_amp.reports.rows import Equation

_NO_FLOAT = "There is nothing to overrule: no operand and no result may be cast."


def how_to_overrule(row: Equation, eqn: Eqn) -> str:
    """Returns how to overrule the dtype of an equation, or why nobody can."""
    is_call = not row.dtype and bool(jaxprs.inner_bodies(eqn))
    if not (row.is_floating or is_call):
        return _NO_FLOAT
    if row.is_opaque:
        return (
            "To overrule it: the plan does not look into it; amp.cast_inputs(fn) has "
            "a function of your own traced in half."
        )
    if row.asked_by:
        return (
            "To overrule it: the program asks for it; remove its dtype=, astype or "
            "half array."
        )
    if row.from_policy:
        return f"To overrule it: take {row.decided_by!r} out of the policy's lists."
    if row.op_class == "keep":
        return "To overrule it: change the program; the plan leaves it as traced."
    ways = _by_name(row, eqn, is_call)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)*", row.module):
        dtype = "mixed_bfloat16" if row.stays_full else "float32"
        ways.append(
            f'amp.PolicyMap(policy, {{"{row.module}": "{dtype}"}}) gives the module a '
            "policy, if it is one of Flax"
        )
    if not row.stays_full:
        ways.append("amp.full_precision marks a function that stays f32")
    return f"To overrule it: {'; '.join(ways)}."


def _by_name(row: Equation, eqn: Eqn, is_call: bool) -> list[str]:
    """Returns what a policy may do that names the operation or the function."""
    name = row.operation.replace("-", "_")
    if is_call:
        function = source_code.function_name(eqn)
        if function is None:
            return []
        low, full = (f'policy.with_{each}("{function}")' for each in ("low", "full"))
        return [f"{full} has all that it calls in f32, {low} in half"]
    if not row.stays_full:
        return [f'policy.with_full("{name}") has each {name} in f32']
    if kind_of(row.operation) is Kind.ALGEBRA:
        return [f"there is no {name} in half precision"]
    return [f'policy.with_low("{name}") has each {name} in half']
