"""Which values lead to a `tanh`, in whatever calls of the program it stands.

XLA makes one operation of a product and a gelu, and it sees no calls: the product, the
gelu or both may stand in a `jax.checkpoint`, a jitted function, a rule, a branch or a
loop.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import compress

from jmp_amp.plan.dataflow.solver import Back, backward, in_any_turn
from jmp_amp.plan.program.jaxprs import Eqn, Jaxpr, Var, inner_bodies, variables
from jmp_amp.plan.tables.operations import is_cheap


class Gelus:
    """Goes back through bodies; through each once for the outputs that lead on."""

    def __init__(self) -> None:
        self._found: dict[object, Set[Var]] = {}

    def before(self, jaxpr: Jaxpr, returned: tuple[bool, ...]) -> Set[Var]:
        """Returns the variables from which elementwise operations lead to a `tanh`.

        Args:
          jaxpr: the body.
          returned: whether each of its outputs leads to one outside.
        """
        key = id(jaxpr), returned
        if key not in self._found:
            self._found[key] = self._before(jaxpr, returned)
        return self._found[key]

    def _before(self, jaxpr: Jaxpr, returned: tuple[bool, ...]) -> Set[Var]:
        found = set(variables([*compress(jaxpr.outvars, returned)]))
        for eqn in reversed(jaxpr.eqns):
            name = eqn.primitive.name
            leads = is_cheap(name) and not found.isdisjoint(eqn.outvars)
            if leads or name == "tanh":
                found.update(variables(eqn.invars))
            inner = inner_bodies(eqn)
            for (_, operands), body in zip(inner, self.inside(eqn, found), strict=True):
                leading = [eqn.invars[i] for i in compress(operands, body.inputs)]
                found.update(variables(leading))
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
