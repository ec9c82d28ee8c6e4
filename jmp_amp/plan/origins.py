"""The first pass of the plan: where do values come from?

A *flow* is what is known of every value of a body before anybody asks who reads it, and
a decision for every equation. Bodies of calls and branches are followed with what is
known of their operands; a loop's carry is settled by fixpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any

import numpy as np

from jmp_amp.plan import constants, jaxprs, rules
from jmp_amp.plan.decisions import (
    Decision,
    Known,
    Origin,
    castable,
    decide,
    is_constant,
)
from jmp_amp.plan.jaxprs import Body, Inner
from jmp_amp.plan.regions import Region, region_of
from jmp_amp.plan.rules import Rule
from jmp_amp.policies.dtypes import F32, is_half

# Of a constant that no dtype is sure to hold.
_ANY_SIZE = (-sys.float_info.max, sys.float_info.max)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The forward pass over one equation: a decision, or flows through its bodies.

    Attributes:
      region: the policy scope that it is in.
      views: what it sees of its operands; of a loop's carry, what is known throughout.
      results: what is known of its results.
      decision: what it runs in, if it calls nothing.
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
    """The forward pass over one body."""

    body: Body
    region: Region
    known: dict[Any, Known]
    steps: tuple[Step, ...]
    outputs: tuple[Known, ...]


class Flows:
    """Follows values through bodies; each body once for what is known of its inputs."""

    def __init__(self) -> None:
        self._flows: dict[Any, Flow] = {}

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
        uses = collections.Counter(
            atom
            for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
            for atom in atoms
            if not isinstance(atom, jaxprs.Literal)
        )
        known = {
            var: dataclasses.replace(k, shared=True)
            if uses[var] > 1 and not k.shared
            else k
            for var, k in zip(jaxpr.invars, inputs, strict=True)
        }
        for var, const in zip(jaxpr.constvars, body.consts, strict=True):
            limits = constants.bounds_of_constant(const)
            known[var] = Known(Origin.FREE, limits, True, region)
        makers: dict[Any, Any] = {}
        steps = []
        for eqn in jaxpr.eqns:
            here = region_of(jaxprs.scope_text(eqn), region)
            views = tuple(view(_known(atom, known, here), here) for atom in eqn.invars)
            step = self._step(eqn, views, here, inherited, makers)
            steps.append(step)
            for var, result in zip(eqn.outvars, step.results, strict=True):
                if result.shared != (uses[var] > 1):
                    result = dataclasses.replace(result, shared=uses[var] > 1)
                known[var] = result
                makers[var] = eqn
        outputs = tuple(
            view(_known(atom, known, region), region) for atom in jaxpr.outvars
        )
        flow = Flow(body, region, known, tuple(steps), outputs)
        self._flows[key] = flow
        return flow

    def _step(
        self,
        eqn: Any,
        views: tuple[Known, ...],
        region: Region,
        inherited: Rule | None,
        makers: dict[Any, Any],
    ) -> Step:
        rule = rules.rule_for(eqn, region.policy, inherited)
        inner = jaxprs.inner_bodies(eqn)
        if not inner:
            assert rule is not None
            decision = decide(eqn, rule, region, views, makers)
            if decision.passes_on:
                results = _in_region(views, region)
            else:
                results = (decision.result,) * len(eqn.outvars)
            return Step(region, views, results, decision)
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
            # A loop is not run again for what reads its results, and the user's rule
            # saves what it needs by itself.
            costly = is_half(region.policy.compute_dtype)
            results = tuple(dataclasses.replace(k, costly=costly) for k in results)
        return Step(
            region, views, _in_region(results, region), None, inner, flows, rule
        )


def carry_dtype(known: Known, atom: Any) -> np.dtype | None:
    """Returns the dtype that a loop carries a value in; None if it is never cast."""
    if not castable(atom):
        return None
    traced = atom.aval.dtype
    if known.origin == Origin.FULL:
        return F32
    low = known.region.policy.compute_dtype
    if known.origin == Origin.LOW and traced == F32 and is_half(low):
        return low
    return traced


def view(known: Known, region: Region) -> Known:
    """Returns what a consumer in `region` sees: values that leave a scope change."""
    if known.region.holds(region) or is_constant(known):
        return known
    half = is_half(known.region.policy.output_dtype)
    origin = Origin.LOW if half else Origin.FULL
    return dataclasses.replace(known, origin=origin, as_parameter=False, costly=False)


def _known(atom: Any, known: dict[Any, Known], region: Region) -> Known:
    if isinstance(atom, jaxprs.Literal):
        limits = constants.bounds_of_constant(atom.val)
        return Known(Origin.FREE, limits, False, region)
    return known[atom]


def _in_region(values: tuple[Known, ...], region: Region) -> tuple[Known, ...]:
    return tuple(
        known if known.region is region else dataclasses.replace(known, region=region)
        for known in values
    )


def _carried_by_scan(atom: Any, start: Known, now: Known, update: Known) -> Known:
    """Returns what is known of a carry after one more turn.

    One that is updated in half precision is half if it starts as an activation, a
    parameter or an input, as a residual stream does. One that starts from constants is
    an accumulator or the state of a recurrence, and f32: an LSTM's in half costs 1.3
    times the gradient error, a GRU's 2.1 times.

    Args:
      atom: the operand that it starts from.
      start: what is known of it before the loop.
      now: what is known of it before this turn.
      update: what is known of it after this turn.
    """
    origin = max(now.origin, update.origin)
    if origin == Origin.LOW and is_constant(start):
        origin = Origin.FULL
    return _carry(now, update, origin)


def _carried_by_while(atom: Any, start: Known, now: Known, update: Known) -> Known:
    """As `_carried_by_scan`, but a carry keeps its dtype."""
    origin = max(now.origin, update.origin)
    if origin != Origin.FREE and castable(atom):
        origin = Origin.LOW if is_half(atom.aval.dtype) else Origin.FULL
    return _carry(now, update, origin)


def _carry(now: Known, update: Known, origin: Origin) -> Known:
    limits = now.bounds
    if limits not in (update.bounds, _ANY_SIZE):
        # Constants that grow from turn to turn, or what inputs have a part in.
        grows = limits is not None and update.bounds is not None
        limits = _ANY_SIZE if grows else None
    return Known(origin, limits, now.as_parameter and update.as_parameter, now.region)


def _either(a: Known, b: Known) -> Known:
    """Returns what is known of a value that is `a` or `b`."""
    known = Known(
        max(a.origin, b.origin),
        (min(a.bounds[0], b.bounds[0]), max(a.bounds[1], b.bounds[1]))
        if a.bounds and b.bounds
        else None,
        a.as_parameter and b.as_parameter,
        a.region,
    )
    low = a.region.policy.compute_dtype
    unfit = any(
        is_constant(k) and is_half(low) and constants.misfit(k.bounds, low) is not None
        for k in (a, b)
    )
    if known.origin == Origin.LOW and unfit:
        return dataclasses.replace(known, origin=Origin.FULL)
    return known
