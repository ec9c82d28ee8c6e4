"""The table of operations: one row for each primitive of JAX.

A row says everything that the plan knows of a primitive. A primitive without a row runs
as it was traced. To add a primitive, add a row.

Sources. [torch] the CUDA lists of `torch.amp` (aten/src/ATen/autocast_mode.h, torch
2.13); [paddle] python/paddle/amp/amp_lists.py; [apex] apex/amp/lists; [xla]
torch_xla/csrc/autocast_mode.cpp; [jax] the derivative rules of `jax.lax`, which the
tests differentiate; [exact] IEEE 754: the result has the bits of an operand.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class OpClass(enum.Enum):
    """What decides the dtype of an operation."""

    LOW = "low"  # the policy's compute dtype
    FULL = "full"  # float32
    FOLLOW = "follow"  # the plan: from its operands and its consumers
    KEEP = "keep"  # as traced


class Kind(enum.Enum):
    """What an operation does to its operands."""

    PRODUCT = "a product: sums products of elements"
    FUNCTION = "a function of each element"
    ARITHMETIC = "arithmetic on each element, which rounds"
    REDUCTION = "a sum or a product of many elements"
    ALGEBRA = "linear algebra, or a Fourier transform"
    MOVE = "a move: elements change their places, not their bits"
    SELECTION = "a selection: each result is an operand or its negative"
    COMPARISON = "a comparison: reads floats and decides"


class Cost(enum.Enum):
    """What it costs to compute an operation again in the backward pass."""

    CHEAP = "computed again: it costs less than to save an f32 result"
    DEAR = "saved: it takes long to compute"
    BOUND = "saved: computed again, it would move data, or a user refers to it"


class Saves(enum.Enum):
    """The float values that the derivative of an operation saves."""

    NOTHING = "nothing"
    RESULT = "its result"
    OPERANDS = "its operands, or a function of them"


class Role(enum.Enum):
    """A part that an operation plays in patterns that the plan looks for."""

    ADDS = "adds two terms"
    SUBTRACTS = "subtracts one term from another"
    NEGATES = "takes the negative"
    MULTIPLIES = "multiplies two factors"
    DIVIDES = "divides by a factor"
    NORMALIZES = "makes the factor of a norm"
    SUMS = "makes one number of many, which may overflow"
    LIMITS = "the larger, or the smaller, of two values"
    CHOOSES = "chooses between values, such as a mask's"
    LOOKS_UP = "writes what it looks up to memory"
    TAKES = "takes the part of an array that begins at a number"
    COUNTS = "makes a whole number, such as an index"
    CURVES = "a dear function of each element: XLA computes it once for all readers"
    HANDS_ON = "each result is one operand: nothing joins their dtypes"


class Also(enum.Flag):
    """What else holds of an operation."""

    NOTHING = 0
    # It compares elements to say where they are, or to move others.
    RANKS = enum.auto()
    # XLA computes it once for all kernels that read it, because it takes long: other
    # operations on elements it makes again in each of them.
    ONCE = enum.auto()
    # It decomposes a matrix: it divides by numbers that may be small.
    SOLVES = enum.auto()
    # It solves a linear system: the result is a solution.
    SOLUTION = enum.auto()
    # Its vectors are as right with the other sign, or in another basis.
    ANY_BASIS = enum.auto()
    # Each result is one element of its operand, or its negative; none is left out.
    ONE_EACH = enum.auto()
    # It reads an element many times, or on many devices: its gradient is a sum.
    REPEATS = enum.auto()
    # Its derivative ends where its operand is large: to round that moves no result far.
    SATURATES = enum.auto()
    # Defined everywhere: a result is infinite because it is too large.
    GROWS = enum.auto()
    # A result is infinite because it is too large, or because it is not defined.
    MAY_GROW = enum.auto()
    # Defined within bounds: an epsilon does not keep the operand there.
    BOUNDED = enum.auto()


# The result of a function whose operands are the corners of their ranges.
Fold = Callable[..., object]
Limits = Fold | tuple[float, float] | None


class Row(NamedTuple):
    """The row of one primitive, in a group that shares class, kind and reason.

    Attributes:
      name: the name of the primitive.
      cost: what it costs to compute it again.
      saves: the values that its derivative saves; nobody asks unless it is `CHEAP`.
      limits: the range of its results: fixed, or a function that is monotone in each
        operand; None takes the range of all operands, a guess for a sum or a product.
      role: the part that it plays in a pattern, if any.
      also: what else holds of it.
      rational: whether it is arithmetic, as in a numerical method, and no activation of
        a network; None takes what holds of its kind.
    """

    name: str
    cost: Cost
    saves: Saves
    limits: Limits = None
    role: Role | None = None
    also: Also = Also.NOTHING
    rational: bool | None = None


class Words(NamedTuple):
    """A reason in the words of each half format.

    Where f16 has no range, bf16 has no digits.

    Attributes:
      reason: the words; for f16, if those for bf16 are others.
      in_bf16: the words for bf16, if they are others.
    """

    reason: str
    in_bf16: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Operations that share a class for one reason."""

    op_class: OpClass
    kind: Kind
    words: Words
    source: str
    rows: tuple[Row, ...]


class Operation(NamedTuple):
    """All that the table says of one primitive."""

    row: Row
    group: Group

    @property
    def kind(self) -> Kind:
        return self.group.kind


CHEAP, DEAR, BOUND = Cost.CHEAP, Cost.DEAR, Cost.BOUND
NOTHING, RESULT, OPERANDS = Saves.NOTHING, Saves.RESULT, Saves.OPERANDS
SOLVES, SOLUTION, GROWS = Also.SOLVES, Also.SOLVES | Also.SOLUTION, Also.GROWS
ONE_EACH, REPEATS, ONCE = Also.ONE_EACH, Also.REPEATS, Also.ONCE
SATURATES = Also.SATURATES
_FOLLOWS = Words("elementwise or structural")


def _named(
    cost: Cost,
    saves: Saves,
    names: str,
    also: Also = Also.NOTHING,
    rational: bool | None = None,
) -> tuple[Row, ...]:
    """Returns a row for each name in a text."""
    rest = None, None, also, rational
    return tuple(Row(name, cost, saves, *rest) for name in names.split())


def _rsqrt(x: float) -> float:
    return 1 / np.sqrt(x)


GROUPS = (
    Group(
        OpClass.LOW,
        Kind.PRODUCT,
        Words("matrix units multiply half precision and accumulate in f32"),
        "[torch] lower_precision_fp; [paddle] white list; [apex] FP16_FUNCS",
        (
            *_named(DEAR, OPERANDS, "dot_general conv_general_dilated", GROWS),
            *_named(DEAR, OPERANDS, "ragged_dot_general", GROWS),
        ),
    ),
    Group(
        OpClass.FULL,
        Kind.FUNCTION,
        Words(
            "grows or shrinks faster than its argument: f16 has no range for it",
            "grows or shrinks faster than its argument: bf16 has no digits for it",
        ),
        "[torch] fp32: exp, expm1, pow, reciprocal, sinh, cosh, tan; [apex] FP32_FUNCS",
        (
            Row("exp", CHEAP, RESULT, np.exp, Role.CURVES, GROWS),
            Row("exp2", CHEAP, RESULT, np.exp2, Role.CURVES, GROWS),
            Row("expm1", CHEAP, RESULT, np.expm1, also=GROWS),
            Row("pow", CHEAP, OPERANDS, np.power, None, ONCE | Also.MAY_GROW, True),
            Row("rsqrt", CHEAP, RESULT, _rsqrt, Role.NORMALIZES, rational=True),
            *_named(CHEAP, OPERANDS, "sinh cosh", GROWS),
            Row("tan", CHEAP, RESULT, None, Role.CURVES, ONCE),
        ),
    ),
    Group(
        OpClass.FULL,
        Kind.FUNCTION,
        Words("ill-conditioned near the ends of its domain: half has no digits for it"),
        "[torch] fp32: log*, acos, asin, erfinv; [paddle] black list: atanh",
        (
            Row("log", CHEAP, OPERANDS, np.log, Role.CURVES),
            Row("log2", CHEAP, OPERANDS),
            Row("log1p", CHEAP, OPERANDS, np.log1p, Role.CURVES),
            *_named(CHEAP, OPERANDS, "acos asin acosh atanh", Also.BOUNDED),
            *_named(CHEAP, RESULT, "erf_inv", Also.BOUNDED),
        ),
    ),
    Group(
        OpClass.FULL,
        Kind.FUNCTION,
        Words(
            "its derivative squares its argument: above 255.9 the square overflows f16",
            "its derivative squares its argument and divides: bf16 has no digits for "
            "it",
        ),
        "[jax] ad.defjvp of asinh_p and atan2_p",
        _named(CHEAP, OPERANDS, "asinh atan2"),
    ),
    Group(
        OpClass.FULL,
        Kind.FUNCTION,
        Words("a special function, evaluated in f32 on every backend"),
        "[xla] fp32; XLA expands them to hundreds of f32 operations",
        _named(
            DEAR,
            OPERANDS,
            "lgamma digamma polygamma zeta igamma igammac igamma_grad_a "
            "regularized_incomplete_beta bessel_i0e bessel_i1e",
        ),
    ),
    Group(
        OpClass.FULL,
        Kind.REDUCTION,
        Words(
            "a sum or product of many terms loses digits, and overflows above 65504 in "
            "f16",
            "a sum or product of many terms loses digits, and bf16 has three",
        ),
        "[torch] fp32_set_opt_dtype: sum, prod, cumsum, cumprod, norm",
        (
            Row("reduce_sum", CHEAP, NOTHING, None, Role.SUMS, GROWS),
            # A scan or a sort inside, which XLA does not fuse.
            Row("reduce_prod", DEAR, OPERANDS, None, Role.SUMS, GROWS),
            Row("cumsum", DEAR, NOTHING, None, Role.SUMS, GROWS),
            Row("cumprod", DEAR, OPERANDS, None, Role.SUMS, GROWS),
            Row("cumlogsumexp", DEAR, OPERANDS, role=Role.SUMS, rational=False),
            *_named(DEAR, NOTHING, "reduce_window_sum scatter-add scatter-sub", GROWS),
            *_named(DEAR, OPERANDS, "scatter-mul select_and_scatter_add", GROWS),
            # They send data to other devices.
            *_named(BOUND, NOTHING, "psum reduce_scatter", GROWS),
        ),
    ),
    Group(
        OpClass.FULL,
        Kind.ALGEBRA,
        Words("linear algebra and FFT have no half-precision kernels"),
        "[xla] fp32: cholesky, qr, svd, triangular_solve, ...",
        (
            *_named(DEAR, OPERANDS, "cholesky cholesky_update hessenberg lu", SOLVES),
            *_named(DEAR, OPERANDS, "qr tridiagonal", SOLVES),
            *_named(DEAR, OPERANDS, "eig eigh schur svd", SOLVES | Also.ANY_BASIS),
            *_named(DEAR, OPERANDS, "triangular_solve tridiagonal_solve", SOLUTION),
            *_named(
                DEAR,
                OPERANDS,
                "fft householder_product lu_pivots_to_permutation symmetric_product",
            ),
        ),
    ),
    Group(
        OpClass.FOLLOW,
        Kind.MOVE,
        _FOLLOWS,
        "[exact]",
        (
            *_named(CHEAP, NOTHING, "reshape squeeze transpose rev copy", ONE_EACH),
            *_named(CHEAP, NOTHING, "stop_gradient", ONE_EACH),
            *_named(CHEAP, NOTHING, "broadcast_in_dim broadcast_to tile", REPEATS),
            *_named(CHEAP, NOTHING, "slice pad concatenate split stack unstack"),
            Row("dynamic_slice", CHEAP, NOTHING, role=Role.TAKES),
            Row("gather", CHEAP, NOTHING, None, Role.LOOKS_UP, REPEATS),
            # They write a whole array for the part of it that changes.
            *_named(DEAR, NOTHING, "dynamic_update_slice scatter"),
            # The policy of a `jax.checkpoint` refers to it.
            Row("name", BOUND, NOTHING),
            # They place data, or send it to other devices.
            *_named(BOUND, NOTHING, "sharding_constraint layout_constraint reshard"),
            *_named(BOUND, NOTHING, "with_memory_space_constraint mesh_cast ppermute"),
            *_named(BOUND, NOTHING, "all_gather_invariant all_gather all_to_all"),
            Row("optimization_barrier", BOUND, NOTHING, None, Role.HANDS_ON, ONE_EACH),
            Row("device_put", BOUND, NOTHING, role=Role.HANDS_ON),
            Row("pvary", BOUND, NOTHING, None, Role.HANDS_ON, REPEATS),
            Row("pbroadcast", BOUND, NOTHING, None, Role.HANDS_ON, REPEATS),
        ),
    ),
    Group(
        OpClass.FOLLOW,
        Kind.SELECTION,
        _FOLLOWS,
        "[exact]",
        (
            Row("select_n", CHEAP, NOTHING, role=Role.CHOOSES),
            Row("max", CHEAP, OPERANDS, np.maximum, Role.LIMITS),
            Row("min", CHEAP, OPERANDS, np.minimum, Role.LIMITS),
            Row("neg", CHEAP, NOTHING, np.negative, Role.NEGATES, ONE_EACH),
            Row("abs", CHEAP, NOTHING, np.abs, also=ONE_EACH, rational=False),
            *_named(CHEAP, NOTHING, "clamp", rational=False),
            *_named(CHEAP, OPERANDS, "reduce_max reduce_min"),
            # A scan or a sort inside, which XLA does not fuse.
            *_named(DEAR, NOTHING, "reduce_window_max reduce_window_min cummax cummin"),
            *_named(DEAR, NOTHING, "top_k approx_top_k", Also.RANKS),
            *_named(DEAR, NOTHING, "select_and_gather_add"),
            *_named(DEAR, NOTHING, "scatter-max scatter-min"),
            Row("sort", DEAR, NOTHING, None, Role.HANDS_ON, Also.RANKS),
            # They send data to other devices.
            *_named(BOUND, NOTHING, "pmax pmin"),
        ),
    ),
    Group(
        OpClass.FOLLOW,
        Kind.COMPARISON,
        _FOLLOWS,
        "[exact]",
        (
            *_named(CHEAP, NOTHING, "eq ne lt le gt ge eq_to lt_to le_to is_finite"),
            *_named(CHEAP, NOTHING, "argmax argmin", Also.RANKS),
        ),
    ),
    Group(
        OpClass.FOLLOW,
        Kind.ARITHMETIC,
        _FOLLOWS,
        "[torch] in no list: promotes to the widest operand",
        (
            Row("add", CHEAP, NOTHING, np.add, Role.ADDS, GROWS),
            Row("sub", CHEAP, NOTHING, np.subtract, Role.SUBTRACTS, GROWS),
            Row("mul", CHEAP, OPERANDS, np.multiply, Role.MULTIPLIES, GROWS),
            Row("div", CHEAP, OPERANDS, np.divide, Role.DIVIDES),
            *_named(CHEAP, OPERANDS, "integer_pow", Also.MAY_GROW),
            *_named(CHEAP, OPERANDS, "one_minus_square"),
            *_named(CHEAP, OPERANDS, "rem", rational=False),
            Row("square", CHEAP, OPERANDS, np.square, also=GROWS),
            Row("sqrt", CHEAP, RESULT, np.sqrt),
            Row("cbrt", CHEAP, RESULT),
            Row("tanh", CHEAP, RESULT, (-1.0, 1.0), Role.CURVES, ONCE | SATURATES),
            Row("logistic", CHEAP, RESULT, (0.0, 1.0), Role.CURVES, SATURATES),
            Row("sin", CHEAP, OPERANDS, (-1.0, 1.0), Role.CURVES, ONCE),
            Row("cos", CHEAP, OPERANDS, (-1.0, 1.0), Role.CURVES, ONCE),
            Row("erf", CHEAP, OPERANDS, (-1.0, 1.0), Role.CURVES, SATURATES),
            Row("erfc", CHEAP, OPERANDS, None, Role.CURVES, ONCE),
            *_named(CHEAP, OPERANDS, "atan", ONCE, rational=False),
            Row("sign", CHEAP, NOTHING, (-1.0, 1.0), rational=False),
            Row("floor", CHEAP, NOTHING, role=Role.COUNTS),
            Row("ceil", CHEAP, NOTHING, role=Role.COUNTS),
            Row("round", CHEAP, NOTHING, role=Role.COUNTS),
            # What autodiff adds: two terms of a gradient.
            Row("add_any", CHEAP, NOTHING, np.add, Role.ADDS, GROWS),
            *_named(CHEAP, NOTHING, "convert_element_type", GROWS),
            # It reads nothing: there is nothing to keep in its place.
            Row("iota", BOUND, NOTHING),
            # A size that `jax.export` is told when the program runs.
            Row("dim_as_value", CHEAP, NOTHING),
        ),
    ),
)

OPERATIONS = {row.name: Operation(row, group) for group in GROUPS for row in group.rows}


def named(also: Also) -> frozenset[str]:
    """Returns the names of the primitives of which something else holds."""
    return frozenset(n for n, each in OPERATIONS.items() if each.row.also & also)


RANKS = named(Also.RANKS)
PRODUCTS = frozenset(n for n, op in OPERATIONS.items() if op.kind is Kind.PRODUCT)
# Elementwise arithmetic; a recipe that has only products in half keeps it in f32.
ARITHMETIC = frozenset(
    name for name, op in OPERATIONS.items() if op.kind is Kind.ARITHMETIC
)
# Asked several times for each equation.
_KINDS = {name: each.kind for name, each in OPERATIONS.items()}
_ROLES = {name: each.row.role for name, each in OPERATIONS.items()}
_CHEAP = frozenset(name for name, op in OPERATIONS.items() if op.row.cost is CHEAP)


def kind_of(name: str) -> Kind | None:
    """Returns the kind of a primitive, or None if it has no row."""
    return _KINDS.get(name)


def role_of(name: str) -> Role | None:
    """Returns the part that a primitive plays in a pattern, if any."""
    return _ROLES.get(name)


def is_cheap(name: str) -> bool:
    """Whether a primitive is computed again in the backward pass, not saved."""
    return name in _CHEAP


# A lookup moves data, so it is not made again. An `iota` reads nothing: it is.
_MADE_AGAIN = (_CHEAP | {"iota"}) - {n for n, r in _ROLES.items() if r is Role.LOOKS_UP}


def is_made_again(name: str) -> bool:
    """Whether the backward pass may make the result of a primitive again."""
    return name in _MADE_AGAIN
