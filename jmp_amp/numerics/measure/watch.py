"""An evaluator that an observer can watch: every value of a traced program.

`watched` runs a jaxpr as it is and hands the values of each body to an observer, once
for every run, in loops, branches and sharded maps too. An observer is a monoid over
statistics of fixed size: loops carry them, branches return them, shards are merged. So
the memory of a watched program does not grow with its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import jax

from jmp_amp.numerics.measure.threaded import Path, Statistics, Threaded
from jmp_amp.plan.dataflow.values import is_move
from jmp_amp.plan.program import binding, jaxprs, meshes
from jmp_amp.plan.program.jaxprs import Atom, Body, ClosedJaxpr, Eqn, Value, Var

S = TypeVar("S")  # A statistic: a pytree of arrays.
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

    def nothing(self, path: Path) -> S | None:
        """Returns the statistic of a body that never ran; None if it has none."""
        ...

    def seen(self, path: Path, run: Run) -> S | None:
        """Returns the statistic of one run of a body; None if it has none."""
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

    The observer is called while the function is traced.
    """
    body = jaxprs.body_of(closed_jaxpr)
    watch = _Watch(observer)

    def run(*args: Value) -> tuple[Sequence[jax.Array], dict[Path, S]]:
        return watch.body(body, args, ())

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


class _Watch(Generic[S]):
    """One evaluation: the statistics of a body, and of those inside it, come out."""

    def __init__(self, observer: Observer[S]):
        self.observer = observer
        self.threaded = Threaded(observer.merged, observer.across)

    def nothing(self, body: Body, path: Path) -> Statistics[S]:
        """Returns the statistics of a body that never ran."""
        found = _by_path(path, self.observer.nothing(path))
        for where, each in bodies_inside(body, path).items():
            for index, eqn in enumerate(each.jaxpr.eqns):
                if jaxprs.runs(eqn) and not runs_inside(eqn):
                    for number, inner in enumerate(jaxprs.inner_bodies(eqn)):
                        found |= self.nothing(inner.body, (*where, index, number))
        return found

    def body(
        self, body: Body, args: Sequence[Value], path: Path
    ) -> tuple[list[Value], Statistics[S]]:
        """Runs a body; `path` leads to it."""
        whole: Run = {}
        found: Statistics[S] = {}
        outputs = self.run(body, args, path, whole, found)
        return outputs, _by_path(path, self.observer.seen(path, whole)) | found

    def run(
        self,
        body: Body,
        args: Sequence[Value],
        path: Path,
        whole: Run,
        found: Statistics[S],
    ) -> list[Value]:
        """Runs a body; adds its variables and statistics to those of the one around."""
        jaxpr = body.jaxpr
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        values = dict(zip(inputs, (*body.consts, *args), strict=True))
        whole[path] = values

        def read(atom: Atom) -> Value:
            return atom.val if isinstance(atom, jaxprs.Literal) else values[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            if not jaxprs.runs(eqn) or self.observer.skips(path, index):
                continue
            here, operands = (*path, index), list(map(read, eqn.invars))
            inner = jaxprs.inner_bodies(eqn)
            inside: Statistics[S] = {}
            with binding.source_of(eqn):
                if not inner:
                    results = _computed_once(eqn, binding.bind(eqn, operands))
                elif runs_inside(eqn):
                    (each,) = inner
                    results = self.run(each.body, operands, (*here, 0), whole, inside)
                else:
                    results, inside = self.construct(eqn, operands, here)
            # The equation may run in another mesh than those around it.
            found |= jax.tree.map(meshes.here, inside)
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def construct(
        self, eqn: Eqn, operands: list[Value], here: Path
    ) -> tuple[Sequence[Value], Statistics[S]]:
        """Runs a loop, a branch, a checkpoint or a sharded map."""
        bodies = [each.body for each in jaxprs.inner_bodies(eqn)]
        return self.threaded.run(
            eqn,
            operands,
            lambda number, args: self.body(bodies[number], args, (*here, number)),
            lambda number: self.nothing(bodies[number], (*here, number)),
        )


def _by_path(path: Path, statistic: S | None) -> Statistics[S]:
    return {} if statistic is None else {path: statistic}


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
