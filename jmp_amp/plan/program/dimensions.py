"""How large arrays are, and the dimensions of a product.

Some products sum over nothing, and of some nothing is left but the sum. `jax.export`
traces sizes that are told when the program runs: symbols, which Python cannot compare.
All comparisons of sizes are here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.export import is_symbolic_dim

from jmp_amp.plan.program.jaxprs import Eqn, aval_of
from jmp_amp.policies.dtypes import F32

# Larger than what any plan looks for, and no half dtype counts as far.
_LARGE = 2**30


def as_number(size: int) -> int:
    """Returns a size; a symbolic one, a batch as a rule, counts as a large number."""
    return _LARGE if is_symbolic_dim(size) else size


def as_counted(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape to count elements of; a symbolic size is that of one example."""
    return tuple(1 if is_symbolic_dim(n) else n for n in shape)


@functools.lru_cache(maxsize=4096)
def elements_of(shape: tuple[int, ...]) -> int:
    """Returns the elements of an array, with `as_counted` sizes."""
    return math.prod(as_counted(shape))


def is_larger(size: int, other: int, *, unless_known: bool) -> bool:
    """Whether a size is larger than another one.

    `8 * b` is larger than 8: only `b = 1`, the least that a symbol may be, makes both
    equal.

    Args:
      size, other: numbers, or made of symbols.
      unless_known: what to return where it depends on the values of the symbols.
    """
    if _is_at_least(size, other):
        return bool(size != other)
    return unless_known and not _is_at_least(other, size)


def _is_at_least(size: int, other: int) -> bool:
    """Whether a size is known to be as large as another one, or larger."""
    try:
        return bool(size >= other)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def is_sum_of_products(eqn: Eqn) -> bool:
    """Whether no dimension of the operands of a product is free, as in `vdot`."""
    if eqn.primitive.name != "dot_general":
        return False
    return not any(Dimensions.of(eqn).free)


def is_elementwise_product(eqn: Eqn) -> bool:
    """Whether a product adds nothing up, as `einsum("i,j->ij")`; see `is_in_f32`.

    It may sum over dimensions of one element, see `sums`.
    """
    if eqn.primitive.name != "dot_general" or not is_in_f32(eqn):
        return False
    shape = aval_of(eqn.invars[0]).shape
    return all(shape[d] == 1 for d in Dimensions.of(eqn).terms[0])


def is_in_f32(eqn: Eqn) -> bool:
    """Whether a product is one of f32 arrays, or of integers with one."""
    dtypes = [aval_of(v).dtype for v in (*eqn.invars, *eqn.outvars)]
    return dtypes[-1] == F32 and all(d == F32 or d.kind in "iub" for d in dtypes)


def sums(eqn: Eqn) -> bool:
    """Whether a product sums over dimensions, if only of one element."""
    return bool(Dimensions.of(eqn).terms[0])


class Sides(NamedTuple):
    """The rows, columns and terms of a product."""

    m: int
    n: int
    k: int


def sides_of(eqn: Eqn) -> Sides:
    """Returns the sides of a `dot_general`, each all its dimensions multiplied."""
    lhs, rhs = (aval_of(v).shape for v in eqn.invars)
    product = Dimensions.of(eqn)

    def size(shape: Sequence[int], dimensions: Sequence[int]) -> int:
        return math.prod(shape[d] for d in dimensions)

    return Sides(
        m=size(lhs, product.free[0]),
        n=size(rhs, product.free[1]),
        k=size(lhs, product.terms[0]),
    )


class Dimensions(NamedTuple):
    """The dimensions of both operands of a product, each in the order of the result.

    Attributes:
      terms: those that are summed over.
      batch: those that both have.
      free: the others.
    """

    terms: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, eqn: Eqn) -> Dimensions:
        """Returns those of a `dot_general`."""
        terms, batch = eqn.params["dimension_numbers"]
        return cls.among(terms, batch, [aval_of(v).ndim for v in eqn.invars])

    @classmethod
    def among(
        cls,
        terms: Sequence[Sequence[int]],
        batch: Sequence[Sequence[int]],
        ranks: Sequence[int],
    ) -> Dimensions:
        lhs, rhs = (
            tuple(d for d in range(rank) if d not in (*terms[i], *batch[i]))
            for i, rank in enumerate(ranks)
        )
        return cls(_both(terms), _both(batch), (lhs, rhs))

    def transposes(self, of: Dimensions, i: int) -> bool:
        """Whether a product of a cotangent is that of `of.transposed(i)`."""
        product, _ = of.transposed(i)
        order = 1 - 2 * i
        return all(
            {*zip(*expected[::order], strict=True)} == {*zip(*found, strict=True)}
            for expected, found in (
                (product.terms, self.terms),
                (product.batch, self.batch),
            )
        )

    def transposed(self, i: int) -> tuple[Dimensions, tuple[int, ...]]:
        """Returns the product that makes the cotangent of operand `i`.

        Its operands are the cotangent of the result and the other operand, for the
        right operand in the opposite order. The permutation that follows it brings its
        dimensions into the order of the operand.
        """
        batch = tuple(range(len(self.batch[0])))
        begin = len(batch) + len(self.free[0])
        # Of the result, and so of its cotangent.
        lhs = tuple(range(len(batch), begin))
        rhs = tuple(range(begin, begin + len(self.free[1])))
        if i == 0:
            product = Dimensions(
                (rhs, self.free[1]), (batch, self.batch[1]), (lhs, self.terms[1])
            )
            order = (*self.batch[0], *self.free[0], *self.terms[0])
        else:
            product = Dimensions(
                (self.free[0], lhs), (self.batch[0], batch), (self.terms[0], rhs)
            )
            order = (*self.batch[1], *self.terms[1], *self.free[1])
        return product, tuple(map(int, np.argsort(order)))


def _both(
    pair: Sequence[Sequence[int]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lhs, rhs = pair
    return tuple(lhs), tuple(rhs)
