"""The same program, written otherwise: equations of a jaxpr in calls, branches, turns.

Each function takes a `Program` and returns one that computes the same. `decided` tells
what is planned for each equation, under a name that it has in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import core

import jmp_amp as amp
from jmp_amp.plan.dataflow.dead_code import without_dead_code
from jmp_amp.plan.planner import plan_program
from jmp_amp.plan.program import binding, jaxprs, source_code

# The variables of the traced program that lead to an equation, its own the last.
Name = tuple[core.Var, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program, and what the variables of its equations are called.

    A variable without a name is one of an equation that the program did not have.
    """

    closed: Any
    names: dict[core.Var, Name]


class Row(NamedTuple):
    """What is planned for an equation.

    Attributes:
      primitive: the name of its primitive.
      dtype: the dtype that it computes in.
      reason: why, in words.
    """

    primitive: str
    dtype: np.dtype | None
    reason: str


# Several for an equation that is there repeatedly.
Rows = dict[Name, set[Row]]


def traced(fn: Callable[..., Any], *args: Any) -> Program:
    """Returns the program of a function without its dead lines."""
    leaves, tree = jax.tree.flatten(args)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))

    closed = without_dead_code(binding.trace(flat, leaves))
    names: dict[core.Var, Name] = {}
    _name(jaxprs.body_of(closed), names)
    return Program(closed, names)


def _name(body: jaxprs.Body, names: dict[core.Var, Name]) -> None:
    for eqn in body.jaxpr.eqns:
        names.update((v, (v,)) for v in eqn.outvars if not isinstance(v, core.DropVar))
        for inner in jaxprs.inner_bodies(eqn):
            _name(inner.body, names)


def _name_of(eqn: jaxprs.Eqn, names: dict[core.Var, Name]) -> Name:
    """Returns the name of an equation; () if the program did not have it."""
    return next((names[v] for v in eqn.outvars if v in names), ())


def decided(program: Program, policy: str) -> Rows:
    """Returns what is planned for each equation."""
    jaxpr = jaxprs.body_of(program.closed).jaxpr
    inputs, outputs = [None] * len(jaxpr.invars), [None] * len(jaxpr.outvars)
    plan = plan_program(program.closed, amp.get_policy(policy), inputs, outputs)
    return decided_in(plan, program.names)


def decided_in(plan: Any, names: dict[core.Var, Name]) -> Rows:
    """Returns what a plan says of each equation that has a name."""
    rows: Rows = {}

    def read(plan: Any, path: Name) -> None:
        for planned, eqn in zip(plan.equations, plan.body.jaxpr.eqns, strict=True):
            name = path + _name_of(eqn, names)
            if not planned.bodies and name != path:
                # One that is left as it is computes in the dtype of its results.
                dtype = planned.dtype or next(filter(None, planned.yields), None)
                row = Row(eqn.primitive.name, dtype, planned.reason)
                rows.setdefault(name, set()).add(row)
            for body in planned.bodies:
                read(body, name)

    read(plan, ())
    return rows


# A function of a piece of the program -> a function of the same arguments.
Way = Callable[[Callable[..., Any]], Callable[..., Any]]


def in_branches(piece: Callable[..., Any]) -> Callable[..., Any]:
    """One of two branches, which are the same."""

    def chosen(*args: Any) -> Any:
        is_first = lax.iota(jnp.int32, 1)[0] > 0
        return lax.cond(is_first, lambda *a: piece(*a), lambda *a: piece(*a), *args)

    return chosen


def in_a_turn(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The only turn of a loop, of constants; its results are stacked."""

    def looped(*args: Any) -> Any:
        _, stacked = lax.scan(lambda _, __: (None, piece(*args)), None, None, length=1)
        return [lax.squeeze(each, [0]) for each in stacked]

    return looped


def in_a_turn_of_slices(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The only turn of a loop, of slices; its results are stacked."""

    def looped(*args: Any) -> Any:
        slices = [lax.expand_dims(each, [0]) for each in args]
        _, stacked = lax.scan(lambda _, x: (None, piece(*x)), None, slices, length=1)
        return [lax.squeeze(each, [0]) for each in stacked]

    return looped


def in_a_carry(piece: Callable[..., Any]) -> Callable[..., Any]:
    """The only turn of a loop, of constants; it carries its results."""

    def looped(*args: Any) -> Any:
        shapes = jax.eval_shape(piece, *args)
        start = [jnp.zeros(each.shape, each.dtype) for each in shapes]
        return lax.scan(lambda _, __: (piece(*args), None), start, None, length=1)[0]

    return looped


CALLS: dict[str, Way] = {"jit": jax.jit, "checkpoint": jax.checkpoint}
TURNS: dict[str, Way] = {
    "turn": in_a_turn,
    "slices": in_a_turn_of_slices,
    "carry": in_a_carry,
}


def into(program: Program, rng: Any, way: Way, longest: int = 6) -> Program:
    """Runs of at most `longest` equations, at any depth, become what `way` makes."""
    names = dict(program.names)
    done: dict[int, Any] = {}

    def parts(eqns: Sequence[jaxprs.Eqn]) -> list[Any]:
        runs = []
        while eqns:
            count = int(rng.integers(1, longest + 1))
            run, eqns = eqns[:count], eqns[count:]
            one = rng.random() < _SHARE and not any(e.effects for e in run)
            runs += [run] if one else [[e] for e in run]
        return runs

    def changed(jaxpr: Any) -> Any:
        opened = jaxprs.body_of(jaxpr).jaxpr
        writer = _Writer(names)
        runs = parts([inside(eqn) for eqn in opened.eqns])
        # The last run that reads a variable.
        last = {v: i for i, run in enumerate(runs) for v in _read(run)}
        last |= dict.fromkeys(filter(_is_var, opened.outvars), len(runs))
        for i, run in enumerate(runs):
            made = [v for eqn in run for v in eqn.outvars]
            results = [v for v in made if last.get(v, i) > i]
            piece = _Piece.of(run, results) if len(run) > 1 else None
            if piece is None:
                writer.copy(run)
            else:
                writer.write(way, piece)
        return jaxprs.with_equations(
            jaxpr, writer.eqns, [writer.now(v) for v in opened.outvars]
        )

    def inside(eqn: jaxprs.Eqn) -> jaxprs.Eqn:
        # Nobody writes lines into the functions of a library.
        if not jaxprs.inner_bodies(eqn):
            return eqn
        if source_code.is_of_library(eqn) and not jaxprs.is_loop(eqn):
            return eqn
        bodies = []
        for body in jaxprs.inner_programs(eqn):
            if id(body) not in done:
                # With the body itself: no other may get its id.
                done[id(body)] = body, changed(body)
            bodies.append(done[id(body)][1])
        return jaxprs.with_programs(eqn, bodies)

    return Program(changed(program.closed), names)


_SHARE = 0.7


def exchanged(program: Program) -> Program:
    """The branches of each `cond` in the other order."""

    def other(eqn: jaxprs.Eqn, writer: _Writer) -> bool:
        if not jaxprs.is_branch(eqn):
            return False
        branches = jaxprs.inner_programs(eqn)
        last = len(branches) - 1
        (index,) = writer.add(lambda i: [last - i], eqn.invars[:1])
        eqn = jaxprs.with_programs(eqn, branches[::-1])
        writer.eqns.append(eqn.replace(invars=[index, *eqn.invars[1:]]))
        return True

    return _everywhere(program, other)


def unrolled(program: Program, longest: int = 8) -> Program:
    """The turns of each `scan` of at most `longest` turns, one after the other."""

    def turns(eqn: jaxprs.Eqn, writer: _Writer) -> bool:
        count = eqn.params.get("length", 0) if jaxprs.is_loop(eqn) else 0
        return 0 < count <= longest and _write_turns(eqn, writer, count)

    return _everywhere(program, turns)


def peeled(program: Program) -> Program:
    """The first turn of each `scan` before a loop of the others."""

    def turns(eqn: jaxprs.Eqn, writer: _Writer) -> bool:
        count = eqn.params.get("length", 0) if jaxprs.is_loop(eqn) else 0
        return count > 1 and _write_turns(eqn, writer, 1)

    return _everywhere(program, turns)


def _write_turns(eqn: jaxprs.Eqn, writer: _Writer, count: int) -> bool:
    """Writes the first turns of a `scan`, and a loop of the others, if it can."""
    body, carried = jaxprs.body_of(eqn.params["jaxpr"]), jaxprs.carried(eqn)
    if body.consts or eqn.effects:
        return False
    length, is_back = eqn.params["length"], eqn.params["reverse"]
    first = range(length)[::-1][:count] if is_back else range(count)

    def way(piece: Callable[..., Any]) -> Callable[..., Any]:
        def straight(*args: Any) -> Any:
            fixed, through = args[: carried.start], args[carried.stop :]

            def turn(carry: Any, slices: Any) -> Any:
                results = piece(*fixed, *carry, *slices)
                return results[: len(carried)], results[len(carried) :]

            carry, stacks = list(args[carried.start : carried.stop]), []
            for i in first:
                slices = [lax.index_in_dim(x, i, 0, False) for x in through]
                carry, results = turn(carry, slices)
                stacks.append([lax.expand_dims(each, [0]) for each in results])
            if len(first) < length:
                others = slice(0, length - count) if is_back else slice(count, length)
                rest = [x[others] for x in through]
                carry, results = lax.scan(
                    turn, carry, rest, length=length - count, reverse=is_back
                )
                stacks.append(results)
            parts = zip(*(stacks[::-1] if is_back else stacks), strict=True)
            return [*carry, *(lax.concatenate(each, 0) for each in parts)]

        return straight

    jaxpr = body.jaxpr
    leads = _name_of(eqn, writer.names)
    piece = _Piece(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, eqn, leads)
    writer.write(way, piece)
    return True


def _everywhere(program: Program, other: Callable[..., bool]) -> Program:
    names, done = dict(program.names), {}

    def changed(jaxpr: Any) -> Any:
        if id(jaxpr) in done:
            return done[id(jaxpr)][1]
        opened = jaxprs.body_of(jaxpr).jaxpr
        writer = _Writer(names)
        for old in opened.eqns:
            eqn = old
            if programs := jaxprs.inner_bodies(eqn) and jaxprs.inner_programs(eqn):
                bodies = [changed(each) for each in programs]
                if any(a is not b for a, b in zip(bodies, programs, strict=True)):
                    eqn = jaxprs.with_programs(eqn, bodies)
            if any(writer.now(v) is not v for v in eqn.invars):
                eqn = eqn.replace(invars=[writer.now(v) for v in eqn.invars])
            if not other(eqn, writer):
                writer.eqns.append(eqn)
        outvars = [writer.now(v) for v in opened.outvars]
        new = jaxpr
        if list(map(id, writer.eqns)) != list(map(id, opened.eqns)):
            new = jaxprs.with_equations(jaxpr, writer.eqns, outvars)
        # With the jaxpr itself: no other may get its id.
        done[id(jaxpr)] = jaxpr, new
        return new

    return Program(changed(program.closed), names)


class _Piece(NamedTuple):
    """Equations that are written elsewhere.

    Attributes:
      eqns: the equations.
      reads: the variables that they read.
      results: those that are read later.
      loop: the equation that they are the body of.
      leads: its name.
    """

    eqns: Sequence[jaxprs.Eqn]
    reads: Sequence[core.Var]
    results: Sequence[jaxprs.Atom]
    loop: jaxprs.Eqn | None = None
    leads: Name = ()

    @classmethod
    def of(
        cls, eqns: Sequence[jaxprs.Eqn], results: Sequence[core.Var]
    ) -> _Piece | None:
        """Returns the piece of a run; None if it is no function of arrays."""
        made = {v for e in eqns for v in e.outvars}
        reads = [v for v in dict.fromkeys(_read(eqns)) if v not in made]
        fits = results and all(map(_is_array, [*reads, *results]))
        return cls(eqns, reads, results) if fits else None


def _read(eqns: Sequence[jaxprs.Eqn]) -> list[core.Var]:
    return [v for eqn in eqns for v in jaxprs.variables(eqn.invars)]


def _is_var(atom: jaxprs.Atom) -> bool:
    return not isinstance(atom, core.Literal)


def _is_array(var: core.Var) -> bool:
    return isinstance(var.aval, ShapedArray) and (
        jnp.issubdtype(var.aval.dtype, jnp.number) or var.aval.dtype == bool
    )


class _Writer:
    """Writes the equations of a body.

    Attributes:
      eqns: those that are written.
      names: of the variables of all bodies.
    """

    def __init__(self, names: dict[core.Var, Name]) -> None:
        self.eqns: list[jaxprs.Eqn] = []
        self.names = names
        # What stands in the place of a variable.
        self._now: dict[core.Var, jaxprs.Atom] = {}

    def now(self, atom: jaxprs.Atom) -> jaxprs.Atom:
        return self._now.get(atom, atom) if _is_var(atom) else atom

    def copy(self, eqns: Sequence[jaxprs.Eqn]) -> None:
        """Writes equations as they are."""
        for eqn in eqns:
            self.eqns.append(eqn.replace(invars=[self.now(v) for v in eqn.invars]))

    def add(self, fn: Callable[..., Any], atoms: Sequence[Any]) -> list[Any]:
        """Writes the equations of a function of some values; returns its results."""
        jaxpr = binding.trace(fn, [v.aval for v in atoms]).jaxpr
        given = dict(zip(jaxpr.invars, atoms, strict=True))
        assert not jaxpr.constvars
        for eqn in jaxpr.eqns:
            invars = [given.get(v, v) if _is_var(v) else v for v in eqn.invars]
            self.eqns.append(eqn.replace(invars=invars))
        return [given.get(v, v) if _is_var(v) else v for v in jaxpr.outvars]

    def write(self, way: Way, piece: _Piece) -> None:
        """Writes a piece of the program in its place inside of what `way` makes."""

        @jax.jit
        def placeholder(*args: Any) -> Any:
            avals = map(jaxprs.aval_of, piece.results)
            return [binding.as_output(jnp.zeros(a.shape, a.dtype), a) for a in avals]

        loop = piece.loop
        reads = piece.reads if loop is None else loop.invars
        results = piece.results if loop is None else loop.outvars

        # Not jitted twice under one name: the call that is left is the user's.
        def helper(*args: Any) -> Any:
            return placeholder(*args)

        start = len(self.eqns)
        found = self.add(lambda *args: way(helper)(*args), list(map(self.now, reads)))
        filled, env = [], {}
        for eqn in self.eqns[start:]:
            filled += self._filled(eqn, piece, env)
        self.eqns[start:] = filled
        found = [env.get(v, v) if _is_var(v) else v for v in found]
        self._now.update(zip(results, found, strict=True))

    def _filled(self, eqn: jaxprs.Eqn, piece: _Piece, env: Any) -> list[jaxprs.Eqn]:
        """Returns an equation with the piece in the place of its placeholders."""
        invars = [env.get(v, v) if _is_var(v) else v for v in eqn.invars]
        eqn = eqn.replace(invars=invars)
        if eqn.params.get("name") == "placeholder":
            return self._copied(eqn, piece, env)
        if not jaxprs.inner_bodies(eqn):
            return [eqn]
        bodies = []
        for body in jaxprs.inner_programs(eqn):
            jaxpr, inner, inside = jaxprs.body_of(body).jaxpr, [], {}
            for each in jaxpr.eqns:
                inner += self._filled(each, piece, inside)
            outvars = [inside.get(v, v) if _is_var(v) else v for v in jaxpr.outvars]
            bodies.append(jaxprs.with_equations(body, inner, outvars))
        return [jaxprs.with_programs(eqn, bodies)]

    def _copied(self, call: jaxprs.Eqn, piece: _Piece, env: Any) -> list[jaxprs.Eqn]:
        """Returns the equations of a piece, of new variables, for one placeholder."""
        inside: dict[Any, Any] = dict(zip(piece.reads, call.invars, strict=True))
        copies = []
        for eqn in piece.eqns:
            outvars = []
            for var in eqn.outvars:
                copy = var
                if not isinstance(var, core.DropVar):
                    copy = inside[var] = core.Var(var.aval)
                    if var in self.names:
                        self.names[copy] = piece.leads + self.names[var]
                outvars.append(copy)
            invars = [inside.get(v, v) if _is_var(v) else v for v in eqn.invars]
            copies.append(eqn.replace(invars=invars, outvars=outvars))
        results = [inside.get(v, v) if _is_var(v) else v for v in piece.results]
        env.update(zip(call.outvars, results, strict=True))
        return copies
