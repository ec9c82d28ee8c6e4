"""Loops, branches, checkpoints and sharded maps that run again, and are counted.

Each run of a body returns statistics of fixed size beside its outputs: its own, and
those of the bodies in it. A construct returns those of all turns, of the branches that
ran, of all shards. So the memory of statistics does not grow with the runs.

A value may be a pytree, such as one array of each of several runs side by side. Then a
`while` goes on until all have ended, and what has ended stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.program import binding, constructs, jaxprs
from jmp_amp.plan.program.jaxprs import Eqn, Value
from jmp_amp.policies.dtypes import PyTree

S = TypeVar("S")  # A statistic: a pytree of arrays, of one structure for each body.
# The way to a body: of each body around it, the equation that calls, and which body.
Path = tuple[int, ...]
Statistics = dict[Path, S]
_Ran = tuple[Sequence[PyTree], Statistics[S]]
# (number of the body, its operands) -> its outputs, and the statistics of this run
RunBody = Callable[[int, list[PyTree]], _Ran[S]]
# Of a `while`: what goes on, the carry, and the statistics so far.
_State = tuple[PyTree, list[PyTree], Statistics[S]]


@dataclasses.dataclass
class Threaded(Generic[S]):
    """Runs constructs; statistics are a monoid.

    Attributes:
      merged: returns the statistic of the runs of two.
      across: returns that of all shards over mesh axes, the same on each.
      mesh: the `shard_map` equation around, if there is one.
    """

    merged: Callable[[S, S], S]
    across: Callable[[S, Sequence[str]], S]
    mesh: Eqn | None = None

    def run(
        self,
        eqn: Eqn,
        operands: list[PyTree],
        run: RunBody[S],
        nothing: Callable[[int], Statistics[S]],
    ) -> _Ran[S]:
        """Returns the results of a construct, and the statistics of its bodies.

        The index of a branch is an array. `run` may be called for one body more than
        once; `nothing` returns the statistics of a body that never ran.
        """
        if jaxprs.is_checkpoint(eqn):
            return _checkpoint(eqn, operands, run)
        if jaxprs.is_shard_map(eqn):
            return self._shard_map(eqn, operands, run)
        none = Statistics[S]()
        for number, _ in enumerate(jaxprs.inner_bodies(eqn)):
            none |= self._varying(nothing(number))
        if jaxprs.is_branch(eqn):
            return self._branch(eqn, operands, run, none)
        if jaxprs.is_while(eqn):
            return self._while_loop(eqn, operands, run, none)
        return self._scan(eqn, operands, run, none)

    def _merged(self, before: Statistics[S], after: Statistics[S]) -> Statistics[S]:
        """Returns the statistics of the runs of both; of `after` a body may be none."""
        return before | {k: self.merged(before[k], x) for k, x in after.items()}

    def _varying(self, found: Statistics[S]) -> Statistics[S]:
        """Returns statistics that differ between the shards around, if any."""
        mesh = self.mesh
        if mesh is None:
            return found
        # They may differ along some of the axes already.
        return jax.tree.map(
            lambda x: x + constructs.varying(mesh, jnp.zeros((), x.dtype)), found
        )

    def _branch(
        self, eqn: Eqn, operands: list[PyTree], run: RunBody[S], none: Statistics[S]
    ) -> _Ran[S]:
        def branch(number: int, operands: list[PyTree]) -> _Ran[S]:
            outputs, found = run(number, operands)
            return outputs, self._merged(none, found)

        index, *others = operands
        numbers = range(len(jaxprs.inner_bodies(eqn)))
        branches = [functools.partial(branch, number) for number in numbers]
        return jax.lax.switch(index, branches, others)

    def _scan(
        self, eqn: Eqn, operands: list[PyTree], run: RunBody[S], none: Statistics[S]
    ) -> _Ran[S]:
        carried = jaxprs.carried(eqn)
        consts, count = operands[: carried.start], len(carried)

        def turn(state: _Ran[S], xs: list[PyTree]) -> tuple[_Ran[S], list[PyTree]]:
            carry, before = state
            outputs, found = run(0, [*consts, *carry, *xs])
            after = self._merged(before, found)
            return ([*outputs[:count]], after), [*outputs[count:]]

        start, xs = operands[carried.start : carried.stop], operands[carried.stop :]
        (carry, found), ys = constructs.scan(eqn, turn, (start, none), xs)
        return [*carry, *ys], found

    def _while_loop(
        self, eqn: Eqn, operands: list[PyTree], run: RunBody[S], none: Statistics[S]
    ) -> _Ran[S]:
        """Runs a `while`; a turn runs the condition after the body, to return both.

        Of several runs side by side, those turns count in which all go on.
        """
        carried = jaxprs.carried(eqn)
        for_test, for_turn = (
            [operands[i] for i in inner.operands if i not in carried]
            for inner in jaxprs.inner_bodies(eqn)
        )

        def test(carry: list[PyTree]) -> tuple[PyTree, Statistics[S]]:
            (goes_on,), found = run(0, [*for_test, *carry])
            return goes_on, found

        def turn(state: _State[S]) -> _State[S]:
            goes_on, before, found = state
            outputs, of_turn = run(1, [*for_turn, *before])
            after, conditions = [*outputs], jax.tree.leaves(goes_on)
            # Under `vmap`, each example has a condition: one that has ended stays.
            if len(conditions) > 1 or np.ndim(conditions[0]):
                pairs = zip(after, before, strict=True)
                after = [jax.tree.map(_select, goes_on, *each) for each in pairs]
            goes_further, of_test = test(after)
            new = self._merged(found, of_test | of_turn)
            if len(conditions) > 1:
                all_go_on = functools.reduce(operator.and_, conditions).any()
                new = jax.tree.map(functools.partial(_select, all_go_on), new, found)
            return jax.tree.map(operator.and_, goes_on, goes_further), after, new

        def one_goes_on(state: _State[S]) -> Value:
            return functools.reduce(operator.or_, jax.tree.leaves(state[0])).any()

        start = [operands[i] for i in carried]
        goes_on, found = test(start)
        state = goes_on, start, self._merged(none, found)
        _, carry, found = jax.lax.while_loop(one_goes_on, turn, state)
        return carry, found

    def _shard_map(self, eqn: Eqn, operands: list[PyTree], run: RunBody[S]) -> _Ran[S]:
        axes = constructs.mapped_axes(eqn)

        def shard(*operands: PyTree) -> _Ran[S]:
            before, self.mesh = self.mesh, eqn
            outputs, found = run(0, [*operands])
            found = self._varying(found)
            self.mesh = before
            return outputs, {k: self.across(x, axes) for k, x in found.items()}

        return constructs.bind_shard_map_with(eqn, shard, operands)


def _checkpoint(eqn: Eqn, operands: list[PyTree], run: RunBody[S]) -> _Ran[S]:
    """Runs a checkpoint as one call, so that the backward pass recomputes its body."""
    trees = []

    def flat(*operands: Value) -> list[Value]:
        outputs, found = run(0, [*operands])
        leaves, tree = jax.tree.flatten(found)
        trees.append(tree)
        return [*outputs, *leaves]

    results = binding.bind_staged(eqn, [binding.trace(flat, operands)], operands)
    count = len(eqn.outvars)
    return results[:count], trees[-1].unflatten(results[count:])


def _select(condition: Value, yes: Value, no: Value) -> Value:
    """Returns `yes` where a condition holds, else `no`; one, or one per example."""
    others = tuple(range(np.ndim(condition), np.ndim(yes)))
    return jnp.where(jnp.expand_dims(condition, others), yes, no)
