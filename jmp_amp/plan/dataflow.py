"""Analyses over calls, branches and loops: from operands to results, and back.

An analysis knows something of each value of a body. What it knows of the operands of a
call goes into its bodies, and what it knows of their outputs comes back; of a branch it
joins what it knows of both; of a loop's carry it knows what holds in every turn. Each
of these is here, once for all analyses. An analysis is a `Forward` or a `Backward`: it
says what it knows of a body, and how two values join.

The fixpoint of a loop ends if joins only ever add to what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from jmp_amp.plan import jaxprs
from jmp_amp.plan.jaxprs import Eqn

V = TypeVar("V")


class Forward(Protocol[V]):
    """What an analysis says of one equation with bodies, for `forward`."""

    def outputs(self, number: int, inputs: Sequence[V]) -> Sequence[V]:
        """Returns what is known of the outputs of a body, given its inputs."""
        ...

    def turned(self, operand: int, now: V, update: V) -> V:
        """Returns what is known of a carry after one more turn."""
        ...

    def joined(self, one: V, other: V) -> V:
        """Returns what is known of a result that is that of one branch or another."""
        ...


class Through(NamedTuple, Generic[V]):
    """What is known around the bodies of an equation.

    Attributes:
      operands: of its operands; of a carry, what holds in every turn.
      results: of its results.
    """

    operands: Sequence[V]
    results: Sequence[V]


def forward(eqn: Eqn, operands: Sequence[V], analysis: Forward[V]) -> Through[V]:
    """Goes through the bodies of a call, a branch or a loop.

    Args:
      eqn: the equation.
      operands: what is known of its operands before the first turn.
      analysis: of this equation.
    """
    inner = jaxprs.inner_bodies(eqn)
    carried = jaxprs.carried(eqn)
    while True:
        found = [
            analysis.outputs(number, [operands[i] for i in positions])
            for number, (_, positions) in enumerate(inner)
        ]
        settled = list(operands)
        for turn, i in enumerate(carried):
            settled[i] = analysis.turned(i, operands[i], found[-1][turn])
        if settled == list(operands):
            break
        operands = settled
    results = list(found[-1])
    if jaxprs.is_loop(eqn):
        results[: len(carried)] = [operands[i] for i in carried]
    else:
        for other in reversed(found[:-1]):
            results = list(map(analysis.joined, other, results))
    return Through(operands, results)


class Backward(Protocol[V]):
    """What an analysis says of one equation with bodies, for `backward`."""

    def inputs(self, number: int, outputs: tuple[V, ...]) -> Sequence[V]:
        """Returns what is known of the inputs of a body, given its outputs."""
        ...

    def turned(self, carry: int, result: V, now: V, read: V | None) -> V:
        """Returns what is known of an output of a loop's body that the next turn reads.

        Args:
          carry: its number.
          result: what is known of it after the loop.
          now: what is known of it in this turn.
          read: what is known of the input of the next turn; None before the first one.
        """
        ...

    def decided(self) -> V:
        """Returns what is known of the boolean that ends a loop."""
        ...


class Back(NamedTuple, Generic[V]):
    """What is known of the outputs and of the inputs of a body."""

    outputs: tuple[V, ...]
    inputs: Sequence[V]


def backward(eqn: Eqn, results: Sequence[V], analysis: Backward[V]) -> list[Back[V]]:
    """Goes back through the bodies of a call, a branch or a loop.

    Args:
      eqn: the equation.
      results: what is known of its results.
      analysis: of this equation.

    Returns:
      What is known of each of its bodies.
    """
    inner = jaxprs.inner_bodies(eqn)
    first = jaxprs.first_carried(eqn)
    if first is None:
        outputs = tuple(results)
        return [Back(outputs, analysis.inputs(k, outputs)) for k in range(len(inner))]
    count, found = len(jaxprs.carried(eqn)), list[Back[V]]()
    read: Sequence[V | None] = [None] * count
    if jaxprs.is_while(eqn):
        # The condition reads the same carry.
        decided = (analysis.decided(),)
        found.append(Back(decided, analysis.inputs(0, decided)))
        read = found[0].inputs[len(found[0].inputs) - count :]
    outputs, before = tuple(results), None
    inputs: Sequence[V] = ()
    while True:
        carry = enumerate(zip(results, outputs, read, strict=False))
        turned = [analysis.turned(i, *each) for i, each in carry]
        outputs = (*turned, *results[count:])
        if outputs == before:
            break
        inputs = analysis.inputs(len(inner) - 1, outputs)
        before, read = outputs, inputs[first:][:count]
    return [*found, Back(outputs, inputs)]
