"""From which inputs of a body is each of its values computed?

Sets of inputs are bits of an integer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from jmp_amp.plan.dataflow.solver import union
from jmp_amp.plan.dataflow.values import castable
from jmp_amp.plan.program.jaxprs import Atom, Jaxpr, Literal, Var, aval_of


class Sources:
    """The inputs that the values of a body are computed from.

    Attributes:
      layers: the inputs that products multiply by another matrix in each turn.
    """

    def __init__(self, jaxpr: Jaxpr, groups: Sequence[int]) -> None:
        """`groups` are those of its inputs, see `groups_of`."""
        inputs = [*jaxpr.invars, *jaxpr.constvars]
        # A number, such as a step size, is no state.
        self._of: dict[Var, int] = {
            v: 1 << i if castable(v) and aval_of(v).ndim else 0
            for i, v in enumerate(inputs)
        }
        for var, group in zip(jaxpr.invars, groups, strict=True):
            self._of[var] |= group << len(inputs)
        self.layers = 0

    def of(self, atom: Atom) -> int:
        return 0 if isinstance(atom, Literal) else self._of[atom]

    def write(self, variables: Sequence[Var], sources: Sequence[int]) -> None:
        self._of.update(zip(variables, sources, strict=True))


# Asked again in each round of a fixpoint.
@functools.lru_cache(maxsize=256)
def groups_of(sources: tuple[int, ...]) -> tuple[int, ...]:
    """Returns, for each operand of a call, the groups that it is in.

    Operands are in one group if they are made of the same input, as `y` and `f(y)` are:
    inside of the call too, though each is an input of its own. A group is a bit.
    """
    once = shared = 0
    for each in sources:
        shared |= once & each
        once |= each
    # Inputs that the same operands are made of are one group.
    parts = [shared] if shared else []
    for each in sources:
        parts = [p for part in parts for p in (part & each, part & ~each) if p]
    members = [[bool(part & each) for each in sources] for part in parts]
    members.sort(reverse=True)
    return tuple(
        union([1 << number for number, each in enumerate(members) if each[i]])
        for i in range(len(sources))
    )


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


# As `groups_of`, this is asked again in each round of a fixpoint.
@functools.lru_cache(maxsize=256)
def all_translated(sets: tuple[int, ...], operands: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sources outside of a call of several values, see `translated`."""
    return tuple([translated(each, operands) for each in sets])


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
