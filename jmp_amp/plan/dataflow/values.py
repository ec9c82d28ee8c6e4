"""Values: what the plan knows of a value before it asks who reads it."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.core
import numpy as np

from jmp_amp.plan.dataflow import constants
from jmp_amp.plan.dataflow.constants import Bounds
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Eqn, aval_of
from jmp_amp.plan.program.regions import Region
from jmp_amp.plan.tables.operations import Kind, kind_of
from jmp_amp.policies.dtypes import is_castable, is_half


class Origin(enum.IntEnum):
    """Where a value comes from; an equation's is the greatest of its operands'."""

    FREE = 0  # parameters, inputs, constants, and values computed from them alone
    LOW = 1  # made by a half-precision operation
    FULL = 2  # made by an f32 operation from activations


class Trait(enum.Enum):
    """Properties of a value besides its origin and its range."""

    # There is one of each. The hash of `enum` is one in Python, of the name.
    __hash__ = object.__hash__

    # An input, or an input moved around. It is cast at each use, so that the gradients
    # of its uses are summed in its own dtype.
    PARAMETER = "parameter"
    # Rows of a table, such as an embedding, or made of them: a stream begins here. What
    # saves them for the backward pass pays for it, unlike for a parameter.
    LOOKED_UP = "looked up"
    # Another value in each turn of a loop, as the weights of stacked layers are.
    SLICE = "another one in each turn"
    # An argument and what was added to it.
    SUMS_ARGUMENT = "sums an argument"
    # A loop carries it in f32, because it is kept over the turns.
    CARRIED = "carried"
    # It holds a constant, such as a mask's, that half precision has no place for.
    OVERSIZED = "oversized"
    # That of a linear system, or arithmetic on one, whose terms may cancel.
    SOLUTION = "a solution of linear algebra"
    # It has more than one consumer.
    SHARED = "shared"
    # Autodiff keeps it in f32 whatever reads it: to compute it again is too expensive.
    # Operations that follow it inherit the trait.
    SAVED_IN_F32 = "saved in f32"
    # Such a value joins a half stream between layers.
    JOINS_STREAM = "joins a half stream"
    # Made of half values in f32, between products, and of nothing else that is f32.
    BETWEEN = "between products"
    # A product and its bias, moved.
    BIASED = "a product and its bias"
    # A pin keeps it in f32, or what it is made of.
    PINNED = "pinned"
    # Made of a tangent of a derivative rule: what it becomes has to be linear in it.
    TANGENT = "tangent"


# Of a value that is one of two: those that it has if either has them.
CONTAGIOUS = frozenset(
    (
        Trait.LOOKED_UP,
        Trait.SLICE,
        Trait.SUMS_ARGUMENT,
        Trait.PINNED,
        Trait.OVERSIZED,
        Trait.SOLUTION,
        Trait.TANGENT,
    )
)


class Known(NamedTuple):
    """What the forward pass knows of a value.

    Attributes:
      origin: where it comes from.
      bounds: its range, if it is computed from constants.
      region: the policy scope that it was made in.
      traits: its other properties.
    """

    origin: Origin
    bounds: Bounds
    region: Region
    traits: frozenset[Trait] = frozenset()

    @property
    def is_parameter(self) -> bool:
        return Trait.PARAMETER in self.traits

    @property
    def is_shared(self) -> bool:
        return Trait.SHARED in self.traits

    @property
    def follows_product(self) -> bool:
        """Whether it is half, or was made between products."""
        return self.origin == Origin.LOW or Trait.BETWEEN in self.traits

    @property
    def is_constant(self) -> bool:
        return self.origin == Origin.FREE and self.bounds is not None

    def having(self, *traits: Trait) -> Known:
        """Returns the same value, with more traits."""
        return self._replace(traits=self.traits.union(traits))

    def shared(self, is_shared: bool) -> Known:
        """Returns the same value, with one consumer or with several."""
        if is_shared == self.is_shared:
            return self
        return self._replace(traits=self.traits ^ {Trait.SHARED})


def may_round(known: Known) -> bool:
    """Whether a value may be cast to half on its way to half readers.

    An oversized constant would become infinite: its readers saturate it.
    """
    return Trait.OVERSIZED not in known.traits


def traced_dtype(atom: Atom) -> np.dtype | None:
    """Returns the dtype that a value was traced in; None if it is never cast."""
    return aval_of(atom).dtype if castable(atom) else None


def castable(atom: Atom) -> bool:
    """Whether an operand is an array of a dtype that the plan may change."""
    return isinstance(atom.aval, jax.core.ShapedArray) and _is_castable(atom.aval.dtype)


# Asked for each operand of each equation, of a handful of dtypes.
_is_castable = functools.cache(is_castable)


def unfit(
    operands: Sequence[Known], dtype: np.dtype, kind: str | None = None
) -> str | None:
    """Returns in words why one of the constants does not fit `dtype`, or None.

    Args:
      operands: the values that meet in an equation.
      dtype: the dtype that the equation would run in.
      kind: "overflows" or "vanishes" to look for one of these alone.
    """
    if not is_half(dtype):
        return None
    for value in operands:
        if value.origin == Origin.FREE and value.bounds is not None:
            how = constants.misfit(value.bounds, dtype)
            if how is not None and kind in (None, how):
                worst = max(value.bounds, key=abs)
                return f"the constant {worst:g} {how} in {dtype.name}"
    return None


def unfit_bound(operands: Sequence[Known], dtype: np.dtype) -> str | None:
    """Returns in words why `dtype` has no place for a bound beside a number, or None.

    Args:
      operands: the values that meet in a comparison or a selection.
      dtype: the dtype that it would run in.
    """
    if not is_half(dtype):
        return None
    for value in operands:
        for bound in (value.bounds or ()) if value.origin == Origin.FREE else ():
            number = constants.met(bound, dtype)
            if number is not None:
                return f"the bound {bound:g} is {number:g} in {dtype.name}"
    return None


def is_move(eqn: Eqn) -> bool:
    """Whether `eqn` moves values and changes none, as a cast to their dtype does."""
    if jaxprs.is_conversion(eqn):
        (source,) = eqn.invars
        return castable(source) and aval_of(source).dtype == eqn.params["new_dtype"]
    return kind_of(eqn.primitive.name) is Kind.MOVE


def is_exact(eqn: Eqn) -> bool:
    """Whether the elements of the results of `eqn` are those of its operands."""
    return is_move(eqn) or kind_of(eqn.primitive.name) is Kind.SELECTION
