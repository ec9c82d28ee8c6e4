"""Checks that the policy which a diagnosis suggests keeps a call finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jmp_amp.numerics.calls import losses
from jmp_amp.numerics.calls.executables import Compile
from jmp_amp.numerics.calls.losses import LossCall, RunProgram
from jmp_amp.numerics.diagnose.advice import ITSELF, POLICY, Finding, largest_of
from jmp_amp.numerics.diagnose.suggestions import Runs
from jmp_amp.numerics.diagnose.wording import number, place, share
from jmp_amp.numerics.measure import programs
from jmp_amp.plan.program.jaxprs import Value
from jmp_amp.policies.dtypes import is_half, parse_dtype
from jmp_amp.policies.policy import get_policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports.reading import read_plan
from jmp_amp.reports.rows import Equation
from jmp_amp.training.collectives import all_finite
from jmp_amp.training.loss_scale import static_loss_scale

# So large a share of values that underflow may be what is divided by.
_MANY = 0.1


def ends_well(
    call: LossCall, outputs: Sequence[Value], gradients: Sequence[Value]
) -> Value:
    """Whether the value of a call and its gradients are finite: bool[]."""
    return all_finite((call.value(outputs), gradients))


class _Tried(NamedTuple):
    """Whether a run under a policy is finite with its gradients, and whether its value.

    `rows` are its equations, see `read_plan`; none of a run that is finite.
    """

    is_finite: bool
    is_value_finite: bool
    rows: Sequence[Equation] = ()


@dataclasses.dataclass(frozen=True)
class Checks:
    """Runs of a call, of which the numbers are known, under other policies."""

    called: losses.Called
    runs: Runs
    compile_: Compile

    def checked(
        self, findings: Sequence[Finding], scale: float
    ) -> tuple[PolicyMap, list[Finding]]:
        """Returns the suggested policy, tried; its default is f32 if that failed.

        No map changes what a marking in the code keeps in half: a finding says so. The
        value and the gradients are finite without a policy; `scale` is one of the loss
        that the numbers have room for.
        """
        runs = self.runs
        tried = self._tried(runs.policy, scale)
        if tried.is_finite:
            return runs.policy, [*findings]
        policy, kept = self._in_f32(scale)
        told = f"With {str(runs.policy)!r} the run is not finite, "
        if kept:
            told += f"and it is not with an f32 default either. {_marked(runs, kept)}"
        else:
            told += f"so the default of d.policy is f32. {_cause(runs, tried)}"
        # What is said of the policy that was tried is not all that d.policy has in f32.
        findings = [each for each in findings if each.kind != POLICY]
        return policy, [*findings, Finding("tried", told)]

    def with_function_tried(
        self, findings: Sequence[Finding]
    ) -> tuple[list[Finding], bool]:
        """Returns findings, and whether a function is finite if its reference is not.

        What `cast_inputs` marks is half in the reference. Without autocast it is f32,
        and the function may be finite. Then what is said of the function itself is left
        out.
        """
        first = self.runs.first_itself
        if first is None or not first.is_in_half:
            return [*findings], False
        with losses.called_as_it_is(self.called, self.runs.policy) as call:
            if not self._ran(call, call.call.traced.as_it_is, 1.0).is_finite:
                return [*findings], False
        told = (
            f"Without autocast the function is finite: cast_inputs has {place(first)} "
            f"in {first.dtype}, which ends at {largest_of(first.dtype)}."
        )
        others = [each for each in findings if each.kind != ITSELF]
        return [Finding("tried", told), *others], True

    def _in_f32(self, scale: float) -> tuple[PolicyMap, list[Equation]]:
        """Returns a map whose default is f32, in place of one that did not help.

        If the run is not finite with that map either, also returns the equations that
        it leaves in half. A plan that is f32 throughout is the function itself: it is
        finite, and is not run.
        """
        full, failed = get_policy("float32"), self.runs.policy
        maps = [PolicyMap(full)]
        if failed.entries:
            maps.insert(0, PolicyMap(full, failed.entries))
        kept: list[Equation] = []
        for policy in maps:
            with self.called(policy) as call:
                kept = [row for row in read_plan(call.call) if _is_in_half(row)]
            if not kept or self._tried(policy, scale).is_finite:
                return policy, []
        return maps[-1], kept

    def _tried(self, policies: PolicyMap, scale: float) -> _Tried:
        """Returns what comes of a run under a policy; compiles one program."""
        with self.called(policies) as call:
            ran = self._ran(call, call.run, scale)
            return ran if ran.is_finite else ran._replace(rows=read_plan(call.call))

    def _ran(self, call: LossCall, run_program: RunProgram, scale: float) -> _Tried:

        def finite(scale: Value, arrays: Sequence[Value]) -> tuple[Value, Value]:
            both = call.with_gradients(run_program, static_loss_scale(scale).scale)
            outputs, gradients = both(*arrays)
            return ends_well(call, outputs, gradients), ends_well(call, outputs, ())

        inputs = jnp.float32(scale), call.arrays
        compiling = self.compile_(
            finite, *inputs, options=lambda: programs.options_for(0)
        )
        is_finite, is_value_finite = compiling.result()(*inputs)
        return _Tried(bool(is_finite), bool(is_value_finite))


def _is_in_half(row: Equation) -> bool:
    casts = [parse_dtype(cast.target) for cast in row.casts]
    return row.is_in_half or any(map(is_half, casts))


def _marked(runs: Runs, kept: Sequence[Equation]) -> str:
    """Returns in words what a marking in the code keeps in half under every map."""
    places = {(row.module, row.source) for row in kept}
    sites = [s for s in runs.sites if s.is_in_half and (s.module, s.source) in places]
    # The worst kind first.
    bad = [site for site in sites if site.makes_nonfinite]
    bad += filter(runs.overflow, sites)
    bad += [site for site in sites if runs.underflow(site) > _MANY]
    worst = bad[0] if bad else next((row for row in kept if row.is_in_half), kept[0])
    dtype = bad[0].dtype if bad else "half precision"
    return (
        f"{place(worst)} is in {dtype} under every PolicyMap: a marking in the code "
        "(with_policy, an autocast inside, cast_inputs(fn, dtype)) wins over a map. "
        "Change it there."
    )


def _cause(runs: Runs, tried: _Tried) -> str:
    """Returns in words why the suggested policy did not help."""
    if any(site.makes_nonfinite and site.is_in_half for site in runs.reference):
        return "What cast_inputs marks without a dtype is f32 then."
    if tried.is_value_finite and (told := _overflow_backward(runs, tried)):
        return told
    in_half = {row.identity for row in tried.rows if row.is_in_half}
    for site in runs.sites:
        stays = site.is_in_half and site.is_forward and site.identity in in_half
        lost = runs.underflow(site) if stays else 0.0
        if lost > _MANY:
            return (
                f"{share(lost)} of what {place(site)} makes underflows {site.dtype}: "
                "f32 there may be all that it takes."
            )
    if tried.is_value_finite:
        return "The value is finite with it, and a gradient is not."
    return "Look for what is too large where it is used, not where it is made."


def _overflow_backward(runs: Runs, tried: _Tried) -> str:
    """Returns in words what overflows backward in a policy's run; "" if nothing does.

    That run was not measured: the reference tells what is too large for its formats.
    """
    formats = {row.identity: _format_backward(row) for row in tried.rows}
    found = [
        site
        for site in runs.reference
        if not site.is_forward
        and (dtype := formats.get(site.identity)) is not None
        and site.overflow(dtype) > 0
    ]
    if not found:
        return ""
    # What an equation in half makes, before what is cast for one.
    keys = {site.key for site in runs.sites if site.is_in_half}
    most = next((site for site in found if site.key in keys), found[0])
    wider = ", which mixed_bfloat16 has the range for"
    wider *= formats[most.identity] == "f16"
    return (
        f"It overflows in the backward pass{wider}: what {place(most)} makes there "
        f"reaches {number(most.amax)} in f32."
    )


def _format_backward(row: Equation) -> str | None:
    """Returns the format in half that gradients at an equation have; None for f32.

    Where it reads an operand in half as f32, the gradient of the operand is cast back.
    """
    read = (cast.source for cast in row.casts if cast.where == "operand")
    here = (row.dtype, *read) if row.is_in_half else read
    return next((dtype for dtype in here if is_half(parse_dtype(dtype))), None)
