"""The words of facts: what a value is made of, as a set of bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from jmp_amp.plan.program.dimensions import is_larger
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, aval_of
from jmp_amp.plan.tables.operations import OPERATIONS, Kind, Role, role_of

_LINEAR = frozenset(
    name
    for name, each in OPERATIONS.items()
    if each.kind is Kind.MOVE
    or each.row.role in (Role.ADDS, Role.SUBTRACTS, Role.NEGATES)
)


class Made:
    """The bits of a fact: what a value is made of."""

    NOTHING: Final = 0
    # That of a linear system, or a product with one.
    SOLUTION: Final = 1
    # A value times itself, and times another one.
    SQUARE: Final = 2
    TIMES: Final = 4
    # A sum of squares.
    SQUARES: Final = 8
    # A sum of elements, and a sum of products.
    SUM: Final = 16
    PRODUCT: Final = 32
    # A product of squares, or of a value with itself: a second moment; and one of two
    # values that were multiplied before.
    MOMENT: Final = 64
    MIXED_MOMENT: Final = 128
    # A square of a sum, or of a product; two of these multiplied; two sums multiplied.
    SQUARED_MEAN: Final = 256
    TWO_TOTALS: Final = 512
    TWO_SUMS: Final = 1024
    # A reduction; and one, or a sum with one, element for element.
    REDUCED: Final = 2048
    SUM_OR_TERM: Final = 4096
    # The factor of a norm, and what it scales.
    NORMALIZER: Final = 8192
    NORMALIZED: Final = 16384
    # A smaller value, broadcast.
    BROADCAST: Final = 32768
    # What is subtracted from a moment.
    MEANS: Final = SQUARED_MEAN | TWO_TOTALS | TWO_SUMS
    TOTAL: Final = SUM | PRODUCT
    # Of what made a value at last. The other bits are of all that it is made of.
    LAST: Final = REDUCED | SUM_OR_TERM | NORMALIZER | NORMALIZED | BROADCAST


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
      made: what it is made of, a set of the bits of `Made`.
      value: a number that values of a body share if one is the other moved.
      factors: the values that a product multiplied.
      last: where a transpose has put the last axis, from the end.
    """

    made: int
    value: int
    factors: tuple[int, ...] = ()
    last: int = -1


# One for each input, or for each output, of a body.
Facts = tuple[Fact, ...]


def any_of(facts: Iterable[Fact]) -> int:
    """Returns what one of several values is made of."""
    made = Made.NOTHING
    for each in facts:
        made |= each.made
    return made


def is_linear(name: str) -> bool:
    """Whether a primitive moves its operands, adds or subtracts them."""
    return name in _LINEAR


def squares(eqn: Eqn, facts: Sequence[Fact]) -> bool:
    """Whether an operation multiplies a value by itself."""
    name = eqn.primitive.name
    if role_of(name) is Role.MULTIPLIES:
        return facts[0].value == facts[1].value
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)


def scales(eqn: Eqn) -> bool:
    """Whether an operation multiplies by a number."""
    scales = role_of(eqn.primitive.name) in (Role.MULTIPLIES, Role.DIVIDES)
    return scales and any(map(is_number, eqn.invars))


def is_broadcast(eqn: Eqn, i: int, fact: Fact) -> bool:
    """Whether an operand is smaller than the result, or a smaller one broadcast."""
    sizes = aval_of(eqn.outvars[0]).size, aval_of(eqn.invars[i]).size
    is_smaller = is_larger(*sizes, unless_known=True)
    return is_smaller or bool(fact.made & Made.BROADCAST)


def is_number(atom: Atom) -> bool:
    """Whether a value has no dimensions, or is a literal."""
    return isinstance(atom, Literal) or not aval_of(atom).ndim
