"""Which operations made a value: the patterns that the plan looks for."""

from __future__ import annotations

from jmp_amp.plan import jaxprs
from jmp_amp.plan.decisions import Standing
from jmp_amp.plan.jaxprs import Atom, Eqn, Literal, aval_of
from jmp_amp.plan.operations import Kind, Role, kind_of, role_of
from jmp_amp.plan.values import Origin, castable


def is_move(eqn: Eqn) -> bool:
    """Whether `eqn` moves values and changes none, as a cast to their dtype does."""
    if jaxprs.is_conversion(eqn):
        (source,) = eqn.invars
        return castable(source) and aval_of(source).dtype == eqn.params["new_dtype"]
    return kind_of(eqn.primitive.name) is Kind.MOVE


def is_exact(eqn: Eqn) -> bool:
    """Whether the elements of the results of `eqn` are those of its operands."""
    return is_move(eqn) or kind_of(eqn.primitive.name) is Kind.SELECTION


def maker(atom: Atom, at: Standing) -> Eqn | None:
    """Returns the equation that made a value, moves aside."""
    while not isinstance(atom, Literal) and atom in at.makers:
        eqn = at.makers[atom]
        if not is_move(eqn):
            return eqn
        atom = eqn.invars[0]
    return None


def maker_role(atom: Atom, at: Standing) -> Role | None:
    """Returns the role of the operation that made a value, moves aside."""
    eqn = maker(atom, at)
    return None if eqn is None else role_of(eqn.primitive.name)


def is_normalized(atom: Atom, at: Standing) -> bool:
    """Whether a value is a product with a reciprocal square root."""
    eqn = maker(atom, at)
    return (
        eqn is not None
        and role_of(eqn.primitive.name) is Role.MULTIPLIES
        and any(maker_role(v, at) is Role.NORMALIZES for v in eqn.invars)
    )


def gates_a_sum(at: Standing) -> bool:
    """Whether half-precision values gate sums: one for each, none is broadcast."""
    origins = [v.origin for v in at.views]
    if sorted(origins) != [Origin.LOW, Origin.FULL]:
        return False
    atom = at.eqn.invars[origins.index(Origin.FULL)]
    made = maker(atom, at)
    if made is None or aval_of(atom).size != aval_of(made.outvars[0]).size:
        return False
    terms = made.invars if role_of(made.primitive.name) is Role.ADDS else (atom,)
    return any(maker_role(v, at) is Role.SUMS for v in terms)
