"""Which values lead to a `tanh`, in whatever calls of the program it stands.

XLA makes one operation of a product and a gelu, and it sees no calls: the product, the
gelu or both may stand in a `jax.checkpoint`, a jitted function, a rule, a branch or a
loop.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import compress

from jmp_amp.plan.dataflow.solver import Back, backward, entering, in_any_turn, once
from jmp_amp.plan.program.jaxprs import Eqn, Jaxpr, Var, inner_bodies, variables
from jmp_amp.plan.tables.operations import is_cheap


class Gelus:
    """Goes back through bodies; through each once for the outputs that lead on."""

    @once
    def before(self, jaxpr: Jaxpr, returned: tuple[bool, ...]) -> Set[Var]:
        """Returns the variables from which elementwise operations lead to a `tanh`.

        Args:
          jaxpr: the body.
          returned: whether each of its outputs leads to one outside.
        """
        found = set(variables([*compress(jaxpr.outvars, returned)]))
        for eqn in reversed(jaxpr.eqns):
            name = eqn.primitive.name
            leads = is_cheap(name) and not found.isdisjoint(eqn.outvars)
            if leads or name == "tanh":
                found.update(variables(eqn.invars))
            inside = entering(eqn, self.inside(eqn, found))
            found.update(variables([eqn.invars[i] for i, leads in inside if leads]))
        return found

    def inside(self, eqn: Eqn, found: Set[Var]) -> list[Back[bool]]:
        """Returns which inputs and outputs of each body of `eqn` lead to a `tanh`.

        Args:
          eqn: the call.
          found: the variables around it that do.
        """
        inner = inner_bodies(eqn)

        def inputs(number: int, outputs: tuple[bool, ...]) -> list[bool]:
            jaxpr = inner[number].body.jaxpr
            leads = self.before(jaxpr, outputs)
            return [v in leads for v in jaxpr.invars]

        results = [v in found for v in eqn.outvars]
        return backward(eqn, results, inputs, in_any_turn, False, False)
