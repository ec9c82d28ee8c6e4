"""An evaluator that an observer can watch: every value of a traced program.

`watched` runs a jaxpr as it is and hands the values of each body to an observer, once
for every run, in loops, branches and sharded maps too. An observer is a monoid over
statistics of fixed size: loops carry them, branches return them, shards are merged. So
the memory of a watched program does not grow with its activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import jax
import numpy as np

from jmp_amp.plan.dataflow.values import is_move
from jmp_amp.plan.program import binding, constructs, jaxprs, meshes
from jmp_amp.plan.program.jaxprs import (
    Atom,
    Body,
    ClosedJaxpr,
    Eqn,
    Literal,
    Value,
    Var,
)

S = TypeVar("S")  # A statistic: a pytree of arrays.
# The way to a body: of each body around it, the equation that calls, and which body.
Path = tuple[int, ...]
# The variables of a body and of those that run once in it, by the way to each of them:
# of jitted functions, of custom derivative rules, of blocks.
Run = dict[Path, Mapping[Var, Value]]


class Observer(Protocol[S]):
    """Makes one statistic of each run of a body, and merges those of several.

    All statistics of a body have the same structure, shapes and dtypes. A body is
    named by the way to it, as in `Identity`. Under `vmap`, an example whose `while` has
    ended runs on beside the others, and is seen.
    """

    def skips(self, path: Path, index: int) -> bool:
        """Whether an equation of a body, whose results nobody reads, is left out."""
        ...

    def nothing(self, path: Path) -> S:
        """Returns the statistic of a body that never ran."""
        ...

    def seen(self, path: Path, run: Run) -> S:
        """Returns the statistic of one run of a body."""
        ...

    def merged(self, before: S, after: S) -> S:
        """Returns the statistic of the runs of both."""
        ...

    def across(self, statistic: S, axes: Sequence[str]) -> S:
        """Returns the statistic of all shards over mesh axes, the same on each."""
        ...


def watched(
    closed_jaxpr: ClosedJaxpr, observer: Observer[S]
) -> Callable[..., tuple[Sequence[jax.Array], dict[Path, S]]]:
    """Returns a function that runs a program while `observer` watches.

    The function takes the inputs of the program and returns its outputs, and one
    statistic for each body of a loop, a branch, a checkpoint or a sharded map, `(4, 0)`
    for body 0 of equation 4, and `()` for the program itself. A call of a body that JAX
    does not expose, such as a `custom_vjp` or a Pallas kernel, is an equation like
    others. The function is not meant to be differentiated: watch the program of the
    gradient instead.

    Args:
      closed_jaxpr: the program.
      observer: it is called while the function is traced.
    """
    body = jaxprs.body_of(closed_jaxpr)
    watch = _Watch(observer)

    def run(*args: Value) -> tuple[Sequence[jax.Array], dict[Path, S]]:
        return watch.body(body, args, watch.nothing(body, ()), ())

    return run


def runs_inside(eqn: Eqn) -> bool:
    """Whether the body of `eqn` is seen with the body around it, as a part of it."""
    if not jaxprs.inner_bodies(eqn) or jaxprs.is_loop(eqn) or jaxprs.is_branch(eqn):
        return False
    is_kept = jaxprs.is_checkpoint(eqn) and eqn.params["prevent_cse"]
    return not is_kept and not jaxprs.is_shard_map(eqn)


def bodies_inside(body: Body, path: Path) -> dict[Path, Body]:
    """Returns a body and those that are seen with it, by the way to each of them."""
    found = {path: body}
    for index, eqn in enumerate(body.jaxpr.eqns):
        if jaxprs.runs(eqn) and runs_inside(eqn):
            for number, each in enumerate(jaxprs.inner_bodies(eqn)):
                found |= bodies_inside(each.body, (*path, index, number))
    return found


Statistics = dict[Path, S]
# The outputs of a body, and the statistics of all bodies inside it.
_Watched = tuple[Sequence[Value], Statistics[S]]
# (number of the body, its inputs, statistics) -> outputs and statistics
_RunBody = Callable[[int, Sequence[Value], Statistics[S]], _Watched[S]]


class _Watch(Generic[S]):
    """One evaluation; statistics go in and come out, as in a loop's carry."""

    def __init__(self, observer: Observer[S]):
        self.observer = observer

    def nothing(self, body: Body, path: Path) -> Statistics[S]:
        """Returns the statistics of a body that never ran."""
        found: Statistics[S] = {path: self.observer.nothing(path)}
        for where, each in bodies_inside(body, path).items():
            for index, eqn in enumerate(each.jaxpr.eqns):
                if jaxprs.runs(eqn) and not runs_inside(eqn):
                    for number, inner in enumerate(jaxprs.inner_bodies(eqn)):
                        found |= self.nothing(inner.body, (*where, index, number))
        return found

    def body(
        self,
        body: Body,
        args: Sequence[Value],
        statistics: Statistics[S],
        path: Path,
    ) -> _Watched[S]:
        """Runs a body; `path` leads to it."""
        whole: Run = {}
        outputs, statistics = self.run(body, args, statistics, path, whole)
        seen = self.observer.seen(path, whole)
        return outputs, {
            **statistics,
            path: self.observer.merged(statistics[path], seen),
        }

    def run(
        self,
        body: Body,
        args: Sequence[Value],
        statistics: Statistics[S],
        path: Path,
        whole: Run,
    ) -> _Watched[S]:
        """Runs a body, and adds its variables to those of the body around it."""
        jaxpr, statistics = body.jaxpr, dict(statistics)
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        values = dict(zip(inputs, (*body.consts, *args), strict=True))
        whole[path] = values

        def read(atom: Atom) -> Value:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            if jaxprs.runs(eqn) and not self.observer.skips(path, index):
                here, operands = (*path, index), list(map(read, eqn.invars))
                with binding.source_of(eqn):
                    if runs_inside(eqn):
                        (inner,) = jaxprs.inner_bodies(eqn)
                        results, found = self.run(
                            inner.body, operands, statistics, (*here, 0), whole
                        )
                    else:
                        results, found = self.equation(eqn, operands, statistics, here)
                statistics.update(jax.tree.map(meshes.here, found))
                values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars)), statistics

    def equation(
        self,
        eqn: Eqn,
        operands: Sequence[Value],
        statistics: Statistics[S],
        here: Path,
    ) -> _Watched[S]:
        """Runs an equation; returns its results and the statistics that it changed."""
        inner = jaxprs.inner_bodies(eqn)
        if not inner:
            return _computed_once(eqn, binding.bind(eqn, operands)), {}
        inside = {k: s for k, s in statistics.items() if k[: len(here)] == here}
        inside = jax.tree.map(meshes.here, inside)

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
        assert jaxprs.is_shard_map(eqn)
        return self.shard_map(eqn, operands, inside, run, here)

    def shard_map(
        self,
        eqn: Eqn,
        operands: Sequence[Value],
        statistics: Statistics[S],
        run: _RunBody[S],
        here: Path,
    ) -> _Watched[S]:
        """Runs a sharded map: each shard begins anew, and all are merged."""
        axes = constructs.mapped_axes(eqn)
        (inner,) = jaxprs.inner_bodies(eqn)
        nothing = functools.partial(self.nothing, inner.body, (*here, 0))
        tree = jax.tree.structure(jax.eval_shape(nothing))

        def shard(*args: Value) -> list[Value]:
            # The statistics of a shard differ from those of others, and its loops carry
            # them. A mesh with explicit axes lets no array of outside in.
            none = jax.tree.map(lambda x: constructs.varying(eqn, x), nothing())
            outputs, found = run(0, args, none)
            whole = {k: self.observer.across(s, axes) for k, s in found.items()}
            return [*outputs, *jax.tree.leaves(whole)]

        results = constructs.bind_shard_map(eqn, shard, operands, tree.num_leaves)
        found = tree.unflatten(results[len(eqn.outvars) :])
        return results[: len(eqn.outvars)], {
            k: self.observer.merged(statistics[k], each) for k, each in found.items()
        }


def _computed_once(eqn: Eqn, results: Sequence[Value]) -> Sequence[Value]:
    """Returns results that every reader, and the observer, reads as the same bits.

    XLA fuses an equation into each of its readers, and each may round it otherwise: the
    derivative of `max(x, y)` asks which of them `x == max(x, y)` is, and was zero.
    """
    if is_move(eqn):
        return results  # it rounds nothing, and may be larger than what it repeats
    return [
        jax.lax.optimization_barrier(x) if jaxprs.is_floating(v) else x
        for x, v in zip(results, eqn.outvars, strict=True)
    ]


def _scan(
    eqn: Eqn, operands: Sequence[Value], statistics: Statistics[S], run: _RunBody[S]
) -> _Watched[S]:
    carried = jaxprs.carried(eqn)
    consts = operands[: carried.start]

    def turn(
        carry: tuple[Sequence[Value], Statistics[S]], xs: Sequence[Value]
    ) -> tuple[tuple[Sequence[Value], Statistics[S]], Sequence[Value]]:
        outputs, found = run(0, [*consts, *carry[0], *xs], carry[1])
        return (outputs[: len(carried)], found), outputs[len(carried) :]

    start = operands[carried.start : carried.stop], statistics
    (carry, statistics), outputs = constructs.scan(
        eqn, turn, start, operands[carried.stop :]
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

    staged = binding.trace(flat, [*operands, *leaves])
    results = binding.bind_staged(eqn, [staged], [*operands, *leaves])
    count = len(eqn.outvars)
    return results[:count], tree.unflatten(results[count:])
