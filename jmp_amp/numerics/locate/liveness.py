"""Which equations of a program are read: XLA drops all others, in loops too."""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

from jmp_amp.plan.dataflow.solver import backward, entering, in_any_turn, once
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Body, Eqn, Var

Flags = tuple[bool, ...]


class Live(NamedTuple):
    """What is read of a body of which some outputs are.

    Attributes:
      eqns: which equations lead to one of these outputs, or have an effect.
      read: the variables that these equations and outputs read.
      inputs: which inputs are among them.
      outputs: for each equation that calls and is read, those of its bodies.
    """

    eqns: Flags
    read: frozenset[Var]
    inputs: Flags
    outputs: dict[int, list[Flags]]


class Liveness:
    """Follows what is read backwards, each body once for its outputs that are."""

    @once
    def of(self, body: Body, outputs: Flags) -> Live:
        """Returns what is read of `body` if these of its outputs are."""
        jaxpr = body.jaxpr
        read = set(jaxprs.variables([*compress(jaxpr.outvars, outputs)]))
        eqns = [False] * len(jaxpr.eqns)
        inside: dict[int, list[Flags]] = {}
        for index, eqn in reversed([*enumerate(jaxpr.eqns)]):
            if not eqn.effects and read.isdisjoint(eqn.outvars):
                continue
            eqns[index] = True
            operands = eqn.invars
            if jaxprs.inner_bodies(eqn):
                results = tuple(v in read for v in eqn.outvars)
                inside[index], wanted = self._through(eqn, results)
                operands = [operands[i] for i in wanted]
            read.update(jaxprs.variables(operands))
        inputs = tuple(v in read for v in jaxpr.invars)
        return Live(tuple(eqns), frozenset(read), inputs, inside)

    def _through(self, eqn: Eqn, results: Flags) -> tuple[list[Flags], set[int]]:
        """Returns which outputs of the bodies of `eqn` are read, and which operands."""
        inner = jaxprs.inner_bodies(eqn)
        found = backward(
            eqn,
            results,
            lambda number, outputs: self.of(inner[number].body, outputs).inputs,
            in_any_turn,
            False,
            True,
        )
        wanted = {i for i, is_read in entering(eqn, found) if is_read}
        wanted.update(compress(jaxprs.carried(eqn), found[-1].outputs))
        if jaxprs.is_branch(eqn):
            wanted.add(0)
        return [body.outputs for body in found], wanted
