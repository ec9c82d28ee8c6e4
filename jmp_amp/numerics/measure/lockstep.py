"""A function and its plan side by side: how far apart each value is.

Every value of this walk is a pair, under the policy and as it is. Both are computed
equation by equation, in loops and branches too, so that the distance of the two is
exact and no activation is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmp_amp.numerics.calls.executables import Compile
from jmp_amp.numerics.measure import distances, pair_constructs
from jmp_amp.numerics.measure.distances import Distance
from jmp_amp.numerics.measure.measuring import MOVES
from jmp_amp.numerics.measure.pair_constructs import Distances, Key, Keys, Pair, Ran
from jmp_amp.numerics.measure.programs import options_for
from jmp_amp.numerics.measure.threaded import Threaded
from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.plan.program import binding, jaxprs, meshes, source_code
from jmp_amp.plan.program.jaxprs import Eqn, Literal, Value, Var
from jmp_amp.plan.rewrites.fp8 import quantised
from jmp_amp.plan.walk import Walk
from jmp_amp.transform.interpreter import Replay


class Errors(NamedTuple):
    """What a run in lockstep tells.

    Attributes:
      of: for each site, the relative distance of its results.
      operands: for each site, the sites that its operands come from; for the carry of a
        loop, those before the loop and in the turn before.
    """

    of: dict[Key, float]
    operands: dict[Key, Keys]

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


def errors(
    compile_: Compile, plan: Plan, arrays: Sequence[Value], traced: Sequence[Value]
) -> Callable[[], Errors]:
    """Begins to compile a plan and its function side by side.

    It returns a function that runs the program, once. `traced` are the inputs of the
    plan in the dtypes that the function was traced with.
    """
    walk = Lockstep(meshes.mesh_of(arrays))
    # An array in both is one input: the program takes no copy of it.
    inputs = enumerate(zip(arrays, traced, strict=True))
    others = {i: full for i, (low, full) in inputs if low is not full}

    def run(arrays: Sequence[Value], others: Mapping[int, Value]) -> Distances:
        full = [others.get(i, each) for i, each in enumerate(arrays)]
        return walk.run(plan, list(map(Pair, arrays, full)), ())[1]

    compiling = compile_(run, arrays, others, options=lambda: options_for(walk.size))

    def found() -> Errors:
        apart = jax.device_get(compiling.result()(arrays, others))
        worst: dict[Key, float] = {}
        for path, each in apart.items():
            relative = distances.relative(each).tolist()
            for key, error in zip(walk.keys[path], relative, strict=True):
                worst[key] = max(worst.get(key, 0.0), error)
        return Errors(worst, walk.operands)

    return found


@dataclasses.dataclass(eq=False)
class Lockstep(Walk[Pair]):
    """The walk through a body.

    Attributes:
      devices: the mesh that the program runs on, see `meshes.mesh_of`.
      operands: as in `Errors`.
      keys: the sites that are compared in each body, by the way to it.
      threaded: what runs constructs, and merges the distances of all runs.
      turns: how often the body runs, as far as the program tells.
      size: how many values are compared, those of a `while` in one turn.
      pairs: what is to be compared, and the sites.
      found: the distances in bodies inside that run otherwise often.
      here: the equation, and which of its inserted casts comes next.
    """

    devices: Mesh | None
    operands: dict[Key, Keys] = dataclasses.field(default_factory=dict)
    keys: dict[tuple[int, ...], Keys] = dataclasses.field(default_factory=dict)
    threaded: Threaded[Distance] = dataclasses.field(
        default_factory=lambda: Threaded(distances.merged, distances.across)
    )
    path: tuple[int, ...] = ()
    turns: int = 1
    size: int = 0
    pairs: list[tuple[Key, Pair]] = dataclasses.field(default_factory=list)
    found: Distances = dataclasses.field(default_factory=dict)
    here: tuple[tuple[int, ...], str, int] = ((), "out", 0)
    replay = Replay(recomputes=False)

    def run(
        self, plan: Plan, pairs: Sequence[Pair], path: tuple[int, ...], times: int = 1
    ) -> Ran:
        """Runs a body that may run several times, or on some shards only.

        It runs `times` as often as the body around it, as far as the program tells.
        """
        here, turns = (path, "out", 0), self.turns * times
        walk = dataclasses.replace(
            self, path=path, turns=turns, here=here, size=0, pairs=[], found={}
        )
        results = walk.body(plan, pairs)
        self.size += walk.size
        if walk.pairs:
            self.keys[path] = tuple(key for key, _ in walk.pairs)
            compared = [(pair.low, pair.full) for _, pair in walk.pairs]
            walk.found[path] = distances.distances(compared, self.devices)
        return results, jax.tree.map(meshes.here, walk.found)

    def _note(self, key: Key, *made: Keys) -> None:
        """Notes the sites that the operands of a site may come from."""
        self.operands[key] = pair_constructs.united([self.operands.get(key, ()), *made])

    def _compare(self, key: Key, pair: Pair, operands: Sequence[Pair]) -> Pair:
        """Notes a result of a site; returns it."""
        self._note(key, *(each.made for each in operands))
        # A literal is no array.
        low, full = jnp.asarray(pair.low), jnp.asarray(pair.full)
        self.pairs.append((key, Pair(low, full)))
        self.size += self.turns * full.size
        return dataclasses.replace(pair, made=(key,))

    def constant(self, value: Value, var: Var) -> Pair:
        value = self.replay.constant(value, var)
        return Pair(value, value)

    def literal(self, atom: Literal, dtype: np.dtype | None, saturate: bool) -> Pair:
        return Pair(
            self.replay.literal(atom, dtype, saturate),
            self.replay.literal(atom, None, False),
        )

    def dtype_of(self, value: Pair) -> np.dtype | None:
        return value.low.dtype

    def cast(self, value: Pair, dtype: np.dtype, saturate: bool) -> Pair:
        low = self.replay.cast(value.low, dtype, saturate)
        return self._compare(self._next_cast(), Pair(low, value.full), [value])

    def _next_cast(self) -> Key:
        identity, place, count = self.here
        self.here = identity, place, count + 1
        return identity, f"{place}{count}"

    def equation(
        self, eqn: Eqn, planned: EquationPlan, read: Callable[[], list[Pair]]
    ) -> list[Pair]:
        before, self.here = self.here, ((*self.path, planned.index), "own", 0)
        with binding.source_of(eqn):
            operands = read()
            if jaxprs.happens(eqn) and not jaxprs.is_read(eqn):
                # It was seen when the policy and the reference ran.
                results = [Pair(None, None)] * len(eqn.outvars)
            elif planned.bodies:
                results = self._call(eqn, planned, operands)
            else:
                results = self._both(eqn, planned, operands)
        self.here = before
        return results

    def _both(
        self, eqn: Eqn, planned: EquationPlan, operands: list[Pair]
    ) -> list[Pair]:
        """Computes an equation under the policy and as it is."""
        identity, _, _ = self.here
        lows = [x.low for x in operands]
        bound = self.replay.bound(eqn, planned, lows)
        full = binding.bind(eqn, [x.full for x in operands])
        fp8 = None if planned.rewrite is None else planned.rewrite.fp8
        if fp8 is not None:
            for i, (x, low) in enumerate(
                zip(operands, quantised(fp8, lows), strict=True)
            ):
                pair = Pair(low.restored(x.low.dtype), x.full)
                operands[i] = self._compare((identity, f"quantised{i}"), pair, [x])
        made = pair_constructs.united([x.made for x in operands])
        # What a mutable array holds may come from the other operands.
        for atom, each in zip(eqn.invars, operands, strict=False):
            if jaxprs.is_mutable(atom):
                for key in each.made:
                    self._note(key, made)
        results, cast = [], None
        made_of = zip(eqn.outvars, bound, full, planned.writes, strict=True)
        for var, low, other, dtype in made_of:
            pair = Pair(low, other, made)
            if jaxprs.is_mutable(var):
                # It has a key of its own, as if it were a site.
                key = identity, "mutable"
                self.operands[key] = made
                pair = dataclasses.replace(pair, made=(key,))
            elif eqn.primitive.name in MOVES:
                self.operands[identity, None] = made
            elif jaxprs.is_floating(var):
                pair = self._compare((identity, None), pair, operands)
            if dtype is not None and pair.low.dtype != dtype:
                # It is kept in another dtype.
                cast = cast or self._next_cast()
                low = jax.lax.convert_element_type(low, dtype)
                pair = self._compare(cast, Pair(low, other), [pair])
            results.append(pair)
        return results

    def _call(
        self, eqn: Eqn, planned: EquationPlan, operands: list[Pair]
    ) -> list[Pair]:
        identity, _, _ = self.here
        is_branch, plans = jaxprs.is_branch(eqn), planned.bodies
        if is_branch or jaxprs.is_loop(eqn) or jaxprs.is_shard_map(eqn):
            times = jaxprs.repetitions(eqn)

            def run(number: int, pairs: Sequence[Pair]) -> Ran:
                return self.run(plans[number], pairs, (*identity, number), times)

            results, found = pair_constructs.run_construct(
                eqn, operands, identity, run, self.operands, self.threaded
            )
            self.found |= found
            if not is_branch:
                return results
            # Where the other branch was taken, they are further apart than what made
            # them.
            results = pair_constructs.of_own_branch(plans, operands, results)
            return [
                self._compare((identity, f"branch{i}"), pair, [pair])
                if jaxprs.is_floating(var)
                else pair
                for i, (var, pair) in enumerate(zip(eqn.outvars, results, strict=True))
            ]
        before = self.path, self.here
        self.path = (*identity, 0)
        if not source_code.is_helper(eqn):
            self.here = self.path, "out", 0
        results = self.body(plans[0], operands)
        self.path, self.here = before
        return results
