"""An evaluator that an observer can watch: every equation of a traced program.

`watched` runs a jaxpr as it is and hands the operands and the results of each equation
to an observer, in loops, branches and sharded maps too. An observer is a monoid over
statistics of fixed size: loops carry them, branches return them, shards are merged. So
the memory of a watched program does not grow with its activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import jax
import numpy as np

from jmp_amp.plan import jaxprs
from jmp_amp.plan.jaxprs import Atom, Body, ClosedJaxpr, Eqn, Literal, Value
from jmp_amp.plan.plan import Identity

S = TypeVar("S")  # A statistic: a pytree of arrays.


class Observer(Protocol[S]):
    """Makes one statistic of each run of an equation, and merges those of several.

    All statistics of an equation have the same structure, shapes and dtypes. Under
    `vmap`, an example whose `while` has ended runs on beside the others, and is seen.
    """

    def nothing(self, eqn: Eqn) -> S:
        """Returns the statistic of an equation that never ran."""
        ...

    def seen(self, eqn: Eqn, operands: Sequence[Value], results: Sequence[Value]) -> S:
        """Returns the statistic of one run of an equation."""
        ...

    def merged(self, before: S, after: S) -> S:
        """Returns the statistic of the runs of both."""
        ...

    def across(self, statistic: S, axes: Sequence[str]) -> S:
        """Returns the statistic of all shards over mesh axes, the same on each."""
        ...


def watched(
    closed_jaxpr: ClosedJaxpr, observer: Observer[S]
) -> Callable[..., tuple[Sequence[jax.Array], dict[Identity, S]]]:
    """Returns a function that runs a program while `observer` watches.

    The function takes the inputs of the program and returns its outputs, and one
    statistic for each equation that calls nothing and that somebody reads. A call of
    a body that JAX does not expose, such as a `custom_vjp` or a Pallas kernel, is one
    equation. The function is not meant to be differentiated: watch the program of the
    gradient instead.

    Args:
      closed_jaxpr: the program.
      observer: it is called while the function is traced.
    """
    body = jaxprs.body_of(closed_jaxpr)
    watch = _Watch(observer)

    def run(*args: Value) -> tuple[Sequence[jax.Array], dict[Identity, S]]:
        return watch.body(body, args, watch.nothing(body, ()), ())

    return run


_Path = tuple[int, ...]
Statistics = dict[Identity, S]
# The outputs of a body, and the statistics of all equations inside it.
_Watched = tuple[Sequence[Value], Statistics[S]]
# (number of the body, its inputs, statistics) -> outputs and statistics
_RunBody = Callable[[int, Sequence[Value], Statistics[S]], _Watched[S]]


class _Watch(Generic[S]):
    """One evaluation; statistics go in and come out, as in a loop's carry."""

    def __init__(self, observer: Observer[S]):
        self.observer = observer

    def nothing(self, body: Body, path: _Path) -> Statistics[S]:
        """Returns the statistics of a body that never ran."""
        found: Statistics[S] = {}
        for index, eqn in enumerate(body.jaxpr.eqns):
            if not jaxprs.runs(eqn):
                continue
            here = Identity((*path, index))
            inner = jaxprs.inner_bodies(eqn)
            if not inner:
                found[here] = self.observer.nothing(eqn)
            for number, each in enumerate(inner):
                found |= self.nothing(each.body, (*here, number))
        return found

    def body(
        self,
        body: Body,
        args: Sequence[Value],
        statistics: Statistics[S],
        path: _Path,
    ) -> _Watched[S]:
        """Runs a body; `path` leads to it, as in `Identity`."""
        jaxpr, statistics = body.jaxpr, dict(statistics)
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        values = dict(zip(inputs, (*body.consts, *args), strict=True))

        def read(atom: Atom) -> Value:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            if jaxprs.runs(eqn):
                here = Identity((*path, index))
                operands = list(map(read, eqn.invars))
                with jaxprs.source_of(eqn):
                    results, found = self.equation(eqn, operands, statistics, here)
                statistics.update(found)
                values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars)), statistics

    def equation(
        self,
        eqn: Eqn,
        operands: Sequence[Value],
        statistics: Statistics[S],
        here: Identity,
    ) -> _Watched[S]:
        """Runs an equation; returns its results and the statistics that it changed."""
        inner = jaxprs.inner_bodies(eqn)
        if not inner:
            results = jaxprs.bind(eqn, operands)
            seen = self.observer.seen(eqn, operands, results)
            return results, {here: self.observer.merged(statistics[here], seen)}
        inside = {k: s for k, s in statistics.items() if k[: len(here)] == here}

        def run(
            number: int, args: Sequence[Value], found: Statistics[S]
        ) -> _Watched[S]:
            return self.body(inner[number].body, args, found, (*here, number))

        if jaxprs.is_branch(eqn):
            branches = [functools.partial(run, number) for number in range(len(inner))]
            return jax.lax.switch(operands[0], branches, operands[1:], inside)
        if jaxprs.is_while(eqn):
            return _while_loop(eqn, operands, inside, run)
        if jaxprs.is_loop(eqn):
            return _scan(eqn, operands, inside, run)
        if jaxprs.is_checkpoint(eqn):
            return _checkpoint(eqn, operands, inside, run)
        if jaxprs.is_shard_map(eqn):
            return self.shard_map(eqn, operands, inside, run, here)
        return run(0, operands, inside)

    def shard_map(
        self,
        eqn: Eqn,
        operands: Sequence[Value],
        statistics: Statistics[S],
        run: _RunBody[S],
        here: Identity,
    ) -> _Watched[S]:
        """Runs a sharded map: each shard begins anew, and all are merged."""
        axes = jaxprs.mapped_axes(eqn)
        (inner,) = jaxprs.inner_bodies(eqn)
        nothing = self.nothing(inner.body, (*here, 0))
        tree = jax.tree.structure(nothing)

        def shard(*args: Value) -> list[Value]:
            # The statistics of a shard differ from those of others, and its loops carry
            # them.
            none = jax.tree.map(lambda x: jaxprs.varying(eqn, x), nothing)
            outputs, found = run(0, args, none)
            whole = {k: self.observer.across(s, axes) for k, s in found.items()}
            return [*outputs, *jax.tree.leaves(whole)]

        results = jaxprs.bind_shard_map(eqn, shard, operands, tree.num_leaves)
        found = tree.unflatten(results[len(eqn.outvars) :])
        return results[: len(eqn.outvars)], {
            k: self.observer.merged(statistics[k], each) for k, each in found.items()
        }


def _scan(
    eqn: Eqn, operands: Sequence[Value], statistics: Statistics[S], run: _RunBody[S]
) -> _Watched[S]:
    carried, params = jaxprs.carried(eqn), eqn.params
    consts = operands[: carried.start]

    def turn(
        carry: tuple[Sequence[Value], Statistics[S]], xs: Sequence[Value]
    ) -> tuple[tuple[Sequence[Value], Statistics[S]], Sequence[Value]]:
        outputs, found = run(0, [*consts, *carry[0], *xs], carry[1])
        return (outputs[: len(carried)], found), outputs[len(carried) :]

    (carry, statistics), outputs = jax.lax.scan(
        turn,
        (operands[carried.start : carried.stop], statistics),
        operands[carried.stop :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *outputs], statistics


def _while_loop(
    eqn: Eqn, operands: Sequence[Value], statistics: Statistics[S], run: _RunBody[S]
) -> _Watched[S]:
    """Runs a `while`; a turn runs the condition after the body, to return both."""
    carried = jaxprs.carried(eqn)
    condition, body = jaxprs.inner_bodies(eqn)
    for_condition = [operands[i] for i in condition.operands if i not in carried]
    for_body = [operands[i] for i in body.operands if i not in carried]

    def test(
        carry: Sequence[Value], found: Statistics[S]
    ) -> tuple[Value, Sequence[Value], Statistics[S]]:
        (goes_on,), found = run(0, [*for_condition, *carry], found)
        return goes_on, carry, found

    def turn(
        state: tuple[Value, Sequence[Value], Statistics[S]],
    ) -> tuple[Value, Sequence[Value], Statistics[S]]:
        goes_on, before, found = state
        after, found = run(1, [*for_body, *before], found)
        # Under `vmap`, each example has a condition: one that has ended stays.
        carry = [_select(goes_on, a, b) for a, b in zip(after, before, strict=True)]
        return test(carry, found)

    start = test([operands[i] for i in carried], statistics)
    _, carry, statistics = jax.lax.while_loop(lambda state: state[0].any(), turn, start)
    return carry, statistics


def _select(condition: Value, yes: Value, no: Value) -> Value:
    """Returns `yes` where a condition holds, else `no`; one, or one per example."""
    if not np.ndim(condition):
        return yes
    leading = tuple(range(np.ndim(condition)))
    everywhere = jax.lax.broadcast_in_dim(condition, np.shape(yes), leading)
    return jax.lax.select(everywhere, yes, no)


def _checkpoint(
    eqn: Eqn, operands: Sequence[Value], statistics: Statistics[S], run: _RunBody[S]
) -> _Watched[S]:
    """Runs a checkpoint as one call, so that the backward pass recomputes its body."""
    leaves, tree = jax.tree.flatten(statistics)
    count = len(operands)

    def flat(*args: Value) -> list[Value]:
        outputs, found = run(0, args[:count], tree.unflatten(args[count:]))
        return [*outputs, *jax.tree.leaves(found)]

    staged = jaxprs.trace(flat, [*operands, *leaves])
    results = jaxprs.bind_staged(eqn, [staged], [*operands, *leaves])
    count = len(eqn.outvars)
    return results[:count], tree.unflatten(results[count:])
