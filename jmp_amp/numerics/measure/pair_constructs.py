"""Pairs, a value under the policy and as it is, in loops, branches and sharded maps.

JAX traces a body as a function of arrays, so that the sites that a pair comes from go
around it: they are known when the body has been traced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jmp_amp.numerics.measure.distances import Distance
from jmp_amp.numerics.measure.threaded import Statistics, Threaded
from jmp_amp.plan.plan import Plan
from jmp_amp.plan.program import binding, constructs, jaxprs
from jmp_amp.plan.program.jaxprs import Eqn, Inner, Value

# Which site: the identity of an equation, and which of its inserted casts.
Key = tuple[tuple[int, ...], str | None]
Keys = tuple[Key, ...]
# Values under the policy, and as they are: what a body of JAX takes and returns.
_Values = list[tuple[Value, Value]]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value under the policy, as it is, and the sites that it may come from."""

    low: Value
    full: Value
    made: Keys = ()


Distances = Statistics[Distance]
# One run of a body: its results, and the distances in it.
Ran = tuple[list[Pair], Distances]
# Runs a body: its number, what it reads.
RunBody = Callable[[int, Sequence[Pair]], Ran]


def united(keys: Sequence[Keys]) -> Keys:
    """Returns all keys of several tuples, each once, in their order."""
    return tuple(dict.fromkeys(key for each in keys for key in each))


def run_construct(
    eqn: Eqn,
    operands: Sequence[Pair],
    identity: tuple[int, ...],
    run: RunBody,
    known: dict[Key, Keys],
    threaded: Threaded[Distance],
) -> Ran:
    """Runs a loop, a branch or a sharded map: of branches, that of the policy for both.

    The distances are those of all runs. `known` are the sites that the operands of each
    site come from; carries are added.
    """
    values = [(pair.low, pair.full) for pair in operands]
    made = [pair.made for pair in operands]
    carries = []
    for count, i in enumerate(jaxprs.carried(eqn)):
        # It comes from before the loop or from the turn before: it has a key of its
        # own, as if it were a site.
        key = identity, f"carry{count}"
        known[key], made[i] = made[i], (key,)
        carries.append(key)
    bodies = [
        _Body(eqn, functools.partial(run, number), inner, values, made)
        for number, inner in enumerate(jaxprs.inner_bodies(eqn))
    ]
    is_branch = jaxprs.is_branch(eqn)
    results, found = threaded.run(
        eqn,
        [operands[0].low, *values[1:]] if is_branch else values,
        lambda number, args: bodies[number].run(args),
        lambda number: bodies[number].nothing(),
    )
    # Of a `while`, the body.
    returning = bodies if is_branch else bodies[-1:]
    last = list(map(united, zip(*(each.made for each in returning), strict=True)))
    for i, key in enumerate(carries):
        known[key] = united([known[key], last[i]])
        last[i] = united([last[i], (key,)])
    return _paired(results, last), found


def of_own_branch(
    plans: Sequence[Plan], operands: Sequence[Pair], results: Sequence[Pair]
) -> list[Pair]:
    """Returns results of a branch as they are: of another branch, if it differs."""
    index, *others = operands
    run = [functools.partial(binding.run_as_traced, plan.body) for plan in plans]
    full = jax.lax.cond(
        index.low == index.full,
        lambda full, values: full,
        lambda full, values: jax.lax.switch(index.full, run, values),
        [pair.full for pair in results],
        [pair.full for pair in others],
    )
    return [Pair(x.low, y, x.made) for x, y in zip(results, full, strict=True)]


def _paired(values: Sequence[tuple[Value, Value]], made: Sequence[Keys]) -> list[Pair]:
    return [Pair(*each, keys) for each, keys in zip(values, made, strict=True)]


class _Body:
    """A body of a construct, which is traced once, however often it runs.

    Attributes:
      run: returns the values of its results, and the distances in it.
      made: for each result, the sites that it may come from, when it was traced.
    """

    made: list[Keys]

    def __init__(
        self,
        eqn: Eqn,
        run_body: Callable[[Sequence[Pair]], Ran],
        inner: Inner,
        values: _Values,
        made: Sequence[Keys],
    ):
        self._eqn, self._values = eqn, [values[i] for i in inner.operands]
        made = [made[i] for i in inner.operands]

        # It keeps its trace: the bodies inside would be traced again for each call.
        @functools.partial(jax.jit, inline=True)
        def run(values: _Values) -> tuple[_Values, Distances]:
            results, found = run_body(_paired(values, made))
            self.made = [pair.made for pair in results]
            return [(pair.low, pair.full) for pair in results], found

        self.run = run

    def nothing(self) -> Distances:
        """Returns the distances of a run that has compared nothing."""
        _, found = jax.eval_shape(self._traced)
        # Those of all turns of a `scan` have an axis more.
        return jax.tree.map(lambda x: jnp.zeros(x.shape[-2:], x.dtype), found)

    def _traced(self) -> tuple[_Values, Distances]:
        values = self._values
        if not jaxprs.is_loop(self._eqn) or jaxprs.is_while(self._eqn):
            return self.run(values)
        start, stop = jaxprs.carried(self._eqn).start, jaxprs.carried(self._eqn).stop

        def turn(carry: _Values, xs: _Values) -> tuple[_Values, Distances]:
            return carry, self.run([*values[:start], *carry, *xs])[1]

        return constructs.scan(self._eqn, turn, values[start:stop], values[stop:])
