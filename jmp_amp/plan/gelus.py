"""Which values lead to a `tanh`, in whatever calls of the program it stands.

XLA makes one operation of a product and a gelu, and it sees no calls: the product, the
gelu or both may stand in a `jax.checkpoint`, a jitted function, a rule, a branch or a
loop.
"""

from __future__ import annotations

from collections.abc import Set

from jmp_amp.plan.jaxprs import Eqn, Jaxpr, Var, carried, inner_bodies, variables
from jmp_amp.plan.operations import is_cheap


class Gelus:
    """Goes back through bodies; through each once for the outputs that lead on."""

    def __init__(self) -> None:
        self._found: dict[object, Set[Var]] = {}

    def before(self, jaxpr: Jaxpr, returned: frozenset[int]) -> Set[Var]:
        """Returns the variables from which elementwise operations lead to a `tanh`.

        Args:
          jaxpr: the body.
          returned: its outputs that lead to one outside.
        """
        key = id(jaxpr), returned
        if key not in self._found:
            self._found[key] = self._before(jaxpr, returned)
        return self._found[key]

    def _before(self, jaxpr: Jaxpr, returned: frozenset[int]) -> Set[Var]:
        found = set(variables([jaxpr.outvars[i] for i in returned]))
        for eqn in reversed(jaxpr.eqns):
            name = eqn.primitive.name
            leads = is_cheap(name) and not found.isdisjoint(eqn.outvars)
            if leads or name == "tanh":
                found.update(variables(eqn.invars))
            for body, operands in inner_bodies(eqn):
                inside = self.before(body.jaxpr, self.returned(eqn, body.jaxpr, found))
                for i, var in zip(operands, body.jaxpr.invars, strict=True):
                    if var in inside:
                        found.update(variables((eqn.invars[i],)))
        return found

    def returned(self, eqn: Eqn, jaxpr: Jaxpr, found: Set[Var]) -> frozenset[int]:
        """Returns the outputs of a body of `eqn` that lead to a `tanh`.

        Args:
          eqn: the call.
          jaxpr: one of its bodies.
          found: the variables around it that do.
        """
        if len(jaxpr.outvars) != len(eqn.outvars):
            return frozenset()  # the condition of a `while`
        results = frozenset(i for i, v in enumerate(eqn.outvars) if v in found)
        carry = len(carried(eqn))
        inside = self.before(jaxpr, results) if carry else ()
        if any(var in inside for var in jaxpr.invars):
            # What a turn returns, the next one reads: whichever of the carries it is.
            return results | frozenset(range(carry))
        return results
