"""From which inputs of a body is each of its values computed?

A bias and a state are both f32 arguments that meet activations in an addition. The
difference is what is added: `h + b` adds a value that is not made of `b`, but
`y + dt * f(y)` adds one that is made of `y`. Sets of inputs are bits of an integer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from jmp_amp.plan.jaxprs import Atom, Jaxpr, Literal, Var, aval_of
from jmp_amp.plan.values import castable


class Sources:
    """The inputs that the values of a body are computed from.

    Attributes:
      layers: the inputs that products multiply by another matrix in each turn.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        inputs = [*jaxpr.invars, *jaxpr.constvars]
        # A number, such as a step size, is no state.
        self._of: dict[Var, int] = {
            v: 1 << i if castable(v) and aval_of(v).ndim else 0
            for i, v in enumerate(inputs)
        }
        self.layers = 0

    def of(self, atom: Atom) -> int:
        return 0 if isinstance(atom, Literal) else self._of[atom]

    def write(self, variables: Sequence[Var], sources: Sequence[int]) -> None:
        self._of.update(zip(variables, sources, strict=True))


def union(sets: Sequence[int]) -> int:
    """Returns the inputs that are in one of the sets."""
    found = 0
    for each in sets:
        found |= each
    return found


def positions(inputs: int) -> Iterator[int]:
    """Yields the inputs that are in a set, and takes no time for the others."""
    while inputs:
        lowest = inputs & -inputs
        yield lowest.bit_length() - 1
        inputs ^= lowest


def translated(inputs: int, operands: Sequence[int]) -> int:
    """Returns the sources outside of a call of a value inside.

    Args:
      inputs: the inputs of the body that it is computed from.
      operands: the sources of the operand that each input comes from.
    """
    # The constants of the body come behind its operands, and are nothing outside.
    inputs &= (1 << len(operands)) - 1
    return union([operands[i] for i in positions(inputs)])


# Asked again in each round of a fixpoint, as a rule of the same sets.
@functools.lru_cache(maxsize=256)
def over_turns(
    outputs: tuple[int, ...], layers: int, carried: range
) -> tuple[Sequence[int], int]:
    """Returns the operands that a loop's results are made of, and its layers'.

    Args:
      outputs: the operands that the outputs of its body are made of in one turn.
      layers: the operands that its layers read in one turn.
      carried: which operands it carries, to its first outputs.
    """
    carry = union([1 << i for i in carried])

    def before(operands: int, found: Sequence[int]) -> int:
        """Returns what the turn before adds, or as many turns as are known."""
        updates = [found[i - carried.start] for i in positions(operands & carry)]
        return operands | union(updates)

    found, earlier = outputs, ()
    while found != earlier:
        found, earlier = tuple([before(each, found) for each in found]), found
    return found, before(layers, found)
