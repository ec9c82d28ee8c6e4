"""What becomes of values: an index, linear algebra, a distance, nothing derived.

`floor`, `ceil`, `round` and a cast to an integer turn a float into a place: a pixel, a
cell, a bin. Half precision has 8 or 11 digits, so it misses pixel 257 or 2049. A choice
by rank, as of the largest scores, is a place too. All elementwise operations that lead
to such a place are therefore computed in f32, back to the product, sum or argument that
they begin with.

A decomposition of a matrix, or a linear system, makes an error larger by the condition
number. What leads to one is f32 as well, with the product that it begins with, and with
the products whose sums and differences that product reads: `F @ P @ F.T + Q`. A layer
of a network is half, and so is a stream that layers read too.

The product in `|a|^2 - 2 a b + |b|^2` is f32 too: its digits cancel. So do those of a
second moment from which squared means are subtracted: `w @ (x * x) - (w @ x) ** 2`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final, TypeAlias

import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.dataflow.facts import (
    BodyFacts,
    Fact,
    FactFinder,
    Facts,
    Made,
    any_of,
    scales,
    weighs_solution,
)
from jmp_amp.plan.dataflow.made import is_linear
from jmp_amp.plan.dataflow.solver import Back, backward, entering, once, union
from jmp_amp.plan.dataflow.values import castable
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Body, Eqn, Literal, Var, aval_of
from jmp_amp.plan.tables.operations import (
    OPERATIONS,
    PRODUCTS,
    RANKS,
    Also,
    Kind,
    OpClass,
    Role,
    named,
    role_of,
)

# What becomes of a value: a set of the bits of `Ends`.
End: TypeAlias = int


class Ends:
    """The bits of an end: what some reader of a value makes of it."""

    NONE: Final = 0
    # An index.
    INDEX: Final = 1
    # The operand of a decomposition, or of a linear system.
    SOLVED: Final = 2
    # A term or a factor of a product that leads there.
    FACTOR: Final = 4
    # A factor of a solution: no layer.
    EXACT: Final = 8
    # A factor of a layer, which does not lead there: a stream between layers.
    STREAM: Final = 16
    # A term beside a sum of squares, as in `|a|^2 - 2 a b + |b|^2`: a distance.
    DISTANCE: Final = 32
    # The `F @ P` of `F @ P @ F.T` that leads there.
    FORM: Final = 128
    # A term beside squared means, or their factor: a variance.
    MOMENT: Final = 512


_LINEAR_ENDS = Ends.FACTOR | Ends.DISTANCE | Ends.MOMENT
_ELEMENTWISE = Ends.SOLVED | Ends.EXACT | Ends.STREAM
_NOTHING_PASSES = (Kind.PRODUCT, Kind.ALGEBRA, Kind.COMPARISON)
# Linear algebra that divides by numbers that may be small.
_SOLVES = named(Also.SOLVES) | {"custom_linear_solve"}


def solves(name: str) -> bool:
    """Whether a primitive decomposes a matrix or solves a linear system."""
    return name in _SOLVES


def _begun(name: str) -> End:
    """Returns what becomes of the operands of a primitive, whatever reads it."""
    if solves(name):
        return Ends.SOLVED
    return Ends.INDEX if role_of(name) is Role.COUNTS else Ends.NONE


def _passed(name: str) -> End:
    """Returns which ends of its results are ends of the operands of a primitive too."""
    operation = OPERATIONS.get(name)
    if operation is None or operation.kind in _NOTHING_PASSES:
        return Ends.NONE
    if operation.group.op_class is not OpClass.FOLLOW:
        return _ELEMENTWISE
    linear = _LINEAR_ENDS if is_linear(name) else Ends.NONE
    return _ELEMENTWISE | Ends.INDEX | linear


# Asked for each equation. A primitive of the table has no bodies.
_NAMES = (*OPERATIONS, *_SOLVES)
_BEGUN = {name: _begun(name) for name in _NAMES}
_PASSED = {name: _passed(name) for name in _NAMES}


class Destinations:
    """Finds them, in each body once for what becomes of its outputs."""

    def __init__(self) -> None:
        self.facts = FactFinder()

    @once
    def of(self, body: Body, outputs: tuple[End, ...], inputs: Facts) -> dict[Var, End]:
        """Returns what becomes of the variables of `body`.

        Args:
          body: the body.
          outputs: what becomes of each of its outputs outside of it.
          inputs: what is known of its inputs.
        """
        jaxpr = body.jaxpr
        found: dict[Var, End] = {}
        for atom, end in zip(jaxpr.outvars, outputs, strict=True):
            _add(found, [atom], end)
        facts = self.facts.of(body, inputs)
        # What later equations read, and callers.
        read = set(jaxprs.variables(jaxpr.outvars))
        for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
            ranked = _ranked(eqn, read) if eqn.primitive.name in RANKS else ()
            read.update(jaxprs.variables(eqn.invars))
            if index in facts.inner:
                bodies = self._back(eqn, found, facts.inner[index])
                for i, end in entering(eqn, bodies):
                    _add(found, [eqn.invars[i]], end)
                continue
            results = union(found.get(v, Ends.NONE) for v in eqn.outvars)
            operands = list(map(facts.of, eqn.invars))
            made = Made.NOTHING
            if results & Ends.MOMENT:
                made = any_of(map(facts.of, eqn.outvars))
            end = end_of_operands(eqn, results, operands, made)
            _add(found, _selected(eqn), end)
            _add(found, ranked, Ends.INDEX)
            if end & Ends.FACTOR and eqn.primitive.name in PRODUCTS:
                _add(found, _between(eqn, facts), Ends.FORM)
        return found

    def outputs(
        self, eqn: Eqn, found: dict[Var, End], inputs: Sequence[Facts]
    ) -> list[tuple[End, ...]]:
        """Returns what becomes of the outputs of each body of `eqn`.

        Args:
          eqn: a call, a loop or a branch.
          found: what becomes of the variables around it.
          inputs: what is known of the inputs of each body.
        """
        return [each.outputs for each in self._back(eqn, found, inputs)]

    def _back(
        self, eqn: Eqn, found: dict[Var, End], inputs: Sequence[Facts]
    ) -> list[Back[End]]:
        results = [found.get(v, Ends.NONE) for v in eqn.outvars]
        inner = jaxprs.inner_bodies(eqn)

        def inside(number: int, outputs: tuple[End, ...]) -> list[End]:
            body = inner[number].body
            ends = self.of(body, outputs, inputs[number])
            return [ends.get(v, Ends.NONE) for v in body.jaxpr.invars]

        def back(results: Sequence[End], told: End) -> list[Back[End]]:
            def turned(carry: int, now: End, read: End) -> End:
                return now | read & told

            return backward(eqn, results, inside, turned, Ends.NONE, Ends.NONE)

        bodies = back(results, ~Ends.STREAM)
        if not jaxprs.carried(eqn):
            return bodies
        # What leads to no linear algebra in this turn may do so in the next one.
        return back(bodies[-1].outputs, ~Ends.NONE)


def _add(found: dict[Var, End], atoms: Sequence[Atom], end: End) -> None:
    if not end:
        return
    for atom in atoms:
        if not isinstance(atom, Literal):
            before = found.get(atom, Ends.NONE)
            if end & ~before and castable(atom):
                found[atom] = before | end


def end_of_operands(eqn: Eqn, results: End, facts: Sequence[Fact], made: int) -> End:
    """Returns what becomes of the operands of an equation that calls nothing.

    A choice by rank makes an index of its operands beside, see `_ranked`.

    Args:
      eqn: the equation.
      results: what becomes of its results.
      facts: what its operands are made of.
      made: what its results are made of, a set of the bits of `Made`.
    """
    name = eqn.primitive.name
    if jaxprs.is_conversion(eqn):
        return _end_of_converted(eqn, results)
    end = _BEGUN.get(name, Ends.NONE) | results & _PASSED.get(name, Ends.NONE)
    if results & _LINEAR_ENDS and scales(eqn):
        end |= results & _LINEAR_ENDS
    if made & Made.MEANS:
        end |= results & Ends.MOMENT
    if role_of(name) in (Role.ADDS, Role.SUBTRACTS):
        # What becomes of a term beside the others.
        beside = any_of(facts)
        if beside & Made.SOLUTION:
            end |= Ends.SOLVED
        if beside & Made.SQUARES:
            end |= Ends.DISTANCE
        if subtracts_means(eqn, facts):
            end |= Ends.MOMENT
    if name not in PRODUCTS:
        return end
    if weighs_solution(eqn, facts):
        # Its terms cancel: the other factor has to be as exact.
        end |= Ends.SOLVED | Ends.EXACT
    leads = results & (Ends.SOLVED | Ends.FACTOR)
    if leads:
        return end | Ends.FACTOR
    return end if end & Ends.EXACT else end | Ends.STREAM


def subtracts_means(eqn: Eqn, facts: Sequence[Fact]) -> bool:
    """Whether squared means are subtracted from a second moment, or the other way."""
    if role_of(eqn.primitive.name) is not Role.SUBTRACTS:
        return False
    a, b = (each.made for each in facts)
    return any(
        (moment & Made.MOMENT and means & Made.MEANS)
        or (moment & Made.MIXED_MOMENT and means & (Made.TWO_TOTALS | Made.TWO_SUMS))
        or (moment & Made.PRODUCT and means & Made.TWO_SUMS)
        for moment, means in ((a, b), (b, a))
    )


def _ranked(eqn: Eqn, read: Set[Var]) -> Sequence[Atom]:
    """Returns the operands of `eqn` whose order says where something is.

    Whoever reads the largest values alone asks for no place. `read` is what is read
    after it.
    """
    count = len(eqn.invars)
    places = [v for v in eqn.outvars if not castable(v)]
    if eqn.primitive.name == "sort":
        # The keys move the other operands.
        count = eqn.params["num_keys"]
        places = eqn.outvars[count:]
    return () if read.isdisjoint(places) else eqn.invars[:count]


def _selected(eqn: Eqn) -> Sequence[Atom]:
    """Returns the operands of `eqn`; of a selection by a number, the one it takes."""
    if eqn.primitive.name == "select_n" and isinstance(eqn.invars[0], Literal):
        case = np.asarray(eqn.invars[0].val)
        return eqn.invars[1 + int(case) :][:1] if case.ndim == 0 else eqn.invars
    return eqn.invars


def _between(eqn: Eqn, facts: BodyFacts) -> list[Atom]:
    """Returns the factors of a product that it multiplies by one of theirs again.

    `F @ P` in `(F @ P) @ F.T`, which maps a covariance: a square matrix.
    """
    rows, columns = (0, 0, *aval_of(eqn.outvars[0]).shape)[-2:]
    if rows != columns:
        return []
    lhs, rhs = eqn.invars[:2]
    return [
        atom
        for atom, other in ((lhs, rhs), (rhs, lhs))
        if facts.of(other).value in facts.of(atom).factors
    ]


def _end_of_converted(eqn: Eqn, results: End) -> End:
    source, target = (aval_of(v).dtype for v in (eqn.invars[0], eqn.outvars[0]))
    if jnp.issubdtype(target, jnp.integer):
        return Ends.INDEX
    return results if source == target else Ends.NONE
