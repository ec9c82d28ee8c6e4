"""What may be f32 or half where both are right: what each costs in memory.

Autodiff saves values for the backward pass, in the dtype in which they are made. A
decision lists its options; `demands` takes one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jmp_amp.plan.choose.half_rules import adds_bias, is_pair, moves, repeats
from jmp_amp.plan.choose.modes import Demands, Mode, demand_of
from jmp_amp.plan.choose.pins import sums_argument
from jmp_amp.plan.choose.records import Decision, Option
from jmp_amp.plan.dataflow.facts import Made
from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.storage import Store
from jmp_amp.plan.dataflow.values import (
    Known,
    Origin,
    Trait,
    is_exact,
    is_move,
    unfit,
    unfit_bound,
)
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import is_larger
from jmp_amp.plan.program.jaxprs import aval_of, is_floating
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import (
    Also,
    Kind,
    OpClass,
    Role,
    is_cheap,
    kind_of,
    named,
    role_of,
)
from jmp_amp.policies.dtypes import F16, F32, is_half

_SATURATES = named(Also.SATURATES)


def misfit_of(at: Standing, dtype: np.dtype) -> str | None:
    """Returns why a constant that an operation reads has no place in `dtype`."""
    found = unfit(at.operands, dtype)
    if found is None and kind_of(at.name) in (Kind.COMPARISON, Kind.SELECTION):
        return unfit_bound(at.operands, dtype)
    return found


def is_saved_in_f32(at: Standing, made: Decision, rewrite: Rewrite | None) -> bool:
    """Whether an operation makes f32 values that are saved for the backward pass."""
    return (
        is_half(at.half)
        and made.result.origin == Origin.FULL
        and (rewrite is None or rewrite.result is None)
        and not at.rule.from_user
        and (at.rule.op_class is OpClass.FULL or made.mode is Mode.AS_TRACED)
        and not is_cheap(at.name)
        and all(aval_of(v).dtype == F32 for v in at.eqn.outvars if is_floating(v))
    )


def follows_saved(at: Standing, made: Decision) -> bool:
    """Whether the f32 operands of an operation are all saved in f32.

    A sum, a difference or a sine of such values needs their digits: `c[16:] - c[:-16]`
    of running sums. It computes in f32, and stores its result in half for half readers.
    """
    full = [v for v in at.operands if v.origin == Origin.FULL]
    are_saved = full and all(Trait.SAVED_IN_F32 in v.traits for v in full)
    return bool(are_saved) and _may_be_half(at, made)


def joins_stream(at: Standing) -> bool:
    """Whether something is added to a half value, which may be a stream."""
    adds = role_of(at.name) is Role.ADDS
    return adds and any(v.origin == Origin.LOW for v in at.operands)


def moves_stream(at: Standing) -> bool:
    """Whether f32 values that join a half stream are moved."""
    full = [v for v in at.operands if v.origin == Origin.FULL]
    joined = all(Trait.JOINS_STREAM in v.traits for v in full)
    return is_exact(at.eqn) and bool(full) and joined


def _may_be_half(at: Standing, made: Decision) -> bool:
    """Whether an operation computes in f32 for one reason: an operand is f32."""
    return (
        is_half(at.half)
        and at.pin is None
        and at.rule.op_class is OpClass.FOLLOW
        and not jaxprs.is_conversion(at.eqn)
        and made.dtype == F32
        and made.result.origin == Origin.FULL
        and misfit_of(at, at.half) is None
    )


def is_between(at: Standing, made: Decision) -> bool:
    """Whether an f32 result follows half values alone, through operations like it."""
    full = [v for v in at.operands if v.origin == Origin.FULL]
    follows = all(Trait.BETWEEN in v.traits for v in full)
    return follows and _may_be_half(at, made) and not sums_argument(at)


def may_fall(at: Standing, made: Decision) -> bool:
    """Whether an operation on f32 values may cast them to half before it.

    Values that are saved in f32 may be cast where they are moved, chosen or scaled,
    where a curve saturates, or where they join a half stream. So may the values that a
    parameter scales in the last step of a norm: else the gradient of that step is kept
    in f32. So may the sums that a half-precision value gates, such as the output of a
    state space model: the gradient of the gate needs them, and nobody adds them up
    again. In f16 a value must be in range: a sum that overflows may become a mean.
    """
    if not _may_be_half(at, made) or repeats(at):
        return False
    if moves(at):
        return not any(Trait.OVERSIZED in v.traits for v in at.operands)
    low, role = at.half, role_of(at.name)
    scales = role in (Role.MULTIPLIES, Role.DIVIDES)
    if follows_saved(at, made):
        if not (
            scales or joins_stream(at) or is_exact(at.eqn) or at.name in _SATURATES
        ):
            return False
        by_free = scales and any(v.origin == Origin.FREE for v in at.operands)
        return low != F16 or not by_free
    if role is Role.MULTIPLIES and low != F16 and _gates_a_sum(at):
        return True
    return (
        role is Role.MULTIPLIES
        and any(v.is_parameter for v in at.operands)
        and (low != F16 or any(each.made & Made.NORMALIZED for each in at.facts))
    )


def _gates_a_sum(at: Standing) -> bool:
    """Whether half-precision values gate sums: one for each, none is broadcast."""
    gated = {v.origin: f.made for v, f in zip(at.views, at.facts, strict=True)}
    is_pair = gated.keys() == {Origin.LOW, Origin.FULL}
    return is_pair and bool(gated[Origin.FULL] & Made.SUM_OR_TERM)


def _moves_as_much(at: Standing) -> bool:
    """Whether half values are moved or chosen, and not to more of them."""
    sizes = aval_of(at.eqn.outvars[0]).size, aval_of(at.eqn.invars[0]).size
    return moves(at) and not is_larger(*sizes, unless_known=False)


def options(
    at: Standing, made: Decision, result: Known, saved: bool, falls: bool
) -> Iterator[Option]:
    """Yields the options of a decision, the first to be taken first.

    Args:
      at: the equation.
      made: the decision.
      result: what is known of its results.
      saved: whether autodiff saves the results in f32.
      falls: whether f32 operands may be cast to half before it.
    """
    low = at.half
    follows = made.rule.op_class is OpClass.FOLLOW and made.mode is Mode.IN_DTYPE
    if follows and made.result.origin == Origin.LOW:
        yield Option(Demands.RETURNED, "returned in f32", F32, some=True)
        biased = adds_bias(at) and at.store is not Store.ACROSS
        if biased or _moves_as_much(at):
            # The gradient is then a sum of what nobody has rounded.
            yield Option(Demands.F32, "only f32 operations read it", F32)
    if not is_half(low):
        return
    half = demand_of(low)
    if made.saturate:
        yield Option(half, f"{made.reason}, so it saturates", low)
    if falls or (made.is_between and is_pair(at)):
        yield Option(half, "only half precision reads it", low)
    free = result.origin == Origin.FREE and bool(at.operands)
    # Held in half, it would hand on a sum of gradients in half.
    stays = free and at.region.asked.reduce_dtype is not None
    # A table is cast after the lookup: the gradients of a row that is looked up often
    # are summed in f32, and XLA casts where it looks up.
    looks_up = role_of(at.name) in (Role.LOOKS_UP, Role.TAKES)
    moves = free and not stays and is_move(at.eqn) and not looks_up
    if moves and made.mode is Mode.AS_TRACED:
        if unfit([*at.operands, result], low) is None:
            reason = "moves parameters that only half precision reads"
            yield Option(half, reason, low, once=True)
    computed = free and not is_move(at.eqn) and result.bounds is None
    computed = computed and all(aval_of(v).dtype == F32 for v in at.eqn.outvars)
    if computed and role_of(at.name) is Role.ADDS:
        # Made in f32 and stored in half, XLA would keep the f32 sum for an f32 reader,
        # such as a norm. What is looked up hands gradients on to its lookup alone.
        is_sum = not stays or any(Trait.LOOKED_UP in v.traits for v in at.operands)
        if is_sum and all(v.is_parameter for v in at.operands):
            reason = "adds up parameters that only half precision reads"
            yield Option(half, reason, low)
    if (computed and not stays) or saved:
        # Made of parameters and read twice, the sum of its gradients would be half.
        yield Option(half, made.reason, store=low, once=not saved)
