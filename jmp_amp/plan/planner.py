"""Planning: from a traced program and a policy to the dtype of every equation.

Three passes over a body, each over its inner bodies too. None of them traces or
executes anything:

1. `choices`: where do values come from? Every value is *free* (parameters, inputs,
   constants and values computed from them alone), *low* (made by a half-precision
   operation) or *full* (made by an f32 operation from activations). Every equation gets
   a decision, with options. If the program has derivatives of products in f32, this
   pass is done again: see `derivatives`.
2. `demands`: where do they go? The first option whose condition holds is taken.
3. here: the dtypes in which every equation reads and writes, and the blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.choose import modes
from jmp_amp.plan.choose.choices import flow_of
from jmp_amp.plan.choose.demands import BodyOutcome, Consumers, Outcome
from jmp_amp.plan.choose.flows import Flow, Step, carry_dtype
from jmp_amp.plan.choose.held import Held
from jmp_amp.plan.choose.modes import Demands, Dtypes, Mode, demand_of
from jmp_amp.plan.choose.uses import Use, Uses
from jmp_amp.plan.dataflow.gelus import Gelus
from jmp_amp.plan.dataflow.solver import once
from jmp_amp.plan.dataflow.values import Known, Origin, Trait, traced_dtype
from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.jaxprs import (
    Atom,
    Body,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Var,
    aval_of,
)
from jmp_amp.plan.program.regions import Entries, Region, outermost
from jmp_amp.plan.rewrites.f32_gradients import f32_gradients, moves_parameter
from jmp_amp.plan.rewrites.rewriting import Readers
from jmp_amp.plan.saved.blocks import Saving, find_blocks
from jmp_amp.plan.tables.rules import OpClass, Rule, rule_of_library
from jmp_amp.policies.dtypes import F32, is_castable, is_half
from jmp_amp.policies.policy import Policy


def plan_program(
    closed_jaxpr: ClosedJaxpr,
    policy: Policy,
    stored: Sequence[np.dtype | None],
    states: Sequence[np.dtype | None],
    cpu: Cpu | None = None,
    entries: Entries = (),
    norms: frozenset[Policy] = frozenset(),
) -> Plan:
    """Returns the plan of a traced function whose arguments are all free.

    Args:
      closed_jaxpr: the result of `binding.trace`.
      policy: its `compute_dtype` is that of the low equations; outputs that were
        traced in f32 are returned in its `output_dtype`.
      stored: for each argument, the dtype it is stored in if it was traced as f32;
        else None.
      states: for each output that updates a state, the dtype of the state; else None.
      cpu: the CPU that it is for; None for a GPU or a TPU.
      entries: those of a map that match name scopes of the program.
      norms: the policies that only norms have, for reasons in words.
    """
    body = jaxprs.body_of(closed_jaxpr)
    region = outermost(policy, cpu, entries, norms)
    argument = Known(Origin.FREE, None, region, frozenset((Trait.PARAMETER,)))
    outputs = [
        returned_dtype(v, state, policy)
        for v, state in zip(body.jaxpr.outvars, states, strict=True)
    ]
    reads = [
        dtype or traced_dtype(v)
        for v, dtype in zip(body.jaxpr.invars, stored, strict=True)
    ]
    uses = tuple(map(_returned_use, outputs))
    plan = _plan(
        body, [argument] * len(reads), reads, outputs, uses, region, None, Saving.BESIDE
    )
    return dataclasses.replace(plan, entries=entries) if entries else plan


def plan_derivative_rule(
    closed_jaxpr: ClosedJaxpr,
    eqn: Eqn,
    planned: EquationPlan,
    differentiated: Sequence[int],
) -> Plan:
    """Returns the plan of the derivative rule of a planned `custom_jvp` equation.

    Args:
      closed_jaxpr: the result of `trace_derivative_rule`. Its inputs are the
        operands of `eqn` and the tangents of those at the positions `differentiated`,
        its outputs are the results and their tangents.
      eqn: the `custom_jvp` equation.
      planned: its plan, which gives the operands and the results their dtypes.
      differentiated: the positions of the operands that have a tangent.
    """
    assert planned.rule_context is not None
    context = planned.rule_context
    moving = [context.views[i].having(Trait.TANGENT) for i in differentiated]
    known = [each._replace(bounds=None) for each in (*context.views, *moving)]
    reads = [*planned.reads, *(planned.reads[i] for i in differentiated)]
    tangents = [
        dtype or aval_of(v).dtype
        for dtype, v in zip(planned.writes, eqn.outvars, strict=True)
        if jnp.issubdtype(aval_of(v).dtype, jnp.inexact)
    ]
    tangents = [dtype if is_castable(dtype) else None for dtype in tangents]
    outputs = [*planned.writes, *tangents]
    return _plan(
        jaxprs.body_of(closed_jaxpr),
        known,
        reads,
        outputs,
        tuple(Use(demand_of(dtype)) for dtype in outputs),
        context.region,
        context.inherited or rule_of_library(eqn),
        # It runs in the block of the call, which makes again what it computes.
        Saving.NOTHING,
    )


def returned_dtype(
    atom: Atom, state: np.dtype | None, policy: Policy
) -> np.dtype | None:
    """Returns the dtype of an output of the program; None if it is never cast."""
    traced = traced_dtype(atom)
    if traced == F32 and state is None:
        return policy.output_dtype
    return traced and (state or traced)


def _returned_use(dtype: np.dtype | None) -> Use:
    demand = demand_of(dtype)
    return Use(demand | Demands.RETURNED if demand == Demands.F32 else demand)


def _plan(
    body: Body,
    known: Sequence[Known],
    reads: Sequence[np.dtype | None],
    outputs: Sequence[np.dtype | None],
    uses: Uses,
    region: Region,
    inherited: Rule | None,
    saving: Saving,
) -> Plan:
    flow = flow_of(body, tuple(known), region, inherited)
    outcome = Consumers().of(flow, uses)
    alive = (True,) * len(reads)
    return _Planner().settle(flow, outcome, tuple(reads), tuple(outputs), saving, alive)


class _BodyContext(NamedTuple):
    """What all equations of a body share, see `_Planner.settle`."""

    values: Held
    saving: Saving
    before_tanh: Set[Var]
    rounded: frozenset[Var]


class _Planner:
    """The last pass; through each body once for the dtypes that go in and out."""

    def __init__(self) -> None:
        # By the outcome, which alike equations share, and the dtypes of the operands.
        self._by_outcome: dict[tuple[Outcome, Dtypes], _Dtypes] = {}
        self._gelus = Gelus()

    @once
    def settle(
        self,
        flow: Flow,
        outcome: BodyOutcome,
        inputs: Dtypes,
        outputs: Dtypes | None,
        saving: Saving,
        alive: tuple[bool, ...],
        curved: tuple[bool, ...] | None = None,
        rounded: frozenset[Var] = frozenset(),
    ) -> Plan:
        """Returns the plan of a body, given the dtypes in which its inputs come.

        Args:
          flow: the forward pass over it.
          outcome: the backward pass.
          inputs: the dtypes of its inputs.
          outputs: those of its outputs; None leaves them to `Held.handed_out`.
          saving: what differentiation saves of what it computes.
          alive: whether each input is an argument of the program.
          curved: whether each output leads to a `tanh`, see `Gelus`.
          rounded: f32 values that are kept in half, as far as the caller knows.
        """
        jaxpr = flow.body.jaxpr
        values = Held(flow, inputs, alive)
        asks = self._asks(flow)
        before_tanh: Set[Var] = frozenset()
        if asks:
            returned = curved or (False,) * len(jaxpr.outvars)
            before_tanh = self._gelus.before(jaxpr, returned)
        context = _BodyContext(values, saving, before_tanh, rounded)
        equations = self._equations(outcome, context)
        returned = outputs
        if returned is None:
            returned = tuple(map(values.handed_out, jaxpr.outvars, outcome.outputs))
        if asks:
            equations = _beside_readers(jaxpr, equations, before_tanh)
        plan = Plan(flow.body, tuple(equations), returned, values.free_in_f32())
        blocks, needs, found = find_blocks(flow, plan, values, saving)
        found |= _raised_for(flow, plan, found)
        if not found <= rounded:
            # What is kept depends on the dtypes, and they on what is kept.
            given = outcome, inputs, outputs, saving, alive, curved
            return self.settle(flow, *given, rounded | found)
        moved = _moved(flow, plan)
        return dataclasses.replace(plan, blocks=blocks, needs=needs, moved=moved)

    def _equations(
        self, outcome: BodyOutcome, context: _BodyContext
    ) -> list[EquationPlan]:
        """Returns the plan of each equation of a body, and settles what they make."""
        equations, values = [], context.values
        flow = values.flow
        for index, (eqn, step, each) in enumerate(
            zip(flow.body.jaxpr.eqns, flow.steps, outcome.equations, strict=True)
        ):
            if step.flows:
                planned = self._call(index, eqn, step, each, context)
            else:
                if not context.rounded.isdisjoint(eqn.outvars):
                    each = _rounded(each, step)
                planned = self._equation(index, eqn, step, each, values)
            values.dtypes.update(zip(eqn.outvars, planned.writes, strict=True))
            equations.append(planned)
        return equations

    def _call(
        self, index: int, eqn: Eqn, step: Step, outcome: Outcome, context: _BodyContext
    ) -> EquationPlan:
        """Returns the plan of a call, a loop or a branch."""
        carried, values = jaxprs.carried(eqn), context.values
        reads = values.handed_to(eqn, step.views, outcome.operands)
        saving = context.saving.inside(eqn)
        inputs = [tuple(reads[i] for i in operands) for _, operands in step.inner]

        def settled(body: int, outputs: Dtypes | None, saving: Saving) -> Plan:
            flow, inner = step.flows[body], outcome.bodies[body]
            curved = None
            if self._asks(flow):
                curved = self._gelus.inside(eqn, context.before_tanh)[body].outputs
            alive = tuple(
                values.is_alive(eqn.invars[i]) for i in step.inner[body].operands
            )
            given = inner, inputs[body], outputs, saving, alive, curved
            return self.settle(flow, *given, context.rounded)

        # Their dtypes first: what is kept depends on them.
        first = Saving.NOTHING if carried or len(step.flows) > 1 else saving
        bodies = [settled(body, None, first) for body in range(len(step.flows))]
        writes = bodies[-1].outputs
        if carried:
            # A loop hands the same dtypes from turn to turn.
            carry = tuple(reads[i] for i in carried)
            writes = carry + writes[len(carry) :]
            bodies[-1] = settled(len(bodies) - 1, writes, saving)
        elif len(bodies) > 1 and not jaxprs.is_while(eqn):
            writes = _of_branches(eqn, step, bodies)
            bodies = [settled(body, writes, saving) for body in range(len(bodies))]
        name = source_code.function_name(eqn) or eqn.primitive.name
        rule = step.inherited or Rule(OpClass.FOLLOW, outcome.reason, name)
        return EquationPlan(
            *(index, rule, Mode.CALL, None, outcome.reason, reads),
            yields=writes,
            writes=writes,
            bodies=tuple(bodies),
            rule_context=step if jaxprs.is_custom_jvp(eqn) else None,
        )

    @once
    def _asks(self, flow: Flow) -> bool:
        """Whether a rewrite in a body, or inside of it, asks what reads its results."""
        return any(
            any(map(self._asks, step.flows))
            or (
                step.decision is not None
                and step.decision.rewrite is not None
                and step.decision.rewrite.beside is not None
            )
            for step in flow.steps
        )

    def _equation(
        self, index: int, eqn: Eqn, step: Step, outcome: Outcome, values: Held
    ) -> EquationPlan:
        """Returns the plan of an equation that calls nothing."""
        decision = step.decision
        assert decision is not None
        held = tuple(map(values.of, eqn.invars))
        key = outcome, held
        if key not in self._by_outcome:
            self._by_outcome[key] = _dtypes(eqn, step, *key)
        reads = self._by_outcome[key].reads
        return EquationPlan(
            index,
            decision.rule,
            outcome.mode,
            outcome.dtype,
            outcome.reason,
            *self._by_outcome[key],
            rewrite=decision.rewrite,
            saturate=decision.saturate and outcome.dtype != F32,
            decision=decision,
            option=outcome.option,
            f32_gradients=f32_gradients(eqn, step.region, step.views, held, reads),
        )


def _rounded(outcome: Outcome, step: Step) -> Outcome:
    """Returns the outcome of an operation whose f32 result is kept in half."""
    assert step.decision is not None
    half = step.region.policy.compute_dtype
    reason = "one operation that the backward pass of a loop keeps"
    if step.decision.dtype == half:
        reason = step.decision.reason
    return dataclasses.replace(outcome, dtype=half, reason=reason)


def _raised_for(flow: Flow, plan: Plan, rounded: frozenset[Var]) -> frozenset[Var]:
    """Returns the half results that are f32 for readers which are to be half."""
    if not rounded:
        return rounded
    halves, others = set(rounded), set(jaxprs.variables(flow.body.jaxpr.outvars))
    steps = zip(flow.body.jaxpr.eqns, flow.steps, plan.equations, strict=True)
    for eqn, step, planned in reversed(list(steps)):
        decision = step.decision
        is_raised = decision is not None and is_half(decision.dtype)
        if is_raised and planned.dtype == F32 and others.isdisjoint(eqn.outvars):
            halves.update(eqn.outvars)
        if halves.isdisjoint(eqn.outvars):
            others.update(jaxprs.variables(eqn.invars))
    return frozenset(halves)


def _moved(flow: Flow, plan: Plan) -> dict[Var, np.dtype]:
    """Returns `Plan.moved`, from the readers back."""
    found: dict[Var, np.dtype] = {}
    if all(step.region.asked.reduce_dtype is None for step in flow.steps):
        return found
    read = set(plan.last_read)
    steps = zip(flow.body.jaxpr.eqns, flow.steps, strict=True)
    for eqn, step in reversed(list(steps)):
        half = step.region.policy.compute_dtype
        if not moves_parameter(eqn, step.region):
            continue
        moved = [v for v in eqn.outvars if (v, half) in read]
        if moved and all(v in plan.cast_per_use for v in eqn.outvars):
            found.update(dict.fromkeys(moved, half))
            read.update((var, half) for var in jaxprs.variables(eqn.invars))
    return found


def _of_branches(eqn: Eqn, step: Step, branches: Sequence[Plan]) -> Dtypes:
    """Returns the dtypes of the results of a branch: all branches return the same."""
    return tuple(
        dtypes[0] if len(set(dtypes)) == 1 else carry_dtype(known, var)
        for dtypes, known, var in zip(
            zip(*(branch.outputs for branch in branches), strict=True),
            step.results,
            eqn.outvars,
            strict=True,
        )
    )


class _Dtypes(NamedTuple):
    """The dtypes of an equation, as in `EquationPlan`."""

    reads: Dtypes
    yields: Dtypes
    writes: Dtypes


def _dtypes(eqn: Eqn, step: Step, outcome: Outcome, held: Dtypes) -> _Dtypes:
    """Returns the dtypes of an equation that calls nothing.

    `held` are the dtypes that its operands have.
    """
    assert step.decision is not None
    mode, dtype, rewrite = outcome.mode, outcome.dtype, step.decision.rewrite
    activations = [view.origin != Origin.FREE for view in step.views]
    reads = modes.read(mode, dtype, eqn, held, activations)
    made = dtype if rewrite is None else rewrite.result or dtype
    yields = modes.computed(mode, made, eqn, reads)
    writes = modes.computed(mode, outcome.store or made, eqn, reads)
    return _Dtypes(reads, yields, writes)


def _beside_readers(
    jaxpr: Jaxpr, equations: Sequence[EquationPlan], before_tanh: Set[Var]
) -> list[EquationPlan]:
    """Returns equations with the rewrites that suit what reads their results."""
    readers = Readers(jaxpr, [each.reads for each in equations], before_tanh)
    return [
        dataclasses.replace(each, rewrite=each.rewrite.beside(eqn, readers))
        if each.rewrite is not None and each.rewrite.beside is not None
        else each
        for eqn, each in zip(jaxpr.eqns, equations, strict=True)
    ]
