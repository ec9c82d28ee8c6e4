"""A program without the lines whose results nobody reads.

`jax.grad` inside of a program leaves the value that it was called with, and a helper
may return more than its caller takes. Such lines change no number, and must not change
the dtype of what they read. XLA leaves them out; so does the plan, before it is made.

Constructs keep their operands and results. In their bodies, a carry that nobody reads
is handed on as it came, and zeros stand in the place of another dead result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray

from jmp_amp.plan.dataflow.solver import backward, entering, in_any_turn, once
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.plan.program.jaxprs import (
    Atom,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    aval_of,
)

# For each operand, result or output, whether somebody reads it.
Alive = tuple[bool, ...]


def without_dead_code(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with the same results that computes nothing else.

    Equations with effects stay, and bodies in which nothing is dead are the same
    objects.
    """
    count = len(jaxprs.body_of(program).jaxpr.outvars)
    return _Living().of(program, (True,) * count, None).program


def inputs_read(program: ClosedJaxpr, *, is_differentiated: bool = False) -> Alive:
    """Returns which inputs a program reads: if differentiated, or when it runs."""
    count = len(jaxprs.body_of(program).jaxpr.outvars)
    return _Living(is_differentiated).of(program, (True,) * count, None).inputs


class _Body(NamedTuple):
    """What is alive in a body.

    Attributes:
      program: the body without the rest.
      inputs: which of its inputs are read.
    """

    program: Any  # a `Jaxpr` or a `ClosedJaxpr`, as it was
    inputs: Alive


class _Living:
    """Finds what is alive, in each body once for the outputs that are read.

    Attributes:
      is_differentiated: whether what a derivative alone reads is alive too.
    """

    def __init__(self, is_differentiated: bool = True) -> None:
        self.is_differentiated = is_differentiated

    @once
    def of(
        self, program: Jaxpr | ClosedJaxpr, outputs: Alive, carry: int | None
    ) -> _Body:
        """Returns what is alive in a body.

        Args:
          program: the body, as an equation holds it.
          outputs: which of its outputs are read.
          carry: for a loop, the input that its first output is in the next turn.
        """
        jaxpr = jaxprs.body_of(program).jaxpr
        zeros = _Zeros()
        outvars = list(jaxpr.outvars)
        for i, (atom, is_read) in enumerate(zip(outvars, outputs, strict=True)):
            if not is_read and _has_zeros(atom):
                handed_on = [] if carry is None else jaxpr.invars[carry + i :][:1]
                outvars[i] = handed_on[0] if handed_on else zeros.of(atom)
        kept = [o for o, old in zip(outvars, jaxpr.outvars, strict=True) if o is old]
        alive = set(jaxprs.variables(kept))
        eqns: list[Eqn] = []
        for eqn in reversed(jaxpr.eqns):
            results = tuple(v in alive for v in eqn.outvars)
            if any(results) or jaxprs.has_effect(eqn):
                eqn, read = self._inside(eqn, results)
                alive.update(jaxprs.variables([*compress(eqn.invars, read)]))
                eqns.append(eqn)
        made = alive.union(jaxpr.invars, jaxpr.constvars)
        eqns = [_with_zeros(eqn, made, zeros) for eqn in reversed(eqns)]
        inputs = tuple(v in alive for v in jaxpr.invars)
        if _same(eqns, jaxpr.eqns) and _same(outvars, jaxpr.outvars):
            return _Body(program, inputs)
        eqns = [*zeros.eqns, *eqns]
        return _Body(jaxprs.with_equations(program, eqns, outvars), inputs)

    def _inside(self, eqn: Eqn, results: Alive) -> tuple[Eqn, Alive]:
        """Returns an equation with living bodies, and which operands they read."""
        inner = jaxprs.inner_bodies(eqn)
        if not inner:
            solved = None if self.is_differentiated else jaxprs.solution(eqn)
            if solved is None:
                return eqn, (True,) * len(eqn.invars)
            program, positions = solved
            read = set(compress(positions, self.of(program, results, None).inputs))
            return eqn, tuple(i in read for i in range(len(eqn.invars)))
        programs = jaxprs.inner_programs(eqn)
        carry = jaxprs.first_carried(eqn)
        if jaxprs.is_shard_map(eqn) or jaxprs.is_custom_jvp(eqn):
            results = (True,) * len(results)
        found: dict[int, _Body] = {}

        def inputs(number: int, outputs: Alive) -> Alive:
            program = programs[number]
            handed_on = carry if program is programs[-1] else None
            found[number] = self.of(program, outputs, handed_on)
            return found[number].inputs

        back = backward(eqn, results, inputs, in_any_turn, False, True)
        bodies = [found[number] for number in range(len(programs))]
        operands = {i for _, positions in inner for i in positions}
        # What no body gets is the number of a branch.
        read = set(range(len(eqn.invars))) - operands
        read.update(i for i, v in enumerate(eqn.invars) if not _has_zeros(v))
        read.update(i for i, is_read in entering(eqn, back) if is_read)
        if self.is_differentiated and jaxprs.is_custom_jvp(eqn):
            # Its rule may read the tangent of what its body does not read.
            read.update(range(len(eqn.invars)))
        alive = [body.program for body in bodies]
        living = eqn if _same(alive, programs) else jaxprs.with_programs(eqn, alive)
        return living, tuple(i in read for i in range(len(eqn.invars)))


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(
        a is b for a, b in zip(some, others, strict=True)
    )


def _with_zeros(eqn: Eqn, made: set[Var], zeros: _Zeros) -> Eqn:
    """Returns an equation that reads zeros in the place of what nobody computes."""
    invars = [
        atom if isinstance(atom, Literal) or atom in made else zeros.of(atom)
        for atom in eqn.invars
    ]
    return eqn if _same(invars, eqn.invars) else eqn.replace(invars=invars)


def _has_zeros(atom: Atom) -> bool:
    """Whether zeros may stand in the place of a value.

    It is an array of numbers, and says nothing of devices.
    """
    aval = atom.aval
    return (
        isinstance(aval, ShapedArray)
        and (jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == bool)
        and aval == ShapedArray(aval.shape, aval.dtype, aval.weak_type)
    )


class _Zeros:
    """Zeros of a body, one array for each shape and dtype.

    Attributes:
      eqns: the equations that make them.
    """

    def __init__(self) -> None:
        self.eqns: list[Eqn] = []
        self._made: dict[ShapedArray, Atom] = {}

    def of(self, atom: Atom) -> Atom:
        aval = aval_of(atom)
        if aval not in self._made:
            made = binding.trace(lambda: [jnp.zeros(aval.shape, aval.dtype)], [])
            jaxpr = jaxprs.body_of(made).jaxpr
            self.eqns += jaxpr.eqns
            (self._made[aval],) = jaxpr.outvars
        return self._made[aval]
