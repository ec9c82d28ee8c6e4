"""What one equation should run in, as far as its operands tell.

This is the forward half of the plan: no look at the consumers, which may still change
the decision, in the ways that a `Decision` allows.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan import constants, jaxprs, rules
from jmp_amp.plan.constants import Bounds
from jmp_amp.plan.regions import Region
from jmp_amp.plan.rules import OpClass, Rule
from jmp_amp.policies.dtypes import F16, F32, is_castable, is_half
from jmp_amp.policies.policy import Policy

_SUMS = frozenset(("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp"))


class Origin(enum.IntEnum):
    """Where a value comes from; an equation's is the greatest of its operands'."""

    FREE = 0
    LOW = 1
    FULL = 2


@dataclasses.dataclass(frozen=True)
class Known:
    """What the forward pass knows of a value.

    Attributes:
      origin: where it comes from.
      bounds: its range, if it is computed from constants.
      as_parameter: it is an input, or an input moved around: cast at each use, so that
        the gradients of its uses are summed in its own dtype.
      region: the policy scope it was made in.
      gains: to cast it early, in the operation that made it, gains something: that
        operation rounds, or its operand is cast for others too.
      shared: it has more than one consumer.
      costly: an f32 value that is saved in f32 whatever reads it, as it is too costly
        to compute again, or made from one by operations that follow.
    """

    origin: Origin
    bounds: Bounds
    as_parameter: bool
    region: Region
    gains: bool = False
    shared: bool = False
    costly: bool = False


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the forward pass decides for one equation.

    Attributes:
      rule: the class of the operation, and the name that decided it.
      dtype: the dtype of the computation; None if it runs as traced, or reads its
        operands as they are.
      reason: why, in words.
      result: what is known of the results.
      as_traced: reads and writes the dtypes that it was traced with.
      may_rise: runs in f32 if all consumers do.
      may_fall: runs in half if all consumers do, though it reads f32.
      may_sink: moves parameters, so it runs in half if its one consumer does.
      may_add_in_half: adds up parameters, such as the embeddings of a token and of its
        position, so it runs in half if all consumers do.
      may_store_half: made of parameters, or costly, so its result is kept in half if
        all consumers read half.
      saturate: constants that overflow become the largest finite value.
      f32_result: half operands, f32 result.
      passes_on: each result is an operand, in the dtype that it has.
    """

    rule: Rule
    dtype: np.dtype | None
    reason: str
    result: Known
    as_traced: bool = False
    may_rise: bool = False
    may_fall: bool = False
    may_sink: bool = False
    may_add_in_half: bool = False
    may_store_half: bool = False
    saturate: bool = False
    f32_result: bool = False
    passes_on: bool = False


def decide(
    eqn: Any,
    rule: Rule,
    region: Region,
    views: Sequence[Known],
    makers: Mapping[Any, Any],
) -> Decision:
    """Returns the decision for `eqn`, which calls nothing.

    Args:
      eqn: the equation.
      rule: its rule from the table.
      region: the policy scope it is in.
      views: what it sees of each of its operands.
      makers: the equation that made each variable of the body so far.
    """
    if rule.op_class is OpClass.FOLLOW and eqn.primitive.name in rules.PASSED_ON:
        nothing = Known(Origin.FREE, None, False, region)
        return Decision(rule, None, "hands on what it gets", nothing, passes_on=True)
    operands = [v for v, a in zip(views, eqn.invars, strict=True) if _inexact(a)]
    fill = constants.bounds_of_fill(eqn)
    if fill is not None:
        operands.append(Known(Origin.FREE, fill, False, region))
    origin = max((v.origin for v in operands), default=Origin.FREE)
    choice = _choose(eqn, rule, region.policy, operands, origin, makers)
    structural = is_structural(eqn)
    free = choice.origin == Origin.FREE
    limits = None
    if (
        free
        and rule.op_class is not OpClass.KEEP
        and eqn.primitive.name not in rules.COMPARISONS
    ):
        limits = constants.bounds_of_result(eqn, [v.bounds for v in views])
    exact = structural or eqn.primitive.name in rules.SELECTIONS
    gains = choice.may_rise
    if eqn.primitive.name in ("gather", "sort"):
        # What they make is written to memory: in f32 only to sum gradients in f32.
        gains = gains and any(v.shared for v in operands if v.origin)
    # The derivative of what reads the sum in f32 saves the sum, or both terms.
    gains = gains and not (
        eqn.primitive.name == "add" and all(v.origin == Origin.LOW for v in operands)
    )
    gains = gains and (
        not exact or any(v.gains or v.shared for v in operands if v.origin)
    )
    low = region.policy.compute_dtype
    may_fall = _may_fall(eqn, choice, rule, operands, low, makers)
    costly = _is_costly(eqn, choice, rule) and is_half(low)
    result = Known(
        choice.origin,
        limits,
        free and structural and any(v.as_parameter for v in operands),
        region,
        gains,
        costly=costly or may_fall,
    )
    fits = is_half(low) and _unfit([*operands, result], low) is None
    computed = free and bool(operands) and not structural and limits is None
    computed = computed and all(v.aval.dtype == F32 for v in eqn.outvars)
    computed = computed and is_half(low)
    return Decision(
        choice.rule or rule,
        choice.dtype,
        choice.reason,
        result,
        as_traced=choice.as_traced,
        # To cast before an exact operation gains nothing, unless what made its operand
        # gains, or others need the cast.
        may_rise=gains,
        may_sink=free and structural and choice.as_traced and fits,
        # Made in f32 and stored in half, XLA would keep the f32 sum for whoever reads
        # it in f32 again, such as a norm.
        may_add_in_half=computed
        and eqn.primitive.name == "add"
        and all(v.as_parameter for v in operands),
        may_store_half=computed or costly,
        may_fall=may_fall,
        saturate=choice.saturate,
        f32_result=choice.f32_result,
    )


def _is_costly(eqn: Any, choice: _Choice, rule: Rule) -> bool:
    """Whether `eqn` makes f32 values that are not computed again for the derivative."""
    return (
        choice.origin == Origin.FULL
        and not choice.f32_result
        and not rule.from_user
        and (rule.op_class is OpClass.FULL or choice.as_traced)
        and eqn.primitive.name not in rules.RECOMPUTED
        and all(v.aval.dtype == F32 for v in eqn.outvars if _inexact(v))
    )


def _may_fall(
    eqn: Any,
    choice: _Choice,
    rule: Rule,
    operands: list[Known],
    low: np.dtype,
    makers: Mapping[Any, Any],
) -> bool:
    """Whether what reads f32 values may be cast to half before, not after.

    Costly values may, and so may what a parameter scales, as the last step of a norm:
    else the gradient of that step is kept in f32. In f16 only if it must be in range: a
    sum that overflows may become a mean.
    """
    if not (
        is_half(low)
        and rule.op_class is OpClass.FOLLOW
        and not jaxprs.is_conversion(eqn)
        and choice.dtype == F32
        and choice.origin == Origin.FULL
        and _unfit(operands, low) is None
    ):
        return False
    scales = eqn.primitive.name in ("mul", "div") and any(
        v.origin == Origin.FREE for v in operands
    )
    if all(v.costly for v in operands if v.origin == Origin.FULL):
        return low != F16 or not scales
    return (
        eqn.primitive.name == "mul"
        and any(v.as_parameter for v in operands)
        and (low != F16 or any(_is_normalized(atom, makers) for atom in eqn.invars))
    )


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The part of a `Decision` that depends on the class of the operation."""

    dtype: np.dtype | None
    reason: str
    origin: Origin
    rule: Rule | None = None
    as_traced: bool = False
    may_rise: bool = False
    saturate: bool = False
    f32_result: bool = False


def _choose(
    eqn: Any,
    rule: Rule,
    policy: Policy,
    operands: list[Known],
    origin: Origin,
    makers: Mapping[Any, Any],
) -> _Choice:
    if jaxprs.is_conversion(eqn) and not is_structural(eqn):
        return _convert(eqn, rule, origin, makers)
    if rule.op_class is OpClass.KEEP or not _may_cast(eqn, rule):
        if origin != Origin.FREE:
            traced = [v.aval.dtype for v in eqn.outvars if castable(v)]
            half = bool(traced) and all(is_half(d) for d in traced)
            origin = Origin.LOW if half else Origin.FULL
        if rule.op_class is not OpClass.KEEP:
            rule = Rule(OpClass.KEEP, "nothing here may be cast", rule.decided_by)
        return _Choice(None, rule.reason, origin, rule, as_traced=True)
    low = _low_dtype(eqn, policy)
    if rule.op_class is OpClass.LOW:
        if _wants_f32_result(eqn) and not is_half(policy.compute_dtype):
            return _Choice(None, "as traced", Origin.FULL, as_traced=True)
        if _wants_f32_result(eqn):
            return _Choice(
                low, "half operands, f32 result", Origin.FULL, f32_result=True
            )
        unfit = _unfit(operands, low, "overflows")
        if unfit is not None:
            return _Choice(F32, unfit, Origin.FULL)
        if not is_half(low):
            return _Choice(low, "the policy computes in f32", Origin.FULL)
        return _Choice(low, rule.reason, Origin.LOW)
    if rule.op_class is OpClass.FULL:
        made = Origin.FREE if origin == Origin.FREE else Origin.FULL
        return _Choice(F32, rule.reason, made)
    return _follow(eqn, origin, operands, low)


def _follow(eqn: Any, origin: Origin, operands: list[Known], low: np.dtype) -> _Choice:
    name = eqn.primitive.name
    if origin == Origin.FREE:
        reason = "only parameters, inputs and constants"
        return _Choice(None, reason, origin, as_traced=True)
    unfit = _unfit(operands, low)
    if name in rules.COMPARISONS:
        if origin == Origin.LOW and unfit is not None:
            return _Choice(F32, unfit, origin)
        return _Choice(None, "a comparison reads values as they are", origin)
    if origin == Origin.FULL:
        return _Choice(F32, "an operand is f32", Origin.FULL)
    if not is_half(low):
        return _Choice(low, "the policy computes in f32", Origin.FULL)
    if unfit is None:
        return _Choice(low, "follows its operands", Origin.LOW, may_rise=True)
    if name == "select_n" and _unfit(operands, low, "vanishes") is None:
        return _Choice(
            low,
            f"{unfit}, so it saturates",
            Origin.LOW,
            may_rise=True,
            saturate=True,
        )
    return _Choice(F32, unfit, Origin.FULL)


def _convert(
    eqn: Any, rule: Rule, origin: Origin, makers: Mapping[Any, Any]
) -> _Choice:
    source, target = eqn.invars[0], eqn.params["new_dtype"]
    made = origin
    if origin != Origin.FREE:
        made = Origin.LOW if is_half(target) else Origin.FULL
    if not (castable(source) and is_castable(target)):
        return _Choice(None, "a conversion, as traced", made, as_traced=True)
    if (
        origin != Origin.FREE
        and is_half(target)
        and (rule.op_class is OpClass.FULL or _is_sum(source, makers))
    ):
        # jnp sums f16 in f32 and casts the sum back to f16, where it overflows.
        return _Choice(F32, "the cast back after an f32 reduction waits", Origin.FULL)
    return _Choice(target, "an explicit cast", made)


def is_constant(known: Known) -> bool:
    return known.origin == Origin.FREE and known.bounds is not None


def _inexact(atom: Any) -> bool:
    # A mutable array has the dtype of its elements, and is no value.
    aval = atom.aval
    return isinstance(aval, jax.core.ShapedArray) and jnp.issubdtype(
        aval.dtype, jnp.inexact
    )


def castable(atom: Any) -> bool:
    return _inexact(atom) and is_castable(atom.aval.dtype)


def traced_dtype(atom: Any) -> np.dtype | None:
    return atom.aval.dtype if castable(atom) else None


def _may_cast(eqn: Any, rule: Rule) -> bool:
    """Whether `eqn` has operands that may be cast and nothing that forbids it."""
    floats = [v for v in (*eqn.invars, *eqn.outvars) if _inexact(v)]
    if not any(castable(v) for v in eqn.invars):
        return False
    if rule.op_class is OpClass.FULL and all(v.aval.dtype == F32 for v in floats):
        return True
    return all(castable(v) for v in floats) and not jaxprs.is_fixed(eqn)


def is_structural(eqn: Any) -> bool:
    if jaxprs.is_conversion(eqn):
        return castable(eqn.invars[0]) and (
            eqn.invars[0].aval.dtype == eqn.params["new_dtype"]
        )
    return eqn.primitive.name in rules.STRUCTURAL


def _low_dtype(eqn: Any, policy: Policy) -> np.dtype:
    # A program that was written in one half dtype keeps it, whatever the policy's is.
    traced = {v.aval.dtype for v in eqn.invars if castable(v)}
    if len(traced) == 1 and is_half(*traced):
        return traced.pop()
    return policy.compute_dtype


def _wants_f32_result(eqn: Any) -> bool:
    return (
        "preferred_element_type" in eqn.params
        and all(is_half(v.aval.dtype) for v in eqn.invars if castable(v))
        and eqn.outvars[0].aval.dtype == F32
    )


def _unfit(
    operands: Sequence[Known], dtype: np.dtype, kind: str | None = None
) -> str | None:
    """Returns in words why one of the constants does not fit `dtype`, or None."""
    for value in operands:
        if value.origin == Origin.FREE and is_half(dtype):
            how = constants.misfit(value.bounds, dtype)
            if how is not None and kind in (None, how):
                assert value.bounds is not None
                worst = max(value.bounds, key=abs)
                return f"the constant {worst:g} {how} in {dtype.name}"
    return None


def _is_sum(atom: Any, makers: Mapping[Any, Any]) -> bool:
    eqn = _maker(atom, makers)
    return eqn is not None and eqn.primitive.name in _SUMS


def _is_normalized(atom: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether a value is something times a reciprocal square root."""
    eqn = _maker(atom, makers)
    return (
        eqn is not None
        and eqn.primitive.name == "mul"
        and any(
            factor is not None and factor.primitive.name == "rsqrt"
            for factor in (_maker(v, makers) for v in eqn.invars)
        )
    )


def _maker(atom: Any, makers: Mapping[Any, Any]) -> Any:
    """Returns the equation that made a value, but for moving it around."""
    while not isinstance(atom, jaxprs.Literal) and atom in makers:
        eqn = makers[atom]
        if not is_structural(eqn):
            return eqn
        atom = eqn.invars[0]
    return None
