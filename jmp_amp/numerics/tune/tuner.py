"""`tune`: the cheapest policies by module that keep the gradient's error in bounds."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.numerics.calls import asked, losses
from jmp_amp.numerics.calls.executables import undisturbed
from jmp_amp.numerics.calls.losses import LossCall
from jmp_amp.numerics.tune.flagged import BASE, Flagged, Held
from jmp_amp.numerics.tune.groups import Group, members, module_paths, policies_in_force
from jmp_amp.numerics.tune.moves import menu_of
from jmp_amp.numerics.tune.searching import Search
from jmp_amp.numerics.tune.trials import Bench, gradient_flops, gradients_of
from jmp_amp.numerics.tune.tuning import Tuned, Tuning
from jmp_amp.plan.program import binding
from jmp_amp.plan.program.cpu_target import checked_target, cpu_of
from jmp_amp.plan.program.jaxprs import Value
from jmp_amp.policies.arguments import checked_flag
from jmp_amp.policies.deferred import Waiting, in_two_calls
from jmp_amp.policies.dtypes import F32, AnyFn, is_half
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map
from jmp_amp.reports.askers import own_dtypes
from jmp_amp.reports.reading import inputs_of, read_plan
from jmp_amp.training.gradients import Argnums


class NoPoliciesError(ValueError):
    """No policies meet the bound."""


@in_two_calls
def tune(
    fn: AnyFn,
    policy: Policy | PolicyMap | str = "mixed_float16",
    *,
    max_grad_error: float,
    argnums: Argnums = 0,
    has_aux: bool = False,
    candidates: Sequence[Policy | str] = ("float32",),
    progress: bool = False,
    target: str | None = None,
) -> Callable[..., Tuning]:
    """Returns a function that finds policies which keep a gradient accurate enough.

    It takes the arguments of `fn` and returns a `Tuning`. Its `policy` is a `PolicyMap`
    for `autocast`: `policy`, and another one for as few modules as it takes. The error
    of the gradient `g` is `|g - g32| / |g32|`, L2 over the whole gradient tree, where
    `g32` is the gradient of `fn` without any autocast. There is no loss scale: scale
    the loss in `fn` if f16 gradients underflow.

    * The bound holds for the compiled program of `autocast(fn, tuning.policy)`, which
      ran on these arguments, compiled with `xla_allow_excess_precision` off.
    * Each entry is needed: without any single one the bound is broken, measured too.
      If `policy` alone meets the bound there are no entries.
    * Modules that contain no other get entries first; their parents, whose entries
      reach their children too, only if that is not enough. Siblings that got the same
      policy share a glob, `"blocks/*/attn"`, that matches no other module.
    * What no module computes, and what the outermost one computes itself, gets f32 by
      the name of the function that was jitted or has a `custom_jvp`, else by operation:
      `Policy.with_full` of the map's default.

    One program is compiled that rounds each module's values if a flag of it says so; it
    tells how much of the error each module makes, and which maps are worth compiling.
    What `with_policy` or an autocast inside of `fn` marks has its own policy: a map
    reaches the modules in it alone. `Tuning.notes` say what `fn` asks for itself in
    half precision (`dtype=`, `astype`, half arrays), which is so in `g32` too.

    `fn` runs some hundred times, its callbacks too. nnx objects are left as they were.

    Args:
      fn: returns one real scalar, or a pair of that and anything if `has_aux`.
      policy: where to start: a `Policy`, its text, or a `PolicyMap`.
      max_grad_error: the bound, positive.
      argnums: which arguments are differentiated, as in `value_and_grad`.
      has_aux: whether `fn` returns `(loss, aux)`.
      candidates: policies that modules may get instead, from cheap to dear.
      progress: whether to show what is being done.
      target: what the plans are for, as `autocast` takes it. Give the one that you
        train with.

    Returns:
      A function of the arguments of `fn`, arrays and no shapes.

    Raises:
      TypeError: if an argument is of the wrong kind; from the function returned, if
        `fn` returns no real scalar or nothing can be differentiated.
      ValueError: if the bound is not positive, `argnums` name an argument twice, or a
        policy or `target` is unknown; from the function returned, if JAX cannot
        differentiate `fn`, if its gradient itself is not finite, or if no map of the
        candidates meets the bound.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> @jax.jit
      ... def cancel(h, offset):
      ...     return (h + offset) @ jnp.eye(4) - offset
      >>> def loss(w, x, offset):
      ...     return jnp.mean(cancel(x @ w[0], offset) @ w[1])
      >>> w, x, offset = jnp.full((2, 4, 4), 0.3), jnp.eye(4), jnp.full((1, 4), 900.0)
      >>> tuning = amp.tune(loss, max_grad_error=0.01)(w, x, offset)
      >>> print(tuning.policy, tuning.cost)
      p=f32,c=f16,o=f32,full=cancel 0.7142857142857143
    """
    call = "tune(fn)"
    losses.check_measured("tune", fn, argnums)
    start = as_policy_map(policy, "tune(fn, {})")
    bound = asked.checked_bound(max_grad_error)
    others = asked.checked_candidates(candidates)
    has_aux = checked_flag(has_aux, "tune(fn, has_aux={})")
    progress = checked_flag(progress, "tune(fn, progress={})")
    checked_target(target, "tune(fn, target={})")
    name = getattr(fn, "__name__", type(fn).__name__)

    @undisturbed()
    def tuned(*args: object, **kwargs: object) -> Tuning:
        loss = functools.partial(
            losses.loss_call, fn, args, kwargs, argnums, has_aux, call, cpu_of(target)
        )
        with asked.shown(progress) as say:
            bench = Bench(loss, call, say)
            return _Tuner(name, bench, start, others, bound).tuning()

    return Waiting(tuned, f"tune({name})", "Tuning")


@dataclasses.dataclass
class _Tuner:
    """One call of the function that `tune` returns."""

    name: str
    bench: Bench
    start: PolicyMap
    candidates: Sequence[Policy]
    bound: float
    notes: tuple[str, ...] = ()

    def tuning(self) -> Tuning:
        bench = self.bench
        # What the flags above `BASE` round to; the last of all leaves values.
        dtypes = [each.compute_dtype for each in self.candidates]
        others = [*(dtype if is_half(dtype) else None for dtype in dtypes), None]
        bench.refer(self.start)
        bench.say("tracing")
        with losses.called_beside_f32(bench.loss, self.start) as loss:
            found, rows = list(members(loss.plan)), read_plan(loss.call)
            gradient = binding.trace(gradients_of(loss, loss.run), loss.arrays)
            menu = menu_of(
                self.start,
                self.candidates,
                [each for each in found if not each.group.is_fixed],
                module_paths(loss.plan),
                gradient_flops(rows, gradient),
            )
            fixed = dict.fromkeys(m.group for m in found if m.group.is_fixed)
            groups = (*menu.groups, *fixed)
            bench.say("compiling the program with flags")
            levels_tell = self._expected(loss, groups, others)
        self.notes = tuple(own_dtypes(rows))
        bench.say("measuring modules")
        exact = others.index(None) + 1

        def alone(those: Collection[Group]) -> float:
            return levels_tell(tuple(BASE if g in those else exact for g in groups))

        def expected(levels: tuple[int, ...]) -> float:
            return levels_tell((*levels, *(BASE for _ in fixed)))

        search = Search(
            menu,
            self.bound,
            expected,
            bench.measured,
            lambda: bench.compilations,
            {group: alone({group}) for group in menu.groups},
        )
        policies = search.found()
        if policies is None:
            self._give_up(search)
        paths = {row.identity: row.module for row in rows}
        together: defaultdict[str, set[Group]] = defaultdict(set)
        for group, identity in found:
            # Of some modules all operations are one group.
            known = group if group in groups else Group(group.path)
            together[paths[identity]].add(known)
        of_modules = {path: alone(groups) for path, groups in together.items()}
        return self._result(search, policies, of_modules)

    def _result(
        self, search: Search, policies: PolicyMap, sensitivity: dict[str, float]
    ) -> Tuning:
        before, after = search.steps[self.start], search.steps[policies]
        return Tuning(
            function=self.name,
            policy=policies,
            max_grad_error=self.bound,
            error=after.error,
            error_before=before.error,
            cost=after.cost,
            cost_before=before.cost,
            modules=self._modules(policies, sensitivity),
            steps=tuple(search.steps.values()),
            compilations=self.bench.compilations,
            is_minimal=search.is_minimal,
            notes=self.notes,
        )

    def _expected(
        self, loss: LossCall, groups: Sequence[Group], others: Sequence[np.dtype | None]
    ) -> Callable[[tuple[int, ...]], float]:
        """Returns the error of the flagged program, given the level of each group."""
        dtypes, numbers = inputs_of(loss.call), {g: i for i, g in enumerate(groups)}

        def flagged(flags: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            walk = Flagged(flags, numbers, others)

            def run(arrays: Sequence[Value]) -> list[Value]:
                held = map(Held, loss.call.traced.as_traced(arrays), dtypes)
                return walk.run(loss.plan, list(held))

            return gradients_of(loss, run)(*arrays)

        flags = jnp.zeros(len(numbers), jnp.int32)
        compiled, _ = self.bench.compiled(flagged, flags, *loss.arrays, in_haste=True)
        arrays = list(loss.arrays)

        @functools.cache
        def expected(levels: tuple[int, ...]) -> float:
            return self.bench.error(compiled(jnp.asarray(levels, jnp.int32), *arrays))

        return expected

    def _modules(
        self, policies: PolicyMap, sensitivity: dict[str, float]
    ) -> dict[str, Tuned]:
        """Returns what each module of the program got under a map of policies."""
        with losses.called_beside_f32(self.bench.loss, policies) as loss:
            got = policies_in_force(loss.plan, policies.default)
            rows = read_plan(loss.call)
        flops, first = Counter[str](), dict[str, Policy]()
        for row in rows:
            flops[row.module] += row.flops
            if row.identity in got:
                first.setdefault(row.module, got[row.identity])
        return {
            path: Tuned(policy, sensitivity.get(path, 0.0), flops[path])
            for path, policy in first.items()
            if path in sensitivity or flops[path]
        }

    def _give_up(self, search: Search) -> NoReturn:
        best, measured = min(search.steps.items(), key=lambda item: item[1].error)
        remedy = 'Raise the bound, or end candidates with "float32".'
        if self.candidates[-1].compute_dtype == F32:
            # Nothing else is half then.
            remedy = (
                "Raise the bound: with_policy, an autocast inside and "
                "cast_inputs(fn, dtype) keep in half what they mark."
            )
        told = " ".join([remedy, *self.notes])
        raise NoPoliciesError(
            f"{self.bench.call}: no policies were found that meet "
            f"max_grad_error={self.bound!r}. The smallest error is "
            f"{measured.error:.3g}, with {str(best)!r}. {told}"
        )
