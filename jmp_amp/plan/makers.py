"""Operations that change no element: moves and selections."""

from __future__ import annotations

from jmp_amp.plan import jaxprs
from jmp_amp.plan.jaxprs import Eqn, aval_of
from jmp_amp.plan.operations import Kind, kind_of
from jmp_amp.plan.values import castable


def is_move(eqn: Eqn) -> bool:
    """Whether `eqn` moves values and changes none, as a cast to their dtype does."""
    if jaxprs.is_conversion(eqn):
        (source,) = eqn.invars
        return castable(source) and aval_of(source).dtype == eqn.params["new_dtype"]
    return kind_of(eqn.primitive.name) is Kind.MOVE


def is_exact(eqn: Eqn) -> bool:
    """Whether the elements of the results of `eqn` are those of its operands."""
    return is_move(eqn) or kind_of(eqn.primitive.name) is Kind.SELECTION
