"""The first pass of the plan: where do values come from?

A *flow* records, for every value of a body, where it comes from, and for every equation
a decision. Consumers are not looked at yet. Bodies of calls and branches are followed
with what is known of their operands; a loop's carry is settled by fixpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import sys

import numpy as np

from jmp_amp.plan import constants, jaxprs, rules
from jmp_amp.plan.decisions import Decision, decide
from jmp_amp.plan.jaxprs import Atom, Body, Eqn, Inner, Literal, Var, aval_of
from jmp_amp.plan.modes import Mode
from jmp_amp.plan.regions import Region, region_of
from jmp_amp.plan.rules import Rule
from jmp_amp.plan.values import Known, Origin, Trait, castable, unfit
from jmp_amp.policies.dtypes import F32, is_half

# Of a constant that no dtype is sure to hold.
_ANY_SIZE = (-sys.float_info.max, sys.float_info.max)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The forward pass over one equation: a decision, or flows through its bodies.

    Attributes:
      region: the policy scope that it is in.
      views: what it sees of its operands; of a loop's carry, what holds in every turn.
      results: what is known of its results.
      decision: the decision; None for a call, a loop or a branch.
      inner: its bodies.
      flows: the flow through each of them.
      inherited: the rule that its name gives to its bodies.
    """

    region: Region
    views: tuple[Known, ...]
    results: tuple[Known, ...]
    decision: Decision | None = None
    inner: tuple[Inner, ...] = ()
    flows: tuple[Flow, ...] = ()
    inherited: Rule | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Flow:
    """The forward pass over one body.

    Attributes:
      body: the body.
      region: the policy scope that it is called in.
      known: what is known of each of its variables.
      steps: one for each of its equations.
      outputs: what its caller sees of its outputs.
    """

    body: Body
    region: Region
    known: dict[Var, Known]
    steps: tuple[Step, ...]
    outputs: tuple[Known, ...]

    def of(self, atom: Atom) -> Known | None:
        """Returns what is known of a variable; None of a literal."""
        return None if isinstance(atom, Literal) else self.known[atom]


class Flows:
    """Follows values through bodies; each body once for what is known of its inputs."""

    def __init__(self) -> None:
        self._flows: dict[object, Flow] = {}

    def through(
        self,
        body: Body,
        inputs: tuple[Known, ...],
        region: Region,
        inherited: Rule | None,
    ) -> Flow:
        """Returns the flow through `body`, given what is known of its inputs.

        Args:
          body: the body.
          inputs: one for each of its inputs.
          region: the policy scope that it is called in.
          inherited: the rule that the name of its caller gives to all of it.
        """
        key = id(body.jaxpr), inputs, region, inherited
        if key in self._flows:
            return self._flows[key]
        jaxpr = body.jaxpr
        read = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
        uses = collections.Counter(jaxprs.variables([*read, *jaxpr.outvars]))
        known = {
            var: each.shared(each.is_shared or uses[var] > 1)
            for var, each in zip(jaxpr.invars, inputs, strict=True)
        }
        for var, const in zip(jaxpr.constvars, body.consts, strict=True):
            limits = constants.bounds_of_constant(const)
            traits = frozenset((Trait.PARAMETER,))
            known[var] = Known(Origin.FREE, limits, region, traits)
        makers: dict[Var, Eqn] = {}
        steps = []
        for eqn in jaxpr.eqns:
            here = region_of(jaxprs.scope_text(eqn), region)
            views = tuple(seen(_known(atom, known, here), here) for atom in eqn.invars)
            step = self._step(eqn, views, here, inherited, makers)
            steps.append(step)
            for var, result in zip(eqn.outvars, step.results, strict=True):
                known[var] = result.shared(uses[var] > 1)
                makers[var] = eqn
        outputs = tuple(
            seen(_known(atom, known, region), region) for atom in jaxpr.outvars
        )
        flow = Flow(body, region, known, tuple(steps), outputs)
        self._flows[key] = flow
        return flow

    def _step(
        self,
        eqn: Eqn,
        views: tuple[Known, ...],
        region: Region,
        inherited: Rule | None,
        makers: dict[Var, Eqn],
    ) -> Step:
        rule = rules.rule_for(eqn, region.policy, inherited)
        inner = jaxprs.inner_bodies(eqn)
        if inner:
            return self._call(eqn, views, region, rule, inner)
        assert rule is not None
        decision = decide(eqn, rule, region, views, makers)
        if decision.mode is Mode.PASSED_ON:
            results = _in_region(views, region)
        else:
            results = (decision.result,) * len(eqn.outvars)
        return Step(region, views, results, decision)

    def _call(
        self,
        eqn: Eqn,
        views: tuple[Known, ...],
        region: Region,
        rule: Rule | None,
        inner: tuple[Inner, ...],
    ) -> Step:
        """Follows values through the bodies of a call, a loop or a branch.

        The fixpoint ends: the origin of a carry only rises, its bounds widen once, to
        any size, and it may only lose the trait of a parameter.
        """
        starts = views = _in_region(views, region)
        carried = jaxprs.carried(eqn)
        join = _carried_by_while if jaxprs.is_while(eqn) else _carried_by_scan
        while True:
            flows = tuple(
                self.through(body, tuple(views[i] for i in operands), region, rule)
                for body, operands in inner
            )
            settled = list(views)
            # Without a carry there is nothing to settle.
            for i, update in zip(carried, flows[-1].outputs, strict=False):
                settled[i] = join(eqn.invars[i], starts[i], views[i], update)
            if tuple(settled) == views:
                break
            views = tuple(settled)
        if carried:
            carry = tuple(views[i] for i in carried)
            results = carry + flows[-1].outputs[len(carried) :]
        else:
            results = flows[0].outputs
            for other in flows[1:]:
                results = tuple(map(_either, results, other.outputs))
        if carried or jaxprs.is_custom_jvp(eqn):
            # A loop is not run again for the readers of its results, and the user's
            # rule says what it saves.
            half = is_half(region.policy.compute_dtype)
            saved = frozenset((Trait.SAVED_IN_F32,))
            results = tuple(
                k._replace(traits=k.traits | saved if half else k.traits - saved)
                for k in results
            )
        results = _in_region(results, region)
        return Step(region, views, results, None, inner, flows, rule)


def carry_dtype(known: Known, atom: Atom) -> np.dtype | None:
    """Returns the dtype that a loop carries a value in; None if it is never cast."""
    if not castable(atom):
        return None
    if known.origin == Origin.FULL:
        return F32
    traced, low = aval_of(atom).dtype, known.region.policy.compute_dtype
    if known.origin == Origin.LOW and traced == F32 and is_half(low):
        return low
    return traced


def seen(known: Known, region: Region) -> Known:
    """Returns what a consumer in `region` sees: values that leave a scope change."""
    if known.region.holds(region) or known.is_constant:
        return known
    half = is_half(known.region.policy.output_dtype)
    origin = Origin.LOW if half else Origin.FULL
    traits = known.traits - {Trait.PARAMETER, Trait.SAVED_IN_F32}
    return known._replace(origin=origin, traits=traits)


def _known(atom: Atom, known: dict[Var, Known], region: Region) -> Known:
    if isinstance(atom, Literal):
        return Known(Origin.FREE, constants.bounds_of_constant(atom.val), region)
    return known[atom]


def _in_region(values: tuple[Known, ...], region: Region) -> tuple[Known, ...]:
    return tuple(
        known if known.region is region else known._replace(region=region)
        for known in values
    )


def _carried_by_scan(atom: Atom, start: Known, now: Known, update: Known) -> Known:
    """Returns what is known of a carry after one more turn.

    A carry that every turn updates in half is half if it starts as an activation, a
    parameter or an input, as in a residual stream. A carry that starts from constants
    is an accumulator or the state of a recurrence, and f32: an LSTM's in half costs 1.3
    times the gradient error, a GRU's 2.1 times.

    Args:
      atom: the operand that it starts from.
      start: what is known of it before the loop.
      now: what is known of it before this turn.
      update: what is known of it after this turn.
    """
    origin = max(now.origin, update.origin)
    if origin == Origin.LOW and start.is_constant:
        origin = Origin.FULL
    return _carry(now, update, origin)


def _carried_by_while(atom: Atom, start: Known, now: Known, update: Known) -> Known:
    """As `_carried_by_scan`, but a carry keeps its dtype."""
    origin = max(now.origin, update.origin)
    if origin != Origin.FREE and castable(atom):
        origin = Origin.LOW if is_half(aval_of(atom).dtype) else Origin.FULL
    return _carry(now, update, origin)


def _carry(now: Known, update: Known, origin: Origin) -> Known:
    limits = now.bounds
    if limits not in (update.bounds, _ANY_SIZE):
        # Constants that grow from turn to turn, or that inputs have a part in.
        grows = limits is not None and update.bounds is not None
        limits = _ANY_SIZE if grows else None
    both = now.traits & update.traits & {Trait.PARAMETER}
    return Known(origin, limits, now.region, both)


def _either(a: Known, b: Known) -> Known:
    """Returns what is known of a value that is `a` or `b`."""
    limits = None
    if a.bounds and b.bounds:
        limits = min(a.bounds[0], b.bounds[0]), max(a.bounds[1], b.bounds[1])
    origin = max(a.origin, b.origin)
    low = a.region.policy.compute_dtype
    if origin == Origin.LOW and unfit((a, b), low) is not None:
        origin = Origin.FULL
    both = a.traits & b.traits & {Trait.PARAMETER}
    return Known(origin, limits, a.region, both)
