"""Planning: from a traced program and a policy to the dtype of every equation.

Three passes over a body, each over its inner bodies too, and none of them executes
anything:

1. forward, *where do values come from?* Every value is *free* (parameters, inputs,
   constants and what is computed from them alone), *low* (made by a half-precision
   operation) or *full* (made by an f32 operation from activations).
2. backward, *where do they go?* A value that only f32 operations read is better made in
   f32 too; a parameter that only half-precision operations read is cast before it is
   broadcast or looked up.
3. forward again: the dtype in which every equation reads its operands.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_amp import bounds, jaxprs, rules, scopes
from jmp_amp.decisions import (
    Decision,
    Known,
    Origin,
    castable,
    decide,
    is_constant,
    traced_dtype,
)
from jmp_amp.dtypes import BF16, F16, F32, is_castable, is_half
from jmp_amp.islands import find_islands
from jmp_amp.jaxprs import Body
from jmp_amp.plan import EquationPlan, Plan, RuleContext
from jmp_amp.policy import Policy
from jmp_amp.rules import OpClass, Rule
from jmp_amp.scopes import Region


class Demand(enum.IntFlag):
    """What the consumers of a value read it in; comparisons read it as it is."""

    NONE = 0
    F16 = 1
    BF16 = 2
    F32 = 4


def plan_program(closed_jaxpr: Any, policy: Policy) -> Plan:
    """Returns the plan of a traced function whose arguments are all free.

    Args:
      closed_jaxpr: what `jaxprs.trace` returned.
      policy: its `compute_dtype` is that of the low equations; outputs that were
        traced in f32 are returned in its `output_dtype`.
    """
    body = jaxprs.body_of(closed_jaxpr)
    region = Region("", policy)
    known = [Known(Origin.FREE, None, True, region)] * len(body.jaxpr.invars)
    outputs = [
        None
        if not castable(v)
        else policy.output_dtype
        if v.aval.dtype == F32
        else v.aval.dtype
        for v in body.jaxpr.outvars
    ]
    reads = [traced_dtype(v) for v in body.jaxpr.invars]
    return _Planner().plan(body, known, reads, outputs, region, None)


def plan_derivative_rule(
    eqn: Any, planned: EquationPlan, differentiated: Sequence[int]
) -> Plan:
    """Returns the plan of the derivative rule of a planned `custom_jvp` equation.

    The inputs are the operands in the dtypes that the plan gave them and the tangents
    of those at the positions `differentiated`, the outputs likewise.
    """
    assert planned.body is not None and planned.rule_context is not None
    context = planned.rule_context
    traced = jaxprs.trace_derivative_rule(eqn, differentiated)
    known = [*context.known, *(context.known[i] for i in differentiated)]
    known = [dataclasses.replace(k, bounds=None) for k in known]
    reads = [*planned.reads, *(planned.reads[i] for i in differentiated)]
    tangents = [
        dtype or v.aval.dtype
        for dtype, v in zip(planned.writes, eqn.outvars, strict=True)
        if jnp.issubdtype(v.aval.dtype, jnp.inexact)
    ]
    tangents = [dtype if is_castable(dtype) else None for dtype in tangents]
    return _Planner().plan(
        jaxprs.body_of(traced),
        known,
        reads,
        [*planned.writes, *tangents],
        context.region,
        context.inherited,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """The forward pass over one equation: a decision, or for a call a flow."""

    region: Region
    views: tuple[Known, ...]
    results: tuple[Known, ...]
    decision: Decision | None = None
    flow: _Flow | None = None
    inherited: Rule | None = None  # by the body of a call


@dataclasses.dataclass(frozen=True, eq=False)
class _Flow:
    """The forward pass over one body."""

    body: Body
    region: Region
    known: dict[Any, Known]
    steps: tuple[_Step, ...]
    outputs: tuple[Known, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Chosen:
    """The backward pass over one equation."""

    dtype: np.dtype | None
    reason: str
    store: np.dtype | None = None  # the dtype in which the results are kept
    body: _Choice | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Choice:
    """The backward pass over one body, with the demands on its inputs and outputs."""

    equations: tuple[_Chosen, ...]
    inputs: tuple[Demand, ...]
    outputs: tuple[Demand, ...]


class _Planner:
    """The three passes; remembers the bodies it has seen, so that each is done once."""

    def __init__(self) -> None:
        self._flows: dict[Any, _Flow] = {}
        self._choices: dict[Any, _Choice] = {}
        self._plans: dict[Any, Plan] = {}

    def plan(
        self,
        body: Body,
        known: Sequence[Known],
        reads: Sequence[np.dtype | None],
        outputs: Sequence[np.dtype | None],
        region: Region,
        inherited: Rule | None,
    ) -> Plan:
        flow = self._forward(body, tuple(known), region, inherited)
        choice = self._backward(flow, tuple(_demand(dtype) for dtype in outputs))
        return self._settle(flow, choice, tuple(reads), tuple(outputs), True)

    # Where do values come from?

    def _forward(
        self,
        body: Body,
        inputs: tuple[Known, ...],
        region: Region,
        inherited: Rule | None,
    ) -> _Flow:
        key = id(body.jaxpr), inputs, region, inherited
        if key in self._flows:
            return self._flows[key]
        jaxpr = body.jaxpr
        uses = collections.Counter(
            atom
            for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
            for atom in atoms
            if not isinstance(atom, jaxprs.Literal)
        )
        known = {
            var: dataclasses.replace(k, shared=k.shared or uses[var] > 1)
            for var, k in zip(jaxpr.invars, inputs, strict=True)
        }
        for var, const in zip(jaxpr.constvars, body.consts, strict=True):
            limits = bounds.bounds_of_constant(const)
            known[var] = Known(Origin.FREE, limits, True, region)
        makers: dict[Any, Any] = {}
        steps = []
        for eqn in jaxpr.eqns:
            here = scopes.region_of(jaxprs.scope_text(eqn), region)
            views = tuple(_view(_known(atom, known, here), here) for atom in eqn.invars)
            step = self._step(eqn, views, here, inherited, makers)
            steps.append(step)
            for var, result in zip(eqn.outvars, step.results, strict=True):
                known[var] = dataclasses.replace(result, shared=uses[var] > 1)
                makers[var] = eqn
        outputs = tuple(
            _view(_known(atom, known, region), region) for atom in jaxpr.outvars
        )
        flow = _Flow(body, region, known, tuple(steps), outputs)
        self._flows[key] = flow
        return flow

    def _step(
        self,
        eqn: Any,
        views: tuple[Known, ...],
        region: Region,
        inherited: Rule | None,
        makers: dict[Any, Any],
    ) -> _Step:
        rule = rules.rule_for(eqn, region.policy, inherited)
        inner = jaxprs.inner_body(eqn)
        if inner is None:
            assert rule is not None
            decision = decide(eqn, rule, region, views, makers)
            if decision.passes_on:
                results = tuple(dataclasses.replace(v, region=region) for v in views)
            else:
                results = (decision.result,) * len(eqn.outvars)
            return _Step(region, views, results, decision)
        inputs = tuple(dataclasses.replace(v, region=region) for v in views)
        flow = self._forward(inner, inputs, region, rule)
        results = tuple(dataclasses.replace(v, region=region) for v in flow.outputs)
        return _Step(region, inputs, results, flow=flow, inherited=rule)

    # Where do they go?

    def _backward(self, flow: _Flow, outputs: tuple[Demand, ...]) -> _Choice:
        key = flow, outputs
        if key in self._choices:
            return self._choices[key]
        jaxpr = flow.body.jaxpr
        demands: dict[Any, Demand] = {}
        uses: dict[Any, int] = {}

        def ask(atom: Any, demand: Demand, region: Region) -> None:
            if not isinstance(atom, jaxprs.Literal):
                if demand == Demand.F32 and _takes_half(flow.known[atom], region):
                    demand = _demand(region.policy.output_dtype)
                demands[atom] = demands.get(atom, Demand.NONE) | demand
                uses[atom] = uses.get(atom, 0) + 1

        for atom, demand in zip(jaxpr.outvars, outputs, strict=True):
            ask(atom, demand, flow.region)
        chosen: list[_Chosen] = []
        for eqn, step in zip(reversed(jaxpr.eqns), reversed(flow.steps), strict=True):
            wanted = tuple(demands.get(var, Demand.NONE) for var in eqn.outvars)
            if step.flow is not None:
                body = self._backward(step.flow, wanted)
                chosen.append(_Chosen(None, "a call: its body is planned", body=body))
                asked = body.inputs
            else:
                assert step.decision is not None
                once = all(uses.get(var, 0) == 1 for var in eqn.outvars)
                chosen.append(_choose(step.decision, step.region, wanted, once))
                asked = wanted
                if not step.decision.passes_on:
                    asked = _operand_demands(eqn, chosen[-1].dtype, step.decision)
            for atom, demand in zip(eqn.invars, asked, strict=True):
                ask(atom, demand, step.region)
        inputs = tuple(demands.get(var, Demand.NONE) for var in jaxpr.invars)
        choice = _Choice(tuple(reversed(chosen)), inputs, outputs)
        self._choices[key] = choice
        return choice

    # The dtype in which every equation reads its operands.

    def _settle(
        self,
        flow: _Flow,
        choice: _Choice,
        inputs: tuple[np.dtype | None, ...],
        outputs: tuple[np.dtype | None, ...] | None,
        saves: bool,
    ) -> Plan:
        """`saves`: differentiation of the body saves values, which islands reduce."""
        key = choice, inputs, outputs, saves
        if key in self._plans:
            return self._plans[key]
        jaxpr = flow.body.jaxpr
        held = dict(zip(jaxpr.invars, inputs, strict=True))
        held.update((var, traced_dtype(var)) for var in jaxpr.constvars)

        def dtype_of(atom: Any) -> np.dtype | None:
            if isinstance(atom, jaxprs.Literal):
                return traced_dtype(atom)
            return held[atom]

        def handed_on(atom: Any, region: Region, demand: Demand) -> np.dtype | None:
            """The dtype of a value that goes into or out of a body."""
            dtype = dtype_of(atom)
            if dtype is None or isinstance(atom, jaxprs.Literal):
                return dtype
            made_in = flow.known[atom].region
            leaves = not made_in.holds(region)
            if leaves and demand != Demand.F32 and not is_constant(flow.known[atom]):
                output = made_in.policy.output_dtype
                return output if is_half(output) else dtype
            return dtype

        def handed_out(atom: Any, demand: Demand) -> np.dtype | None:
            """The dtype of an output of a body: half, if nobody reads it in f32."""
            dtype = handed_on(atom, flow.region, demand)
            low = flow.region.policy.compute_dtype
            from_activations = (
                not isinstance(atom, jaxprs.Literal)
                and flow.known[atom].origin != Origin.FREE
            )
            if demand == _demand(low) and dtype == F32 and from_activations:
                return low
            return dtype

        def handed_in(
            eqn: Any, atom: Any, view: Known, demand: Demand
        ) -> np.dtype | None:
            """The dtype of an operand of a call.

            If the body reads an activation in one dtype only, it gets the cast that
            the other consumers share; a checkpoint would keep the wider one.
            """
            dtype = handed_on(atom, view.region, demand)
            if dtype is None or view.origin == Origin.FREE:
                return dtype
            low = view.region.policy.compute_dtype
            if demand == Demand.F32 and view.shared and not jaxprs.is_checkpoint(eqn):
                return F32
            return low if demand == _demand(low) and dtype == F32 else dtype

        equations = []
        for eqn, step, chosen in zip(
            jaxpr.eqns, flow.steps, choice.equations, strict=True
        ):
            if step.flow is not None:
                assert chosen.body is not None
                reads = tuple(
                    handed_in(eqn, atom, view, demand)
                    for atom, view, demand in zip(
                        eqn.invars, step.views, chosen.body.inputs, strict=True
                    )
                )
                inner_saves = saves and jaxprs.saves_residuals(eqn)
                body = self._settle(step.flow, chosen.body, reads, None, inner_saves)
                name = jaxprs.function_name(eqn) or eqn.primitive.name
                rule = step.inherited or Rule(OpClass.FOLLOW, chosen.reason, name)
                context = RuleContext(step.views, step.region, step.inherited)
                planned = EquationPlan(
                    rule,
                    None,
                    chosen.reason,
                    reads,
                    body.outputs,
                    body=body,
                    rule_context=context if jaxprs.is_custom_jvp(eqn) else None,
                )
            else:
                decision = step.decision
                assert decision is not None
                reads = _reads(eqn, chosen.dtype, decision, step.views, dtype_of)
                writes = _writes(eqn, chosen, decision, reads)
                planned = EquationPlan(
                    decision.rule,
                    chosen.dtype,
                    chosen.reason,
                    reads,
                    writes,
                    saturate=decision.saturate and chosen.dtype != F32,
                    f32_result=decision.f32_result,
                )
            held.update(zip(eqn.outvars, planned.writes, strict=True))
            equations.append(planned)
        if outputs is None:
            outputs = tuple(
                handed_out(atom, demand)
                for atom, demand in zip(jaxpr.outvars, choice.outputs, strict=True)
            )
        plan = Plan(
            flow.body,
            tuple(equations),
            outputs,
            frozenset(var for var, known in flow.known.items() if known.as_parameter),
            find_islands(
                jaxpr,
                [planned.rule for planned in equations],
                [planned.reads for planned in equations],
                outputs,
                held,
                lambda var: flow.known[var].origin != Origin.FREE,
            )
            if saves
            else (),
        )
        self._plans[key] = plan
        return plan


def _known(atom: Any, known: dict[Any, Known], region: Region) -> Known:
    if isinstance(atom, jaxprs.Literal):
        limits = bounds.bounds_of_constant(atom.val)
        return Known(Origin.FREE, limits, False, region)
    return known[atom]


def _view(known: Known, region: Region) -> Known:
    """What a consumer in `region` sees: a value that left its scope is handed on."""
    if known.region.holds(region) or is_constant(known):
        return known
    half = is_half(known.region.policy.output_dtype)
    origin = Origin.LOW if half else Origin.FULL
    return dataclasses.replace(known, origin=origin, as_parameter=False)


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


def _demand(dtype: np.dtype | None) -> Demand:
    if dtype is None:
        return Demand.NONE
    return {F16: Demand.F16, BF16: Demand.BF16, F32: Demand.F32}[dtype]


def _choose(
    decision: Decision, region: Region, wanted: Sequence[Demand], once: bool
) -> _Chosen:
    """Returns the decision as the consumers of the results change it."""
    total = Demand.NONE
    for demand in wanted:
        total |= demand
    low = region.policy.compute_dtype
    if decision.may_rise and total == Demand.F32:
        return _Chosen(F32, "only f32 operations read it")
    if decision.may_sink and total == _demand(low) and once:
        return _Chosen(low, "moves parameters that only half precision reads")
    store = low if decision.may_store_half and total == _demand(low) else None
    return _Chosen(decision.dtype, decision.reason, store)


def _operand_demands(
    eqn: Any, dtype: np.dtype | None, decision: Decision
) -> tuple[Demand, ...]:
    if jaxprs.is_conversion(eqn) and not decision.as_traced:
        return (Demand.NONE,)
    if dtype is None and not decision.as_traced:
        return (Demand.NONE,) * len(eqn.invars)
    return tuple(
        _demand(traced if dtype is None or traced is None else dtype)
        for traced in map(traced_dtype, eqn.invars)
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
    chosen: _Chosen,
    decision: Decision,
    reads: tuple[np.dtype | None, ...],
) -> tuple[np.dtype | None, ...]:
    if decision.passes_on or (jaxprs.is_conversion(eqn) and not decision.as_traced):
        return reads
    dtype = F32 if decision.f32_result else chosen.store or chosen.dtype
    return tuple(
        dtype or var.aval.dtype if castable(var) else None for var in eqn.outvars
    )
