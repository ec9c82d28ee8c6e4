"""What is known of a value that is one of two, or that a loop carries."""

from __future__ import annotations

import sys

from jmp_amp.plan.dataflow.constants import hull
from jmp_amp.plan.dataflow.values import (
    CONTAGIOUS,
    Known,
    Origin,
    Trait,
    castable,
    unfit,
)
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Eqn, aval_of
from jmp_amp.policies.dtypes import F32, is_half

# Of a constant that no dtype is sure to hold.
_ANY_SIZE = (-sys.float_info.max, sys.float_info.max)


def after_turn(
    eqn: Eqn, operand: int, start: Known, now: Known, update: Known, is_stream: bool
) -> Known:
    """Returns what is known of a carry of a loop after one more turn.

    What a `scan` keeps over turns keeps its digits: an argument, such as the state of
    an ODE or of an optimizer; the state of a recurrence (in half an LSTM's costs 1.3
    times the gradient error, a GRU's 2.1 times), or of a method that takes the same
    step in each turn; a sum that no product reads. A stream between layers, which
    products multiply by other weights in each turn and an embedding, a product or a
    norm began, is half. In a `while` a carry keeps its dtype.

    Args:
      eqn: the loop.
      operand: the operand that the carry starts from.
      start: what is known of it before the loop.
      now: what is known of it before this turn.
      update: what is known of it after this turn.
      is_stream: whether layers read it, in this turn or a later one.
    """
    atom, origin = eqn.invars[operand], max(now.origin, update.origin)
    if origin == Origin.FREE or not castable(atom):
        return _carry(start, now, update, origin)
    if jaxprs.is_while(eqn):
        origin = Origin.LOW if is_half(aval_of(atom).dtype) else Origin.FULL
        return _carry(start, now, update, origin)
    if not is_half(now.region.policy.compute_dtype):
        return _carry(start, now, update, origin)
    is_kept = start.is_constant or Trait.CARRIED in now.traits
    if aval_of(atom).dtype == F32:
        begins = start.follows_product or Trait.LOOKED_UP in start.traits
        is_kept = is_kept or not (begins and is_stream)
    if is_kept or Trait.PINNED in start.traits | now.traits | update.traits:
        kept = _carry(start, now, update, Origin.FULL)
        return kept.having(Trait.CARRIED, Trait.PINNED)
    return _carry(start, now, update, Origin.LOW)


def _carry(start: Known, now: Known, update: Known, origin: Origin) -> Known:
    limits = now.bounds and update.bounds and hull([now.bounds, update.bounds])
    if limits not in (None, now.bounds) and now.bounds != start.bounds:
        limits = _ANY_SIZE  # constants that grow from turn to turn
    joined = {Trait.OVERSIZED, Trait.TANGENT, Trait.SOLUTION, Trait.PINNED}
    either = (now.traits | update.traits) & joined
    begun = now.traits
    if start.is_constant and now == start:
        # Zeros that the first turn replaces are no state.
        begun |= {Trait.LOOKED_UP}
    both = begun & update.traits & {Trait.PARAMETER, Trait.LOOKED_UP}
    return Known(origin, limits, now.region, both | either)


def one_of(a: Known, b: Known) -> Known:
    """Returns what is known of a value that is `a` or `b`."""
    limits = a.bounds and b.bounds and hull([a.bounds, b.bounds])
    origin = max(a.origin, b.origin)
    low = a.region.policy.compute_dtype
    if origin == Origin.LOW and unfit((a, b), low) is not None:
        origin = Origin.FULL
    either = (a.traits | b.traits) & CONTAGIOUS
    return Known(origin, limits, a.region, a.traits & b.traits | either)
