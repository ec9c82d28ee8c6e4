"""How the consumers of a value use it, and how many backward passes they are inside of.

A program that takes a gradient contains a backward pass. The backward pass reads values
of the forward pass: the derivative of `tanh(x)` reads `tanh(x)`. It takes each value in
the dtype that the forward pass gives it. If its own dtype, f32, decided that of the
value, then the forward pass would have other numbers with the gradient than without.
"""

from __future__ import annotations

from typing import NamedTuple

from jmp_amp.plan.choose.modes import Demand, Demands


class Use(NamedTuple):
    """How consumers use a value.

    Attributes:
      demand: the dtypes in which they read it; a reader may demand none.
      times: how often they read it: not, once, or, for more, twice.
      depth: how many backward passes the outermost readers are inside of.
      later: for each larger depth, the demand of the readers there.
    """

    demand: Demand
    times: int = 1
    depth: int = 0
    later: tuple[tuple[int, Demand], ...] = ()

    def also(self, other: Use) -> Use:
        """Returns the use of a value that is used in both ways."""
        if not self.times or not other.times:
            return other if other.times else self
        found = dict[int, Demand]()
        for use in (self, other):
            for depth, demand in ((use.depth, use.demand), *use.later):
                found[depth] = found.get(depth, Demands.NONE) | demand
        (depth, demand), *later = sorted(found.items())
        return Use(demand, 2, depth, tuple(later))

    def at_depth(self, depth: int) -> Use:
        """Returns the same use by readers of another depth."""
        return self._replace(depth=depth) if depth != self.depth else self

    def of_made(self, depth: int) -> Use:
        """Returns the use that decides what a value is computed in.

        Readers that are inside of more backward passes than the value decide nothing. A
        value that a backward pass alone reads belongs to that pass.

        Args:
          depth: the depth of the equation that makes the value.
        """
        depth, demand = max(depth, self.depth), self.demand
        for later, each in self.later:
            if later <= depth:
                demand |= each
        return Use(demand, self.times, depth)


UNUSED = Use(Demands.NONE, 0)
# One for each output of a body, or for each result of an equation.
Uses = tuple[Use, ...]
