"""What the derivative of an equation needs, and which equations can be made again."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from jmp_amp.plan.plan import EquationPlan
from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.jaxprs import Eqn, aval_of
from jmp_amp.plan.tables.operations import (
    OPERATIONS,
    Cost,
    Kind,
    Role,
    Saves,
    is_made_again,
)
from jmp_amp.policies.dtypes import F32

# What the plan keeps has this name. No policy of a user asks for it.
KEPT = "jmp_amp.kept"
# Functions of JAX whose rule, see `custom_jvp_rules`, needs the result alone and names
# it `KEPT`.
OF_RESULT = frozenset(("relu",))


class Part(enum.Enum):
    """How an equation takes part in what is kept."""

    OPERATION = "an operation"
    HELPER = "a call that is written out"
    RULE = "a call with a derivative of its own, of operations alone"
    # `jax.checkpoint` keeps no complex number: it calls `reduce_precision` on it.
    END = "entered by itself, an effect, or complex: nothing is made again across it"


def part_of(eqn: Eqn) -> Part:
    """Returns how an equation takes part in what is kept."""
    if jaxprs.has_effect(eqn) or jaxprs.is_complex(eqn):
        return Part.END
    inner = jaxprs.inner_bodies(eqn)
    if not inner:
        # A loop, a kernel or a rule that runs as it was traced; not a sum's body.
        is_call = jaxprs.owned_bodies(eqn) and eqn.primitive.name not in OPERATIONS
        return Part.END if is_call else Part.OPERATION
    if source_code.is_helper(eqn):
        part = Part.HELPER
    elif jaxprs.is_custom_jvp(eqn):
        part = Part.RULE
    else:
        return Part.END
    ends = any(part_of(each) is Part.END for each in inner[0].body.jaxpr.eqns)
    return Part.END if ends else part


def is_cheap(eqn: Eqn) -> bool:
    """Whether the backward pass may make all that an equation does again."""
    inner = jaxprs.inner_bodies(eqn)
    if not inner:
        return is_made_again(eqn.primitive.name)
    return all(map(is_cheap, inner[0].body.jaxpr.eqns))


def is_of_result(eqn: Eqn) -> bool:
    """Whether the derivative of a call is made of its result, see `OF_RESULT`."""
    return (
        source_code.function_name(eqn) in OF_RESULT
        and source_code.is_of_library(eqn)
        and all(aval_of(v).dtype == F32 for v in (*eqn.invars, *eqn.outvars))
    )


class Needs(NamedTuple):
    """What the derivative of an equation needs.

    Attributes:
      operands: the positions of its operands.
      results: whether it needs the results.
      derives: whether it keeps a function of these, such as the cosine of an angle.
    """

    operands: Sequence[int] = ()
    results: bool = False
    derives: bool = False


def needs_of(eqn: Eqn, planned: EquationPlan, active: Sequence[bool]) -> Needs:
    """Returns what the derivative of an operation needs.

    Args:
      eqn: the operation.
      planned: its plan.
      active: for each operand, whether a derivative may be taken with respect to it.
    """
    floats = [i for i, v in enumerate(eqn.invars) if jaxprs.is_floating(v)]
    others = [i for i in range(len(eqn.invars)) if i not in floats]
    if planned.rewrite is not None and planned.rewrite.fp8 is not None:
        return Needs()  # It keeps its operands in 8 bits.
    operation = OPERATIONS.get(eqn.primitive.name)
    if operation is None:
        return Needs([*others, *floats], True)
    row = operation.row
    if row.saves is Saves.NOTHING:
        # The derivative of a rewritten lookup compares indices.
        is_rewritten = planned.rewrite is not None and row.role is Role.LOOKS_UP
        return Needs(others, derives=is_rewritten)
    derives = row.cost is Cost.CHEAP
    if row.saves is Saves.RESULT:
        return Needs(others, True, derives)
    if operation.kind is Kind.PRODUCT or row.role is Role.MULTIPLIES:
        needed = [j for j in floats if any(active[i] for i in floats if i != j)]
        return Needs([*others, *needed])
    if row.role is Role.DIVIDES and not active[1]:
        return Needs([*others, 1])
    return Needs([*others, *floats], False, derives)
