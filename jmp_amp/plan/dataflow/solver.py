"""Analyses over calls, branches and loops: from operands to results, and back.

An analysis knows something of each value of a body. What it knows of the operands of a
call goes into its bodies, and what it knows of their outputs comes back; of a branch it
joins what it knows of both; of a loop's carry it knows what holds in every turn. Each
of these is here, once for all analyses.

The fixpoint of a loop ends if each fact only appears, or only disappears, from turn to
turn. A body that is called often is gone through once for what is known around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Body, Eqn

V = TypeVar("V")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def once(through: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method that goes through a body remember what it returned.

    The object of the method remembers it for each body, its first argument, and all
    other arguments. Two bodies are the same if they are one object. That object stays
    alive with the memory: else a later body might have its identity.
    """

    @functools.wraps(through)
    def remembered(analysis: S, body: object, *known: Any) -> R:
        memory = vars(analysis).setdefault("_remembered", {})
        one = body.jaxpr if isinstance(body, Body) else body
        key = (through, id(one), *known)
        if key not in memory:
            memory[key] = one, through(analysis, body, *known)  # type: ignore
        return memory[key][1]

    return remembered  # type: ignore


def union(sets: Iterable[int]) -> int:
    """Returns the union of sets, each an integer with a bit for each member."""
    return functools.reduce(int.__or__, sets, 0)


class Through(NamedTuple, Generic[V]):
    """What is known of operands, of a carry in every turn, and of the results."""

    operands: Sequence[V]
    results: Sequence[V]


def forward(
    eqn: Eqn,
    operands: Sequence[V],
    outputs: Callable[[int, Sequence[V]], Sequence[V]],
    turned: Callable[[int, V, V], V],
    joined: Callable[[V, V], V],
) -> Through[V]:
    """Goes through the bodies of a call, a branch or a loop.

    Args:
      eqn: the equation.
      operands: what is known of its operands before the first turn.
      outputs: (number of a body, what is known of its inputs) -> of its outputs.
      turned: (number of an operand, what is known of the carry in the turns so far, of
        its update) -> what is known of it after one more turn.
      joined: what is known of a result that is that of one branch or another.
    """
    inner, carried = jaxprs.inner_bodies(eqn), jaxprs.carried(eqn)
    while True:
        found = [
            outputs(number, [operands[i] for i in positions])
            for number, (_, positions) in enumerate(inner)
        ]
        before, operands = list(operands), list(operands)
        for i, update in zip(carried, found[-1], strict=False):
            operands[i] = turned(i, operands[i], update)
        if operands == before:
            break
    results = list(found[-1])
    if jaxprs.is_loop(eqn):
        results[: len(carried)] = [operands[i] for i in carried]
    else:
        for other in reversed(found[:-1]):
            results = list(map(joined, other, results))
    return Through(operands, results)


class Back(NamedTuple, Generic[V]):
    """What is known of the outputs and of the inputs of a body."""

    outputs: tuple[V, ...]
    inputs: Sequence[V]


def backward(
    eqn: Eqn,
    results: Sequence[V],
    inputs: Callable[[int, tuple[V, ...]], Sequence[V]],
    turned: Callable[[int, V, V], V],
    unread: V,
    decided: V,
) -> list[Back[V]]:
    """Goes back through the bodies of a call, a branch or a loop.

    Args:
      eqn: the equation.
      results: what is known of its results.
      inputs: (number of a body, what is known of its outputs) -> of its inputs.
      turned: (number of a carry, what is known of it behind a turn, of the input of the
        next turn) -> what is known of it behind the turn before.
      unread: what is known of a value that nobody reads.
      decided: what is known of the boolean that ends a loop.

    Returns:
      What is known of each of its bodies.
    """
    count, bodies = len(jaxprs.inner_bodies(eqn)), list[Back[V]]()
    first, carry = jaxprs.first_carried(eqn), len(jaxprs.carried(eqn))
    outputs = tuple(results)
    if first is None:
        return [Back(outputs, inputs(number, outputs)) for number in range(count)]
    read: Sequence[V] = [unread] * carry
    if jaxprs.is_while(eqn):
        # The condition reads the same carry.
        bodies.append(Back((decided,), inputs(0, (decided,))))
        read = bodies[0].inputs[len(bodies[0].inputs) - carry :]
    while True:
        turns = [turned(i, outputs[i], read[i]) for i in range(carry)]
        outputs = (*turns, *outputs[carry:])
        if len(bodies) == count and bodies[-1].outputs == outputs:
            return bodies
        bodies = [*bodies[: count - 1], Back(outputs, inputs(count - 1, outputs))]
        read = bodies[-1].inputs[first:][:carry]


def entering(eqn: Eqn, bodies: Sequence[Back[V]]) -> Iterator[tuple[int, V]]:
    """Yields each operand that goes into a body, and what is known of it there."""
    for (_, operands), body in zip(jaxprs.inner_bodies(eqn), bodies, strict=True):
        yield from zip(operands, body.inputs, strict=True)


def in_any_turn(carry: int, now: bool, read: bool) -> bool:
    """Returns what holds of a carry if it holds in this turn or in the next one."""
    return now or read
