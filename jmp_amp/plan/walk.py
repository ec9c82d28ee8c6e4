"""One walk through a plan, for values that are arrays and for values that are dtypes.

`Walk` reads like `jax.core.eval_jaxpr`: read the operands, compute, write the results.
It knows the order of the equations, which casts are shared, and where blocks begin and
end. A subclass says what a value is, what a cast does and what an equation does: the
interpreter computes arrays, the report notes dtypes. Operands come as a function, so
that the interpreter can give their casts the source line of the equation.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence, Set
from typing import Generic, TypeVar

import numpy as np

from jmp_amp.plan.plan import Block, EquationPlan, Key, Plan
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Value, Var, runs, variables
from jmp_amp.policies.dtypes import F32

V = TypeVar("V")


class Walk(abc.ABC, Generic[V]):
    """Goes through a plan in the order in which it runs.

    Attributes:
      differentiates: whether what it runs may be differentiated. An equation then reads
        as well, after all else, the operands whose gradient leaves it in f32, as they
        are held.
      casts_before: whether it casts parameters before they are moved.
    """

    differentiates = False
    casts_before = False

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

    def moved(self, eqn: Eqn, operands: Sequence[V]) -> list[V]:
        """Returns the results of a move of operands in half, see `Plan.moved`."""
        raise NotImplementedError

    def as_cast(self, value: V, cast: V) -> V:
        """Returns the cast of a value, which is known; its derivative is a cast's."""
        raise NotImplementedError

    @abc.abstractmethod
    def equation(
        self, eqn: Eqn, planned: EquationPlan, read: Callable[[], list[V]]
    ) -> list[V]:
        """Returns the results of an equation; `read` returns its operands."""

    def block(self, values: Values[V], block: Block) -> None:
        """Goes through a block."""
        self.through(values, block.start, block.stop)

    def keeps(self) -> Set[Key]:
        """Returns what is kept, for the backward pass, of what the next body makes."""
        return frozenset()

    def kept(self, value: V, key: Key) -> V:
        """Returns a value that is kept for the backward pass, see `Block.kept`."""
        return value

    def body(self, plan: Plan, args: Sequence[V]) -> list[V]:
        """Returns the outputs of a planned body, given its inputs."""
        jaxpr = plan.body.jaxpr
        consts = map(self.constant, plan.body.consts, jaxpr.constvars)
        values = Values(self, plan)
        values.write(jaxpr.constvars, list(consts))
        values.write(jaxpr.invars, args)
        at = 0
        for block in plan.blocks:
            self.through(values, at, block.start)
            self.block(values, block)
            at = block.stop
        self.through(values, at, len(plan.equations))
        return values.read_all(jaxpr.outvars, plan.outputs)

    def through(self, values: Values[V], start: int, stop: int) -> None:
        """Goes through equations of a body, from `start` until before `stop`.

        What they make is added to the values of the body so far.
        """
        plan = values.plan
        for index in range(start, stop):
            eqn, planned = plan.body.jaxpr.eqns[index], plan.equations[index]
            if runs(eqn):

                def read(eqn: Eqn = eqn, planned: EquationPlan = planned) -> list[V]:
                    operands = values.read_all(
                        eqn.invars, planned.reads, planned.saturate
                    )
                    if self.differentiates:
                        held = [eqn.invars[i] for i in planned.f32_gradients]
                        operands += [values.values[v] for v in variables(held)]
                    return operands

                values.write(eqn.outvars, self.equation(eqn, planned, read))
                if plan.moved and self.casts_before:
                    values.cast_before(eqn, planned)


class Values(Generic[V]):
    """The values of a body's variables, and their casts, each made once."""

    def __init__(self, walk: Walk[V], plan: Plan):
        self.walk = walk
        self.plan = plan
        self.keeps = walk.keeps()
        self.values: dict[Var, V] = {}
        self.casts: dict[Key, V] = {}

    def write(self, variables: Sequence[Var], values: Sequence[V]) -> None:
        self.values.update(zip(variables, values, strict=True))
        for var, value in zip(variables, values, strict=True):
            key = var, self.walk.dtype_of(value)
            if self.keeps and key in self.keeps:
                self.values[var] = self.walk.kept(value, key)

    def read(self, atom: Atom, dtype: np.dtype | None, saturate: bool) -> V:
        if isinstance(atom, Literal):
            return self.walk.literal(atom, dtype, saturate)
        value = self.values[atom]
        if dtype is None:
            return value  # a token has no dtype to ask for
        held = self.walk.dtype_of(value)
        if held is None or held == dtype:
            return value
        key = atom, dtype
        known = None if saturate else self.casts.get(key)
        if known is not None and atom not in self.plan.moved:
            return known
        if known is None:
            cast = self.walk.cast(value, dtype, saturate)
        else:
            cast = self.walk.as_cast(value, known)
        if key in self.keeps:
            cast = self.walk.kept(cast, key)
        if not saturate and atom not in self.plan.cast_per_use:
            self.casts[key] = cast
        return cast

    def cast_before(self, eqn: Eqn, planned: EquationPlan) -> None:
        """Makes casts of moved parameters: the move of a cast, see `Plan.moved`."""
        moved = {v: self.plan.moved[v] for v in eqn.outvars if v in self.plan.moved}
        for dtype in set(moved.values()):
            dtypes = [dtype if each == F32 else each for each in planned.reads]
            casts = self.walk.moved(eqn, self.read_all(eqn.invars, dtypes))
            cast_of = dict(zip(eqn.outvars, casts, strict=True))
            self.casts.update(((v, dtype), cast_of[v]) for v in moved)

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
