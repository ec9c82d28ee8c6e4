"""Checks that the policy which a diagnosis suggests keeps a call finite."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jmp_amp.numerics import programs
from jmp_amp.numerics.diagnosis import Diagnosis
from jmp_amp.numerics.executables import Compile
from jmp_amp.numerics.losses import LossCall
from jmp_amp.numerics.suggestions import counterparts
from jmp_amp.numerics.wording import place, share
from jmp_amp.plan.jaxprs import Value
from jmp_amp.policies.dtypes import is_half
from jmp_amp.policies.policy import get_policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.training.finite import all_finite
from jmp_amp.training.loss_scale import static_loss_scale
from jmp_amp.transform.interpreter import run

# So large a share of values that underflow may be what is divided by.
_MANY = 0.1
# Traces and plans the call under a map of policies.
Called = Callable[[PolicyMap], contextlib.AbstractContextManager[LossCall]]


def ends_well(
    call: LossCall, outputs: Sequence[Value], gradients: Sequence[Value]
) -> Value:
    """Whether the value of a call and its gradients are finite: bool[]."""
    return all_finite((call.value(outputs), gradients))


def checked(
    called: Called, found: Diagnosis, scale: float, compile_: Compile
) -> Diagnosis:
    """Returns a diagnosis whose policy was tried; its default is f32 if that failed.

    Args:
      called: of the function, whose value and gradients are finite without a policy.
      found: the diagnosis.
      scale: of the loss, one that the numbers have room for.
      compile_: begins to compile a program.
    """
    if _is_finite(called, found.policy, scale, compile_):
        return found
    entries = found.policy.entries
    policy = PolicyMap(get_policy("float32"), entries)
    if any(is_half(each.compute_dtype) for _, each in entries):
        if not _is_finite(called, policy, scale, compile_):
            policy = PolicyMap("float32")
    told = (
        f"With {str(found.policy)!r} the run is not finite, so the default of d.policy "
        f"is f32. {_cause(found)}"
    )
    return dataclasses.replace(found, policy=policy, advice=(*found.advice, told))


def _cause(found: Diagnosis) -> str:
    """Returns in words why the suggested policy did not help."""
    first = found.first_nonfinite
    if first is not None and first.is_in_half and not first.is_forward:
        wider = ", which mixed_bfloat16 has the range for" * (first.dtype == "f16")
        return f"It overflows in the backward pass{wider}."
    same = counterparts(found.sites, found.reference)
    for site in found.sites:
        known = same(site) if site.is_in_half and site.is_forward else None
        if known is not None and known.underflow(site.dtype) > _MANY:
            lost = share(known.underflow(site.dtype))
            return (
                f"{lost} of what {place(site)} makes underflows {site.dtype}: f32 "
                "there may be all that it takes."
            )
    return "Look for what is too large where it is used, not where it is made."


def _is_finite(
    called: Called, policies: PolicyMap, scale: float, compile_: Compile
) -> bool:
    """Whether a call is finite under a policy; compiles one program."""
    with called(policies) as call:

        def finite(scale: Value, arrays: Sequence[Value]) -> Value:
            scaled = static_loss_scale(scale).scale
            both = call.with_gradients(lambda xs: run(call.plan, xs), scaled)
            return ends_well(call, *both(*arrays))

        inputs = jnp.float32(scale), call.arrays
        compiling = compile_(finite, *inputs, options=lambda: programs.options_for(0))
        return bool(compiling.result()(*inputs))
