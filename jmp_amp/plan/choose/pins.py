"""Pins: what keeps a value in f32, whatever else could be.

A pin is a row of `PINS`. A parameter such as a bias follows the activations that it is
added to. A state does not: `y + 1e-3 * f(y)` in half precision would be `y`. Nor does a
place: one-hot rows times `arange(2048.)` are the numbers of the rows.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.choose.records import Decision
from jmp_amp.plan.dataflow.ends import Ends
from jmp_amp.plan.dataflow.facts import makes_solutions, weighs
from jmp_amp.plan.dataflow.made import is_broadcast, is_linear
from jmp_amp.plan.dataflow.standing import Criterion, Standing
from jmp_amp.plan.dataflow.values import Known, Origin, Trait, castable
from jmp_amp.plan.program.dimensions import Dimensions, is_in_f32
from jmp_amp.plan.program.jaxprs import Atom, aval_of, is_floating
from jmp_amp.plan.tables.operations import (
    Kind,
    OpClass,
    Role,
    kind_of,
    role_of,
)
from jmp_amp.policies.dtypes import F32, is_half

_SCALES = (Role.MULTIPLIES, Role.DIVIDES)


def pin_of(at: Standing) -> Criterion | None:
    """Returns the first pin that holds for an equation that calls nothing."""
    if at.rule.op_class is not OpClass.LOW:
        pins = PINS if at.end & Ends.INDEX else ()
        return next((pin for pin in pins if pin.id == "index"), None)
    asked = at.region.asked.compute_dtype
    if at.rule.from_user or not is_half(asked) or not is_in_f32(at.eqn):
        return None
    return next((pin for pin in PINS if pin.holds(at)), None)


def _factors(at: Standing) -> list[tuple[Known, Atom]]:
    # The sizes of the groups of a ragged product are no factor.
    return list(zip(at.views[:2], at.eqn.invars[:2], strict=True))


def _places(at: Standing) -> bool:
    """Whether a product makes a place: of a constant, or of integers alone."""
    factors = _factors(at)
    return bool(at.end & Ends.INDEX) and (
        any(value.is_constant for value, _ in factors)
        or not any(v.origin != Origin.FREE or is_weight(v, atom) for v, atom in factors)
    )


def _is_grid(at: Standing) -> bool:
    half = at.region.asked.compute_dtype
    return any(_is_long(value, half) for value, _ in _factors(at))


def _is_distance(at: Standing) -> bool:
    return bool(at.end & Ends.DISTANCE) and not _is_rows_by_columns(at)


def _is_derivative(at: Standing) -> bool:
    return at.derived_from is not None and at.derived_from.is_f32


def _weighs_free_solution(at: Standing) -> bool:
    is_low = any(value.follows_product for value, _ in _factors(at))
    return not is_low and _weighs_solution(at)


def _is_solved(at: Standing) -> bool:
    """Whether linear algebra reads a product that is no layer of a network.

    A layer multiplies rows of activations, or of an input, by columns of a parameter.
    Columns times columns, or rows times rows, are the matrix of a linear system. Nor is
    `F @ P @ F.T` one, or a solution times what the next turn of a loop solves.
    """
    if not at.end & (Ends.SOLVED | Ends.FACTOR):
        return False
    if at.end & Ends.FORM:
        return True
    factors = _factors(at)
    if any(Trait.SOLUTION in value.traits for value, _ in factors):
        is_state = bool(at.end & Ends.FACTOR) and not at.end & Ends.STREAM
        if is_state or not any(value.follows_product for value, _ in factors):
            return True
    if at.origin == Origin.FREE:
        return bool(at.end & Ends.EXACT) or not _is_layer(at)
    has_parameter = any(value.origin == Origin.FREE for value, _ in factors)
    is_layer = has_parameter and _sums_last(at, 0) is not False
    return bool(at.end & Ends.SOLVED) and not is_layer


def _is_layer(at: Standing) -> bool:
    """Whether a product of inputs may be the first layer of a network."""
    return not at.is_related and _is_rows_by_columns(at)


def _is_rows_by_columns(at: Standing) -> bool:
    """Whether a product is `x @ w`, and none of `x.T @ w` and `x @ w.T`."""
    return _sums_last(at, 0) is not False and not _sums_last(at, 1)


def _sums_last(at: Standing, i: int) -> bool | None:
    """Whether a product sums over the last axis of an operand; None of a vector."""
    if at.name != "dot_general":
        return None
    rank, terms = aval_of(at.eqn.invars[i]).ndim, Dimensions.of(at.eqn).terms[i]
    if not terms or rank < 2:
        return None
    return rank + at.facts[i].last in terms


def _weighs_solution(at: Standing) -> bool:
    """Whether a product adds up a solution, and is no layer, see `weighs`."""
    return weighs(at.eqn, *(Trait.SOLUTION in v.traits for v in at.views[:2]))


def is_solution(at: Standing, made: Decision) -> bool:
    """Whether a linear system is solved here, or a solution is a term or a factor.

    A product in f32 that leads to linear algebra counts as well: a state of a filter.
    """
    if makes_solutions(at.name):
        return True
    if kind_of(at.name) is Kind.PRODUCT:
        if made.pin is not None and made.pin.id == "solved":
            return True
        return made.dtype == F32 and _weighs_solution(at)
    follows = is_linear(at.name) or role_of(at.name) in _SCALES
    return follows and any(Trait.SOLUTION in v.traits for v in at.operands)


def is_weight(value: Known, atom: Atom) -> bool:
    """Whether a value may be a weight: an argument that holds floats."""
    return value.is_parameter and is_floating(atom)


def _is_long(value: Known, half: np.dtype) -> bool:
    """Whether a constant counts further than `half` does: a grid of 512 pixels."""
    if not value.is_constant or value.bounds is None:
        return False
    low, high = value.bounds
    return low < high and max(-low, high) > 2 / float(jnp.finfo(half).eps)


def is_argument(value: Known, atom: Atom) -> bool:
    """Whether a value is an f32 argument, or computed from arguments alone.

    An array that the function closes over is an argument too; numbers are not.
    """
    is_closed_over = value.is_parameter and aval_of(atom).ndim > 0
    return (
        value.origin == Origin.FREE
        and (is_closed_over or not value.is_constant)
        and castable(atom)
        and aval_of(atom).dtype == F32
    )


def sums_argument(at: Standing) -> bool:
    """Whether an argument, or a sum that it began, is a term of the result."""
    if any(Trait.SUMS_ARGUMENT in v.traits for v in at.views):
        return True
    return role_of(at.name) in (Role.ADDS, Role.SUBTRACTS) and any(
        is_argument(value, atom)
        and Trait.LOOKED_UP not in value.traits
        and not is_broadcast(at.eqn, i, at.facts[i])
        for i, (value, atom) in enumerate(zip(at.views, at.eqn.invars, strict=True))
    )


_SOLVED = "linear algebra reads it: an error grows by the condition number"
_RECURSION = "a recursion: its result returns to the carry by arithmetic alone"
_MOMENT = "a second moment less squared means: their digits cancel"
_SOLUTION = "a factor is a solution of linear algebra: its terms cancel"
# The first that holds wins.
PINS = (
    Criterion("index", "becomes an index", _places),
    Criterion("solved", _SOLVED, _is_solved),
    Criterion(
        "grid", "{half} does not hold every number that the grid counts", _is_grid
    ),
    Criterion("recursion", _RECURSION, lambda at: at.is_recursive),
    Criterion("distance", "a distance: the digits of its terms cancel", _is_distance),
    Criterion("moment", _MOMENT, lambda at: bool(at.end & Ends.MOMENT)),
    Criterion("solution", _SOLUTION, _weighs_free_solution),
    Criterion("derivative", "the derivative of a product in f32", _is_derivative),
)
