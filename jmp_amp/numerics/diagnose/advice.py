"""Advice: what is wrong in the numbers of a run, and what to do about it, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmp_amp.numerics.diagnose.suggestions import Runs, in_half
from jmp_amp.numerics.diagnose.turns import ran_otherwise
from jmp_amp.numerics.diagnose.wording import number, place, run, share
from jmp_amp.numerics.locate.sites import Site, or_infinite, scaled
from jmp_amp.plan.tables.operations import Also, named
from jmp_amp.policies.dtypes import parse_dtype
from jmp_amp.reports import plain_data
from jmp_amp.reports.askers import own_dtypes
from jmp_amp.reports.tables import count, listed, scale_text

# What is not finite without the policy, and what the suggested policy does.
ITSELF, POLICY = "itself", "policy"


class Finding(NamedTuple):
    """A sentence of advice, and what it is about: a key of `_FINDERS`."""

    kind: str
    text: str


# Less than this share of backward values may underflow without a word.
_FEW = 1e-3
# An error, and how much larger than that of its operands, that is worth a word.
_LARGE_ERROR, _AMPLIFIED = 1e-2, 8.0
_GROWS, _MAY_GROW = named(Also.GROWS), named(Also.MAY_GROW)
_BOUNDED, _ANY_BASIS = named(Also.BOUNDED), named(Also.ANY_BASIS)
# It keeps an operand away from where the derivative is infinite, as a root's is at 0.
_WHERE = "jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)"
# An error of a gradient from which on a sum in half precision may be to blame: some
# hundred terms.
_OFF = 1 / 16


def advise(runs: Runs) -> list[Finding]:
    """Returns what is wrong, the most important first; nothing if nothing is."""
    first = runs.first
    kinds = [*_FINDERS]
    if first is not None and _is_own(first, runs):
        kinds[:2] = ITSELF, "origin"  # in the order of the program
    return [Finding(kind, text) for kind in kinds for text in _FINDERS[kind](runs)]


def _summed(runs: Runs) -> Iterator[str]:
    """Yields the lookup whose gradient is summed in half, if gradients are far off."""
    sums = [s for s in runs.sites if s.operation == "scatter-add" and not s.is_forward]
    sums = [site for site in sums if site.dtype in ("bf16", "f16")]
    worst = max((g.error for g in runs.gradients.values() if g.error), default=0.0)
    if sums and worst > _OFF:
        yield (
            f"{place(sums[0])} sums the gradient of a lookup in {sums[0].dtype}, and a "
            f"gradient is {worst:.0%} off: a row that is looked up hundreds of times "
            'loses digits. with_full("gather") of the policy sums it in f32.'
        )


def _pair(runs: Runs) -> Iterator[str]:
    """Yields how to differentiate a function that returns a loss and more."""
    value = runs.value
    if runs.gradients or not isinstance(value, tuple) or len(value) != 2:
        return
    is_scalar = isinstance(value[0], jax.Array) and not value[0].shape
    if is_scalar and jnp.issubdtype(value[0].dtype, jnp.floating):
        yield (
            "The function returns a tuple, so the backward pass did not run. If its "
            "first element is the loss, give has_aux=True."
        )


def _is_own(site: Site, runs: Runs) -> bool:
    """Whether the function makes what is not finite there without the policy too."""
    known = runs.same(site)
    return known is not None and known.makes_nonfinite


def _origin(runs: Runs) -> Iterator[str]:
    """Yields what made the first value that only the policy has not finite, and why."""
    made = (site for site in runs.sites if site.makes_nonfinite)
    first = next((site for site in made if not _is_own(site, runs)), None)
    if first is None:
        return
    told, fits = _made(first, first.nonfinite), not runs.overflow(first)
    if not first.is_forward and runs.scale > 1.0 and first.is_in_half and fits:
        yield (
            f"{told}: the loss scale {scale_text(runs.scale)} is too large for this "
            f"step. Use {scale_text(runs.suggested_scale)}, or amp.dynamic_loss_scale, "
            "which skips the step and halves the scale."
        )
    else:
        is_narrow = first.dtype == "f16" and not first.is_forward
        wider = " Use mixed_bfloat16, which has f32's range." * is_narrow
        yield f"{told}: {_reason(first, runs.same(first))}.{wider}"


def _made(site: Site, made: int, what: str = "infinite or NaN") -> str:
    many = f"{count(made)} of {count(site.size)} values"
    return f"{place(site)} made {many} {what} ({run(site)})"


def _itself(runs: Runs) -> Iterator[str]:
    """Yields what is not finite without the policy, and how to mend the function."""
    first = runs.first_itself
    if first is None:
        return
    what = "function" if first.is_forward else "derivative"
    wide = "in f32 " if first.dtype == "f32" else ""
    told = f"{wide}{_made(first, first.nonfinite)}."
    run = [site for site in runs.sites if site.key == first.key]
    if runs.is_finite_itself:
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
        remedy = _remedy_itself(first, plain_data.is_finite(runs.value))
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


def _given(runs: Runs) -> Iterator[str]:
    """Yields what spoils a value that is not finite already somewhere in f32."""
    first, arguments = runs.first, runs.arguments
    if runs.is_finite:
        return
    if first is None and runs.is_finite_itself:
        for site in runs.sites:
            known = runs.same(site)
            if known is not None and site.nonfinite > known.nonfinite:
                yield (
                    f"{_made(site, site.nonfinite - known.nonfinite)}, beside those "
                    "that are not finite in f32 either, such as a mask of -inf: "
                    f"{_reason(site, known)}."
                )
                return
    if arguments:
        told = f"The argument {listed(arguments, '; ')}."
        if first is None:
            told = f"No operation made the first value that is not finite. {told}"
        yield told
    if first is not None:
        return
    if nan := next((site for site in runs.sites if site.makes_nan), None):
        yield _made_of_infinities(nan, runs.same(nan))
    elif not arguments:
        yield (
            "No operation made the values that are not finite, and the arguments are "
            "finite: an array that the function closes over, or a constant in it, is "
            "not."
        )


def _made_of_infinities(nan: Site, known: Site | None) -> str:
    told = (
        f"{_made(nan, nan.nans, 'NaN')}, out of infinities that an argument or a "
        "constant holds: inf - inf, 0 * inf, inf / inf."
    )
    if known is not None and known.makes_nan:
        told += " The function does so itself, and no policy helps."
    if nan.operation == "sub" and nan.is_forward:
        told += (
            " A softmax is NaN where a mask of -inf leaves nothing: mask with a large "
            "finite number instead, such as -1e9."
        )
    return told


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


def _remedy(runs: Runs) -> Iterator[str]:
    """Yields what the suggested policy does."""
    modules = dict.fromkeys(need.path for need in runs.needs if need.path is not None)
    names = dict.fromkeys(need.name for need in runs.needs if need.name is not None)
    if runs.policy == runs.given or not (modules or names):
        return
    many = "modules" if len(modules) > 1 else "module"
    whole = [f"the {many} {listed(modules)}"] if modules else []
    if names:
        each = "every" if len(names) == 1 else "the operations"
        whole.append(f"{each} {listed(names)}")
    reason = ""
    if runs.first is None:

        def reach(site: Site) -> float:
            known = runs.same(site)
            return 0.0 if known is None else known.amax

        most = max((need.site for need in runs.needs), key=reach)
        reason = f": {place(most)} reaches {number(reach(most))} in f32"
    yield f"amp.autocast(fn, d.policy) has {' and '.join(whole)} in f32{reason}."


def _underflow(runs: Runs) -> Iterator[str]:
    """Yields which share of the backward values in f16 is lost, and what holds them."""
    if not runs.is_finite_itself:
        return  # the reference does not tell what a loss scale has to hold
    scale, suggested = runs.scale, runs.suggested_scale
    values = [
        site
        for site, dtype in in_half(runs.sites, runs.reference, "backward")
        if dtype == "f16" and site.scales
    ]
    # A scale that is no power of two is as good as the one below it.
    used = 2.0 ** (int(scale).bit_length() - 1) if scale >= 1 else 1.0
    unscaled = [scaled(each, 1.0 / used) for each in runs.casts]
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


def _lost(runs: Runs) -> Iterator[str]:
    """Yields the parameters whose gradient is zero under the policy alone."""
    gradients = runs.gradients.items()
    keys = [key or "of the argument" for key, each in gradients if each.is_lost]
    if keys:
        many = "gradients" if len(keys) > 1 else "gradient"
        verb = "are" if len(keys) > 1 else "is"
        yield (
            f"The {many} {listed(keys)} {verb} 0 throughout, and not so in f32: these "
            "parameters do not learn."
        )


def _ends_with_error(runs: Runs) -> bool:
    """Whether the loss or a gradient has a large error; True if there is no gradient.

    An error may be large where nobody asks for it, as that of a mean that is zero.
    """
    if not runs.gradients:
        return True
    last = next((site for site in reversed(runs.sites) if site.is_forward), None)
    errors = [each.error for each in runs.gradients.values()]
    errors += [] if last is None else [last.error]
    return any(or_infinite(error) > _LARGE_ERROR for error in errors)


def _error(runs: Runs) -> Iterator[str]:
    """Yields the operation that makes the largest error of finite values."""

    def is_finite(site: Site) -> bool:
        known = runs.same(site)
        return not (site.nonfinite or (known is not None and known.nonfinite))

    found = [
        site
        for site in runs.sites
        if site.is_forward
        # Vectors that may have the other sign: their distance to f32's says nothing.
        and site.operation not in _ANY_BASIS
        and is_finite(site)
        and or_infinite(site.error) > _LARGE_ERROR
        and or_infinite(site.amplification) > _AMPLIFIED
    ]
    if not found or not _ends_with_error(runs):
        return
    worst = max(found, key=lambda site: or_infinite(site.amplification))
    told = f"{place(worst)} makes a relative error of {number(worst.error)}, "
    if worst.reads_floats:
        told += f"{number(worst.amplification)} times that of its operands"
    else:
        told += "because a comparison or an index came out otherwise than in f32"
    if worst.is_in_half and (lost := runs.underflow(worst)) > 0.1:
        told += f": {share(lost)} of it underflows {worst.dtype}"
    yield (
        f"{told}. amp.tune(fn, policy, max_grad_error=...) finds the modules that need "
        "f32."
    )


# By importance. What is not finite comes first, and where it begins; then ranges and
# errors; what no policy changes comes last.
_FINDERS: dict[str, Callable[[Runs], Iterator[str]]] = {
    "origin": _origin,
    ITSELF: _itself,
    "given": _given,
    POLICY: _remedy,
    "underflow": _underflow,
    "lost": _lost,
    "summed": _summed,
    "otherwise": lambda runs: ran_otherwise(runs.sites, runs.reference, runs.rows),
    "error": _error,
    "pair": _pair,
    "own": lambda runs: own_dtypes(runs.rows),
}
