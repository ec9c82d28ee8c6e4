"""What is half although it is no product: what is stored, and what loses nothing.

Products read and write half. All else that follows activations is f32, in registers,
but for the rows of `HALF_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jmp_amp.plan.dataflow.made import is_broadcast, scales
from jmp_amp.plan.dataflow.standing import Criterion, Standing
from jmp_amp.plan.dataflow.storage import Store
from jmp_amp.plan.dataflow.values import Known, Origin, Trait, is_exact
from jmp_amp.plan.rewrites.f32_gradients import is_repeated
from jmp_amp.plan.tables.operations import Role, role_of
from jmp_amp.plan.tables.rules import EPILOGUE, ONE_OPERATION, Rule


def half_rule_of(at: Standing) -> Criterion | None:
    """Returns the first rule that holds for an operation on half values."""
    return next((rule for rule in HALF_RULES if rule.holds(at)), None)


def rounds_once(at: Standing) -> bool:
    """Whether f32 would be the same number, rounded; and so would its gradients.

    It is one sum or product of half values. A quotient of two has a gradient of more
    operations.
    """
    role = role_of(at.name)
    is_one = role in (Role.ADDS, Role.SUBTRACTS, Role.MULTIPLIES)
    is_one |= role is Role.DIVIDES and scales(at.eqn)
    halves = all(_is_half(v, at.low) for v in at.operands)
    return is_one and halves and not repeats(at)


def is_pair(at: Standing) -> bool:
    """Whether an operation between half readers may be half: the same number, rounded.

    Not a quotient, whose gradient divides by a square, nor a function of a product and
    its bias: the gradient of the bias is a sum of what nobody has rounded.
    """
    biased = any(Trait.BIASED in v.traits for v in at.operands)
    halves = all(_is_half(v, at.low) for v in at.operands)
    divides = role_of(at.name) is Role.DIVIDES
    is_function = halves and not (divides or biased or repeats(at))
    return rounds_once(at) or is_function


def _is_half(value: Known, half: np.dtype) -> bool:
    """Whether a value is half, a row of a table, or a number that half holds."""
    if value.origin == Origin.LOW or Trait.LOOKED_UP in value.traits:
        return True
    low, high = value.bounds or (0.0, 1.0)
    with np.errstate(over="ignore"):
        return value.is_constant and low == high == np.asarray(low).astype(half)


def adds_bias(at: Standing) -> bool:
    """Whether a broadcast parameter is added to half values."""
    return role_of(at.name) is Role.ADDS and any(
        v.is_parameter and is_broadcast(at.eqn, i, at.facts[i])
        for i, v in enumerate(at.views)
    )


def repeats(at: Standing) -> bool:
    """Whether activations are repeated: their gradient is a sum, which f32 keeps."""
    return any(
        value.origin != Origin.FREE and is_repeated(at.eqn, i)
        for i, value in enumerate(at.views)
    )


def moves(at: Standing) -> bool:
    """Whether values are moved or chosen, each of them once."""
    return is_exact(at.eqn) and not repeats(at)


def _moves_half(at: Standing) -> bool:
    return moves(at) and (
        all(
            v.origin == Origin.LOW or v.is_constant or v.is_parameter
            for v in at.operands
        )
    )


def _is_stored(at: Standing) -> bool:
    return at.store is Store.ACROSS and rounds_once(at)


def _has(rule: Rule) -> Callable[[Standing], bool]:
    return lambda at: at.rule == rule


# The first that holds wins.
HALF_RULES = (
    Criterion("epilogue", EPILOGUE.reason, _has(EPILOGUE)),
    Criterion("one_operation", ONE_OPERATION.reason, _has(ONE_OPERATION)),
    Criterion("half_moves", "moves or chooses half values", _moves_half),
    Criterion("bias", "a product and its bias are one operation", adds_bias),
    Criterion("across", "stored across a product", _is_stored),
)
