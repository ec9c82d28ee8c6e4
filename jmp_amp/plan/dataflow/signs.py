"""Where digits cancel: what may be negative, and what is near zero where a sum is."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from jmp_amp.plan.dataflow.made import Fact, Made, any_of, is_number, squares
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal
from jmp_amp.plan.tables.operations import (
    OPERATIONS,
    PRODUCTS,
    Kind,
    Role,
    kind_of,
    role_of,
)


def signs(eqn: Eqn, facts: Sequence[Fact]) -> int:
    """Returns whether results may be negative, or near zero where a difference is."""
    name, role = eqn.primitive.name, role_of(eqn.primitive.name)
    if role is Role.SUBTRACTS:
        return Made.DIFFERENCE | Made.NEGATIVE
    if name in PRODUCTS or role is Role.NEGATES:
        return Made.NEGATIVE | any_of(facts) & Made.DIFFERENCE * (role is Role.NEGATES)
    if kind_of(name) not in (Kind.ARITHMETIC, Kind.SELECTION) or role is Role.COUNTS:
        return Made.NOTHING
    if role is Role.CURVES:
        limits = OPERATIONS[name].row.limits
        return Made.NEGATIVE if isinstance(limits, tuple) and limits[0] < 0 else 0
    either = any_of(facts) & (Made.DIFFERENCE | Made.NEGATIVE)
    if _is_positive(eqn, facts):
        either &= ~Made.NEGATIVE
    if role is Role.DIVIDES:
        return either & Made.NEGATIVE
    if role is Role.ADDS and not either & Made.NEGATIVE:
        # An epsilon is not near what it is added to.
        pairs = zip(facts, eqn.invars, strict=True)
        arrays = [f for f, v in pairs if not is_number(v)] or facts
        return functools.reduce(lambda made, f: made & f.made, arrays, Made.DIFFERENCE)
    return either | (Made.DIFFERENCE if role is Role.ADDS else Made.NOTHING)


def _is_positive(eqn: Eqn, facts: Sequence[Fact]) -> bool:
    """Whether results are at least zero, whatever the signs of the operands."""
    name = eqn.primitive.name
    if name == "max":
        return any(isinstance(v, Literal) and np.all(v.val >= 0) for v in eqn.invars)
    is_even = name == "integer_pow" and eqn.params["y"] % 2 == 0
    return name == "abs" or is_even or squares(eqn, facts)


def sign_of(atom: Atom) -> int:
    """Returns the fact of what nothing here made: it may be negative, unless known.

    The sign of a number in the program is known. An array may hold any sign, whether it
    is an argument or closed over: the plan does not hang on which of the two it is.
    """
    if isinstance(atom, Literal) and not np.iscomplexobj(atom.val):
        return Made.NOTHING if np.all(atom.val >= 0) else Made.NEGATIVE
    return Made.NEGATIVE
