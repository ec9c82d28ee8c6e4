"""`diagnose`: what the numbers of a function do, with a policy and without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp.numerics.calls import losses
from jmp_amp.numerics.calls.executables import Compile, Executables, undisturbed
from jmp_amp.numerics.calls.inputs import nonfinite_inputs
from jmp_amp.numerics.calls.losses import LossCall
from jmp_amp.numerics.diagnose.advice import advise
from jmp_amp.numerics.diagnose.checking import Checks, ends_well
from jmp_amp.numerics.diagnose.decoding import Places, scaled_casts, sites_of
from jmp_amp.numerics.diagnose.diagnosis import Diagnosis
from jmp_amp.numerics.diagnose.suggestions import Runs
from jmp_amp.numerics.locate.sites import Gradient
from jmp_amp.numerics.measure import distances, programs
from jmp_amp.numerics.measure.lockstep import errors
from jmp_amp.numerics.measure.statistics import Figures, counted, layout_of
from jmp_amp.plan.plan import plan_as_traced
from jmp_amp.plan.program import jaxprs, meshes
from jmp_amp.plan.program.cpu_target import checked_target, cpu_of
from jmp_amp.plan.program.jaxprs import Value
from jmp_amp.policies.arguments import checked_flag
from jmp_amp.policies.deferred import Waiting, in_two_calls
from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map
from jmp_amp.reports.reading import read_plan
from jmp_amp.training.gradients import Argnums, find_scaler

# What a program returned: the outputs, and the gradients.
_Returned = tuple[list[Value], list[Value]]


@in_two_calls
def diagnose(
    fn: AnyFn,
    policy: Policy | PolicyMap | str = "mixed_float16",
    *,
    argnums: Argnums = 0,
    loss_scale: PyTree = None,
    has_aux: bool = False,
    target: str | None = None,
) -> Callable[..., Diagnosis]:
    """Returns a function that runs `fn` and reports what its numbers do.

    It takes the arguments of `fn`. It runs `fn` in f32, the *reference*, and under
    the policy; the gradient too, if `fn` returns one real scalar. A step that was
    skipped changed nothing, so its parameters and its batch tell afterwards where it
    overflowed: `diagnose(loss_fn, policy)(params, batch)`.

    Every equation that runs is a site, with the range of its values, their exponents,
    zeros and values that are not finite, by direction. Counts are exact. In loops,
    branches, sharded maps and under `vmap` they are merged. Statistics of fixed size
    leave the device, not activations; nothing is written to nnx objects. What a policy
    keeps in 8 bits for the backward pass is kept as it is, and not rounded. A third
    program runs both side by side, forward only, and tells how far apart each value is.

    All programs are compiled without excess precision, so that every cast rounds. The
    function that is returned keeps the last of them: called again with other values, it
    traces them again and compiles none, but those that have callbacks or close over
    more than 4 MiB.
    `debug.print` and other callbacks run at most once in each of the two runs. If a
    callback with an effect returns something, no error is known.

    `Diagnosis.loss_scale` is 1.0 if nothing backward runs in f16; 2**24 if all that
    does is zero; else the largest power of two s in [1, 2**24] with
    `amax * s <= 65504 / 8` for every backward site of the reference that runs in f16
    under the policy, and `amax * s <= 65504` for every value that the backward pass
    casts to f16; 1.0 if none fits. Factors of a derivative, such as the `cos` of a
    `sin`, do not count: the scale does not multiply them.

    `Diagnosis.policy` has an f32 entry for each module in which a forward site in half
    has values that overflow its format in the reference, or makes a value that is not
    finite where the reference is finite; outside of modules, the function or the
    operation is named. If the value and the gradients of
    the reference are finite, so are those with it: one more run checks that, with the
    smaller one of the loss scales. If they are not, the default becomes f32, and advice
    says so.

    An autocast inside of `fn`, or one that `fn` is, is as `with_policy` is: f32 in the
    reference, and a region of its own policy otherwise. What `fn` asks for itself
    (`dtype=`, `astype`, half arrays) is half in the reference too, and advice says
    where.

    A function that `cast_inputs` marks runs in half in the reference too. If the
    reference is not finite for that reason alone, advice says so, and
    `Diagnosis.policy` is checked all the same.

    Args:
      fn: a function of pytrees, as `autocast` takes it.
      policy: a `Policy`, a text for `get_policy`, or a `PolicyMap`.
      argnums: the arguments to differentiate, as in `value_and_grad`.
      loss_scale: as in `value_and_grad`: a `LossScale`, or a state that holds one. The
        run under the policy is scaled by it; `Diagnosis.gradients` are not.
      has_aux: whether `fn` returns `(loss, aux)`.
      target: what the plan is for, as `autocast` takes it. Give the one that you train
        with: its numbers are diagnosed, on the device that this runs on.

    Returns:
      A function of the arguments of `fn` that returns a `Diagnosis`.

    Raises:
      TypeError: if `fn` is not callable, `policy` no policy, `argnums` no position or
        `target` no text; from the function returned, if an argument is a
        `jax.ShapeDtypeStruct`, or none that is differentiated holds floats.
      ValueError: if the compute dtype is none of float16, bfloat16 and float32,
        `argnums` name an argument twice, or `target` is unknown; from the function
        returned, if `fn` returns one real scalar that JAX cannot differentiate.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> w, x = jnp.full((8, 8), 300.0), jnp.full((8, 8), 300.0)
      >>> found = amp.diagnose(loss, "mixed_float16")(w, x)
      >>> found.first_nonfinite.operation, found.first_nonfinite.nonfinite
      ('dot_general', 64)
      >>> str(found.policy)
      'p=f32,c=f16,o=f32,full=dot_general'
    """
    losses.check_measured("diagnose", fn, argnums)
    policies = as_policy_map(policy, "diagnose(fn, {})")
    has_aux = checked_flag(has_aux, "diagnose(fn, has_aux={})")
    checked_target(target, "diagnose(fn, target={})")
    name = getattr(fn, "__name__", type(fn).__name__)
    call = f"diagnose({name})"
    scaler = find_scaler(loss_scale, call)
    executables = Executables()

    @functools.wraps(fn, updated=())
    @undisturbed()
    def diagnosed(*args: PyTree, **kwargs: PyTree) -> Diagnosis:
        called = functools.partial(
            losses.loss_call, fn, args, kwargs, argnums, has_aux, call, cpu_of(target)
        )
        arguments = functools.partial(nonfinite_inputs, fn, args, kwargs)
        with executables.compiling(call) as compile_:
            with losses.called_beside_f32(called, policies) as low:
                runs = _ran(compile_, low, policies, scaler, arguments)
            return _diagnosis(name, runs, Checks(called, runs, compile_))

    return Waiting(diagnosed, call, "Diagnosis")


def _diagnosis(name: str, runs: Runs, checks: Checks) -> Diagnosis:
    """Returns what the runs of a call tell; the suggested policy is tried."""
    policy, is_finite_itself = runs.policy, runs.is_finite_itself
    findings = advise(runs)
    if not is_finite_itself:
        findings, is_finite_itself = checks.with_function_tried(findings)
    if is_finite_itself and not (runs.is_finite and policy == runs.given):
        # No policy mends a loss scale that is too large.
        scale = min(runs.scale, runs.suggested_scale)
        policy, findings = checks.checked(findings, scale)
    return Diagnosis(
        name,
        str(runs.given),
        runs.value,
        runs.sites,
        runs.reference,
        dict(runs.gradients),
        runs.suggested_scale,
        policy,
        tuple(each.text for each in findings),
    )


def _ran(
    compile_: Compile,
    call: LossCall,
    given: PolicyMap,
    scaler: Any,
    nonfinite_arguments: Callable[[], list[str]],
) -> Runs:
    """Runs all programs of a call, and puts together what they tell."""
    rows, program = read_plan(call.call), call.call.traced
    places = Places(rows, program.jaxpr)
    traced, plan = program.as_traced(call.arrays), plan_as_traced(program.jaxpr)
    measured = functools.partial(programs.measured, compile_, call)
    scaled = (lambda loss: loss) if scaler is None else scaler.scale
    of_low = measured(call.plan, call.arrays, scaled)
    of_full = measured(plan, traced, lambda loss: loss)
    of_errors = None
    body = jaxprs.body_of(program.jaxpr)
    # Both runs would write to one mutable array of the caller, or repeat an effect.
    shared = map(jaxprs.is_mutable, (*body.jaxpr.constvars, *body.jaxpr.invars))
    if not (jaxprs.returns_from_effects(body) or any(shared)):
        of_errors = errors(compile_, call.plan, call.arrays, traced)
    low, full, apart = of_low(), of_full(), of_errors and of_errors()
    roundoff = float(jnp.finfo(given.default.compute_dtype).eps) / 2
    gradients, is_finite = _compared(compile_, call, low, full, scaler)
    return Runs(
        given,
        sites_of(low, places, apart, roundoff),
        sites_of(full, places, None, roundoff),
        call.value(low.outputs),
        gradients,
        *is_finite,
        scale=1.0 if scaler is None else float(scaler.value),
        casts=scaled_casts(low, places),
        arguments=() if is_finite[0] else nonfinite_arguments(),
        rows=rows,
    )


def _compared(
    compile_: Compile,
    call: LossCall,
    low: programs.Program,
    full: programs.Program,
    scaler: Any,
) -> tuple[dict[str, Gradient], list[bool]]:
    """Compares what both programs returned; compiles one program.

    Returns the figures of each gradient, unscaled; whether value and gradients are
    finite under the policy, and in the reference.
    """
    mesh = meshes.mesh_of(low.gradients)
    layouts = [layout_of(each.dtype) for each in low.gradients]

    def measured(low: _Returned, full: _Returned) -> Any:
        finite = [ends_well(call, *each) for each in (low, full)]
        (_, gradients), (_, others) = low, full
        gradients = gradients if scaler is None else scaler.unscale(list(gradients))
        apart = distances.distances(list(zip(gradients, others, strict=True)), mesh)
        counts = []
        for layout in dict.fromkeys(layouts):
            pairs = zip(gradients, layouts, strict=True)
            counts.append(counted([x for x, of in pairs if of == layout], layout, mesh))
        return counts, apart, finite

    both = tuple((each.outputs, list(each.gradients)) for each in (low, full))
    size = sum(each.size for each in low.gradients)
    compiling = compile_(measured, *both, options=lambda: programs.options_for(size))
    found, apart, finite = jax.device_get(compiling.result()(*both))
    rows = {
        layout: zip(*each, strict=True)
        for layout, each in zip(dict.fromkeys(layouts), found, strict=True)
    }
    errors_of, gradients = distances.relative(apart).tolist(), {}
    for key, array, layout, error in zip(
        call.keys.values(), low.gradients, layouts, errors_of, strict=True
    ):
        counts, extremes = next(rows[layout])
        one = Figures(counts, extremes, layout)
        numbers = one.amax, one.amin, one.zeros, one.nonfinite
        gradients[key] = Gradient(*numbers, array.size, error)
    return gradients, list(map(bool, finite))
