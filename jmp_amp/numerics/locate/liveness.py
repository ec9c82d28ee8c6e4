"""Which equations of a program are read: XLA drops all others, in loops too."""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

from jmp_amp.plan.dataflow.solver import backward, in_any_turn
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

    def __init__(self) -> None:
        self._found: dict[tuple[int, Flags], Live] = {}

    def of(self, body: Body, outputs: Flags) -> Live:
        """Returns what is read of `body` if these of its outputs are."""
        key = id(body.jaxpr), outputs
        if key not in self._found:
            self._found[key] = self._of(body, outputs)
        return self._found[key]

    def _of(self, body: Body, outputs: Flags) -> Live:
        jaxpr = body.jaxpr
        ends = zip(jaxpr.outvars, outputs, strict=True)
        read = set(jaxprs.variables([v for v, is_read in ends if is_read]))
        eqns = [False] * len(jaxpr.eqns)
        inside: dict[int, list[Flags]] = {}
        for index in reversed(range(len(jaxpr.eqns))):
            eqn = jaxpr.eqns[index]
            if not eqn.effects and read.isdisjoint(eqn.outvars):
                continue
            eqns[index] = True
            operands = eqn.invars
            if jaxprs.inner_bodies(eqn):
                results = tuple(v in read for v in eqn.outvars)
                inside[index], wanted = self._through(eqn, results)
                operands = [v for i, v in enumerate(operands) if i in wanted]
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
        wanted = {0} if jaxprs.is_branch(eqn) else set()
        for (_, operands), body in zip(inner, found, strict=True):
            wanted.update(compress(operands, body.inputs))
        wanted.update(compress(jaxprs.carried(eqn), found[-1].outputs))
        return [body.outputs for body in found], wanted


def whole(body: Body) -> Flags:
    """Returns that all outputs of a body are read."""
    return (True,) * len(body.jaxpr.outvars)
