"""Measuring gradients: programs that are compiled, their errors and their costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from jmp_amp.numerics.calls import losses
from jmp_amp.numerics.calls.asked import Say, check_loss
from jmp_amp.numerics.calls.executables import compiler_options
from jmp_amp.numerics.calls.losses import LossCall, RunProgram
from jmp_amp.numerics.tune.tuning import Step
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import ClosedJaxpr, Value
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports.costs import matmuls_as_traced, products_as_traced
from jmp_amp.reports.reading import module_scopes
from jmp_amp.reports.rows import Equation

# A program of smaller inputs runs fast anyway.
_FEW_ELEMENTS = 2**22


@dataclasses.dataclass
class Bench:
    """The gradients of one call of a function, under policies.

    Attributes:
      loss: traces and plans the call under a map of policies, as `loss_call`.
      call: the caller's call as written, for errors.
      say: shows what is being done.
      compilations: how many programs were compiled.
      reference: the gradient of the function as it is, flat.
    """

    loss: Callable[..., AbstractContextManager[LossCall]]
    call: str
    say: Say
    compilations: int = 0
    reference: np.ndarray = dataclasses.field(init=False)

    def compiled(
        self, function: Callable[..., Any], *args: Value, in_haste: bool = False
    ) -> tuple[Callable[..., Sequence[Value]], float]:
        """Returns a compiled function, and the share of its matmul FLOPs in half."""
        self.compilations += 1
        is_small = sum(np.size(x) for x in args) < _FEW_ELEMENTS
        options = compiler_options(fast=in_haste and is_small)
        traced = jax.jit(function).trace(*args)
        losses.check_traced(traced, args, self.call)
        found = matmuls_as_traced(jaxprs.body_of(traced.jaxpr), 1)
        cost = found.flops_in_half / found.flops if found.flops else 0.0
        return traced.lower().compile(compiler_options=options), cost

    def refer(self, start: PolicyMap) -> None:
        """Measures the reference; raises a ValueError if it is not finite."""
        self.say("compiling the function as it is")
        traced = functools.partial(self.loss, notes_modules=False)
        with losses.called_as_it_is(traced, start) as loss:
            check_loss(loss)
            gradient = gradients_of(loss, loss.call.traced.as_it_is)
            gradients = self.compiled(gradient, *loss.arrays)[0](*loss.arrays)
        for key, gradient in zip(loss.keys.values(), gradients, strict=True):
            if not np.all(np.isfinite(gradient)):
                raise ValueError(
                    f"{self.call}: the gradient of fn as it is, without a policy, is "
                    f"not finite at {key or 'its argument'}. No policy mends that: "
                    'mend fn first; diagnose(fn, "float32") tells where it begins.'
                )
        self.reference = _flat(gradients)

    def error(self, gradients: Sequence[Value]) -> float:
        """Returns `|g - reference| / |reference|` in f64; inf if it is not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            distance = float(np.linalg.norm(_flat(gradients) - self.reference))
        size = float(np.linalg.norm(self.reference))
        if not distance:
            return 0.0
        return distance / size if size and math.isfinite(distance) else math.inf

    def measured(self, policies: PolicyMap) -> Step:
        """Compiles and runs the call under a map of policies."""
        self.say(f"measuring map {self.compilations - 1}: {str(policies)[:60]}")
        with self.loss(policies, notes_modules=False) as loss:
            compiled, cost = self.compiled(gradients_of(loss, loss.run), *loss.arrays)
            return Step(str(policies), self.error(compiled(*loss.arrays)), cost)


def gradients_of(
    loss: LossCall, run_program: RunProgram
) -> Callable[..., tuple[Value, ...]]:
    """Returns the gradient of a program of a call, a function of its inputs."""
    return lambda *arrays: loss.with_gradients(run_program)(*arrays)[1]


def gradient_flops(rows: Iterable[Equation], gradient: ClosedJaxpr) -> dict[str, int]:
    """Returns what each product of a function costs in its gradient, by identity.

    A layer has three products: one forward, and one for each gradient. The first layer
    has two: nobody asks for the gradient of the input. So the program of the gradient
    is read. The products of a module share what its products cost there.
    """
    rows = [row for row in rows if row.flops]
    forward: Counter[str] = Counter()
    for row in rows:
        forward[row.module] += row.flops
    both: Counter[str] = Counter()
    for around, cost in products_as_traced(jaxprs.body_of(gradient), 1):
        path = "/".join(name for eqn in around for name in module_scopes(eqn))
        both[path] += cost.flops
    found = {}
    for row in rows:
        alone = forward[row.module]
        found[row.identity] = row.flops * both.get(row.module, alone) // alone
    return found


def _flat(gradients: Sequence[Value]) -> np.ndarray:
    return np.concatenate([np.asarray(x).astype(np.float64).ravel() for x in gradients])
