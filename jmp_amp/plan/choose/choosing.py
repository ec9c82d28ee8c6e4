"""The decision for one equation, as far as its operands tell.

This is the forward half of the plan. Consumers may still change a decision, see
`records`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jmp_amp.plan.choose.half_rules import (
    adds_bias,
    half_rule_of,
    moves,
    rounds_once,
)
from jmp_amp.plan.choose.modes import Mode
from jmp_amp.plan.choose.pins import (
    is_solution,
    is_weight,
    pin_of,
    sums_argument,
)
from jmp_amp.plan.choose.records import Decision, decided
from jmp_amp.plan.choose.trade_offs import (
    follows_saved,
    is_between,
    is_saved_in_f32,
    joins_stream,
    may_fall,
    misfit_of,
    moves_stream,
    options,
)
from jmp_amp.plan.dataflow import constants
from jmp_amp.plan.dataflow.facts import Made
from jmp_amp.plan.dataflow.standing import Criterion, Standing
from jmp_amp.plan.dataflow.storage import Store
from jmp_amp.plan.dataflow.values import (
    Known,
    Origin,
    Trait,
    castable,
    is_exact,
    is_move,
    unfit,
    unfit_bound,
)
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.dimensions import is_elementwise_product, sums
from jmp_amp.plan.program.jaxprs import Eqn, aval_of, is_floating
from jmp_amp.plan.rewrites.cpu import why_f32
from jmp_amp.plan.rewrites.fp8 import why_not
from jmp_amp.plan.rewrites.rewrite_table import rewrite_of
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import (
    Kind,
    OpClass,
    Role,
    kind_of,
    role_of,
)
from jmp_amp.plan.tables.rules import ELEMENTWISE_PRODUCT, Rule
from jmp_amp.policies.dtypes import BF16, F32, F64, is_castable, is_half


def decide(at: Standing) -> Decision:
    """Returns the decision for an equation that calls nothing.

    The decision depends only on what `Decided` compares.
    """
    if _multiplies(at):
        at.rule = ELEMENTWISE_PRODUCT
    if at.rule.op_class is OpClass.FOLLOW and role_of(at.name) is Role.HANDS_ON:
        return decided(at, Mode.PASSED_ON, None, "hands on what it gets", Origin.FREE)
    at.pin = pin_of(at)
    rewrite = None if at.pin and at.rule.op_class is OpClass.LOW else rewrite_of(at)
    made = _by_class(at, rewrite)
    if made.result.origin == Origin.FREE:
        rewrite = None
    return _completed(at, made, rewrite)


def _completed(at: Standing, made: Decision, rewrite: Rewrite | None) -> Decision:
    """Returns a decision with what is known of its results, and its options."""
    falls = may_fall(at, made)
    follows = follows_saved(at, made)
    saved = (follows and not falls) or is_saved_in_f32(at, made, rewrite)
    inherits = saved or (falls and (follows or not moves(at)))
    traits = frozenset(_traits(at, made, inherits))
    result = Known(made.result.origin, _limits(at, made), at.region, traits)
    return dataclasses.replace(
        made,
        result=result,
        options=tuple(options(at, made, result, saved, falls)),
        rewrite=rewrite,
        standing=at,
    )


def _multiplies(at: Standing) -> bool:
    """Whether a matrix product is a multiplication that is spelled as one.

    `einsum("i,j->ij", a, b)`; and `positions[:, None] @ frequencies[None]`, the angles
    of an embedding, of numbers that are no activations and no weights. A layer of one
    feature multiplies two arguments, and a derivative begins with one number.
    """
    if at.rule.op_class is not OpClass.LOW or at.rule.from_user:
        return False
    if not is_elementwise_product(at.eqn):
        return False
    if any(v.bounds is not None and v.bounds[0] == v.bounds[1] for v in at.views):
        return False
    return not sums(at.eqn) or (
        all(v.origin == Origin.FREE for v in at.views)
        and any(
            v.is_constant or not is_weight(v, atom)
            for v, atom in zip(at.views, at.eqn.invars, strict=True)
        )
    )


def _by_class(at: Standing, rewrite: Rewrite | None) -> Decision:
    """Returns the decision that the class of the operation makes."""
    if jaxprs.is_conversion(at.eqn) and not is_move(at.eqn):
        return _convert(at)
    if at.rule.op_class is OpClass.KEEP or not _may_cast(at.eqn, at.rule):
        return _keep(at)
    if at.rule.op_class is OpClass.LOW:
        return _low(at, rewrite) if at.pin is None else _pinned(at, at.pin)
    if at.rule.op_class is OpClass.FULL:
        made = Origin.FREE if at.origin == Origin.FREE else Origin.FULL
        mode = Mode.CONVERSION if jaxprs.is_conversion(at.eqn) else Mode.IN_DTYPE
        return decided(at, mode, F32, None, made)
    return _follow(at, rewrite)


def _keep(at: Standing) -> Decision:
    origin = at.origin
    if origin != Origin.FREE:
        traced = [aval_of(v).dtype for v in at.eqn.outvars if castable(v)]
        half = bool(traced) and all(is_half(d) for d in traced)
        origin = Origin.LOW if half else Origin.FULL
    rule = at.rule
    if rule.op_class is not OpClass.KEEP:
        reason = "nothing here may be cast"
        if jaxprs.is_fixed(at.eqn) and any(map(castable, at.eqn.invars)):
            reason = "bound to the dtypes that it was traced in"
        elif any(aval_of(v).dtype == F64 for v in at.eqn.invars):
            reason = "float64 is left as it is: give it float32 arrays"
        rule = Rule(OpClass.KEEP, reason, rule.decided_by)
    known = Known(origin, None, at.region)
    return Decision(rule, Mode.AS_TRACED, None, None, known)


def _low(at: Standing, rewrite: Rewrite | None) -> Decision:
    low = at.low
    if rewrite is not None and rewrite.reason:
        origin = Origin.FULL if rewrite.result == F32 else Origin.LOW
        dtype = rewrite.dtype or low
        return decided(at, Mode.IN_DTYPE, dtype, rewrite.reason, origin)
    if jaxprs.sums_half_in_f32(at.eqn):
        return decided(at, Mode.AS_TRACED, None, "as traced", Origin.FULL)
    misfit = unfit(at.operands, low, "overflows")
    if misfit is not None:
        return decided(at, Mode.IN_DTYPE, F32, misfit, Origin.FULL)
    if not is_half(low):
        reason = why_f32(at) or _by_policy(at)
        return decided(at, Mode.IN_DTYPE, low, reason, Origin.FULL)
    saturate = any(Trait.OVERSIZED in v.traits for v in at.operands)
    return decided(at, Mode.IN_DTYPE, low, why_not(at), Origin.LOW, saturate)


def _by_policy(at: Standing) -> str:
    """Returns why an operation is f32 whose policy is, in words."""
    if at.region.asked in at.region.norms:
        return "a norm computes in f32, whatever the policy around it"
    return "the policy computes in f32"


def _pinned(at: Standing, pin: Criterion) -> Decision:
    # For a CPU the policy of the region has no half dtype, but that of the user may.
    half = at.low if is_half(at.low) else at.region.asked.compute_dtype
    words = pin.words.format(half=half.name)
    made = decided(at, Mode.IN_DTYPE, F32, words, Origin.FULL)
    return dataclasses.replace(made, pin=pin)


def _follow(at: Standing, rewrite: Rewrite | None) -> Decision:
    origin, low = at.origin, at.low
    if origin == Origin.FREE:
        reason = "only parameters, inputs and constants"
        return decided(at, Mode.AS_TRACED, None, reason, origin)
    misfit = misfit_of(at, low)
    if kind_of(at.name) is Kind.COMPARISON:
        if origin == Origin.LOW and misfit is not None:
            return decided(at, Mode.IN_DTYPE, F32, misfit, origin)
        reason = "a comparison reads values as they are"
        return decided(at, Mode.AS_HELD, None, reason, origin)
    if origin == Origin.FULL and at.region.cpu is not None:
        return _in_f32(at)
    if misfit is not None:
        # Beside half readers alone it saturates, see `trade_offs.options`.
        saturate = (
            role_of(at.name) is Role.CHOOSES
            and unfit_bound(at.operands, low) is None
            and unfit(at.operands, low, "vanishes") is None
        )
        return decided(at, Mode.IN_DTYPE, F32, misfit, Origin.FULL, saturate)
    if origin == Origin.FULL:
        carried = any(Trait.CARRIED in v.traits for v in at.operands)
        reason = "kept over the turns of a loop" if carried else "an operand is f32"
        return decided(at, Mode.IN_DTYPE, F32, reason, Origin.FULL)
    if not is_half(low):
        return _in_f32(at)
    if at.pin is not None:
        return _pinned(at, at.pin)
    if not is_half(at.half):
        reason = "the program is in half precision here"
        return decided(at, Mode.IN_DTYPE, low, reason, Origin.LOW)
    if at.store is Store.CHANGE and not adds_bias(at):
        reason = "a change: what two sums have in common cancels"
        return decided(at, Mode.IN_DTYPE, F32, reason, Origin.FULL)
    rule = half_rule_of(at)
    if rule is None:
        made = decided(at, Mode.IN_DTYPE, F32, "f32 between products", Origin.FULL)
        return dataclasses.replace(made, is_between=True, may_round=rounds_once(at))
    reason = rule.words
    if role_of(at.name) is Role.LOOKS_UP and rewrite is None:
        reason += f"; its gradient is summed in {low.name}"
    return decided(at, Mode.IN_DTYPE, low, reason, Origin.LOW)


def _in_f32(at: Standing) -> Decision:
    """Returns the decision for an operation where all but products are f32."""
    if at.region.cpu is None or at.region.asked.compute_dtype == F32:
        return decided(at, Mode.IN_DTYPE, F32, _by_policy(at), Origin.FULL)
    reason = "on a CPU all but products is f32"
    # For the products that read it, see `rewrites.cpu`.
    oversized = (
        role_of(at.name) is Role.CHOOSES
        and unfit(at.operands, BF16, "overflows") is not None
    )
    return decided(at, Mode.IN_DTYPE, F32, reason, Origin.FULL, oversized)


def _convert(at: Standing) -> Decision:
    (source,), target = at.eqn.invars, at.eqn.params["new_dtype"]
    made = at.origin
    if made != Origin.FREE:
        made = Origin.LOW if is_half(target) else Origin.FULL
    if not (castable(source) and is_castable(target)):
        return decided(at, Mode.AS_TRACED, None, "a conversion, as traced", made)
    if made == Origin.LOW and (
        at.rule.op_class is OpClass.FULL or at.facts[0].made & Made.REDUCED
    ):
        # jnp sums f16 in f32 and casts the sum back to f16, where it overflows.
        reason = "the cast back after an f32 reduction waits"
        return decided(at, Mode.CONVERSION, F32, reason, Origin.FULL)
    reason = "an explicit cast"
    if at.region.asked.compute_dtype == F32:
        # Where it is and as often as it is: gradients are summed in the same dtype.
        return decided(at, Mode.AS_TRACED, None, reason, made)
    return decided(at, Mode.CONVERSION, target, reason, made)


def _limits(at: Standing, made: Decision) -> constants.Bounds:
    """Returns the range of the results, if they are computed from constants."""
    if (
        made.result.origin != Origin.FREE
        or at.rule.op_class is OpClass.KEEP
        or kind_of(at.name) is Kind.COMPARISON
    ):
        return None
    return constants.bounds_of_result(at.eqn, [v.bounds for v in at.views])


def _traits(at: Standing, made: Decision, saved: bool) -> Iterator[Trait]:
    """Yields the traits of the results, which autodiff saves in f32 or not."""
    if (
        made.result.origin == Origin.FREE
        and is_move(at.eqn)
        and any(v.is_parameter for v in at.operands)
    ):
        yield Trait.PARAMETER
    inherited = frozenset().union(*(v.traits for v in at.operands))
    yield from inherited & {Trait.TANGENT}
    biased = adds_bias(at) or (is_exact(at.eqn) and Trait.BIASED in inherited)
    if biased and made.result.origin == Origin.LOW:
        yield Trait.BIASED
    if is_between(at, made):
        yield Trait.BETWEEN
    if at.pin is not None or at.store is Store.CHANGE:
        yield Trait.PINNED
    elif made.rule.op_class is not OpClass.LOW:
        yield from inherited & {Trait.PINNED}
    if _is_slice(at):
        yield Trait.SLICE
    if is_solution(at, made):
        yield Trait.SOLUTION
    follows = made.rule.op_class is OpClass.FOLLOW
    if made.result.origin == Origin.FREE:
        if role_of(at.name) is Role.LOOKS_UP:
            yield Trait.LOOKED_UP
        yield from inherited & {Trait.LOOKED_UP}
    elif follows and sums_argument(at):
        yield Trait.SUMS_ARGUMENT
    is_kept = is_exact(at.eqn) and Trait.OVERSIZED in inherited
    if follows and (made.saturate or is_kept):
        yield Trait.OVERSIZED
    if saved:
        yield Trait.SAVED_IN_F32
    if (saved or made.may_round) and joins_stream(at):
        yield Trait.JOINS_STREAM
    elif moves_stream(at) or (saved and Trait.JOINS_STREAM in inherited):
        yield Trait.JOINS_STREAM


def _is_slice(at: Standing) -> bool:
    """Whether a value is another one in each turn, and made of no state of the loop.

    A slice of what the loop goes through is one, `weights[i]` for a turn's number, and
    `weights[chosen]` if activations choose it.
    """
    differs = any(
        Trait.SLICE in v.traits or (v.origin != Origin.FREE and not is_floating(atom))
        for v, atom in zip(at.views, at.eqn.invars, strict=True)
    )
    return differs and all(
        v.origin == Origin.FREE or Trait.SLICE in v.traits for v in at.operands
    )


def _may_cast(eqn: Eqn, rule: Rule) -> bool:
    """Whether `eqn` has operands that may be cast and nothing that forbids it."""
    floats = [v for v in (*eqn.invars, *eqn.outvars) if is_floating(v)]
    if not any(castable(v) for v in eqn.invars):
        return False
    if rule.op_class is OpClass.FULL and all(aval_of(v).dtype == F32 for v in floats):
        return True
    return all(castable(v) for v in floats) and not jaxprs.is_fixed(eqn)
