"""A function and its plan side by side: how far apart each value is.

Every value of this walk is a pair, under the policy and as it is. Both are computed
equation by equation, in loops and branches too, so that the distance of the two is
exact and no activation is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.numerics import distances
from jmp_amp.numerics.distances import Distance
from jmp_amp.numerics.measuring import MOVES
from jmp_amp.numerics.programs import options_for
from jmp_amp.plan import jaxprs
from jmp_amp.plan.jaxprs import Eqn, Literal, Value, Var
from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.plan.walk import Walk
from jmp_amp.transform.interpreter import Replay

# Which site: the identity of an equation, and which of its inserted casts.
Key = tuple[tuple[int, ...], str | None]


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A value under the policy, as it is, and the sites that it may come from."""

    low: Value
    full: Value
    made: tuple[Key, ...] = ()


class Errors(NamedTuple):
    """What a run in lockstep tells.

    Attributes:
      of: for each site, the relative distance of its results.
      operands: for each site, the sites that its operands come from; for the carry of a
        loop, those before the loop and in the turn before.
    """

    of: dict[Key, float]
    operands: dict[Key, tuple[Key, ...]]

    def at(self, key: Key) -> float | None:
        """Returns the error of a site; that of its operands, if it only moves them."""
        known = self.of.get(key)
        if known is None and key in self.operands:
            return self.of_operands(key)
        return known

    def of_operands(self, key: Key) -> float:
        """Returns the largest error among the operands of a site."""
        largest, seen = 0.0, {key}
        waiting = [*self.operands.get(key, ())]
        while waiting:
            each = waiting.pop()
            if each in self.of and each != key:
                largest = max(largest, self.of[each])
            elif each not in seen:
                waiting += self.operands.get(each, ())
            seen.add(each)
        return largest


def errors(plan: Plan, arrays: Sequence[Value], traced: Sequence[Value]) -> Errors:
    """Runs a plan and its function side by side; compiles one program.

    Args:
      plan: the plan.
      arrays: its inputs.
      traced: the same in the dtypes that the function was traced with.
    """
    walk = _Lockstep()

    def run(arrays: Sequence[Value], traced: Sequence[Value]) -> list[Distance]:
        pairs = [_Pair(a, b) for a, b in zip(arrays, traced, strict=True)]
        return walk.frame(lambda: walk.body(plan, pairs), ())[1]

    lowered = jax.jit(run).lower(arrays, traced)
    compiled = lowered.compile(compiler_options=options_for(walk.size))
    found: dict[Key, float] = {}
    apart = jax.device_get(compiled(arrays, traced))
    for keys, each in zip(walk.keys, apart, strict=True):
        for key, error in zip(keys, distances.relative(each).tolist(), strict=True):
            found[key] = max(found.get(key, 0.0), error)
    return Errors(found, walk.operands)


class _Lockstep(Walk[_Pair]):
    """The walk.

    Attributes:
      path: the way to the body.
      keys: the sites of each list of distances of the frame that was left last.
      operands: as in `Errors`.
      mesh: the `shard_map` equation around, if there is one.
      size: how many values are compared in one run of each body.
    """

    def __init__(self) -> None:
        self.path: tuple[int, ...] = ()
        self.keys: list[tuple[Key, ...]] = []
        self.operands: dict[Key, tuple[Key, ...]] = {}
        self.mesh: Eqn | None = None
        self.size = 0
        self.replay = Replay(recomputes=False)
        self._here: tuple[tuple[int, ...], str, int] = ((), "out", 0)
        # Of the frame: pairs to compare, and what inner frames have compared.
        self._pairs: list[tuple[Key, _Pair]] = []
        self._inner: list[tuple[tuple[Key, ...], Distance]] = []

    def frame(
        self, run: Callable[[], list[_Pair]], path: tuple[int, ...]
    ) -> tuple[list[_Pair], list[Distance]]:
        """Returns the results of a body that may run several times, and distances."""
        before = self.path, self._here, self._pairs, self._inner
        self.path, self._pairs, self._inner = path, [], []
        try:
            results = run()
            found = [*self._inner]
            if self._pairs:
                keys = tuple(key for key, _ in self._pairs)
                pairs = [(pair.low, pair.full) for _, pair in self._pairs]
                found.append((keys, distances.distances(pairs)))
        finally:
            self.path, self._here, self._pairs, self._inner = before
        self.keys = [keys for keys, _ in found]
        return results, [each for _, each in found]

    def _compare(self, key: Key, pair: _Pair, operands: Sequence[_Pair]) -> _Pair:
        """Notes a result of a site; returns it."""
        made = tuple(dict.fromkeys(k for each in operands for k in each.made))
        known = self.operands.get(key, ())
        self.operands[key] = tuple(dict.fromkeys((*known, *made)))
        # A literal is no array.
        low, full = jnp.asarray(pair.low), jnp.asarray(pair.full)
        self._pairs.append((key, _Pair(low, full)))
        self.size += full.size
        return dataclasses.replace(pair, made=(key,))

    def constant(self, value: Value, var: Var) -> _Pair:
        value = self.replay.constant(value, var)
        return _Pair(value, value)

    def literal(self, atom: Literal, dtype: np.dtype | None, saturate: bool) -> _Pair:
        return _Pair(
            self.replay.literal(atom, dtype, saturate),
            self.replay.literal(atom, None, False),
        )

    def dtype_of(self, value: _Pair) -> np.dtype | None:
        return value.low.dtype

    def cast(self, value: _Pair, dtype: np.dtype, saturate: bool) -> _Pair:
        low = self.replay.cast(value.low, dtype, saturate)
        return self._compare(self._next_cast(), _Pair(low, value.full), [value])

    def _next_cast(self) -> Key:
        identity, place, count = self._here
        self._here = identity, place, count + 1
        return identity, f"{place}{count}"

    @contextlib.contextmanager
    def _at(self, planned: EquationPlan, place: str) -> Iterator[tuple[int, ...]]:
        before = self._here
        identity = (*self.path, planned.index)
        self._here = identity, place, 0
        try:
            yield identity
        finally:
            self._here = before

    def border(
        self, eqn: Eqn, planned: EquationPlan
    ) -> contextlib.AbstractContextManager[object]:
        return self._at(planned, "border")

    def island(
        self, compute: Callable[..., list[_Pair]], inputs: list[_Pair]
    ) -> list[_Pair]:
        return compute(*inputs)

    def equation(
        self, eqn: Eqn, planned: EquationPlan, read: Callable[[], list[_Pair]]
    ) -> list[_Pair]:
        with jaxprs.source_of(eqn), self._at(planned, "own") as identity:
            operands = read()
            if eqn.effects and not jaxprs.is_read(eqn):
                # It was seen when the policy and the reference ran.
                return [_Pair(None, None)] * len(eqn.outvars)
            if planned.bodies:
                return self._call(eqn, planned, operands, identity)
            bound = self.replay.bound(eqn, planned, [x.low for x in operands])
            full = jaxprs.bind(eqn, [x.full for x in operands])
            made = tuple(k for x in operands for k in x.made)
            results = []
            for var, low, other in zip(eqn.outvars, bound, full, strict=True):
                pair = _Pair(low, other, made)
                if eqn.primitive.name in MOVES:
                    self.operands[identity, None] = made
                elif jaxprs.is_floating(var):
                    pair = self._compare((identity, None), pair, operands)
                results.append(pair)
            return self._written(planned, results)

    def _written(self, planned: EquationPlan, results: Sequence[_Pair]) -> list[_Pair]:
        """Returns results in the dtypes that they are kept in."""
        kept, key = [], None
        for pair, dtype in zip(results, planned.writes, strict=True):
            if dtype is not None and pair.low.dtype != dtype:
                key = key or self._next_cast()
                low = jax.lax.convert_element_type(pair.low, dtype)
                pair = self._compare(key, _Pair(low, pair.full), [pair])
            kept.append(pair)
        return kept

    def _call(
        self,
        eqn: Eqn,
        planned: EquationPlan,
        operands: list[_Pair],
        identity: tuple[int, ...],
    ) -> list[_Pair]:
        if jaxprs.is_branch(eqn):
            return self._cond(planned, operands, identity)
        if jaxprs.is_while(eqn):
            return self._while(eqn, planned, operands, identity)
        if jaxprs.is_loop(eqn):
            return self._scan(eqn, planned, operands, identity)
        if jaxprs.is_shard_map(eqn):
            return self._shard_map(eqn, planned, operands, identity)
        before, self.path = self.path, (*identity, 0)
        try:
            return self.body(planned.bodies[0], operands)
        finally:
            self.path = before

    def _run(self, plan: Plan, pairs: Sequence[_Pair], path: tuple[int, ...]) -> _Frame:
        """Runs a body that may run several times, or on some shards only."""
        results, found = self.frame(lambda: self.body(plan, pairs), path)
        return _Frame(results, found, self.keys)

    def _structure(self, run: Callable[..., _Frame], *args: object) -> _Frame:
        """Returns the shapes of distances; nothing is computed."""
        frames: list[_Frame] = []

        def distances_of(*args: object) -> list[Distance]:
            frames.append(run(*args))
            return frames[-1].distances

        shapes = jax.eval_shape(distances_of, *args)
        nothing = jax.tree.map(self._nothing, shapes)
        return frames[-1]._replace(distances=nothing, results=[])

    def _nothing(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        zeros = jnp.zeros(like.shape, like.dtype)
        return zeros if self.mesh is None else jaxprs.varying(self.mesh, zeros)

    def _note(self, keys: Sequence[tuple[Key, ...]], found: Sequence[Distance]) -> None:
        self._inner += zip(keys, found, strict=True)

    def _scan(
        self,
        eqn: Eqn,
        planned: EquationPlan,
        operands: list[_Pair],
        identity: tuple[int, ...],
    ) -> list[_Pair]:
        carried, params = jaxprs.carried(eqn), eqn.params
        made = self._entering(operands, carried, identity)
        frames: list[_Frame] = []

        def turn(carry: _Values, xs: _Values) -> tuple[_Values, Any]:
            pairs = [*operands[: carried.start]]
            pairs += _paired(carry, made[carried.start : carried.stop])
            pairs += _paired(xs, made[carried.stop :])
            frame = self._run(planned.bodies[0], pairs, (*identity, 0))
            frames.append(frame)
            low, full = _apart(frame.results)
            count = len(carried)
            after = low[:count], full[:count]
            return after, ((low[count:], full[count:]), frame.distances)

        start = _apart(operands[carried.start : carried.stop])
        carry, (ys, found) = jax.lax.scan(
            turn,
            start,
            _apart(operands[carried.stop :]),
            length=params["length"],
            reverse=params["reverse"],
        )
        frame = frames[-1]
        self._note(frame.keys, [_over_turns(each) for each in found])
        results = [*_paired(carry), *_paired(ys)]
        before = made[carried.start : carried.stop]
        return self._through_turns(results, frame.results, before)

    def _entering(
        self, operands: Sequence[_Pair], carried: range, identity: tuple[int, ...]
    ) -> list[tuple[Key, ...]]:
        """Returns where the operands of a loop come from, in every turn.

        A carry comes from before the loop, or from the turn before: it has a key of its
        own, as if it were a site.
        """
        made = [pair.made for pair in operands]
        for number, i in enumerate(carried):
            key = identity, f"carry{number}"
            self.operands[key] = made[i]
            made[i] = (key,)
        return made

    def _through_turns(
        self,
        results: Sequence[_Pair],
        last: Sequence[_Pair],
        before: Sequence[tuple[Key, ...]],
    ) -> list[_Pair]:
        """Returns the results of a loop, with the sites that made them."""
        made = []
        for i, pair in enumerate(results):
            carried = before[i] if i < len(before) else ()
            for key in carried:
                self.operands[key] = (*self.operands[key], *last[i].made)
            keys = tuple(dict.fromkeys((*last[i].made, *carried)))
            made.append(dataclasses.replace(pair, made=keys))
        return made

    def _while(
        self,
        eqn: Eqn,
        planned: EquationPlan,
        operands: list[_Pair],
        identity: tuple[int, ...],
    ) -> list[_Pair]:
        """Runs a `while` until both have ended; distances count while both go on."""
        carried = jaxprs.carried(eqn)
        made = self._entering(operands, carried, identity)[carried.start :]
        condition, body = planned.bodies
        of_condition, of_body = (
            [operands[i] for i in inner.operands if i not in carried]
            for inner in jaxprs.inner_bodies(eqn)
        )

        def test(carry: _Values) -> _Frame:
            pairs = [*of_condition, *_paired(carry, made)]
            return self._run(condition, pairs, (*identity, 0))

        def step(carry: _Values) -> _Frame:
            pairs = [*of_body, *_paired(carry, made)]
            return self._run(body, pairs, (*identity, 1))

        start = _apart([operands[i] for i in carried])
        tested, stepped = self._structure(test, start), self._structure(step, start)
        frames = {"test": tested, "step": stepped}

        def turn(state: _State) -> _State:
            (goes, went), carry, of_test, of_step = state
            frames["step"] = frame = step(carry)
            low, full = _apart(frame.results)
            both = goes & went
            of_step = _add_if(both, of_step, frame.distances)
            after = (
                list(map(functools.partial(_chosen, goes), low, carry[0])),
                list(map(functools.partial(_chosen, went), full, carry[1])),
            )
            goes_on, of_next = once_more(after)
            of_test = _add_if(both, of_test, of_next)
            return (goes & goes_on[0], went & goes_on[1]), after, of_test, of_step

        def once_more(carry: _Values) -> tuple[tuple[Value, Value], list[Distance]]:
            frame = frames["test"] = test(carry)
            (goes_on,) = frame.results
            return (goes_on.low, goes_on.full), frame.distances

        goes_on, found = once_more(start)
        first = jax.tree.map(jnp.add, tested.distances, found)
        state = jax.lax.while_loop(
            lambda state: state[0][0] | state[0][1],
            turn,
            (goes_on, start, first, stepped.distances),
        )
        _, carry, of_test, of_step = state
        self._note(frames["test"].keys, of_test)
        self._note(frames["step"].keys, of_step)
        return self._through_turns(_paired(carry), frames["step"].results, made)

    def _cond(
        self, planned: EquationPlan, operands: list[_Pair], identity: tuple[int, ...]
    ) -> list[_Pair]:
        """Runs the policy's branch for both, then the other's own if it differs."""
        index, *others = operands
        made = [pair.made for pair in others]
        values = _apart(others)

        def runner(number: int) -> Callable[[_Values], _Frame]:
            def run(values: _Values) -> _Frame:
                pairs = _paired(values, made)
                return self._run(planned.bodies[number], pairs, (*identity, number))

            return run

        runners = [runner(number) for number in range(len(planned.bodies))]
        nothing = [self._structure(run, values) for run in runners]
        frames = list(nothing)

        def branch(number: int, values: _Values) -> tuple[_Values, Any]:
            frame = frames[number] = runners[number](values)
            found = [each.distances for each in nothing]
            found[number] = [
                jax.tree.map(jnp.add, a, b)
                for a, b in zip(nothing[number].distances, frame.distances, strict=True)
            ]
            return _apart(frame.results), found

        numbers = range(len(runners))
        branches = [functools.partial(branch, number) for number in numbers]
        (low, full), found = jax.lax.switch(index.low, branches, values)
        for frame, each in zip(frames, found, strict=True):
            self._note(frame.keys, each)
        as_it_is = [functools.partial(self._as_it_is, plan) for plan in planned.bodies]
        full = jax.lax.cond(
            index.low == index.full,
            lambda full, values: full,
            lambda full, values: jax.lax.switch(index.full, as_it_is, values[1]),
            full,
            values,
        )
        results = _paired((low, full))
        made_by = [
            tuple(dict.fromkeys(k for frame in frames for k in frame.results[i].made))
            for i in range(len(results))
        ]
        return [
            dataclasses.replace(pair, made=keys)
            for pair, keys in zip(results, made_by, strict=True)
        ]

    @staticmethod
    def _as_it_is(plan: Plan, values: list[Value]) -> list[Value]:
        return jaxprs.run_as_traced(plan.body, values)

    def _shard_map(
        self,
        eqn: Eqn,
        planned: EquationPlan,
        operands: list[_Pair],
        identity: tuple[int, ...],
    ) -> list[_Pair]:
        axes, before = jaxprs.mapped_axes(eqn), self.mesh
        made = [pair.made for pair in operands]
        count = len(operands)
        frames: list[_Frame] = []

        def shard(*shards: Value) -> list[Value]:
            self.mesh = eqn
            try:
                values = list(shards[:count]), list(shards[count:])
                pairs = _paired(values, made)
                frame = self._run(planned.bodies[0], pairs, (*identity, 0))
            finally:
                self.mesh = before
            frames.append(frame)
            low, full = _apart(frame.results)
            whole = [distances.across(each, axes) for each in frame.distances]
            return [*low, *full, *jax.tree.leaves(whole)]

        low, full = _apart(operands)
        flat = [*low, *full]
        # How many distances there are is known only when the body has been traced.
        with contextlib.suppress(_Counted):
            jaxprs.bind_shard_map(eqn, _counting(shard, frames), flat, copies=2)
        replicated = len(jax.tree.leaves(frames[-1].distances))
        results = jaxprs.bind_shard_map(eqn, shard, flat, replicated, copies=2)
        width = len(eqn.outvars)
        leaves = results[2 * width :]
        tree = jax.tree.structure(frames[-1].distances)
        self._note(frames[-1].keys, tree.unflatten(leaves))
        pairs = _paired((results[:width], results[width : 2 * width]))
        return self._through_turns(pairs, frames[-1].results, ())


_Values = tuple[list[Value], list[Value]]
_State = tuple[tuple[Value, Value], _Values, list[Distance], list[Distance]]


class _Frame(NamedTuple):
    """One run of a body: its results, the distances in it, and whose they are."""

    results: list[_Pair]
    distances: list[Distance]
    keys: list[tuple[Key, ...]]


class _Counted(Exception):
    """Ends the trace of a sharded body, when all is known of it."""


def _counting(
    shard: Callable[..., list[Value]], frames: list[_Frame]
) -> Callable[..., list[Value]]:
    def run(*shards: Value) -> list[Value]:
        shard(*shards)
        raise _Counted

    return run


def _apart(pairs: Sequence[_Pair]) -> _Values:
    return [pair.low for pair in pairs], [pair.full for pair in pairs]


def _paired(
    values: _Values, made: Sequence[tuple[Key, ...]] | None = None
) -> list[_Pair]:
    low, full = values
    made = [()] * len(low) if made is None else made
    return [_Pair(*each) for each in zip(low, full, made, strict=True)]


def _like(condition: Value, value: Value) -> Value:
    return jax.lax.broadcast(condition, np.shape(value))


def _chosen(condition: Value, yes: Value, no: Value) -> Value:
    return jax.lax.select(_like(condition, yes), yes, no)


def _add_if(
    condition: Value, before: list[Distance], after: list[Distance]
) -> list[Distance]:
    """Returns distances with those of another run, if a condition holds."""
    return [
        jax.tree.map(
            functools.partial(_chosen, condition),
            distances.merged(a, b),
            a,
        )
        for a, b in zip(before, after, strict=True)
    ]


def _over_turns(found: Distance) -> Distance:
    """Returns distances [turns, n], merged over the turns."""
    turns, count = found.exponent.shape
    rows = jnp.tile(jnp.arange(count, dtype=jnp.int32), turns)
    flat = jax.tree.map(lambda x: x.reshape(-1), found)
    return distances.added(flat, rows, count)
