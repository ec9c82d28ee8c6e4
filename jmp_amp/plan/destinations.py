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

The product in `|a|^2 - 2 a b + |b|^2` is f32 too: its digits cancel.

`stop_gradient` ends the derivative: what it alone reads is saved by nobody, so f32
costs no memory, back to the product.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jmp_amp.plan import jaxprs
from jmp_amp.plan.dimensions import is_sum_of_products
from jmp_amp.plan.jaxprs import Atom, Body, Eqn, Jaxpr, Literal, Var, aval_of
from jmp_amp.plan.operations import (
    OPERATIONS,
    PRODUCTS,
    RANKS,
    Kind,
    OpClass,
    Role,
    kind_of,
    role_of,
)
from jmp_amp.plan.values import castable

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
    # `stop_gradient` reads it.
    STOPPED: Final = 64
    # The `F @ P` of `F @ P @ F.T` that leads there.
    FORM: Final = 128
    # A product reads it, a caller, or a derivative.
    OTHERWISE: Final = 256


_LINEAR_ENDS = Ends.FACTOR | Ends.DISTANCE
_ELEMENTWISE = Ends.SOLVED | Ends.EXACT | Ends.STREAM | Ends.STOPPED | Ends.OTHERWISE
_NOTHING_PASSES = (Kind.PRODUCT, Kind.ALGEBRA, Kind.COMPARISON)
# What returns the solution of a linear system.
_SOLUTIONS = frozenset("custom_linear_solve triangular_solve tridiagonal_solve".split())
# Linear algebra that divides by numbers that may be small.
_SOLVES = frozenset(
    "cholesky cholesky_update custom_linear_solve eig eigh geqrf hessenberg lu qr "
    "schur svd triangular_solve tridiagonal tridiagonal_solve".split()
)
_TERMS = frozenset(
    name
    for name, each in OPERATIONS.items()
    if each.row.role in (Role.ADDS, Role.SUBTRACTS)
)
_LINEAR = _TERMS.union(
    ("neg", "add_any"),
    (name for name, each in OPERATIONS.items() if each.kind is Kind.MOVE),
)


def solves(name: str) -> bool:
    """Whether a primitive decomposes a matrix or solves a linear system."""
    return name in _SOLVES


def makes_solutions(name: str) -> bool:
    """Whether a primitive returns the solution of a linear system."""
    return name in _SOLUTIONS


def is_linear(name: str) -> bool:
    """Whether a primitive moves its operands, adds or subtracts them."""
    return name in _LINEAR


def settled(end: End) -> End:
    """Returns an end; a stream between layers leads nowhere but to layers."""
    return end & ~(Ends.SOLVED | Ends.EXACT) if end & Ends.STREAM else end


def _begun(name: str) -> End:
    """Returns what becomes of the operands of a primitive, whatever reads it."""
    operation = OPERATIONS.get(name)
    if name == "stop_gradient":
        return Ends.STOPPED
    if solves(name):
        return Ends.SOLVED
    if operation is None or operation.kind in (Kind.PRODUCT, Kind.ALGEBRA):
        return Ends.OTHERWISE
    return Ends.INDEX if operation.row.role is Role.COUNTS else Ends.NONE


def _passed(name: str) -> End:
    """Returns which ends of its results are ends of the operands of a primitive too."""
    operation = OPERATIONS.get(name)
    if operation is None or operation.kind in _NOTHING_PASSES:
        return Ends.NONE
    if operation.group.op_class is not OpClass.FOLLOW:
        return _ELEMENTWISE
    linear = _LINEAR_ENDS if is_linear(name) else Ends.NONE
    passed = _ELEMENTWISE | Ends.INDEX | linear
    return passed & ~Ends.OTHERWISE if name == "stop_gradient" else passed


# Asked for each equation. A primitive of the table has no bodies.
_NAMES = (*OPERATIONS, *_SOLVES)
_BEGUN = {name: _begun(name) for name in _NAMES}
_PASSED = {name: _passed(name) for name in _NAMES}


class _Made(NamedTuple):
    """Variables of a body, by what makes them, moves aside.

    Attributes:
      solutions: those of linear systems, and what they are multiplied with.
      squares: what is multiplied by itself.
      sums: sums of squares.
    """

    solutions: set[Var]
    squares: set[Var]
    sums: set[Var]


class Destinations:
    """Finds them, in each body once for what becomes of its outputs."""

    def __init__(self) -> None:
        self._found: dict[object, dict[Var, End]] = {}
        self._made: dict[int, _Made] = {}

    def of(self, body: Body, outputs: tuple[End, ...]) -> dict[Var, End]:
        """Returns what becomes of the variables of `body`.

        Args:
          body: the body.
          outputs: what becomes of each of its outputs outside of it.
        """
        key = id(body.jaxpr), outputs
        if key not in self._found:
            jaxpr = body.jaxpr
            found: dict[Var, End] = {}
            for atom, end in zip(jaxpr.outvars, outputs, strict=True):
                _add(found, [atom], end)
            made = self._made_in(body)
            makers: dict[Var, Eqn] = {}
            for eqn in reversed(jaxpr.eqns):
                if eqn.primitive.name not in _PASSED and jaxprs.inner_bodies(eqn):
                    self._inside(eqn, found)
                    continue
                end = _end_of_operands(eqn, found)
                if eqn.primitive.name in PRODUCTS:
                    if _weighs(eqn, made.solutions):
                        # Its terms cancel: the other factor has to be as exact.
                        end |= Ends.SOLVED | Ends.EXACT
                    elif not end & Ends.FACTOR:
                        end |= Ends.STREAM
                elif eqn.primitive.name in _TERMS:
                    if _reads(eqn, made.solutions):
                        end |= Ends.SOLVED
                    if _reads(eqn, made.sums):
                        end |= Ends.DISTANCE
                _add(found, _selected(eqn), end)
                if eqn.primitive.name in RANKS:
                    _add(found, _ranked(eqn, jaxpr), Ends.INDEX)
                if end & Ends.FACTOR and eqn.primitive.name in PRODUCTS:
                    makers = makers or _makers(jaxpr)
                    _add(found, _between(eqn, makers), Ends.FORM)
            self._found[key] = found
        return self._found[key]

    def _made_in(self, body: Body) -> _Made:
        """Returns the variables of `body` that are solutions or sums."""
        key = id(body.jaxpr)
        if key not in self._made:
            made = _Made(set(), set(), set())
            for eqn in body.jaxpr.eqns:
                name = eqn.primitive.name
                inner = () if name in _PASSED else jaxprs.inner_bodies(eqn)
                if inner:
                    last = inner[-1].body
                    inside = self._made_in(last)
                    for v, result in zip(eqn.outvars, last.jaxpr.outvars, strict=True):
                        for here, there in zip(made, inside, strict=True):
                            if not isinstance(result, Literal) and result in there:
                                here.add(v)
                    continue
                linear = is_linear(name)
                moves = kind_of(name) is Kind.MOVE
                if (
                    makes_solutions(name)
                    or (moves and _reads(eqn, made.solutions))
                    or (name in PRODUCTS and _weighs(eqn, made.solutions))
                ):
                    made.solutions.update(eqn.outvars)
                if _squares(eqn) or (moves and _reads(eqn, made.squares)):
                    made.squares.update(eqn.outvars)
                summed = name == "reduce_sum" and _reads(eqn, made.squares)
                if summed or _sums_squares(eqn) or (linear and _reads(eqn, made.sums)):
                    made.sums.update(eqn.outvars)
            self._made[key] = made
        return self._made[key]

    def outputs(self, eqn: Eqn, found: dict[Var, End]) -> list[tuple[End, ...]]:
        """Returns what becomes of the outputs of each body of `eqn`.

        Args:
          eqn: a call, a loop or a branch.
          found: what becomes of the variables around it.
        """
        results = tuple(found.get(v, Ends.NONE) for v in eqn.outvars)
        inner = jaxprs.inner_bodies(eqn)
        if jaxprs.is_while(eqn):
            return [(Ends.NONE,), self._settled(eqn, inner[1].body, results)]
        if jaxprs.carried(eqn):
            return [self._settled(eqn, inner[0].body, results)]
        return [results] * len(inner)

    def _settled(
        self, eqn: Eqn, body: Body, outputs: tuple[End, ...]
    ) -> tuple[End, ...]:
        """Returns the ends of the outputs of a loop's body, as the next turns read."""
        count = len(jaxprs.carried(eqn))
        # A scan carries after its constants and before what it goes through.
        first = jaxprs.carried(eqn).start if not jaxprs.is_while(eqn) else -count
        carry = body.jaxpr.invars[first:][:count]
        # What leads to no linear algebra in this turn may do so in the next one.
        for told in (~Ends.STREAM, ~Ends.NONE):
            before = None
            while outputs != before:
                before, found = outputs, self.of(body, outputs)
                read = [found.get(v, Ends.NONE) & told for v in carry]
                read += [Ends.NONE] * (len(outputs) - count)
                outputs = tuple(a | b for a, b in zip(outputs, read, strict=True))
        return outputs

    def _inside(self, eqn: Eqn, found: dict[Var, End]) -> None:
        inner = jaxprs.inner_bodies(eqn)
        outputs = self.outputs(eqn, found)
        for (body, operands), ends in zip(inner, outputs, strict=True):
            inside = self.of(body, ends)
            for i, var in zip(operands, body.jaxpr.invars, strict=True):
                _add(found, [eqn.invars[i]], inside.get(var, Ends.NONE))


def _add(found: dict[Var, End], atoms: Sequence[Atom], end: End) -> None:
    if not end:
        return
    for atom in atoms:
        if not isinstance(atom, Literal):
            before = found.get(atom, Ends.NONE)
            if end & ~before and castable(atom):
                found[atom] = before | end


def _squares(eqn: Eqn) -> bool:
    name = eqn.primitive.name
    if name == "mul":
        return eqn.invars[0] is eqn.invars[1]
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)


def _sums_squares(eqn: Eqn) -> bool:
    """Whether `eqn` is a product such as `einsum("nd,nd->n", x, x)`."""
    return (
        eqn.primitive.name == "dot_general"
        and eqn.invars[0] is eqn.invars[1]
        and is_sum_of_products(eqn)
    )


def _ranked(eqn: Eqn, jaxpr: Jaxpr) -> Sequence[Atom]:
    """Returns the operands of `eqn` whose order says where something is.

    Whoever reads the largest values alone asks for no place.
    """
    count = len(eqn.invars)
    places = [v for v in eqn.outvars if not castable(v)]
    if eqn.primitive.name == "sort":
        # The keys move the other operands.
        count = eqn.params["num_keys"]
        places = eqn.outvars[count:]
    read = [*jaxpr.outvars, *(atom for each in jaxpr.eqns for atom in each.invars)]
    unread = set(jaxprs.variables(read)).isdisjoint(places)
    return () if unread else eqn.invars[:count]


def _selected(eqn: Eqn) -> Sequence[Atom]:
    """Returns the operands of `eqn`; of a selection by a number, the one it takes."""
    if eqn.primitive.name == "select_n" and isinstance(eqn.invars[0], Literal):
        case = np.asarray(eqn.invars[0].val)
        return eqn.invars[1 + int(case) :][:1] if case.ndim == 0 else eqn.invars
    return eqn.invars


def _weighs(eqn: Eqn, solutions: Set[Var]) -> bool:
    """Whether a product adds up a solution: `gain @ x`, or `x @ weights` of a vector.

    Not that of `x @ w`, where a weight of a network may be an inverse.
    """
    if not solutions:
        return False
    lhs, rhs = (jaxprs.variables((atom,)) for atom in eqn.invars[:2])
    is_vector = aval_of(eqn.invars[1]).ndim < 2
    return not solutions.isdisjoint(lhs + rhs if is_vector else lhs)


def _reads(eqn: Eqn, variables: Set[Var]) -> bool:
    """Whether an operand of `eqn` is one of `variables`."""
    return bool(variables) and not variables.isdisjoint(jaxprs.variables(eqn.invars))


def _makers(jaxpr: Jaxpr) -> dict[Var, Eqn]:
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def _untransposed(atom: Atom, makers: dict[Var, Eqn]) -> Atom:
    while not isinstance(atom, Literal) and atom in makers:
        if makers[atom].primitive.name != "transpose":
            break
        atom = makers[atom].invars[0]
    return atom


def _between(eqn: Eqn, makers: dict[Var, Eqn]) -> list[Atom]:
    """Returns the factors of a product that it multiplies by one of theirs again.

    `F @ P` in `(F @ P) @ F.T`, which maps a covariance: a square matrix.
    """
    found: list[Atom] = []
    rows, columns = (0, 0, *aval_of(eqn.outvars[0]).shape)[-2:]
    if rows != columns:
        return found
    inner = [_untransposed(atom, makers) for atom in eqn.invars[:2]]
    for atom, other in zip(inner, reversed(inner), strict=True):
        made = None if isinstance(atom, Literal) else makers.get(atom)
        if made is not None and made.primitive.name in PRODUCTS:
            if any(_untransposed(v, makers) is other for v in made.invars[:2]):
                found.append(atom)
    return found


def _end_of_operands(eqn: Eqn, found: dict[Var, End]) -> End:
    """Returns what becomes of the operands of `eqn`, which calls nothing."""
    name = eqn.primitive.name
    results = Ends.NONE
    for var in eqn.outvars:
        results |= found.get(var, Ends.NONE)
    results = settled(results)
    if jaxprs.is_conversion(eqn):
        return _end_of_converted(eqn, results)
    end = _BEGUN.get(name, Ends.OTHERWISE) | results & _PASSED.get(name, Ends.NONE)
    leads = results & (Ends.SOLVED | Ends.FACTOR)
    if leads and name in PRODUCTS:
        end |= Ends.FACTOR
    if results & _LINEAR_ENDS and _scales(eqn):
        end |= results & _LINEAR_ENDS
    return end


def _end_of_converted(eqn: Eqn, results: End) -> End:
    source, target = (aval_of(v).dtype for v in (eqn.invars[0], eqn.outvars[0]))
    if jnp.issubdtype(target, jnp.integer):
        return Ends.INDEX
    return results if source == target else Ends.OTHERWISE


def _scales(eqn: Eqn) -> bool:
    """Whether an operation multiplies by a number."""
    return role_of(eqn.primitive.name) in (Role.MULTIPLIES, Role.DIVIDES) and any(
        isinstance(v, Literal) for v in eqn.invars
    )
