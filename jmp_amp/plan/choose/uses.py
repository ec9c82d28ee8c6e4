"""How the consumers of a value use it, and of which backward pass they are.

A gradient that is taken inside of a program has a backward pass that is part of the
program. It reads values of its forward pass: the derivative of `tanh(x)` reads
`tanh(x)`. It takes them as they are, for a reader in f32 would have the forward pass in
f32 too: other numbers than without the gradient, and than where it is taken around.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from jmp_amp.plan.choose.modes import Demand, Demands
from jmp_amp.plan.program import jaxprs, scope_text
from jmp_amp.plan.program.jaxprs import Eqn


class Use(NamedTuple):
    """How consumers use a value.

    Attributes:
      demand: the dtypes in which they read it; a reader may demand none.
      times: how often they read it: not, once, or, for more, twice.
      depth: of how many backward passes the first ones are, see `depth_of`.
      later: the demands of those of more backward passes, by how many.
    """

    demand: Demand
    times: int = 1
    depth: int = 0
    later: tuple[tuple[int, Demand], ...] = ()

    @property
    def repeatedly(self) -> bool:
        return self.times > 1

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

    def of_pass(self, depth: int) -> Use:
        """Returns the same use in a pass."""
        return self._replace(depth=depth) if depth != self.depth else self

    def of_made(self, depth: int) -> Use:
        """Returns the use that decides what a value is computed in.

        It is that of the pass that it is made for: what a backward pass alone reads is
        made for it.

        Args:
          depth: that of the equation that makes it.
        """
        depth, demand = max(depth, self.depth), self.demand
        for later, each in self.later:
            if later <= depth:
                demand |= each
        return Use(demand, self.times, depth)


UNUSED = Use(Demands.NONE, 0)
# One for each output of a body, or for each result of an equation.
Uses = tuple[Use, ...]


def depth_of(eqn: Eqn) -> int:
    """Returns of how many backward passes an equation is, beside those of its body.

    What a checkpoint computes again in a backward pass is of its forward pass.
    """
    return _depth_in(jaxprs.scope_text(eqn))


# The equations of one scope have one text.
@functools.lru_cache(maxsize=4096)
def _depth_in(scopes: str) -> int:
    again = scope_text.AGAIN in scopes
    return scopes.count(scope_text.BACKWARD) - again
