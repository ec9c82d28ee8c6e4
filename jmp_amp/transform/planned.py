"""A call of a function, traced and planned; nothing is executed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax

from jmp_amp.plan.dataflow.values import traced_dtype
from jmp_amp.plan.plan import Plan
from jmp_amp.plan.planner import plan_program
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.jaxprs import ClosedJaxpr, Value, aval_of
from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.transform.calls import traced_call
from jmp_amp.transform.scopes import norm_policy
from jmp_amp.transform.unused_names import warn_of_unused_names


class PlannedCall(NamedTuple):
    """A call of a function, traced and planned.

    Attributes:
      plan: its plan.
      jaxpr: the closed jaxpr of the function as it is, from arrays to arrays.
      arrays: the inputs of the plan.
      returned: returns what the call does, given the outputs of the plan, and writes to
        nnx objects.
      seen: the same, and writes nothing: objects come back as None.
      numbered: as in `TracedCall`.
      policies: the map that it was planned with.
      cpu: the CPU that the plan is for; None for a GPU or a TPU.
    """

    plan: Plan
    jaxpr: ClosedJaxpr
    arrays: list[Value]
    returned: Callable[[Sequence[Value]], PyTree]
    seen: Callable[[Sequence[Value]], PyTree]
    numbered: Callable[[], tuple[tuple[PyTree, ...], dict[str, PyTree]]]
    policies: PolicyMap
    cpu: Cpu | None = None

    def as_it_is(self, arrays: Sequence[Value]) -> list[Value]:
        """Runs the function without the plan."""
        return binding.run_as_traced(jaxprs.body_of(self.jaxpr), self.as_traced(arrays))

    def as_traced(self, arrays: Sequence[Value]) -> list[Value]:
        """Returns inputs in the dtypes that the program was traced with."""
        # Parameters may be stored in half precision, and caches.
        return [
            jax.lax.convert_element_type(x, aval_of(v).dtype)
            if traced_dtype(v) is not None
            else x
            for x, v in zip(arrays, self.jaxpr.jaxpr.invars, strict=True)
        ]


@contextmanager
def planned_call(
    fn: AnyFn,
    policies: PolicyMap,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    call: str,
    cpu: Cpu | None = None,
    notes_modules: bool = False,
) -> Iterator[PlannedCall]:
    """Traces and plans `fn(*args, **kwargs)`, see `calls.traced_call`.

    `cpu` is the CPU that the plan is for; None for a GPU or a TPU.
    """
    with traced_call(fn, policies, args, kwargs, call, notes_modules, cpu) as traced:
        plan = plan_program(
            traced.jaxpr,
            policies.default,
            traced.stored,
            traced.states,
            cpu,
            traced.entries,
            _norms(policies),
        )
        warn_of_unused_names(plan, policies)
        yield PlannedCall(
            plan,
            traced.jaxpr,
            traced.arrays,
            traced.returned,
            traced.seen,
            traced.numbered,
            policies,
            cpu,
        )


def _norms(policies: PolicyMap) -> frozenset[Policy]:
    """Returns the policies of norms that the map gives to no other module."""
    chosen = {policies.default, *(policy for _, policy in policies.entries)}
    return frozenset(map(norm_policy, chosen)) - chosen
