"""What may be f32 or half where both are right: what each costs in memory.

Autodiff saves values for the backward pass, in the dtype in which they are made. A
decision lists its options; `demands` takes one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jmp_amp.plan.choose.modes import Demands, Mode, demand_of
from jmp_amp.plan.choose.pins import is_pinned
from jmp_amp.plan.choose.records import Decision, Option
from jmp_amp.plan.dataflow.ends import Ends
from jmp_amp.plan.dataflow.facts import Made
from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.values import (
    Known,
    Origin,
    Trait,
    is_exact,
    is_inexact,
    is_move,
    unfit,
    unfit_bound,
)
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import is_larger
from jmp_amp.plan.program.jaxprs import Eqn, aval_of
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


def is_worth_f32(at: Standing, made: Decision) -> bool:
    """Whether an operation that follows half operands may compute in f32 instead."""
    if (
        at.rule.op_class is not OpClass.FOLLOW
        or made.mode is not Mode.IN_DTYPE
        or made.result.origin != Origin.LOW
    ):
        return False
    moving = at.activations
    shared = any(v.is_shared for v in moving)
    looks_up = role_of(at.name) is Role.LOOKS_UP and not at.end & Ends.COORDINATE
    if looks_up and grows(at.eqn):
        # The nodes of a graph that its edges look up are written once for each edge.
        return False
    if at.name == "add" and all(
        v.origin != Origin.FREE or Trait.LOOKED_UP in v.traits for v in at.operands
    ):
        # The derivative of an f32 reader saves the sum of a stream, or both terms. A
        # parameter is there anyway, and what is worth f32 is made again. A sum that
        # autodiff makes, of gradients, is seldom differentiated.
        return all(Trait.WORTH_F32 in v.traits for v in at.operands)
    if is_exact(at.eqn) and made.dtype != F32 and not at.end & Ends.COORDINATE:
        # An exact operation may be cast after as well as before, unless the maker of
        # its operand is worth f32, or another consumer needs the cast.
        return shared or any(Trait.WORTH_F32 in v.traits for v in moving)
    return True


def grows(eqn: Eqn) -> bool:
    """Whether the results are larger than the first operand; unless known, no: f32."""
    results = sum(aval_of(v).size for v in eqn.outvars)
    return is_larger(results, aval_of(eqn.invars[0]).size, unless_known=False)


def is_saved_in_f32(at: Standing, made: Decision, rewrite: Rewrite | None) -> bool:
    """Whether an operation makes f32 values that are saved for the backward pass."""
    return (
        is_half(at.half)
        and made.result.origin == Origin.FULL
        and (rewrite is None or rewrite.result is None)
        and not at.rule.from_user
        and (at.rule.op_class is OpClass.FULL or made.mode is Mode.AS_TRACED)
        and not is_cheap(at.name)
        and all(aval_of(v).dtype == F32 for v in at.eqn.outvars if is_inexact(v))
    )


def follows_saved(at: Standing, made: Decision) -> bool:
    """Whether the f32 operands of an operation are all saved in f32.

    A sum, a difference or a sine of such values needs their digits: `c[16:] - c[:-16]`
    of running sums. It computes in f32, and stores its result in half for half readers.
    """
    full = [v for v in at.operands if v.origin == Origin.FULL]
    return _may_be_half(at, made) and all(Trait.SAVED_IN_F32 in v.traits for v in full)


def joins_stream(at: Standing) -> bool:
    """Whether something is added to a half value, which may be a stream."""
    adds = role_of(at.name) is Role.ADDS
    return adds and any(v.origin == Origin.LOW for v in at.operands)


def _may_be_half(at: Standing, made: Decision) -> bool:
    """Whether an operation computes in f32 for one reason: an operand is f32."""
    return (
        is_half(at.half)
        and not is_pinned(at)
        and at.rule.op_class is OpClass.FOLLOW
        and not jaxprs.is_conversion(at.eqn)
        and made.dtype == F32
        and made.result.origin == Origin.FULL
        and misfit_of(at, at.half) is None
    )


def may_fall(at: Standing, made: Decision) -> bool:
    """Whether an operation on f32 values may cast them to half before it.

    Values that are saved in f32 may be cast where they are moved, chosen or scaled,
    where a curve saturates, or where they join a half stream. So may the values that a
    parameter scales in the last step of a norm: else the gradient of that step is kept
    in f32. So may the sums that a half-precision value gates, such as the output of a
    state space model: the gradient of the gate needs them, and nobody adds them up
    again. In f16 a value must be in range: a sum that overflows may become a mean.
    """
    if not _may_be_half(at, made):
        return False
    low, role = at.half, role_of(at.name)
    scales = role in (Role.MULTIPLIES, Role.DIVIDES)
    if follows_saved(at, made):
        if not (
            scales or joins_stream(at) or is_exact(at.eqn) or at.name in _SATURATES
        ):
            return False
        return low != F16 or not (scales and len(at.activations) < len(at.operands))
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


# Options of whatever follows half operands.
_RISES = (
    Option(Demands.RETURNED, "returned in f32", F32, some=True),
    Option(Demands.CARRIED, "kept over the turns of a loop", F32, some=True),
    Option(Demands.AS_IS, "only comparisons and prints read it", F32),
)


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
        yield from _RISES
    if Trait.WORTH_F32 in result.traits and made.dtype != F32:
        yield Option(Demands.F32, "only f32 operations read it", F32)
        yield Option(Demands.F32, "an f32 operation reads it", F32, some=True)
    if not is_half(low):
        return
    half = demand_of(low)
    if made.saturate:
        yield Option(half, f"{made.reason}, so it saturates", low)
    if falls:
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
