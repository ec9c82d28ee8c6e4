"""The plan: a dtype for every equation of a program, and the reason, as plain data.

`planner` makes it; `walk` goes through it, for the interpreter and for the report.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.core import ShapedArray

from jmp_amp.plan.choose.flows import Step
from jmp_amp.plan.choose.modes import Dtypes, Mode
from jmp_amp.plan.choose.records import Decision, Option
from jmp_amp.plan.program.jaxprs import (
    Body,
    ClosedJaxpr,
    Jaxpr,
    Var,
    body_of,
    inner_bodies,
    variables,
)
from jmp_amp.plan.program.regions import Entries
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.plan.tables.rules import Rule


class Identity(tuple[int, ...]):
    """Which equation of a program: the way to it through bodies.

    `(4, 0, 2)` is equation 2 in body 0 of equation 4; its text is `4.0.2`. Two traces
    of the same program give an equation the same identity, under every policy.
    """

    def __str__(self) -> str:
        return ".".join(map(str, self))


@dataclasses.dataclass(frozen=True, eq=False)
class EquationPlan:
    """How one equation runs.

    Attributes:
      index: its place among the equations of its body, see `Identity`.
      rule: the class of the operation, and the name that decided it.
      mode: how it treats the dtypes of its operands.
      dtype: the dtype of the computation; None if the mode says all.
      reason: why, in words.
      reads: the dtype in which each operand is read; None for one left as it is.
      yields: the dtype of each result as it is computed.
      writes: the dtype in which each result is kept.
      rewrite: how it is bound, if not as traced.
      saturate: constants that overflow `dtype` become its largest finite value.
      bodies: the plans of its bodies: of calls, loops and branches.
      rule_context: of a `custom_jvp`, the forward pass over it, for planning its rule
        later.
      decision: the decision of the forward pass; None for a call.
      option: the option of the decision that its consumers took, if they did.
      f32_gradients: the operands whose gradients leave it in f32.
    """

    index: int
    rule: Rule
    mode: Mode
    dtype: np.dtype | None
    reason: str
    reads: Dtypes
    yields: Dtypes
    writes: Dtypes
    rewrite: Rewrite | None = None
    saturate: bool = False
    bodies: tuple[Plan, ...] = ()
    rule_context: Step | None = None
    decision: Decision | None = None
    option: Option | None = None
    f32_gradients: tuple[int, ...] = ()


# A variable, and the dtype in which it is kept; None is the dtype that it is made in,
# before it is cast to the one that it is held in.
Key = tuple[Var, np.dtype | None]


class Result(NamedTuple):
    """An operation whose result is kept as its own derivative reads it.

    A name would be given to the result only after that. So it is told by its name, its
    dtype and its last dimensions: a map over the program puts its axes in front.
    """

    operation: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def matches(self, operation: str, operands: Sequence[ShapedArray]) -> bool:
        """Whether an operation, as it is bound in the end, is this one.

        It is elementwise: its result has the dtype and the shape of its operand.
        """
        if operation != self.operation:
            return False
        shape = operands[0].shape
        end = shape[max(len(shape) - len(self.shape), 0) :]
        return (operands[0].dtype, end) == (self.dtype, self.shape)


class Block(NamedTuple):
    """Consecutive equations of which the backward pass makes some again.

    Attributes:
      start, stop: the first of them, and the first after them.
      kept: what is kept of what they make, by the body that makes it: the path to it
        through the bodies of helpers, `()` for that of the block itself.
      results: the operations whose results are kept as their own derivatives read them.
      recomputed: the equations that are made again, by their paths.
      around: the variables from outside that XLA may make again: made of arguments and
        constants alone, or in front of a call, a loop or a branch.
      apart: whether XLA has to be kept from merging both computations.
    """

    start: int
    stop: int
    kept: Mapping[tuple[int, ...], frozenset[Key]]
    results: frozenset[Result]
    recomputed: frozenset[tuple[int, ...]]
    around: frozenset[Var]
    apart: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How one body runs.

    Attributes:
      body: the traced body.
      equations: one `EquationPlan` for each equation of the body.
      outputs: the dtype of each output; None for one that is never cast.
      cast_per_use: the variables whose casts are not shared between their uses.
      blocks: the equations that are differentiated as one, in their order.
      needs: for each input, whether the backward pass needs it.
      moved: the f32 variables that are moved parameters, with the dtype of their casts:
        the cast goes before the move, and gradients are f32, see `Policy.reduce_dtype`.
      entries: of a whole program, those of the map that match its name scopes.
    """

    body: Body
    equations: tuple[EquationPlan, ...]
    outputs: Dtypes
    cast_per_use: frozenset[Var]
    blocks: tuple[Block, ...] = ()
    needs: tuple[bool, ...] | None = None
    moved: Mapping[Var, np.dtype] = dataclasses.field(default_factory=dict)
    entries: Entries = ()

    @functools.cached_property
    def readers(self) -> dict[Var, list[int]]:
        """The indices of the equations that read each variable, in their order."""
        readers: dict[Var, list[int]] = {}
        for index, eqn in enumerate(self.body.jaxpr.eqns):
            for var in dict.fromkeys(variables(eqn.invars)):
                readers.setdefault(var, []).append(index)
        return readers

    @functools.cached_property
    def last_read(self) -> dict[Key, int]:
        """Where each variable is read last, in each dtype and, by `None`, in any.

        An index of an equation; for an output of the body their number.
        """
        jaxpr, last = self.body.jaxpr, dict[Key, int]()
        read = [
            (eqn.invars, planned.reads)
            for eqn, planned in zip(jaxpr.eqns, self.equations, strict=True)
        ]
        for index, (atoms, dtypes) in enumerate([*read, (jaxpr.outvars, self.outputs)]):
            for var, dtype in zip(atoms, dtypes, strict=True):
                if isinstance(var, Var):
                    last[var, dtype] = last[var, None] = index
        return last


def plan_as_traced(program: Jaxpr | ClosedJaxpr) -> Plan:
    """Returns the plan that runs a program as it was traced; no cast is inserted.

    Its equations have the same identities as those of every other plan.
    """
    return _as_traced(body_of(program), {})


_AS_TRACED = Rule(OpClass.KEEP, "as traced", "as traced")


def _as_traced(body: Body, known: dict[int, Plan]) -> Plan:
    # A function that is called twice has one jaxpr, and one plan.
    if id(body.jaxpr) in known:
        return known[id(body.jaxpr)]
    equations = []
    for index, eqn in enumerate(body.jaxpr.eqns):
        bodies = tuple(_as_traced(each.body, known) for each in inner_bodies(eqn))
        mode = Mode.CALL if bodies else Mode.AS_TRACED
        reads, writes = (None,) * len(eqn.invars), (None,) * len(eqn.outvars)
        planned = EquationPlan(
            *(index, _AS_TRACED, mode, None, _AS_TRACED.reason, reads),
            yields=writes,
            writes=writes,
            bodies=bodies,
        )
        equations.append(planned)
    outputs = (None,) * len(body.jaxpr.outvars)
    plan = Plan(body, tuple(equations), outputs, frozenset())
    return known.setdefault(id(body.jaxpr), plan)
