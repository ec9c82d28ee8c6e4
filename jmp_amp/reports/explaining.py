"""`explain`: what autocast would do to a function, to be read before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import numpy as np

from jmp_amp.plan.program.cpu_target import Cpu, checked_target, cpu_of
from jmp_amp.policies.deferred import Waiting, in_two_calls
from jmp_amp.policies.dtypes import AnyFn
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map
from jmp_amp.reports.reading import inputs_of, read_plan
from jmp_amp.reports.report import Report
from jmp_amp.reports.rows import Equation
from jmp_amp.reports.saved_bytes import read_saved
from jmp_amp.reports.ways import Frame
from jmp_amp.transform.functions import check_function
from jmp_amp.transform.planned import planned_call


@in_two_calls
def explain(
    fn: AnyFn,
    policy: Policy | PolicyMap | str = "mixed_bfloat16",
    *,
    target: str | None = None,
) -> Callable[..., Report]:
    """Returns a function that reports the plan of a call of `autocast(fn, policy)`.

    It takes the arguments of `fn`, executes nothing, and returns a `Report`: the dtype
    of every operation and why, with its source line; the casts; the operations of
    matrix products in half precision; and the bytes kept for the backward pass. What
    the numbers do under this plan, `diagnose` measures. `Report.asked` is what is in
    half whatever the policy says. An autocast inside of `fn`, or one that `fn` is, is
    part of the plan: it has its own policy, as what `with_policy` marks.

    Args:
      fn: a function of pytrees, as `autocast` takes it.
      policy: a `Policy`, a text for `get_policy`, or a `PolicyMap`.
      target: what the plan is made for, as `autocast` takes it. For "cpu" the reasons
        begin with "on this CPU", and the saved bytes tell what f32 between products
        costs: they may be more than without autocast.

    Returns:
      A function of the arguments of `fn`; in place of arrays it takes
      `jax.ShapeDtypeStruct`s too.

    Raises:
      TypeError: if `fn` is not callable, `policy` is no policy or `target` no text.
      ValueError: if the compute dtype is none of float16, bfloat16 and float32, or
        `target` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> def loss(w, x):
      ...     return jnp.mean(jax.nn.relu(x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
      >>> report = amp.explain(loss, "mixed_float16")(w, w)
      >>> report.total.matmuls_in_half, report.total.matmuls
      (1, 1)
      >>> [(r.reason, r.operations) for r in report.stays_full][0]
      ('only f32 operations read it', ('max',))
    """
    check_function(fn, "explain", "explain", "(*args)")
    name = getattr(fn, "__name__", type(fn).__name__)
    policies = as_policy_map(policy, "explain(fn, {})")
    checked_target(target, "explain(fn, target={})")

    def explained(*args: object, **kwargs: object) -> Report:
        cpu = cpu_of(target)
        with planned_call(fn, policies, args, kwargs, "explain(fn)", cpu) as call:
            equations = read_plan(call)
            kept = read_saved(call, equations)
            program = Frame(call.plan, inputs_of(call))
        decided = {e.decided_by for e in equations if e.from_policy}
        chosen = [policies.default, *(each for _, each in policies.entries)]
        asked = {each.compute_dtype for each in chosen}
        named = {n for each in chosen for n in (*each.low, *each.full, *each.follow)}
        return Report(
            function=name,
            policy=str(policies),
            equations=equations,
            unused_rules=tuple(sorted(named - decided)),
            on_cpu=None if cpu is None else _on_cpu(cpu, asked, equations, program),
            _program=program,
            **kept._asdict(),
        )

    return Waiting(explained, f"explain({name})", "Report")


def _on_cpu(
    cpu: Cpu, asked: Set[np.dtype], equations: Sequence[Equation], program: Frame
) -> str:
    """Returns what a CPU makes of the half precision that a policy asks for."""

    def is_its_own(each: Equation) -> bool:
        place = program.place(each.identity) if each.identity else None
        return bool(place and place.planned.rewrite and place.planned.rewrite.dtype)

    others = [each for each in equations if not is_its_own(each)]
    own = any(each.runs_in_half for each in others)
    return cpu.in_words(asked, len(others) < len(equations), own)
