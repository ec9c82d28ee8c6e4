"""The first pass of the plan: where do values come from?

A *flow* records, for every value of a body, where it comes from, and for every equation
a decision. Consumers are not looked at yet, but for `ends`. Bodies of calls and
branches are followed with what is known of their operands; a loop's carry is settled by
fixpoint.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jmp_amp.plan.choose.decision_cache import Decided
from jmp_amp.plan.choose.derivatives import derivatives
from jmp_amp.plan.choose.flows import Flow, Step
from jmp_amp.plan.choose.modes import Mode
from jmp_amp.plan.choose.solver_loops import SOLVER, is_solver
from jmp_amp.plan.dataflow import constants
from jmp_amp.plan.dataflow.ends import Destinations, End, Ends
from jmp_amp.plan.dataflow.facts import BodyFacts, Facts, of_arguments
from jmp_amp.plan.dataflow.joins import after_turn, one_of
from jmp_amp.plan.dataflow.recursions import Cycle, Way, is_in_stream, recursions_of
from jmp_amp.plan.dataflow.solver import forward, once, union
from jmp_amp.plan.dataflow.sources import (
    Sources,
    all_translated,
    groups_of,
    over_turns,
    translated,
)
from jmp_amp.plan.dataflow.standing import Derived, Standing
from jmp_amp.plan.dataflow.storage import Storage, StorageFinder, Store, variables_of
from jmp_amp.plan.dataflow.values import Known, Origin, Trait
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Body, Eqn, Literal, Var
from jmp_amp.plan.program.regions import Region, region_of
from jmp_amp.plan.tables import rules
from jmp_amp.plan.tables.operations import PRODUCTS
from jmp_amp.plan.tables.rules import Rule
from jmp_amp.policies.dtypes import is_half


class Called(NamedTuple):
    """What is known where a body is called.

    Attributes:
      inputs: what is known of each of its inputs.
      region: the policy scope that it is called in.
      inherited: the rule that the name of its caller gives to all of it.
      ends: what becomes of each of its outputs.
      facts: what its inputs are made of.
      groups: the groups that its inputs are in, see `groups_of`.
      cycles: its recursive products, and why they are.
    """

    inputs: tuple[Known, ...]
    region: Region
    inherited: Rule | None
    ends: tuple[End, ...]
    facts: Facts
    groups: tuple[int, ...]
    cycles: frozenset[tuple[Way, Cycle]]
    stored: Storage


def flow_of(
    body: Body, inputs: tuple[Known, ...], region: Region, inherited: Rule | None
) -> Flow:
    """Returns the flow through a body that nothing of its program calls.

    It goes through the body again if it matters what its products are derived from.
    """
    count = len(body.jaxpr.outvars)
    called = Called(
        inputs,
        region,
        inherited,
        ends=(Ends.NONE,) * count,
        facts=of_arguments(body),
        groups=(0,) * len(inputs),
        cycles=frozenset(recursions_of(body).items()),
        stored=StorageFinder().of(body, (Store.NOWHERE,) * count),
    )
    flow = Flows({}).through(body, called)
    derived = dict(derivatives(flow))
    return Flows(derived).through(body, called) if derived else flow


class Flows:
    """Follows values through bodies; each body once for what is known of its inputs."""

    def __init__(self, derived: Mapping[int, Derived]) -> None:
        self._destinations = Destinations()
        self._storage = StorageFinder()
        self._decided = Decided()
        self._derived = derived

    @once
    def _uses(self, body: Body) -> collections.Counter[Var]:
        """Returns how often each variable of a body is read.

        A call does not read an operand that its body does not read.
        """
        read = list(body.jaxpr.outvars)
        for eqn in body.jaxpr.eqns:
            inner = jaxprs.inner_bodies(eqn)
            inside = {
                i
                for (called, operands) in inner
                for i, var in zip(operands, called.jaxpr.invars, strict=True)
                if self._uses(called)[var]
            }
            read += [eqn.invars[i] for i in inside] if inner else eqn.invars
        return collections.Counter(jaxprs.variables(read))

    @once
    def through(self, body: Body, called: Called) -> Flow:
        """Returns the flow through a body, given what is known where it is called."""
        jaxpr, region = body.jaxpr, called.region
        uses = self._uses(body)
        known = {
            var: each.shared(each.is_shared or uses[var] > 1)
            for var, each in zip(jaxpr.invars, called.inputs, strict=True)
        }
        for var, const in zip(jaxpr.constvars, body.consts, strict=True):
            limits = constants.bounds_of_constant(const)
            traits = frozenset((Trait.PARAMETER,))
            known[var] = Known(Origin.FREE, limits, region, traits)
        cycles = collections.defaultdict[int, list[tuple[Way, Cycle]]](list)
        for way, cycle in called.cycles:
            cycles[way[0].equation].append((way, cycle))
        around = _Around(
            called.inherited,
            self._destinations.facts.of(body, called.facts),
            Sources(jaxpr, called.groups),
            self._destinations.of(body, called.ends, called.facts),
            cycles,
            dict(zip(variables_of(jaxpr), called.stored.found, strict=True)),
            dict(called.stored.calls),
        )
        steps = []
        # By the identity of name stacks: equations of one scope have the same one.
        regions: dict[int, Region] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            here = regions.get(id(eqn.source_info.name_stack))
            if here is None:
                here = region_of(jaxprs.scope_text(eqn), region)
                regions[id(eqn.source_info.name_stack)] = here
            views = tuple([_view(atom, known, here) for atom in eqn.invars])
            step = self._step(_Here(index, eqn, views, here), around)
            steps.append(step)
            for var, result in zip(eqn.outvars, step.results, strict=True):
                known[var] = result.shared(uses[var] > 1)
        outputs = tuple([_view(atom, known, region) for atom in jaxpr.outvars])
        return Flow(body, region, known, tuple(steps), outputs, around.sources)

    def _step(self, here: _Here, around: _Around) -> Step:
        index, eqn, views, region = here
        rule = rules.rule_for(eqn, region, around.inherited)
        if index in around.facts.inner:
            return self._call(here, rule, around)
        assert rule is not None
        sources = around.sources
        read = list(map(sources.of, eqn.invars))
        stored = [around.storage[v] for v in eqn.outvars]
        at = Standing(
            *(eqn, rule, region, views),
            facts=list(map(around.facts.of, eqn.invars)),
            is_related=bool(len(read) > 1 and read[0] & read[1]),
            end=union(around.ends.get(v, Ends.NONE) for v in eqn.outvars),
            is_recursive=index in around.cycles,
            derived_from=self._derived.get(id(eqn)),
            store=max(stored, default=Store.NOWHERE),
        )
        decision = self._decided.of(at)
        if decision.mode is Mode.PASSED_ON:
            results = _in_region(views, region)
            sources.write(eqn.outvars, read)
        else:
            results = _in_region((decision.result,) * len(eqn.outvars), region)
            sources.write(eqn.outvars, [union(read)] * len(eqn.outvars))
            if eqn.primitive.name in PRODUCTS:
                sources.layers |= _multiplied_by_slices(views, read)
        return Step(region, views, results, decision)

    def _call(self, here: _Here, rule: Rule | None, around: _Around) -> Step:
        """Follows values through the bodies of a call, a loop or a branch.

        The fixpoint ends: the origin of a carry only rises, its bounds widen twice, at
        last to any size; after the first turn it may only lose the traits of a
        parameter and of a lookup, and only get those of an oversized constant, of a
        tangent and of a solution.
        """
        eqn = here.eqn
        if rule is not None:
            return self._through_bodies(here, rule, around)
        if jaxprs.is_custom_jvp(eqn) and not self._storage.crosses(eqn):
            rule = rules.rule_of_library(eqn) or rules.ONE_OPERATION
        step = self._through_bodies(here, rule, around)
        if jaxprs.is_while(eqn) and is_solver(eqn, step):
            return self._through_bodies(here, SOLVER, around)
        return step

    def _through_bodies(self, here: _Here, rule: Rule | None, around: _Around) -> Step:
        """Follows values through bodies that a rule is given to, see `_call`."""
        index, eqn, views, region = here
        inner, facts = jaxprs.inner_bodies(eqn), around.facts.inner[index]
        sources = around.sources
        read = tuple([sources.of(atom) for atom in eqn.invars])
        starts = _in_region(views, region)
        cycles = _of_streams(eqn, starts, around.cycles.get(index, ()))
        ends = self._destinations.outputs(eqn, around.ends, facts)
        flows: dict[int, Flow] = {}
        layers: dict[int, int] = {}  # operands that layers of a body read in any turn

        def outputs(number: int, inputs: Sequence[_Part]) -> list[_Part]:
            body, positions = inner[number]
            known = _entering(eqn, [each.known for each in inputs], positions)
            groups = groups_of(tuple([each.sources for each in inputs]))
            inside = [(w[1:], cycle) for w, cycle in cycles if w[0].body == number]
            each = ends[number], facts[number], groups, frozenset(inside)
            stored = around.stored_inside.get(index)
            of_loop = _stored_outputs(eqn, number, inputs, around.storage)
            storage = stored[number] if stored else self._storage.of(body, of_loop)
            called = Called(known, region, rule, *each, storage)
            flow = flows[number] = self.through(body, called)
            # The condition of a loop, its first body, hands nothing to the next turn.
            carried = jaxprs.carried(eqn) if number == len(inner) - 1 else range(0)
            made, layers[number] = _made_of(flow, positions, carried)
            return list(map(_Part, flow.outputs, all_translated(tuple(made), read)))

        def turned(operand: int, now: _Part, update: _Part) -> _Part:
            each = starts[operand], now.known, update.known
            known = after_turn(eqn, operand, *each, bool(layers[0] >> operand & 1))
            return _Part(known, now.sources | update.sources)

        given = [*map(_Part, starts, read)]
        operands, made = forward(eqn, given, outputs, turned, _joined)
        sources.write(eqn.outvars, [each.sources for each in made])
        sources.layers |= translated(union([*layers.values()]), read)
        return Step(
            region,
            tuple([each.known for each in operands]),
            _saved(eqn, region, [each.known for each in made]),
            *(None, inner, tuple([flows[n] for n in range(len(inner))]), rule),
        )


class _Here(NamedTuple):
    """An equation of a body, what it sees of its operands, and its policy scope."""

    number: int
    eqn: Eqn
    views: tuple[Known, ...]
    region: Region


class _Part(NamedTuple):
    """What is known of an operand or a result of a call.

    Attributes:
      known: what is known of it.
      sources: the inputs of the body around that it is computed from, in any turn.
    """

    known: Known
    sources: int


def _of_streams(
    eqn: Eqn, starts: Sequence[Known], cycles: Sequence[tuple[Way, Cycle]]
) -> Sequence[tuple[Way, Cycle]]:
    """Returns the recursive products of a loop, given what it starts from.

    A stream between layers, which an activation or a lookup begins, is no state of a
    method.
    """
    begun = [
        number
        for number, i in enumerate(jaxprs.carried(eqn))
        if starts[i].follows_product or Trait.LOOKED_UP in starts[i].traits
    ]
    return [each for each in cycles if not is_in_stream(*each, begun)]


def _stored_outputs(
    eqn: Eqn, number: int, inputs: Sequence[_Part], storage: Mapping[Var, Store]
) -> tuple[Store, ...]:
    """Returns how the outputs of a body of a loop are stored, given its inputs."""
    if jaxprs.is_while(eqn) and number == 0:
        return (Store.NOWHERE,)
    stored = [storage[v] for v in eqn.outvars]
    if jaxprs.is_loop(eqn) and not jaxprs.is_while(eqn):
        # A stream that a loop carries is stored from turn to turn, see `after_turn`.
        for n, i in enumerate(jaxprs.carried(eqn)):
            if inputs[i].known.origin == Origin.LOW:
                stored[n] = max(stored[n], Store.ACROSS)
    return tuple(stored)


def _joined(one: _Part, other: _Part) -> _Part:
    return _Part(one_of(one.known, other.known), one.sources | other.sources)


def _made_of(
    flow: Flow, operands: Sequence[int], carried: range
) -> tuple[Sequence[int], int]:
    """Returns the operands that each output of a body is made of, and its layers'."""
    bits = tuple([1 << i for i in operands])
    inside = flow.sources
    outputs = tuple(map(inside.of, flow.body.jaxpr.outvars))
    made = all_translated(outputs, bits)
    return over_turns(made, translated(inside.layers, bits), carried)


class _Around(NamedTuple):
    """What is known around an equation of a body.

    Attributes:
      inherited: the rule that the name of the body's caller gives to all of it.
      facts: what each variable is made of.
      sources: the inputs that each variable so far is computed from.
      ends: what becomes of each variable.
      cycles: by equation, the recursive product that it is, or those of its bodies.
      storage: how each variable is stored.
      stored_inside: by equation, how the variables of its bodies are.
    """

    inherited: Rule | None
    facts: BodyFacts
    sources: Sources
    ends: dict[Var, End]
    cycles: Mapping[int, Sequence[tuple[Way, Cycle]]]
    storage: Mapping[Var, Store]
    stored_inside: Mapping[int, tuple[Storage, ...]]


def _entering(
    eqn: Eqn, inputs: Sequence[Known], operands: Sequence[int]
) -> tuple[Known, ...]:
    """Returns what is known of the inputs of a body.

    A turn reads its slices of what a `scan` goes through, and has a number.
    """
    carried = jaxprs.carried(eqn)

    def differs(i: int) -> bool:
        is_number = i in carried and not jaxprs.is_floating(eqn.invars[i])
        return is_number or (jaxprs.is_loop(eqn) and i >= carried.stop)

    return tuple(
        each.having(Trait.SLICE) if each.origin == Origin.FREE and differs(i) else each
        for i, each in zip(operands, inputs, strict=True)
    )


def _multiplied_by_slices(views: Sequence[Known], sources: Sequence[int]) -> int:
    """Returns the inputs that a factor of a product is made of, if it is a layer.

    Layers read slices of stacked arrays, or their part of an array by number; steps of
    a method multiply by the same matrix in each turn.
    """
    found = 0
    for i, j in ((0, 1), (1, 0)):
        if Trait.SLICE in views[i].traits:
            found |= sources[j]
    return found


def _saved(eqn: Eqn, region: Region, results: Sequence[Known]) -> tuple[Known, ...]:
    """Returns what is known in a region of the results of a call, a loop or a branch.

    A loop is not run again for the readers of its results, and the user's rule says
    what it saves.
    """
    if jaxprs.carried(eqn) or jaxprs.is_custom_jvp(eqn):
        half = is_half(region.policy.compute_dtype)
        saved = {Trait.SAVED_IN_F32}
        results = [
            k._replace(traits=k.traits | saved if half else k.traits - saved)
            for k in results
        ]
    return _in_region(tuple(results), region)


def seen(known: Known, region: Region) -> Known:
    """Returns what a consumer in `region` sees: values that leave a scope change."""
    if known.region.holds(region) or known.is_constant:
        return known
    half = is_half(known.region.policy.output_dtype)
    origin = Origin.LOW if half else Origin.FULL
    traits = known.traits - {Trait.PARAMETER, Trait.SAVED_IN_F32, Trait.CARRIED}
    return known._replace(origin=origin, traits=traits)


def _view(atom: Atom, known: dict[Var, Known], region: Region) -> Known:
    """Returns what an equation or an output in `region` sees of a value."""
    if isinstance(atom, Literal):
        return Known(Origin.FREE, constants.bounds_of_constant(atom.val), region)
    found = known[atom]
    return found if found.region is region else seen(found, region)


def _in_region(values: tuple[Known, ...], region: Region) -> tuple[Known, ...]:
    return tuple(
        known if known.region is region else known._replace(region=region)
        for known in values
    )
