"""The second pass of the plan: where do values go?

A value that only f32 operations read is better made in f32 too; a parameter that only
half-precision operations read is cast before it is broadcast or looked up.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp_amp.plan import jaxprs
from jmp_amp.plan.decisions import Decision, Known, Origin, traced_dtype
from jmp_amp.plan.origins import Flow, Step, carry_dtype
from jmp_amp.plan.regions import Region
from jmp_amp.policies.dtypes import BF16, F16, F32, is_half


class Demand(enum.IntFlag):
    """What the consumers of a value read it in; comparisons read it as it is."""

    NONE = 0
    F16 = 1
    BF16 = 2
    F32 = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """The backward pass over one equation.

    Attributes:
      dtype: the dtype of the computation; None if it runs as traced or is a call.
      reason: why, in words.
      store: the dtype in which the results are kept, if not the computation's.
      bodies: the choices for its bodies.
      asked: the demands on its operands.
      often: which of its operands it may read more than once.
    """

    dtype: np.dtype | None
    reason: str
    asked: tuple[Demand, ...]
    store: np.dtype | None = None
    bodies: tuple[Choice, ...] = ()
    often: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The backward pass over one body, with the demands on its inputs and outputs.

    `often` tells which of its inputs are read more than once.
    """

    equations: tuple[Chosen, ...]
    inputs: tuple[Demand, ...]
    outputs: tuple[Demand, ...]
    often: tuple[bool, ...]


class Demands:
    """Goes back through flows; through each once for what is asked of its outputs."""

    def __init__(self) -> None:
        self._choices: dict[Any, Choice] = {}

    def on(
        self, flow: Flow, outputs: tuple[Demand, ...], often: tuple[bool, ...]
    ) -> Choice:
        """Returns the choice for every equation of a body.

        Args:
          flow: the forward pass over it.
          outputs: what is asked of its outputs.
          often: which of its outputs are read more than once.
        """
        key = flow, outputs, often
        if key in self._choices:
            return self._choices[key]
        jaxpr = flow.body.jaxpr
        demands: dict[Any, Demand] = {}
        uses: dict[Any, int] = {}

        def ask(atom: Any, demand: Demand, region: Region, often: bool) -> None:
            if not isinstance(atom, jaxprs.Literal):
                if demand == Demand.F32 and _takes_half(flow.known[atom], region):
                    demand = demand_of(region.policy.output_dtype)
                demands[atom] = demands.get(atom, Demand.NONE) | demand
                uses[atom] = uses.get(atom, 0) + 1 + often

        for atom, demand, many in zip(jaxpr.outvars, outputs, often, strict=True):
            ask(atom, demand, flow.region, many)
        chosen: list[Chosen] = []
        for eqn, step in zip(reversed(jaxpr.eqns), reversed(flow.steps), strict=True):
            wanted = tuple(demands.get(var, Demand.NONE) for var in eqn.outvars)
            shared = tuple(uses.get(var, 0) > 1 for var in eqn.outvars)
            if step.flows:
                made = self._bodies(eqn, step, flow, wanted, shared)
                many = made.often
            else:
                made = _choose(eqn, step, wanted, not any(shared))
                assert step.decision is not None
                # A result that is an operand is read as often as the operand.
                passed_on = step.decision.passes_on and any(shared)
                many = (passed_on,) * len(eqn.invars)
            chosen.append(made)
            for atom, demand, each in zip(eqn.invars, made.asked, many, strict=True):
                ask(atom, demand, step.region, each)
        inputs = tuple(demands.get(var, Demand.NONE) for var in jaxpr.invars)
        read = tuple(uses.get(var, 0) > 1 for var in jaxpr.invars)
        choice = Choice(tuple(reversed(chosen)), inputs, outputs, read)
        self._choices[key] = choice
        return choice

    def _bodies(
        self,
        eqn: Any,
        step: Step,
        flow: Flow,
        wanted: tuple[Demand, ...],
        shared: tuple[bool, ...],
    ) -> Chosen:
        carried = jaxprs.carried(eqn)
        carry = tuple(
            demand_of(carry_dtype(step.views[i], eqn.invars[i])) for i in carried
        )
        outputs = carry + wanted[len(carry) :]
        wants, many = [outputs] * len(step.flows), [shared] * len(step.flows)
        if jaxprs.is_while(eqn):
            # Its condition returns a boolean.
            wants[0], many[0] = (Demand.NONE,), (False,)
        bodies = tuple(map(self.on, step.flows, wants, many))
        asked = [Demand.NONE] * len(eqn.invars)
        # A loop reads its constants in every turn, and of what it goes through a part
        # in each, which is where parameters are cast.
        often = [False] * len(eqn.invars)
        for index, x in enumerate(eqn.invars if jaxprs.is_loop(eqn) else ()):
            often[index] = index < carried.start or (
                index >= carried.stop and _is_parameter(x, flow)
            )
        for (_, operands), body in zip(step.inner, bodies, strict=True):
            for i, demand, each in zip(operands, body.inputs, body.often, strict=True):
                asked[i] |= demand
                often[i] |= each
        for i, demand in zip(carried, carry, strict=True):
            # Cast before the loop, however often its turns read what is carried.
            asked[i], often[i] = demand, False
        reason = "a loop" if carried else "a call: its body is planned"
        return Chosen(None, reason, tuple(asked), bodies=bodies, often=tuple(often))


def demand_of(dtype: np.dtype | None) -> Demand:
    """Returns the demand of a consumer that reads `dtype`."""
    if dtype is None:
        return Demand.NONE
    return {F16: Demand.F16, BF16: Demand.BF16, F32: Demand.F32}[dtype]


def _is_parameter(atom: Any, flow: Flow) -> bool:
    return not isinstance(atom, jaxprs.Literal) and flow.known[atom].as_parameter


def _takes_half(known: Known, region: Region) -> bool:
    """Whether a value that enters `region` is rounded to half precision first.

    A norm hands on half precision, and takes it too: what it normalises is not kept in
    f32 for its sake. Its parameters and statistics are.
    """
    enters = known.region.path != region.path and known.region.holds(region)
    return (
        enters
        and is_half(region.policy.output_dtype)
        and known.origin != Origin.FULL
        and not known.as_parameter
    )


def _choose(eqn: Any, step: Step, wanted: Sequence[Demand], once: bool) -> Chosen:
    """Returns the decision as the consumers of the results change it."""
    decision = step.decision
    assert decision is not None
    if decision.passes_on:
        return Chosen(decision.dtype, decision.reason, tuple(wanted))
    total = Demand.NONE
    for demand in wanted:
        total |= demand
    low = step.region.policy.compute_dtype
    dtype, reason, store = decision.dtype, decision.reason, None
    if decision.may_rise and total == Demand.F32:
        dtype, reason = F32, "only f32 operations read it"
    elif decision.may_fall and total == demand_of(low):
        dtype, reason = low, "only half precision reads it"
    elif decision.may_sink and total == demand_of(low) and once:
        dtype, reason = low, "moves parameters that only half precision reads"
    elif decision.may_add_in_half and total == demand_of(low):
        dtype, reason = low, "adds up parameters that only half precision reads"
    elif (
        decision.may_store_half
        and total == demand_of(low)
        and (once or decision.result.costly)
    ):
        # Made of parameters and read twice, the sum of its gradients would be half.
        store = low
    return Chosen(dtype, reason, _operand_demands(eqn, dtype, decision), store)


def _operand_demands(
    eqn: Any, dtype: np.dtype | None, decision: Decision
) -> tuple[Demand, ...]:
    if jaxprs.is_conversion(eqn) and not decision.as_traced:
        return (Demand.NONE,)
    if dtype is None and not decision.as_traced:
        return (Demand.NONE,) * len(eqn.invars)
    return tuple(
        demand_of(traced if dtype is None or traced is None else dtype)
        for traced in map(traced_dtype, eqn.invars)
    )
