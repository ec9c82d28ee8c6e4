"""Planning: from a traced program and a policy to the dtype of every equation.

Three passes over a body, each over its inner bodies too, and none of them executes
anything:

1. `flows`: where do values come from? Every value is *free* (parameters, inputs,
   constants and what is computed from them alone), *low* (made by a half-precision
   operation) or *full* (made by an f32 operation from activations).
2. `demands`: where do they go?
3. here: the dtype in which every equation reads its operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_amp.plan import jaxprs
from jmp_amp.plan.consumers import Choice, Chosen, Demand, Demands, demand_of
from jmp_amp.plan.decisions import (
    Decision,
    Known,
    Origin,
    castable,
    is_constant,
    traced_dtype,
)
from jmp_amp.plan.islands import Seen, find_islands, in_order
from jmp_amp.plan.jaxprs import Body
from jmp_amp.plan.origins import Flow, Flows, Step, carry_dtype
from jmp_amp.plan.plan import EquationPlan, Plan, RuleContext
from jmp_amp.plan.regions import Region
from jmp_amp.plan.rewrites import picks_from_rows
from jmp_amp.plan.rules import COMPARISONS, RECOMPUTED, OpClass, Rule
from jmp_amp.policies.dtypes import F32, is_castable, is_half
from jmp_amp.policies.policy import Policy

_Dtypes = tuple[np.dtype | None, ...]


def plan_program(
    closed_jaxpr: Any,
    policy: Policy,
    held: Sequence[np.dtype | None],
    states: Sequence[np.dtype | None],
) -> Plan:
    """Returns the plan of a traced function whose arguments are all free.

    Args:
      closed_jaxpr: what `jaxprs.trace` returned.
      policy: its `compute_dtype` is that of the low equations; outputs that were
        traced in f32 are returned in its `output_dtype`.
      held: the dtypes of the arguments that come in another one than they were traced
        in; None for the others.
      states: the dtypes of the outputs that have one of their own; None for the others.
    """
    body = jaxprs.body_of(closed_jaxpr)
    region = Region("", policy)
    known = [Known(Origin.FREE, None, True, region)] * len(body.jaxpr.invars)
    outputs = [
        None
        if not castable(v)
        else policy.output_dtype
        if v.aval.dtype == F32 and state is None
        else state or v.aval.dtype
        for v, state in zip(body.jaxpr.outvars, states, strict=True)
    ]
    reads = [
        dtype or traced_dtype(v)
        for v, dtype in zip(body.jaxpr.invars, held, strict=True)
    ]
    return _plan(body, known, reads, outputs, region, None)


def plan_derivative_rule(
    closed_jaxpr: Any, eqn: Any, planned: EquationPlan, differentiated: Sequence[int]
) -> Plan:
    """Returns the plan of the derivative rule of a planned `custom_jvp` equation.

    Args:
      closed_jaxpr: what `jaxprs.trace_derivative_rule` returned. Its inputs are the
        operands of `eqn` and the tangents of those at the positions `differentiated`,
        its outputs are the results and their tangents.
      eqn: the `custom_jvp` equation.
      planned: its plan, which gives the operands and the results their dtypes.
      differentiated: the positions of the operands that have a tangent.
    """
    assert planned.rule_context is not None
    context = planned.rule_context
    known = [*context.known, *(context.known[i] for i in differentiated)]
    known = [dataclasses.replace(k, bounds=None) for k in known]
    reads = [*planned.reads, *(planned.reads[i] for i in differentiated)]
    tangents = [
        dtype or v.aval.dtype
        for dtype, v in zip(planned.writes, eqn.outvars, strict=True)
        if jnp.issubdtype(v.aval.dtype, jnp.inexact)
    ]
    tangents = [dtype if is_castable(dtype) else None for dtype in tangents]
    return _plan(
        jaxprs.body_of(closed_jaxpr),
        known,
        reads,
        [*planned.writes, *tangents],
        context.region,
        context.inherited,
    )


def _plan(
    body: Body,
    known: Sequence[Known],
    reads: Sequence[np.dtype | None],
    outputs: Sequence[np.dtype | None],
    region: Region,
    inherited: Rule | None,
) -> Plan:
    flow = Flows().through(body, tuple(known), region, inherited)
    wanted = tuple(map(demand_of, outputs))
    choice = Demands().on(flow, wanted, (False,) * len(wanted))
    return _Planner().settle(flow, choice, tuple(reads), tuple(outputs), True)


class _Planner:
    """The last pass; through each body once for the dtypes that go in and out."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def settle(
        self,
        flow: Flow,
        choice: Choice,
        inputs: _Dtypes,
        outputs: _Dtypes | None,
        saves: bool,
    ) -> Plan:
        """Returns the plan of a body, given the dtypes in which its inputs come.

        Args:
          flow: the forward pass over it.
          choice: the backward pass.
          inputs: the dtypes of its inputs.
          outputs: those of its outputs; None lets it hand them out as it likes.
          saves: whether differentiation saves what it computes, which islands reduce.
        """
        key = choice, inputs, outputs, saves
        if key not in self._plans:
            self._plans[key] = self._settle(flow, choice, inputs, outputs, saves)
        return self._plans[key]

    def _settle(
        self,
        flow: Flow,
        choice: Choice,
        inputs: _Dtypes,
        outputs: _Dtypes | None,
        saves: bool,
    ) -> Plan:
        jaxpr = flow.body.jaxpr
        held = dict(zip(jaxpr.invars, inputs, strict=True))
        held.update((var, traced_dtype(var)) for var in jaxpr.constvars)
        values = _Held(flow, held)
        equations = []
        for eqn, step, chosen in zip(
            jaxpr.eqns, flow.steps, choice.equations, strict=True
        ):
            if step.flows:
                planned = self._bodies(eqn, step, chosen, values, saves)
            else:
                planned = _equation(eqn, step, chosen, values)
            held.update(zip(eqn.outvars, planned.writes, strict=True))
            equations.append(planned)
        if outputs is None:
            outputs = tuple(map(values.handed_out, jaxpr.outvars, choice.outputs))
        islands = ()
        if saves:
            islands = find_islands(
                Seen(
                    jaxpr,
                    [planned.dtype for planned in equations],
                    [planned.reads for planned in equations],
                    list(map(_is_recomputed, jaxpr.eqns, equations)),
                    outputs,
                    held,
                    lambda var: flow.known[var].origin != Origin.FREE,
                    lambda var: flow.known[var].as_parameter,
                )
            )
        return Plan(
            flow.body,
            tuple(equations),
            outputs,
            # What has gradients to be summed: they are f32, one by one, then.
            frozenset(
                v
                for v, known in flow.known.items()
                if known.origin == Origin.FREE and held[v] == F32
            ),
            in_order(jaxpr, islands),
        )

    def _bodies(
        self, eqn: Any, step: Step, chosen: Chosen, values: _Held, saves: bool
    ) -> EquationPlan:
        carried = jaxprs.carried(eqn)
        reads = tuple(
            carry_dtype(view, atom)
            if i in carried
            else values.handed_in(eqn, atom, view, demand)
            for i, (atom, view, demand) in enumerate(
                zip(eqn.invars, step.views, chosen.asked, strict=True)
            )
        )
        saves = saves and jaxprs.saves_residuals(eqn)
        given = [tuple(reads[i] for i in operands) for _, operands in step.inner]
        bodies = [
            self.settle(flow, choice, inputs, None, saves)
            for flow, choice, inputs in zip(
                step.flows, chosen.bodies, given, strict=True
            )
        ]
        writes = bodies[-1].outputs
        if carried or len(bodies) > 1:
            # What a loop hands from turn to turn, and what either branch returns, is of
            # one dtype.
            carry = tuple(reads[i] for i in carried)
            writes = carry + tuple(
                _common([body.outputs[i] for body in bodies], step.results[i], var)
                if not carried
                else writes[i]
                for i, var in enumerate(eqn.outvars)
                if i >= len(carry)
            )
            bodies = [
                body
                if index < len(bodies) - 1 and jaxprs.is_while(eqn)
                else self.settle(flow, choice, inputs, writes, saves)
                for index, (body, flow, choice, inputs) in enumerate(
                    zip(bodies, step.flows, chosen.bodies, given, strict=True)
                )
            ]
        name = jaxprs.function_name(eqn) or eqn.primitive.name
        rule = step.inherited or Rule(OpClass.FOLLOW, chosen.reason, name)
        context = RuleContext(step.views, step.region, step.inherited)
        return EquationPlan(
            rule,
            None,
            chosen.reason,
            reads,
            writes,
            bodies=tuple(bodies),
            rule_context=context if jaxprs.is_custom_jvp(eqn) else None,
        )


@dataclasses.dataclass(frozen=True)
class _Held:
    """The dtypes that the variables of a body are held in, as far as it is settled."""

    flow: Flow
    dtypes: dict[Any, np.dtype | None]

    def of(self, atom: Any) -> np.dtype | None:
        if isinstance(atom, jaxprs.Literal):
            return traced_dtype(atom)
        return self.dtypes[atom]

    def handed_out(self, atom: Any, demand: Demand) -> np.dtype | None:
        """The dtype of an output of a body: half, if nobody reads it in f32."""
        dtype = self._handed_on(atom, self.flow.region, demand)
        low = self.flow.region.policy.compute_dtype
        from_activations = (
            not isinstance(atom, jaxprs.Literal)
            and self.flow.known[atom].origin != Origin.FREE
        )
        if demand == demand_of(low) and dtype == F32 and from_activations:
            return low
        return dtype

    def handed_in(
        self, eqn: Any, atom: Any, view: Known, demand: Demand
    ) -> np.dtype | None:
        """The dtype of an operand of a call.

        If the body reads an activation in one dtype only, it gets the cast that the
        other consumers share; a checkpoint would keep the wider one.
        """
        dtype = self._handed_on(atom, view.region, demand)
        if dtype is None or view.origin == Origin.FREE:
            return dtype
        low = view.region.policy.compute_dtype
        if demand == Demand.F32 and view.shared and not jaxprs.is_checkpoint(eqn):
            return F32
        return low if demand == demand_of(low) and dtype == F32 else dtype

    def _handed_on(self, atom: Any, region: Region, demand: Demand) -> np.dtype | None:
        """The dtype of a value that goes into or out of a body."""
        dtype = self.of(atom)
        if dtype is None or isinstance(atom, jaxprs.Literal):
            return dtype
        known = self.flow.known[atom]
        leaves = not known.region.holds(region)
        if leaves and demand != Demand.F32 and not is_constant(known):
            output = known.region.policy.output_dtype
            return output if is_half(output) else dtype
        return dtype


def _common(
    dtypes: Sequence[np.dtype | None], result: Known, var: Any
) -> np.dtype | None:
    """The dtype of a value that one of several branches returns."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return carry_dtype(result, var)


def _is_recomputed(eqn: Any, planned: EquationPlan) -> bool:
    """Whether an equation is a call that computes in f32, and cheaply."""
    if not planned.bodies or not jaxprs.is_helper(eqn):
        return False
    (plan,) = planned.bodies
    return all(
        _is_recomputed(inner, p)
        if p.bodies
        else p.dtype in (F32, None) and inner.primitive.name in RECOMPUTED | COMPARISONS
        for inner, p in zip(plan.body.jaxpr.eqns, plan.equations, strict=True)
    )


def _equation(eqn: Any, step: Step, chosen: Chosen, values: _Held) -> EquationPlan:
    decision = step.decision
    assert decision is not None
    reads = _reads(eqn, chosen.dtype, decision, step.views, values.of)
    return EquationPlan(
        decision.rule,
        chosen.dtype,
        chosen.reason,
        reads,
        _writes(eqn, chosen, decision, reads),
        saturate=decision.saturate and chosen.dtype != F32,
        f32_result=decision.f32_result,
        picks=is_half(step.region.policy.compute_dtype)
        and decision.result.origin != Origin.FREE
        and picks_from_rows(eqn),
    )


def _reads(
    eqn: Any,
    dtype: np.dtype | None,
    decision: Decision,
    views: Sequence[Known],
    dtype_of: Callable[[Any], np.dtype | None],
) -> tuple[np.dtype | None, ...]:
    if decision.passes_on:
        return tuple(map(dtype_of, eqn.invars))
    if jaxprs.is_conversion(eqn) and not decision.as_traced:
        # An up-cast is made by whoever reads the result: up and down again is nothing.
        return (dtype_of(eqn.invars[0]) if dtype == F32 else dtype,)
    if dtype is None and decision.as_traced:
        return tuple(map(traced_dtype, eqn.invars))
    if dtype is None:
        # A comparison reads its activations as they are, and the rest alike.
        held = {
            dtype_of(atom)
            for atom, view in zip(eqn.invars, views, strict=True)
            if castable(atom) and view.origin != Origin.FREE
        }
        dtype = held.pop() if len(held) == 1 else F32
    return tuple(dtype if castable(atom) else None for atom in eqn.invars)


def _writes(
    eqn: Any,
    chosen: Chosen,
    decision: Decision,
    reads: tuple[np.dtype | None, ...],
) -> tuple[np.dtype | None, ...]:
    if decision.passes_on or (jaxprs.is_conversion(eqn) and not decision.as_traced):
        return reads
    dtype = F32 if decision.f32_result else chosen.store or chosen.dtype
    return tuple(
        dtype or var.aval.dtype if castable(var) else None for var in eqn.outvars
    )
