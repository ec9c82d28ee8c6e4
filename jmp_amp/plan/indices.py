"""Which values become an index.

`floor`, `ceil`, `round` and a cast to an integer turn a float into a place: a pixel, a
cell, a bin. Half precision has 8 or 11 digits, so it misses pixel 257 or 2049. All
elementwise operations that lead to such a place are therefore computed in f32, back to
the product, sum or argument that they begin with.
"""

from __future__ import annotations

import jax.numpy as jnp

from jmp_amp.plan import jaxprs
from jmp_amp.plan.jaxprs import Atom, Body, Eqn, Literal, Var, aval_of
from jmp_amp.plan.operations import OPERATIONS, OpClass, Role, role_of
from jmp_amp.plan.values import castable


class Indices:
    """Finds them, in each body once for those of its outputs that become an index."""

    def __init__(self) -> None:
        self._found: dict[object, frozenset[Var]] = {}

    def of(self, body: Body, outputs: frozenset[int]) -> frozenset[Var]:
        """Returns the variables of `body` that become an index.

        Args:
          body: the body.
          outputs: the positions of its outputs that become one outside of it.
        """
        key = id(body.jaxpr), outputs
        if key not in self._found:
            jaxpr = body.jaxpr
            found: set[Var] = set()
            _add(found, [jaxpr.outvars[i] for i in outputs])
            for eqn in reversed(jaxpr.eqns):
                if jaxprs.inner_bodies(eqn):
                    self._inside(eqn, found)
                elif _counts(eqn) or (_follows(eqn) and found & set(eqn.outvars)):
                    _add(found, eqn.invars)
            self._found[key] = frozenset(found)
        return self._found[key]

    def outputs(self, eqn: Eqn, found: frozenset[Var]) -> list[frozenset[int]]:
        """Returns the outputs of each body of `eqn` that become an index.

        Args:
          eqn: a call, a loop or a branch.
          found: the variables around it that become one.
        """
        results = frozenset(i for i, v in enumerate(eqn.outvars) if v in found)
        inner = jaxprs.inner_bodies(eqn)
        if jaxprs.is_while(eqn):
            return [frozenset(), self._settled(eqn, inner[1].body, results)]
        if jaxprs.carried(eqn):
            return [self._settled(eqn, inner[0].body, results)]
        return [results] * len(inner)

    def _settled(self, eqn: Eqn, body: Body, outputs: frozenset[int]) -> frozenset[int]:
        """Returns the outputs of a loop's body, with what the next turns read."""
        count = len(jaxprs.carried(eqn))
        # A scan carries after its constants and before what it goes through.
        first = jaxprs.carried(eqn).start if not jaxprs.is_while(eqn) else -count
        carry = body.jaxpr.invars[first:][:count]
        while True:
            found = self.of(body, outputs)
            more = outputs | {i for i, v in enumerate(carry) if v in found}
            if more == outputs:
                return outputs
            outputs = more

    def _inside(self, eqn: Eqn, found: set[Var]) -> None:
        inner = jaxprs.inner_bodies(eqn)
        outputs = self.outputs(eqn, frozenset(found))
        for (body, operands), wanted in zip(inner, outputs, strict=True):
            inside = self.of(body, wanted)
            inputs = zip(operands, body.jaxpr.invars, strict=True)
            _add(found, [eqn.invars[i] for i, v in inputs if v in inside])


def _add(found: set[Var], atoms: list[Atom]) -> None:
    found.update(v for v in atoms if not isinstance(v, Literal) and castable(v))


def _counts(eqn: Eqn) -> bool:
    """Whether `eqn` makes whole numbers of floats."""
    if jaxprs.is_conversion(eqn):
        return jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.integer)
    return role_of(eqn.primitive.name) is Role.COUNTS


def _follows(eqn: Eqn) -> bool:
    """Whether the digits of a result are those of the operands."""
    if jaxprs.is_conversion(eqn):
        return aval_of(eqn.outvars[0]).dtype == aval_of(eqn.invars[0]).dtype
    operation = OPERATIONS.get(eqn.primitive.name)
    return operation is not None and operation.group.op_class is OpClass.FOLLOW
