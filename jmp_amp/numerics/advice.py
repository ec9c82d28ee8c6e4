"""Advice: what is wrong in the numbers of a run, and what to do about it, in words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from jmp_amp.numerics.sites import Gradient, Site, or_infinite, scaled
from jmp_amp.numerics.suggestions import Need, counterparts, in_half, needs_of
from jmp_amp.numerics.wording import count, listed, number, place, run, share
from jmp_amp.policies.dtypes import PyTree, is_half, parse_dtype
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports import plain_data
from jmp_amp.reports.tables import scale_text

# How sentences begin that tell what the suggested policy does.
ABOUT_POLICY = "amp.autocast(fn, d.policy) "
# And those about what is not finite without the policy.
ITSELF = (
    "The function itself is",
    "The derivative itself is",
    "Without the policy the",
)

# A site of the policy's run -> the same equation of the reference, if it has it.
_Same = Callable[[Site], Site | None]

# Less than this share of backward values may underflow without a word.
_FEW = 1e-3
# An error, and how much larger than that of its operands, that is worth a word.
_LARGE_ERROR, _AMPLIFIED = 1e-2, 8.0
# Defined everywhere: their results are infinite because they are too large. Of the
# others either may be the case.
_GROWS = frozenset(
    "convert_element_type exp exp2 expm1 sinh cosh mul square add add_any sub "
    "dot_general conv_general_dilated reduce_sum reduce_prod reduce_window_sum cumsum "
    "cumprod scatter-add".split()
)
_MAY_GROW = frozenset("pow integer_pow".split())
# Defined within bounds: an epsilon does not keep the operand there.
_BOUNDED = frozenset("acos acosh asin atanh erf_inv".split())
# It keeps an operand away from where the derivative is infinite, as a root's is at 0.
_WHERE = "jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)"
# Their vectors are as right with the other sign, or in another basis: the distance to
# those of f32 says nothing.
_FREE = frozenset("svd eigh eig schur".split())


def advise(
    sites: Sequence[Site],
    reference: Sequence[Site],
    gradients: Mapping[str, Gradient],
    given: PolicyMap,
    policy: PolicyMap,
    loss_scale: float | None,
    suggested_scale: float,
    *,
    casts: Sequence[Site] = (),
    value: PyTree = None,
    functions: Collection[str] | None = None,
    otherwise: Collection[str] = (),
    is_finite_itself: bool | None = None,
    arguments: Sequence[str] | None = None,
    inside: Collection[str] = (),
    own: Collection[str] = (),
) -> tuple[str, ...]:
    """Returns sentences, the most important first; none if nothing is wrong.

    Where a value that is not finite began, or which argument holds it, and what mends
    it; what is too large for half precision; which backward values underflow f16 and
    the loss scale that holds them; parameters whose gradient is lost; a branch that the
    policy changes; where the error is made.

    Args:
      sites, reference: of the runs with and without the policy.
      gradients: by parameter, unscaled.
      given: the policy of the run.
      policy: the suggested one.
      loss_scale: that of the run; None is 1.0.
      suggested_scale: the suggested one.
      casts: what the backward pass of the run casts to f16, as it is before.
      value: what the function returned under the policy.
      functions: as in `suggested_policy`.
      otherwise: what ran otherwise than in the reference, in words.
      is_finite_itself: whether the value and the gradients of the reference are; by
        default as under the policy.
      arguments: those that are not finite, in words; None if that is not known.
      inside: the identities of what an autocast inside of the function decides.
      own: what is in half whatever the policy says, in words.
    """
    scale = 1.0 if loss_scale is None else float(loss_scale)
    ended_well = plain_data.is_finite(value) and not any(
        each.nonfinite for each in gradients.values()
    )
    if is_finite_itself is None:
        is_finite_itself = ended_well
    mended = [site for site in sites if site.identity not in inside]
    needs = needs_of(mended, reference, functions)
    same = counterparts(sites, reference)
    first = next((site for site in sites if site.makes_nonfinite), None)
    found = [
        *_origin(sites, same, scale, suggested_scale),
        *_itself(sites, reference, is_finite_itself, value),
    ]
    if first is not None and _is_own(first, same):
        found.reverse()
    if not ended_well:
        grown = None
        if first is None and is_finite_itself:
            grown = next((site for site in sites if _is_grown(site, same)), None)
        if grown is not None:
            found.append(_beside(grown, same))
        else:
            found += _given(sites, same, first, arguments)
    found += _remedy(first, needs, same, given, policy)
    if is_finite_itself:
        # Else the reference does not tell what a loss scale has to hold.
        found += _underflow(sites, reference, casts, scale, suggested_scale)
    found += _lost(gradients)
    found += _summed(sites, gradients)
    found += otherwise
    if _ends_with_error(sites, gradients):
        found += _error(sites, same)
    if not gradients and _begins_with_a_number(value):
        found.append(
            "The function returns a tuple, so the backward pass did not run. If its "
            "first element is the loss, give has_aux=True."
        )
    return (*found, *own)


# An error of a gradient from which on a sum in half precision may be to blame: some
# hundred terms.
_OFF = 1 / 16


def _summed(sites: Sequence[Site], gradients: Mapping[str, Gradient]) -> Iterator[str]:
    """Yields the lookup whose gradient is summed in half, if gradients are far off."""
    sums = [s for s in sites if s.operation == "scatter-add" and not s.is_forward]
    sums = [site for site in sums if site.dtype in ("bf16", "f16")]
    worst = max((g.error for g in gradients.values() if g.error), default=0.0)
    if sums and worst > _OFF:
        yield (
            f"{place(sums[0])} sums the gradient of a lookup in {sums[0].dtype}, and a "
            f"gradient is {worst:.0%} off: a row that is looked up hundreds of times "
            'loses digits. with_full("gather") of the policy sums it in f32.'
        )


def _begins_with_a_number(value: PyTree) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    first = value[0]
    is_scalar = isinstance(first, jax.Array) and not first.shape
    return is_scalar and jnp.issubdtype(first.dtype, jnp.floating)


def _is_own(site: Site, same: _Same) -> bool:
    """Whether the function makes what is not finite there without the policy too."""
    known = same(site)
    return known is not None and known.makes_nonfinite


def _origin(
    sites: Sequence[Site],
    same: _Same,
    scale: float,
    suggested_scale: float,
) -> Iterator[str]:
    """Yields what made the first value that only the policy has not finite, and why."""
    made = (site for site in sites if site.makes_nonfinite)
    first = next((site for site in made if not _is_own(site, same)), None)
    if first is None:
        return
    known = same(first)
    told = _made(first)
    if first.is_forward:
        yield f"{told}: {_reason(first, known)}."
    elif _is_scale_at_fault(first, known, scale):
        yield (
            f"{told}: the loss scale {scale_text(scale)} is too large for this step. "
            f"Use {scale_text(suggested_scale)}, or amp.dynamic_loss_scale, which "
            "skips the step and halves the scale."
        )
    else:
        wider = " Use mixed_bfloat16, which has f32's range." * (first.dtype == "f16")
        yield f"{told}: {_reason(first, known)}.{wider}"


def _made(site: Site) -> str:
    many = f"{count(site.nonfinite)} of {count(site.size)} values"
    return f"{place(site)} made {many} infinite or NaN ({run(site)})"


def _itself(
    sites: Sequence[Site],
    reference: Sequence[Site],
    is_finite_itself: bool,
    value: PyTree,
) -> Iterator[str]:
    """Yields what is not finite without the policy, and how to mend the function."""
    first = next((site for site in reference if site.makes_nonfinite), None)
    if first is None:
        return
    what = "function" if first.is_forward else "derivative"
    wide = "in f32 " if first.dtype == "f32" else ""
    told = f"{wide}{_made(first)}."
    run = [site for site in sites if site.key == first.key]
    if is_finite_itself:
        yield (
            "The value and the gradients of the function itself are finite, though "
            f"{told[:-1]}: it is masked, or not read."
        )
    elif run and not any(site.nonfinite for site in run):
        yield (
            f"Without the policy the {what} itself is not finite: {told} Under the "
            f"policy it is finite there, in {run[0].dtype}: keep it so in the function."
        )
    else:
        remedy = _remedy_itself(first, plain_data.is_finite(value))
        yield f"The {what} itself is not finite, and no policy helps: {told} {remedy}"


def _remedy_itself(first: Site, is_value_finite: bool) -> str:
    """Returns what to change in a function that is not finite without a policy."""
    dtype = first.dtype
    if first.operation in _GROWS:
        large = f"A value is too large: {dtype} ends at {largest_of(dtype)}. Make its "
        wider = "" if dtype == "f32" else ", or keep it in f32"
        return f"{large}operands smaller{wider}."
    if first.operation == "custom_vjp_call":
        rule = "the function" if first.is_forward else "the backward rule"
        return f"Look into {rule} of the custom_vjp: nothing in it is measured alone."
    if not first.is_forward:
        return f"Keep its operand from where the derivative is infinite: {_WHERE}."
    if is_value_finite:
        return (
            "The value is finite and a gradient is not: jnp.where around it does not "
            f"keep its derivative away. Keep its operand away too: {_WHERE}."
        )
    if first.operation in _MAY_GROW:
        return "Its operands are too large, or where it is not defined."
    if first.operation in _BOUNDED:
        return "Keep its operands inside of where it is defined, with jnp.clip."
    remedy = "Keep its operands from where it is not defined, with an epsilon"
    if first.is_in_half:
        smallest = float(jnp.finfo(parse_dtype(dtype) or dtype).smallest_subnormal)
        return f"{remedy}: {dtype} begins at {number(smallest)}, and less is 0 in it."
    return f"{remedy}."


def _is_grown(site: Site, same: _Same) -> bool:
    """Whether more values of a site are not finite than without the policy."""
    known = same(site)
    return known is not None and site.nonfinite > known.nonfinite


def _beside(site: Site, same: _Same) -> str:
    """Returns what made values that are not finite beside others that it was given."""
    known = same(site)
    assert known is not None
    return (
        f"{place(site)} made {count(site.nonfinite - known.nonfinite)} of "
        f"{count(site.size)} values infinite or NaN ({run(site)}), beside those that "
        "are not finite in f32 either, such as a mask of -inf: "
        f"{_reason(site, known)}."
    )


def _given(
    sites: Sequence[Site],
    same: _Same,
    first: Site | None,
    arguments: Sequence[str] | None,
) -> Iterator[str]:
    """Yields what is not finite already before anything is computed."""
    if arguments:
        told = f"The argument {listed(arguments, '; ')}."
        if first is None:
            told = f"No operation made the first value that is not finite. {told}"
        yield told
    if first is not None:
        return
    nan = next((site for site in sites if site.makes_nan), None)
    if nan is not None:
        many = f"{count(nan.nans)} of {count(nan.size)} values"
        known = same(nan)
        told = f"{place(nan)} made {many} NaN ({run(nan)}), out of infinities that an "
        told += "argument or a constant holds: inf - inf, 0 * inf, inf / inf."
        if known is not None and known.makes_nan:
            told += " The function does so itself, and no policy helps."
        if nan.operation == "sub" and nan.is_forward:
            told += (
                " A softmax is NaN where a mask of -inf leaves nothing: mask with a "
                "large finite number instead, such as -1e9."
            )
        yield told
    elif arguments is None:
        yield (
            "No operation made the values that are not finite: an argument or a "
            "constant is not finite already. Look at the batch and the parameters "
            "with amp.all_finite."
        )
    elif not arguments:
        yield (
            "No operation made the values that are not finite, and the arguments are "
            "finite: an array that the function closes over, or a constant in it, is "
            "not."
        )


def _is_scale_at_fault(first: Site, same: Site | None, scale: float) -> bool:
    fits = same is None or not same.overflow(first.dtype)
    return scale > 1.0 and first.is_in_half and fits


def _reason(first: Site, same: Site | None) -> str:
    if not first.is_in_half:
        return (
            "in f32 without the policy it is finite: half precision spoilt an operand"
        )
    largest = f"{first.dtype} ends at {largest_of(first.dtype)}"
    if same is None:
        return f"a value is too large for the cast, {largest}"
    if same.overflow(first.dtype):
        return f"in f32 it reaches {number(same.amax)}, and {largest}"
    return f"in f32 it is finite and reaches {number(same.amax)}; {largest}"


def largest_of(dtype: str) -> str:
    """Returns the largest finite value of a dtype in digits."""
    value = float(jnp.finfo(parse_dtype(dtype) or dtype).max)
    return f"{value:.0f}" if value < 1e6 else number(value)


def _remedy(
    first: Site | None,
    needs: Sequence[Need],
    same: _Same,
    given: PolicyMap,
    policy: PolicyMap,
) -> Iterator[str]:
    """Yields what the suggested policy does."""
    if policy == given:
        return
    halves = [is_half(each.default.compute_dtype) for each in (given, policy)]
    if halves == [True, False]:
        yield (
            f"{ABOUT_POLICY}computes in f32 by default: with f32 for "
            "single modules something still was not finite."
        )
        return
    modules = dict.fromkeys(need.path for need in needs if need.path is not None)
    names = dict.fromkeys(need.name for need in needs if need.name is not None)
    many = "modules" if len(modules) > 1 else "module"
    whole = [f"the {many} {listed(modules)}"] if modules else []
    if names:
        each = "every" if len(names) == 1 else "the operations"
        whole.append(f"{each} {listed(names)}")
    if whole:
        reason = ""
        if first is None:
            most = max(needs, key=lambda need: _reach(need, same))
            largest = number(_reach(most, same))
            reason = f": {place(most.site)} reaches {largest} in f32"
        yield f"{ABOUT_POLICY}has {' and '.join(whole)} in f32{reason}."


def _reach(need: Need, same: _Same) -> float:
    known = same(need.site)
    return 0.0 if known is None else known.amax


def _underflow(
    sites: Sequence[Site],
    reference: Sequence[Site],
    casts: Sequence[Site],
    scale: float,
    suggested: float,
) -> Iterator[str]:
    """Yields which share of the backward values in f16 is lost, and what holds them."""
    values = [
        site
        for site, dtype in in_half(sites, reference, "backward")
        if dtype == "f16" and site.scales
    ]
    # A scale that is no power of two is as good as the one below it.
    used = 2.0 ** (int(scale).bit_length() - 1) if scale >= 1 else 1.0
    unscaled = [scaled(each, 1.0 / used) for each in casts]
    if _lost_of(values, used) < _FEW:
        return
    without, now, held = (
        _lost_of([*values, *unscaled], each) for each in (1.0, used, suggested)
    )
    told = f"{share(without)} of the backward values that run in f16 underflow to 0"
    told += " without a loss scale"
    if scale > 1.0:
        told += f", {share(now)} with {scale_text(scale)}"
    if held < now / 2:
        yield (
            f"{told}, and {share(held) or 'none'} with {scale_text(suggested)}: train "
            f"with amp.dynamic_loss_scale({scale_text(suggested)})."
        )
    else:
        yield f"{told}, and no scale that fits holds many more: use mixed_bfloat16."


def _lost_of(values: Sequence[Site], scale: float) -> float:
    """Returns the share of values that a loss scale leaves too small for f16."""
    total = sum(site.finite for site in values)
    gone = (scaled(each, scale).underflow("f16") * each.finite for each in values)
    return sum(gone) / total if total else 0.0


def _lost(gradients: Mapping[str, Gradient]) -> Iterator[str]:
    keys = [key or "of the argument" for key, each in gradients.items() if each.is_lost]
    if keys:
        many = "gradients" if len(keys) > 1 else "gradient"
        verb = "are" if len(keys) > 1 else "is"
        yield (
            f"The {many} {listed(keys)} {verb} 0 throughout, and not so in f32: these "
            "parameters do not learn."
        )


def _ends_with_error(sites: Sequence[Site], gradients: Mapping[str, Gradient]) -> bool:
    """Whether the loss or a gradient has a large error; True if there is no gradient.

    An error may be large where nobody asks for it, as that of a mean that is zero.
    """
    if not gradients:
        return True
    last = next((site for site in reversed(sites) if site.is_forward), None)
    errors = [each.error for each in gradients.values()]
    errors += [] if last is None else [last.error]
    return any(or_infinite(error) > _LARGE_ERROR for error in errors)


def _is_nonfinite(site: Site | None) -> bool:
    return site is not None and site.nonfinite > 0


def _error(sites: Sequence[Site], same: _Same) -> Iterator[str]:
    """Yields the operation that makes the largest error of finite values."""
    found = [
        site
        for site in sites
        if site.is_forward
        and not site.nonfinite
        and site.operation not in _FREE
        and not _is_nonfinite(same(site))
        and or_infinite(site.error) > _LARGE_ERROR
        and or_infinite(site.amplification) > _AMPLIFIED
    ]
    if not found:
        return
    worst = max(found, key=lambda site: or_infinite(site.amplification))
    known = same(worst)
    told = f"{place(worst)} makes a relative error of {number(worst.error)}, "
    if worst.reads_floats:
        told += f"{number(worst.amplification)} times that of its operands"
    else:
        told += "because a comparison or an index came out otherwise than in f32"
    if known is not None and worst.is_in_half and known.underflow(worst.dtype) > 0.1:
        told += (
            f": {share(known.underflow(worst.dtype))} of it underflows {worst.dtype}"
        )
    yield (
        f"{told}. amp.tune(fn, policy, max_grad_error=...) finds the modules that need "
        "f32."
    )
