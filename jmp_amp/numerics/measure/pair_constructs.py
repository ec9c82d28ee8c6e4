"""Loops, branches and sharded maps side by side: what runs in them are pairs.

JAX traces a body as a function of arrays, so that the sites that a pair comes from go
around it: they are known when the body has been traced. The distances of each run come
out of the construct, merged over turns, branches and shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.numerics.measure import distances
from jmp_amp.numerics.measure.distances import Distance
from jmp_amp.numerics.measure.pairs import (
    Frame,
    Key,
    Keys,
    Origins,
    Pair,
    Values,
    apart,
    paired,
    united,
)
from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.plan.program import binding, constructs, jaxprs
from jmp_amp.plan.program.jaxprs import Eqn, Value


class Bodies(Protocol):
    """Who runs the bodies of a construct.

    Attributes:
      operands: for each site, the sites that its operands come from.
      mesh: the `shard_map` equation around, if there is one.
    """

    operands: dict[Key, Keys]
    mesh: Eqn | None

    def run(
        self, plan: Plan, pairs: Sequence[Pair], path: tuple[int, ...], times: int
    ) -> Frame:
        """Runs a body that may run several times, or on some shards only."""
        ...

    def note(self, keys: Sequence[Keys], found: Sequence[Distance]) -> None:
        """Notes distances of all runs of a body."""
        ...

    def compared(self, key: Key, pair: Pair) -> Pair:
        """Compares a result that `key` stands for; returns it as one that it made."""
        ...


class _Traced(NamedTuple):
    """A run of a body that is traced once, however often it is called.

    Attributes:
      run: returns the values of its results, and the distances in it.
      nothing: the distances of a run that has compared nothing.
      origins: where its results come from.
    """

    run: Callable[..., tuple[Values, list[Distance]]]
    nothing: list[Distance]
    origins: Origins


@dataclasses.dataclass(frozen=True)
class Construct:
    """A loop, a branch or a sharded map, and what it is given.

    Attributes:
      walk: who runs its bodies.
      eqn: the equation.
      planned: its plan.
      operands: those of both runs.
      identity: that of the equation.
    """

    walk: Bodies
    eqn: Eqn
    planned: EquationPlan
    operands: list[Pair]
    identity: tuple[int, ...]

    def run(self, number: int, pairs: Sequence[Pair]) -> Frame:
        """Runs one of its bodies."""
        path, times = (*self.identity, number), jaxprs.repetitions(self.eqn)
        return self.walk.run(self.planned.bodies[number], pairs, path, times)

    def traced(self, run: Callable[..., Frame], *args: object) -> _Traced:
        """Returns a run that may be called with such arguments; computes nothing."""
        seen: list[Origins] = []

        # It keeps its trace: the bodies inside would be traced again for each call.
        @functools.partial(jax.jit, inline=True)
        def once(*args: object) -> tuple[Values, list[Distance]]:
            frame = run(*args)
            seen.append(frame.origins)
            return apart(frame.results), frame.distances

        _, shapes = jax.eval_shape(once, *args)
        return _Traced(once, jax.tree.map(self._nothing, shapes), seen[-1])

    def _nothing(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        return self.varying(jnp.zeros(like.shape, like.dtype))

    def varying(self, array: jax.Array) -> jax.Array:
        """Returns an array that differs between the shards along all axes, if any."""
        mesh = self.walk.mesh
        if mesh is None:
            return array
        # It may differ along some of them already.
        return array + constructs.varying(mesh, jnp.zeros((), array.dtype))

    def entering(self, carried: range) -> list[Keys]:
        """Returns where the operands of a loop come from, in every turn.

        A carry comes from before the loop, or from the turn before: it has a key of its
        own, as if it were a site.
        """
        made = [pair.made for pair in self.operands]
        for number, i in enumerate(carried):
            key = self.identity, f"carry{number}"
            self.walk.operands[key] = made[i]
            made[i] = (key,)
        return made

    def leaving(
        self, results: Sequence[Pair], last: Sequence[Keys], before: Sequence[Keys]
    ) -> list[Pair]:
        """Returns results with the sites that made them.

        Args:
          results: of the construct.
          last: the sites that made those of its body.
          before: the keys of what a loop carries; its first results are theirs.
        """
        made = []
        for i, pair in enumerate(results):
            carried = before[i] if i < len(before) else ()
            for key in carried:
                operands = self.walk.operands
                operands[key] = united([operands[key], last[i]])
            keys = united([last[i], carried])
            made.append(dataclasses.replace(pair, made=keys))
        return made


def scan(construct: Construct) -> list[Pair]:
    """Runs all turns of a `scan`."""
    eqn, operands = construct.eqn, construct.operands
    carried = jaxprs.carried(eqn)
    count = len(carried)
    made = construct.entering(carried)
    before = made[carried.start : carried.stop]
    seen: list[Origins] = []

    def turn(carry: Values, xs: Values) -> tuple[Values, Any]:
        pairs = [*operands[: carried.start], *paired(carry, before)]
        frame = construct.run(0, [*pairs, *paired(xs, made[carried.stop :])])
        seen.append(frame.origins)
        low, full = apart(frame.results)
        after = low[:count], full[:count]
        return after, ((low[count:], full[count:]), frame.distances)

    start = apart(operands[carried.start : carried.stop])
    xs = apart(operands[carried.stop :])
    carry, (ys, found) = constructs.scan(eqn, turn, start, xs)
    keys, last = seen[-1]
    construct.walk.note(keys, list(map(_over_turns, found)))
    return construct.leaving([*paired(carry), *paired(ys)], last, before)


_State = tuple[tuple[Value, Value], Values, list[Distance], list[Distance]]


def while_loop(construct: Construct) -> list[Pair]:
    """Runs a `while` until both have ended; distances count while both go on."""
    eqn, operands = construct.eqn, construct.operands
    carried = jaxprs.carried(eqn)
    made = construct.entering(carried)[carried.start :]
    of_condition, of_body = (
        [operands[i] for i in inner.operands if i not in carried]
        for inner in jaxprs.inner_bodies(eqn)
    )

    start = apart([operands[i] for i in carried])
    test = construct.traced(
        lambda carry: construct.run(0, [*of_condition, *paired(carry, made)]), start
    )
    step = construct.traced(
        lambda carry: construct.run(1, [*of_body, *paired(carry, made)]), start
    )

    def once_more(carry: Values) -> tuple[tuple[Value, Value], list[Distance]]:
        ((goes,), (went,)), found = test.run(carry)
        return (goes, went), found

    def turn(state: _State) -> _State:
        (goes, went), carry, of_test, of_step = state
        (low, full), found = step.run(carry)
        # Under `vmap`, each example has a condition.
        both = (goes & went).any()
        of_step = _add_if(both, of_step, found)
        after = (
            list(map(functools.partial(_chosen, goes), low, carry[0])),
            list(map(functools.partial(_chosen, went), full, carry[1])),
        )
        goes_on, of_next = once_more(after)
        of_test = _add_if(both, of_test, of_next)
        return (goes & goes_on[0], went & goes_on[1]), after, of_test, of_step

    goes_on, found = once_more(start)
    first = jax.tree.map(jnp.add, test.nothing, found)
    _, carry, of_test, of_step = jax.lax.while_loop(
        lambda state: (state[0][0] | state[0][1]).any(),
        turn,
        (goes_on, start, first, step.nothing),
    )
    construct.walk.note(test.origins.keys, of_test)
    construct.walk.note(step.origins.keys, of_step)
    return construct.leaving(paired(carry), step.origins.made, made)


def cond(construct: Construct) -> list[Pair]:
    """Runs the policy's branch for both, then the other's own if it differs."""
    index, *others = construct.operands
    eqn, walk = construct.eqn, construct.walk
    made = [pair.made for pair in others]
    plans, values = construct.planned.bodies, apart(others)

    def run(number: int, values: Values) -> Frame:
        return construct.run(number, paired(values, made))

    traced = [
        construct.traced(functools.partial(run, number), values)
        for number in range(len(plans))
    ]

    def branch(number: int, values: Values) -> tuple[Values, Any]:
        results, compared = traced[number].run(values)
        found = [each.nothing for each in traced]
        found[number] = jax.tree.map(jnp.add, found[number], compared)
        return results, found

    branches = [functools.partial(branch, number) for number in range(len(plans))]
    (low, full), found = jax.lax.switch(index.low, branches, values)
    for each, of_branch in zip(traced, found, strict=True):
        walk.note(each.origins.keys, of_branch)
    as_it_is = [functools.partial(binding.run_as_traced, plan.body) for plan in plans]
    full = jax.lax.cond(
        index.low == index.full,
        lambda full, values: full,
        lambda full, values: jax.lax.switch(index.full, as_it_is, values[1]),
        full,
        values,
    )
    of_results = zip(*(each.origins.made for each in traced), strict=True)
    results = paired((low, full), list(map(united, of_results)))
    # Where the other branch was taken, they are further apart than what made them.
    return [
        walk.compared((construct.identity, f"branch{number}"), pair)
        if jaxprs.is_floating(var)
        else pair
        for number, (var, pair) in enumerate(zip(eqn.outvars, results, strict=True))
    ]


def shard_map(construct: Construct) -> list[Pair]:
    """Runs a sharded map; the distances of all shards are merged."""
    eqn, walk = construct.eqn, construct.walk
    axes, before = constructs.mapped_axes(eqn), walk.mesh
    made = [pair.made for pair in construct.operands]
    seen: list[Origins] = []
    trees: list[tuple[int, Any]] = []

    def shard(*shards: Value) -> list[Value]:
        values = list(shards[: len(made)]), list(shards[len(made) :])
        walk.mesh = eqn
        try:
            frame = construct.run(0, paired(values, made))
            found = jax.tree.map(construct.varying, frame.distances)
        finally:
            walk.mesh = before
        low, full = apart(frame.results)
        whole = [distances.across(each, axes) for each in found]
        leaves, tree = jax.tree.flatten(whole)
        seen.append(frame.origins)
        trees.append((len(leaves), tree))
        return [*low, *full, *leaves]

    low, full = apart(construct.operands)
    flat = [*low, *full]
    # How many distances there are is known only when the body has been traced.
    with contextlib.suppress(_Counted):
        constructs.bind_shard_map(eqn, _counting(shard), flat, copies=2)
    count, tree = trees[-1]
    results = constructs.bind_shard_map(eqn, shard, flat, count, copies=2)
    width = len(eqn.outvars)
    keys, last = seen[-1]
    walk.note(keys, tree.unflatten(results[2 * width :]))
    pairs = paired((results[:width], results[width : 2 * width]))
    return construct.leaving(pairs, last, ())


class _Counted(Exception):
    """Ends the trace of a sharded body, when all is known of it."""


def _counting(shard: Callable[..., list[Value]]) -> Callable[..., list[Value]]:
    def run(*shards: Value) -> list[Value]:
        shard(*shards)
        raise _Counted

    return run


def _chosen(condition: Value, yes: Value, no: Value) -> Value:
    leading = tuple(range(np.ndim(condition)))
    whole = jax.lax.broadcast_in_dim(condition, np.shape(yes), leading)
    return jax.lax.select(whole, yes, no)


def _add_if(
    condition: Value, before: list[Distance], after: list[Distance]
) -> list[Distance]:
    """Returns distances with those of another run, if a condition holds."""
    choose = functools.partial(_chosen, condition)
    return [
        jax.tree.map(choose, distances.merged(a, b), a)
        for a, b in zip(before, after, strict=True)
    ]


def _over_turns(found: Distance) -> Distance:
    """Returns distances [turns, n], merged over the turns."""
    turns, count = found.exponent.shape
    rows = jnp.tile(jnp.arange(count, dtype=jnp.int32), turns)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
    return distances.added(flat, rows, count)
