"""Loops, branches and sharded maps side by side: what runs in them are pairs.

JAX traces a body as a function of arrays, so that the sites that a pair comes from go
around it: they are known when the body has been traced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import jax

from jmp_amp.numerics.measure import distances
from jmp_amp.numerics.measure.distances import Distance
from jmp_amp.numerics.measure.pairs import (
    Frame,
    Key,
    Keys,
    Pair,
    Values,
    apart,
    paired,
    united,
)
from jmp_amp.numerics.measure.threaded import Threaded
from jmp_amp.plan.plan import EquationPlan, Plan
from jmp_amp.plan.program import binding, constructs, jaxprs
from jmp_amp.plan.program.jaxprs import Eqn, Inner


class Bodies(Protocol):
    """Who runs the bodies of a construct.

    Attributes:
      operands: for each site, the sites that its operands come from.
      threaded: what runs constructs, and merges the distances of all runs.
    """

    operands: dict[Key, Keys]
    threaded: Threaded[list[Distance]]

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

    def results(self) -> list[Pair]:
        """Runs the construct: of branches, that of the policy for both."""
        values, made = apart(self.operands), [pair.made for pair in self.operands]
        known, carries = self.walk.operands, []
        for count, i in enumerate(jaxprs.carried(self.eqn)):
            # It comes from before the loop or from the turn before: it has a key of its
            # own, as if it were a site.
            key = self.identity, f"carry{count}"
            known[key], made[i] = made[i], (key,)
            carries.append(key)
        bodies = [
            _Body(self, number, inner, values, made)
            for number, inner in enumerate(jaxprs.inner_bodies(self.eqn))
        ]
        is_branch = jaxprs.is_branch(self.eqn)
        read = [self.operands[0].low, *values[1:]] if is_branch else values
        results, found = self.walk.threaded.run(
            self.eqn,
            read,
            lambda number, args: bodies[number].run(args),
            lambda number: bodies[number].nothing(),
        )
        for body, each in zip(bodies, found, strict=True):
            self.walk.note(body.keys, each)
        # Of a `while`, the body.
        returning = bodies if is_branch else bodies[-1:]
        last = list(map(united, zip(*(each.made for each in returning), strict=True)))
        for i, key in enumerate(carries):
            known[key] = united([known[key], last[i]])
            last[i] = united([last[i], (key,)])
        pairs = paired(results, last)
        return self._of_own_branch(pairs) if is_branch else pairs

    def _of_own_branch(self, results: list[Pair]) -> list[Pair]:
        """Returns results of a branch as they are: of another branch, if it differs."""
        index, *others = self.operands
        run = [
            functools.partial(binding.run_as_traced, plan.body)
            for plan in self.planned.bodies
        ]
        full = jax.lax.cond(
            index.low == index.full,
            lambda full, values: full,
            lambda full, values: jax.lax.switch(index.full, run, values),
            [pair.full for pair in results],
            [pair.full for pair in others],
        )
        # Where the other branch was taken, they are further apart than what made them.
        return [
            self.walk.compared((self.identity, f"branch{i}"), Pair(x.low, y, x.made))
            if jaxprs.is_floating(var)
            else Pair(x.low, y, x.made)
            for i, (var, x, y) in enumerate(
                zip(self.eqn.outvars, results, full, strict=True)
            )
        ]


class _Body:
    """A body of a construct, which is traced once, however often it runs.

    Attributes:
      run: returns the values of its results, and the distances in it.
      keys: whose these distances are, when it was traced.
      made: for each result, the sites that it may come from.
    """

    keys: list[Keys]
    made: list[Keys]

    def __init__(
        self,
        construct: Construct,
        number: int,
        inner: Inner,
        values: Values,
        made: Sequence[Keys],
    ):
        self._eqn, self._values = construct.eqn, [values[i] for i in inner.operands]
        made = [made[i] for i in inner.operands]

        # It keeps its trace: the bodies inside would be traced again for each call.
        @functools.partial(jax.jit, inline=True)
        def run(values: Values) -> tuple[Values, list[Distance]]:
            frame = construct.run(number, paired(values, made))
            self.keys, self.made = frame.keys, [pair.made for pair in frame.results]
            return apart(frame.results), frame.distances

        self.run = run

    def nothing(self) -> list[Distance]:
        """Returns the distances of a run that has compared nothing."""
        jax.eval_shape(self._traced)
        return list(map(distances.nothing, map(len, self.keys)))

    def _traced(self) -> object:
        values = self._values
        if not jaxprs.is_loop(self._eqn) or jaxprs.is_while(self._eqn):
            return self.run(values)
        start, stop = jaxprs.carried(self._eqn).start, jaxprs.carried(self._eqn).stop

        def turn(carry: Values, xs: Values) -> tuple[Values, list[Distance]]:
            return carry, self.run([*values[:start], *carry, *xs])[1]

        return constructs.scan(self._eqn, turn, values[start:stop], values[stop:])
