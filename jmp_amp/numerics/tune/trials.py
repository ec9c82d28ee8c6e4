"""Measuring gradients: programs that are compiled, and their errors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from jmp_amp.numerics.calls.losses import (
    LossCall,
    RunProgram,
    check_traced,
    loss_call,
)
from jmp_amp.numerics.calls.options import compiler_options
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.jaxprs import Value
from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports.costs import matmuls_as_traced
from jmp_amp.transform.interpreter import run

Gradients = list[np.ndarray]
# A program of smaller inputs runs fast anyway.
_FEW_ELEMENTS = 2**22


class Measured(NamedTuple):
    """The gradient under a map of policies, as its compiled program computes it.

    Attributes:
      error: `|g - g32| / |g32|`; inf if a gradient is not finite.
      cost: the share of the matmul FLOPs of its program in half precision or less.
    """

    error: float
    cost: float


class Bench:
    """The gradients of one call of a function, under policies.

    Attributes:
      call: the caller's call as written, for errors.
      compilations: how many programs were compiled.
      reference: the gradient of the function as it is.
    """

    def __init__(
        self,
        fn: AnyFn,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        argnums: Any,
        has_aux: bool,
        call: str,
        cpu: Cpu | None,
    ):
        self.call = call
        self._cpu = cpu
        self.compilations = 0
        self.reference: Gradients = []
        self._of_fn = fn, args, kwargs, argnums, has_aux
        self._measured: dict[PolicyMap, Measured] = {}

    @contextlib.contextmanager
    def loss(self, policies: PolicyMap, notes_modules: bool) -> Iterator[LossCall]:
        """Traces and plans the call under a map of policies."""
        fn, args, kwargs, argnums, has_aux = self._of_fn
        with loss_call(
            fn,
            policies,
            args,
            kwargs,
            argnums,
            has_aux,
            self.call,
            self._cpu,
            notes_modules,
        ) as loss:
            yield loss

    def compiled(
        self, function: Callable[..., Any], *args: Value, in_haste: bool = False
    ) -> tuple[Callable[..., Sequence[Value]], float]:
        """Returns a compiled function, and the share of its matmul FLOPs in half."""
        self.compilations += 1
        is_small = sum(np.size(x) for x in args) < _FEW_ELEMENTS
        options = compiler_options(fast=in_haste and is_small)
        traced = jax.jit(function).trace(*args)
        check_traced(traced, args, self.call)
        found = matmuls_as_traced(jaxprs.body_of(traced.jaxpr), 1)
        cost = found.flops_in_half / found.flops if found.flops else 0.0
        return traced.lower().compile(compiler_options=options), cost

    def refer(self, loss: LossCall) -> None:
        """Measures the reference.

        Raises:
          ValueError: if it is not finite.
        """
        compiled, _ = self.compiled(gradients_of(loss, loss.as_it_is), *loss.arrays)
        self.reference = on_host(compiled(*loss.arrays))
        for key, gradient in zip(loss.keys, self.reference, strict=True):
            if not np.all(np.isfinite(gradient)):
                raise ValueError(
                    f"{self.call}: the gradient of fn as it is, without a policy, is "
                    f"not finite at {key or 'its argument'}. No policy mends that: "
                    'mend fn first; diagnose(fn, "float32") tells where it begins.'
                )

    def error(self, gradients: Sequence[Value]) -> float:
        """Returns the relative distance of gradients to the reference, in f64."""
        return relative_error(on_host(gradients), self.reference)

    def measured(self, policies: PolicyMap) -> Measured:
        """Compiles and runs the call under a map of policies, once for each map."""
        if policies not in self._measured:
            with self.loss(policies, notes_modules=False) as loss:
                plan = loss.plan
                function = gradients_of(loss, lambda arrays: run(plan, arrays))
                compiled, cost = self.compiled(function, *loss.arrays)
                error = self.error(compiled(*loss.arrays))
            self._measured[policies] = Measured(error, cost)
        return self._measured[policies]


def gradients_of(
    loss: LossCall, run_program: RunProgram
) -> Callable[..., tuple[Value, ...]]:
    """Returns the gradient of a program of a call, a function of its inputs."""
    return lambda *arrays: loss.with_gradients(run_program)(*arrays)[1]


def on_host(gradients: Sequence[Value]) -> Gradients:
    return [np.asarray(each).astype(np.float64) for each in gradients]


def relative_error(gradients: Gradients, reference: Gradients) -> float:
    """Returns `|gradients - reference| / |reference|`, L2; inf if it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        pairs = zip(gradients, reference, strict=True)
        distance = math.hypot(*(_norm(a - b) for a, b in pairs))
    size = math.hypot(*map(_norm, reference))
    if not math.isfinite(distance):
        return math.inf
    if not distance:
        return 0.0
    return distance / size if size else math.inf


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.ravel()))
