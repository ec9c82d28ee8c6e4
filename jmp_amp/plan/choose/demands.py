"""The second pass of the plan: where do values go?

A value that only f32 operations read is better made in f32 too; a parameter that only
half-precision operations read is cast before it is broadcast or looked up. This pass
goes backward, so that the demands on a result are known before its equation is reached,
and takes the option of each decision whose condition holds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jmp_amp.plan.choose import modes
from jmp_amp.plan.choose.flows import Flow, Step, carry_dtype
from jmp_amp.plan.choose.modes import Demand, Demands, Mode, demand_of
from jmp_amp.plan.choose.records import Decision, Option
from jmp_amp.plan.choose.uses import UNUSED, Use, Uses
from jmp_amp.plan.dataflow.solver import backward, entering, once, union
from jmp_amp.plan.dataflow.values import (
    Known,
    Origin,
    Trait,
    castable,
    is_exact,
    is_move,
)
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Var
from jmp_amp.plan.program.regions import Region
from jmp_amp.plan.program.scope_text import backward_depth
from jmp_amp.plan.rewrites.f32_gradients import is_repeated
from jmp_amp.plan.tables.operations import PRODUCTS, OpClass
from jmp_amp.policies.dtypes import F16, F32, is_half


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """The backward pass over an equation, or several: a decision with an option taken.

    Attributes:
      mode: how the equation treats the dtypes of its operands.
      dtype: the dtype of the computation; None if the mode says all.
      reason: why, in words.
      operands: how the equation uses its operands.
      store: the dtype in which the results are kept, if not the computation's.
      bodies: the outcomes of its bodies.
      option: the option that was taken, if one was.
    """

    mode: Mode
    dtype: np.dtype | None
    reason: str
    operands: Uses
    store: np.dtype | None = None
    bodies: tuple[BodyOutcome, ...] = ()
    option: Option | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class BodyOutcome:
    """The backward pass over one body, with the uses of its inputs and outputs."""

    equations: tuple[Outcome, ...]
    inputs: Uses
    outputs: Uses


class Consumers:
    """Goes back through flows; through each once for the uses of its outputs."""

    def __init__(self) -> None:
        # By the decision, which alike equations share.
        self._by_decision: dict[tuple[Decision, Uses], Outcome] = {}

    @once
    def of(self, flow: Flow, outputs: Uses, depth: int = 0) -> BodyOutcome:
        """Returns the outcome of every equation of a body.

        Args:
          flow: the forward pass over it.
          outputs: how its outputs are used.
          depth: how many backward passes its call is inside of.
        """
        jaxpr = flow.body.jaxpr
        used: dict[Var, Use] = {}

        def use(atom: Atom, wanted: Use, region: Region) -> None:
            if isinstance(atom, Literal) or not wanted.times:
                return
            demand = wanted.demand
            is_f32 = (demand & Demands.DTYPES) == Demands.F32
            if is_f32 and _takes_half(flow.known[atom], region):
                demand = demand_of(region.policy.output_dtype)
            wanted = wanted._replace(demand=demand)
            used[atom] = used.get(atom, UNUSED).also(wanted)

        for atom, wanted in zip(jaxpr.outvars, outputs, strict=True):
            use(atom, wanted, flow.region)
        outcomes: list[Outcome] = []
        for eqn, step in zip(reversed(jaxpr.eqns), reversed(flow.steps), strict=True):
            here = depth + backward_depth(jaxprs.scope_text(eqn))
            results = tuple(used.get(v, UNUSED).of_made(here) for v in eqn.outvars)
            if step.flows:
                outcome = self._bodies(eqn, step, flow, results, here)
                operands = outcome.operands
            else:
                outcome, operands = self._equation(eqn, step, results, here)
            outcomes.append(outcome)
            for atom, wanted in zip(eqn.invars, operands, strict=True):
                use(atom, wanted, step.region)
        inputs = tuple(used.get(var, UNUSED) for var in jaxpr.invars)
        return BodyOutcome(tuple(reversed(outcomes)), inputs, outputs)

    def _equation(
        self, eqn: Eqn, step: Step, results: Uses, depth: int
    ) -> tuple[Outcome, Uses]:
        """Returns the outcome, and its uses of the operands.

        An operation has the depth of the readers of its results: what is computed for a
        backward pass belongs to it. A product has its own depth, since it reads half
        whoever reads it.
        """
        assert step.decision is not None
        key = step.decision, tuple([each.at_depth(0) for each in results])
        if key not in self._by_decision:
            self._by_decision[key] = _taken(eqn, step, key[1])
        outcome = self._by_decision[key]
        if eqn.primitive.name not in PRODUCTS:
            depth = min([each.depth for each in results if each.times], default=depth)
        return outcome, tuple([each.at_depth(depth) for each in outcome.operands])

    def _bodies(
        self, eqn: Eqn, step: Step, flow: Flow, results: Uses, depth: int
    ) -> Outcome:
        carried = jaxprs.carried(eqn)
        carry = {
            i: demand_of(carry_dtype(step.views[i], eqn.invars[i])) for i in carried
        }
        found: dict[int, BodyOutcome] = {}

        def inputs(number: int, outputs: Uses) -> Uses:
            found[number] = self.of(step.flows[number], outputs, depth)
            return found[number].inputs

        def turned(number: int, now: Use, read: Use) -> Use:
            # The next turn reads it, in the dtype that it is carried in.
            return Use(carry[carried[number]], max(now.times, 1), depth)

        back = backward(eqn, results, inputs, turned, UNUSED, UNUSED)
        bodies = tuple(found[number] for number in range(len(step.flows)))
        operands = [UNUSED] * len(eqn.invars)
        for i, inside in entering(eqn, back):
            times = max(operands[i].times, inside.times)
            operands[i] = operands[i].also(inside)._replace(times=times)
        for i in _read_every_turn(eqn, flow):
            if operands[i].times:
                operands[i] = operands[i]._replace(times=2)
        for i, demand in carry.items():
            # It is cast before the loop, however often the turns read it.
            operands[i] = Use(demand, 1, depth)
        reason = "a loop" if carried else "a call: its body is planned"
        return Outcome(Mode.CALL, None, reason, tuple(operands), bodies=bodies)


def _taken(eqn: Eqn, step: Step, results: Uses) -> Outcome:
    """Returns the decision for an equation, with the option that its consumers take."""
    decision = step.decision
    assert decision is not None
    repeatedly = any(use.times > 1 for use in results)
    if decision.mode is Mode.PASSED_ON:
        # A result that is an operand is read as often as the operand.
        operands = tuple(Use(use.demand, 1 + repeatedly) for use in results)
        return Outcome(decision.mode, decision.dtype, decision.reason, operands)
    readers = union(use.demand for use in results)
    mode, dtype, reason = decision.mode, decision.dtype, decision.reason
    option = decision.option(readers, once=not repeatedly)
    if option is not None:
        reason = option.reason
        if option.dtype is not None:
            mode, dtype = Mode.IN_DTYPE, option.dtype
    if (
        readers == Demands.AS_IS
        and is_move(eqn)
        and len(eqn.invars) == len(eqn.outvars) == 1
    ):
        return Outcome(Mode.PASSED_ON, None, reason, (Use(readers),), option=option)
    asked = [
        # Its gradient is a sum, which leaves the operation in f32.
        Demands.F32 if is_half(dtype) and _is_summed(eqn, i, view) else each
        for i, (each, view) in enumerate(
            zip(modes.asked(mode, dtype, eqn), step.views, strict=True)
        )
    ]
    if readers == Demands.AS_IS and dtype == F32:
        asked = tuple(each and Demands.AS_IS for each in asked)
    elif dtype == F32 and decision.rule.op_class is OpClass.FOLLOW:
        kept = readers & Demands.RETURNED
        asked = tuple(
            each | kept if each and _hands_on_kept(eqn, view) else each
            for each, view in zip(asked, step.views, strict=True)
        )
    store = None if option is None else option.store
    return Outcome(mode, dtype, reason, _uses(tuple(asked)), store, option=option)


# A program has thousands of equations, and a handful of these.
@functools.lru_cache(maxsize=1024)
def _uses(demands: tuple[Demand, ...]) -> Uses:
    """Returns the uses of the operands of an equation, each of which it reads once."""
    return tuple(map(Use, demands))


def _is_summed(eqn: Eqn, i: int, operand: Known) -> bool:
    is_free = operand.origin == Origin.FREE and not operand.is_constant
    return is_free and castable(eqn.invars[i]) and is_repeated(eqn, i)


def _hands_on_kept(eqn: Eqn, operand: Known) -> bool:
    """Whether an operand of a kept result is kept as well.

    The elements of a move or a selection are those of its operands. An argument that
    comes back after additions is kept in all of them.
    """
    return is_exact(eqn) or Trait.SUMS_ARGUMENT in operand.traits


def _read_every_turn(eqn: Eqn, flow: Flow) -> Sequence[int]:
    """Returns the operands of a loop that all of its turns read.

    They are its constants, and the parameters that it goes through: a turn casts the
    part that it reads.
    """
    if not jaxprs.is_loop(eqn):
        return ()
    through = range(jaxprs.carried(eqn).stop, len(eqn.invars))
    known = [(i, flow.of(eqn.invars[i])) for i in through]
    parameters = [i for i, each in known if each is not None and each.is_parameter]
    return [*jaxprs.read_every_turn(eqn), *parameters]


def _takes_half(known: Known, region: Region) -> bool:
    """Whether a value that enters `region` is rounded to half precision first.

    A norm hands on half precision, and takes it too: the values that it normalises are
    not kept in f32 for its sake, and nor is a stream that a dear f32 value joins. In
    f16 a stream is rounded only where f32 values follow half ones alone: any other may
    be out of range. The parameters and statistics of a norm are f32.
    """
    enters = known.region.path != region.path and known.region.holds(region)
    half = region.policy.output_dtype
    in_range = half != F16 or Trait.BETWEEN in known.traits
    is_stream = Trait.JOINS_STREAM in known.traits and in_range
    return (
        enters
        and is_half(half)
        and (known.origin != Origin.FULL or is_stream)
        and not known.is_parameter
    )
