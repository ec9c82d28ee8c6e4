"""One walk through a plan, for values that are arrays and for values that are dtypes.

`Walk` reads like `jax.core.eval_jaxpr`: read the operands, compute, write the results.
It knows the order of the equations, which casts are shared, and where islands begin and
end. A subclass says what a value is, what a cast does and what an equation does: the
interpreter computes arrays, the report notes dtypes. Operands come as a function, so
that the interpreter can give their casts the source line of the equation.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from jmp_amp.plan.plan import Border, EquationPlan, Island, Plan
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Value, Var, runs
from jmp_amp.plan.rewrites.quantising import Quantiser
from jmp_amp.plan.rewrites.rewriting import Shared

V = TypeVar("V")


class Walk(abc.ABC, Generic[V]):
    """Goes through a plan in the order in which it runs."""

    @abc.abstractmethod
    def constant(self, value: Value, var: Var) -> V:
        """Returns the value of a constant that a body holds."""

    @abc.abstractmethod
    def literal(self, atom: Literal, dtype: np.dtype | None, saturate: bool) -> V:
        """Returns the value of a literal, read in `dtype`; None reads it as it is."""

    @abc.abstractmethod
    def dtype_of(self, value: V) -> np.dtype | None:
        """Returns the dtype of a value."""

    @abc.abstractmethod
    def cast(self, value: V, dtype: np.dtype, saturate: bool) -> V:
        """Returns a value in another dtype."""

    @abc.abstractmethod
    def quantised(self, value: V, shared: Shared) -> V:
        """Returns what a rewrite computes of an operand, see `Rewrite.shared`."""

    @abc.abstractmethod
    def equation(
        self, eqn: Eqn, planned: EquationPlan, read: Callable[[], list[V]]
    ) -> list[V]:
        """Returns the results of an equation.

        `read` returns its operands, and then what its rewrite computes of them before.
        """

    def border(
        self, eqn: Eqn, planned: EquationPlan
    ) -> contextlib.AbstractContextManager[object]:
        """Returns a context for the casts that an island makes for an equation."""
        return contextlib.nullcontext()

    def island(self, plan: Plan, island: Island, inputs: Sequence[V]) -> list[V]:
        """Returns the results of an island, each cast for its reader."""
        return self.through(plan, island, inputs)

    def through(
        self,
        plan: Plan,
        island: Island,
        inputs: Sequence[V],
        eqns: Mapping[int, Eqn] | None = None,
    ) -> list[V]:
        """Goes through an island; `eqns` are its equations if the plan's are not."""
        inside = _Values(self, plan)
        inside.write([var for var, _ in island.inputs], inputs)
        self._steps(inside, island.equations, eqns or plan.body.jaxpr.eqns)
        return inside.read_leaving(island)

    def body(self, plan: Plan, args: Sequence[V]) -> list[V]:
        """Returns the outputs of a planned body, given its inputs."""
        jaxpr = plan.body.jaxpr
        consts = map(self.constant, plan.body.consts, jaxpr.constvars)
        values = _Values(self, plan)
        values.write(jaxpr.constvars, list(consts))
        values.write(jaxpr.invars, args)
        self._steps(values, plan.order, jaxpr.eqns)
        return values.read_all(jaxpr.outvars, plan.outputs)

    def _steps(
        self,
        values: _Values[V],
        order: Sequence[int | Island],
        eqns: Sequence[Eqn] | Mapping[int, Eqn],
    ) -> None:
        plan = values.plan
        for step in order:
            if isinstance(step, Island):
                results = self.island(plan, step, values.read_entering(step))
                values.write([var for var, _ in step.outputs], results)
                continue
            eqn, planned = eqns[step], plan.equations[step]
            if runs(eqn):

                def read(eqn: Eqn = eqn, planned: EquationPlan = planned) -> list[V]:
                    operands = values.read_all(
                        eqn.invars, planned.reads, planned.saturate
                    )
                    return operands + values.shared(eqn, planned, operands)

                values.write(eqn.outvars, self.equation(eqn, planned, read))


class _Values(Generic[V]):
    """The values of a body's variables, and their casts, each made once."""

    def __init__(self, walk: Walk[V], plan: Plan):
        self.walk = walk
        self.plan = plan
        self.values: dict[Var, V] = {}
        self.casts: dict[tuple[Var, np.dtype], V] = {}
        self.quantised: dict[tuple[Atom, Quantiser], V] = {}

    def write(self, variables: Sequence[Var], values: Sequence[V]) -> None:
        self.values.update(zip(variables, values, strict=True))

    def read(self, atom: Atom, dtype: np.dtype | None, saturate: bool) -> V:
        if isinstance(atom, Literal):
            return self.walk.literal(atom, dtype, saturate)
        value = self.values[atom]
        if dtype is None:
            return value  # a token has no dtype to ask for
        held = self.walk.dtype_of(value)
        if held is None or held == dtype:
            return value
        if saturate or atom in self.plan.cast_per_use:
            return self.walk.cast(value, dtype, saturate)
        key = atom, dtype
        if key not in self.casts:
            self.casts[key] = self.walk.cast(value, dtype, False)
        return self.casts[key]

    def read_all(
        self,
        atoms: Sequence[Atom],
        dtypes: Sequence[np.dtype | None],
        saturate: bool = False,
    ) -> list[V]:
        return [
            self.read(atom, dtype, saturate)
            for atom, dtype in zip(atoms, dtypes, strict=True)
        ]

    def shared(self, eqn: Eqn, planned: EquationPlan, operands: Sequence[V]) -> list[V]:
        """Returns what the rewrite of an equation computes of its operands, if any."""
        if planned.rewrite is None:
            return []
        found = []
        for each in planned.rewrite.shared:
            key = eqn.invars[each.operand], each.quantiser
            if key not in self.quantised:
                value = operands[each.operand]
                self.quantised[key] = self.walk.quantised(value, each)
            found.append(self.quantised[key])
        return found

    def read_entering(self, island: Island) -> list[V]:
        """Returns the values that an island begins with, each cast for its reader."""
        inside = frozenset(island.equations)
        return [self.read_border(each, inside.__contains__) for each in island.inputs]

    def read_leaving(self, island: Island) -> list[V]:
        """Returns the values that an island ends with, each cast for its reader."""
        inside = frozenset(island.equations)
        return [
            self.read_border(each, lambda i: i not in inside) for each in island.outputs
        ]

    def read_border(self, border: Border, reads: Callable[[int], bool]) -> V:
        """Returns a value at the border of an island, cast for its first reader.

        `reads` says of an equation whether it is on the side that is read for.
        """
        var, dtype = border
        held = self.walk.dtype_of(self.values[var])
        if dtype is None or held is None or held == dtype:
            return self.values[var]
        reader = next((i for i in self.plan.readers.get(var, ()) if reads(i)), None)
        if reader is None:
            return self.read(var, dtype, False)
        eqns, equations = self.plan.body.jaxpr.eqns, self.plan.equations
        with self.walk.border(eqns[reader], equations[reader]):
            return self.read(var, dtype, False)
