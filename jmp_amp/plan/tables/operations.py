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
      ranks: whether it compares elements to say where they are, or to move others.
      once: whether XLA computes it once for all kernels that read it, because it takes
        long: other operations on elements it makes again in each of them.
      rational: whether it is arithmetic, as in a numerical method, and no activation of
        a network; None takes what holds of its kind, see `RATIONAL`.
    """

    name: str
    cost: Cost
    saves: Saves
    limits: Limits = None
    role: Role | None = None
    ranks: bool = False
    rational: bool | None = None
    once: bool = False


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

    @property
    def is_cheap(self) -> bool:
        return self.row.cost is Cost.CHEAP


CHEAP, DEAR, BOUND = Cost.CHEAP, Cost.DEAR, Cost.BOUND
NOTHING, RESULT, OPERANDS = Saves.NOTHING, Saves.RESULT, Saves.OPERANDS
_FOLLOWS = Words("elementwise or structural")


def _named(
    cost: Cost, saves: Saves, names: str, rational: bool | None = None
) -> tuple[Row, ...]:
    """Returns a row for each name in a text."""
    return tuple(Row(name, cost, saves, rational=rational) for name in names.split())


GROUPS = (
    Group(
        OpClass.LOW,
        Kind.PRODUCT,
        Words("matrix units multiply half precision and accumulate in f32"),
        "[torch] lower_precision_fp; [paddle] white list; [apex] FP16_FUNCS",
        _named(DEAR, OPERANDS, "dot_general conv_general_dilated ragged_dot_general"),
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
            Row("exp", CHEAP, RESULT, np.exp, Role.CURVES),
            Row("exp2", CHEAP, RESULT, np.exp2, Role.CURVES),
            Row("expm1", CHEAP, RESULT, np.expm1),
            Row("pow", CHEAP, OPERANDS, np.power, rational=True, once=True),
            Row(
                "rsqrt",
                CHEAP,
                RESULT,
                lambda x: 1 / np.sqrt(x),
                Role.NORMALIZES,
                rational=True,
            ),
            Row("sinh", CHEAP, OPERANDS),
            Row("cosh", CHEAP, OPERANDS),
            Row("tan", CHEAP, RESULT, role=Role.CURVES, once=True),
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
            *_named(CHEAP, OPERANDS, "acos asin acosh atanh"),
            Row("erf_inv", CHEAP, RESULT),
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
            Row("reduce_sum", CHEAP, NOTHING, role=Role.SUMS),
            # A scan or a sort inside, which XLA does not fuse.
            Row("reduce_prod", DEAR, OPERANDS, role=Role.SUMS),
            Row("cumsum", DEAR, NOTHING, role=Role.SUMS),
            Row("cumprod", DEAR, OPERANDS, role=Role.SUMS),
            Row("cumlogsumexp", DEAR, OPERANDS, role=Role.SUMS, rational=False),
            *_named(DEAR, NOTHING, "reduce_window_sum scatter-add scatter-sub"),
            *_named(DEAR, OPERANDS, "scatter-mul select_and_scatter_add"),
            # They send data to other devices.
            *_named(BOUND, NOTHING, "psum reduce_scatter"),
        ),
    ),
    Group(
        OpClass.FULL,
        Kind.ALGEBRA,
        Words("linear algebra and FFT have no half-precision kernels"),
        "[xla] fp32: cholesky, qr, svd, triangular_solve, ...",
        _named(
            DEAR,
            OPERANDS,
            "cholesky cholesky_update eig eigh fft hessenberg householder_product lu "
            "lu_pivots_to_permutation qr schur svd symmetric_product triangular_solve "
            "tridiagonal tridiagonal_solve",
        ),
    ),
    Group(
        OpClass.FOLLOW,
        Kind.MOVE,
        _FOLLOWS,
        "[exact]",
        (
            *_named(CHEAP, NOTHING, "broadcast_in_dim broadcast_to reshape transpose"),
            *_named(CHEAP, NOTHING, "squeeze slice rev pad concatenate"),
            Row("dynamic_slice", CHEAP, NOTHING, role=Role.TAKES),
            *_named(CHEAP, NOTHING, "split stack unstack tile copy stop_gradient"),
            Row("gather", CHEAP, NOTHING, role=Role.LOOKS_UP),
            # They write a whole array for the part of it that changes.
            *_named(DEAR, NOTHING, "dynamic_update_slice scatter"),
            # The policy of a `jax.checkpoint` refers to it.
            Row("name", BOUND, NOTHING),
            # They place data, or send it to other devices.
            *_named(BOUND, NOTHING, "sharding_constraint layout_constraint reshard"),
            *_named(BOUND, NOTHING, "mesh_cast"),
            *_named(BOUND, NOTHING, "with_memory_space_constraint all_gather"),
            *_named(BOUND, NOTHING, "all_gather_invariant all_to_all ppermute"),
            Row("optimization_barrier", BOUND, NOTHING, role=Role.HANDS_ON),
            Row("device_put", BOUND, NOTHING, role=Role.HANDS_ON),
            Row("pvary", BOUND, NOTHING, role=Role.HANDS_ON),
            Row("pbroadcast", BOUND, NOTHING, role=Role.HANDS_ON),
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
            Row("neg", CHEAP, NOTHING, np.negative),
            Row("abs", CHEAP, NOTHING, np.abs, rational=False),
            *_named(CHEAP, NOTHING, "clamp", rational=False),
            *_named(CHEAP, OPERANDS, "reduce_max reduce_min"),
            # A scan or a sort inside, which XLA does not fuse.
            *_named(DEAR, NOTHING, "reduce_window_max reduce_window_min cummax cummin"),
            Row("top_k", DEAR, NOTHING, ranks=True),
            Row("approx_top_k", DEAR, NOTHING, ranks=True),
            *_named(DEAR, NOTHING, "select_and_gather_add"),
            *_named(DEAR, NOTHING, "scatter-max scatter-min"),
            Row("sort", DEAR, NOTHING, role=Role.HANDS_ON, ranks=True),
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
            Row("argmax", CHEAP, NOTHING, ranks=True),
            Row("argmin", CHEAP, NOTHING, ranks=True),
        ),
    ),
    Group(
        OpClass.FOLLOW,
        Kind.ARITHMETIC,
        _FOLLOWS,
        "[torch] in no list: promotes to the widest operand",
        (
            Row("add", CHEAP, NOTHING, np.add, Role.ADDS),
            Row("sub", CHEAP, NOTHING, np.subtract, Role.SUBTRACTS),
            Row("mul", CHEAP, OPERANDS, np.multiply, Role.MULTIPLIES),
            Row("div", CHEAP, OPERANDS, np.divide, Role.DIVIDES),
            *_named(CHEAP, OPERANDS, "integer_pow one_minus_square"),
            *_named(CHEAP, OPERANDS, "rem", rational=False),
            Row("square", CHEAP, OPERANDS, np.square),
            Row("sqrt", CHEAP, RESULT, np.sqrt),
            Row("cbrt", CHEAP, RESULT),
            Row("tanh", CHEAP, RESULT, (-1.0, 1.0), Role.CURVES, once=True),
            Row("logistic", CHEAP, RESULT, (-1.0, 1.0), Role.CURVES),
            Row("sin", CHEAP, OPERANDS, (-1.0, 1.0), Role.CURVES, once=True),
            Row("cos", CHEAP, OPERANDS, (-1.0, 1.0), Role.CURVES, once=True),
            Row("erf", CHEAP, OPERANDS, (-1.0, 1.0), Role.CURVES),
            Row("erfc", CHEAP, OPERANDS, role=Role.CURVES, once=True),
            Row("atan", CHEAP, OPERANDS, rational=False, once=True),
            Row("sign", CHEAP, NOTHING, (-1.0, 1.0), rational=False),
            Row("floor", CHEAP, NOTHING, role=Role.COUNTS),
            Row("ceil", CHEAP, NOTHING, role=Role.COUNTS),
            Row("round", CHEAP, NOTHING, role=Role.COUNTS),
            *_named(CHEAP, NOTHING, "add_any convert_element_type"),
            # It reads nothing: there is nothing to keep in its place.
            Row("iota", BOUND, NOTHING),
            # A size that `jax.export` is told when the program runs.
            Row("dim_as_value", CHEAP, NOTHING),
        ),
    ),
)

OPERATIONS = {row.name: Operation(row, group) for group in GROUPS for row in group.rows}
RANKS = frozenset(name for name, each in OPERATIONS.items() if each.row.ranks)
PRODUCTS = frozenset(n for n, op in OPERATIONS.items() if op.kind is Kind.PRODUCT)
# Elementwise arithmetic; a recipe that has only products in half keeps it in f32.
ARITHMETIC = frozenset(
    name for name, op in OPERATIONS.items() if op.kind is Kind.ARITHMETIC
)


# The kinds whose operations are arithmetic where their row does not say.
RATIONAL = (
    *(Kind.PRODUCT, Kind.ARITHMETIC, Kind.REDUCTION, Kind.ALGEBRA),
    *(Kind.MOVE, Kind.SELECTION),
)
# Not of a curve, nor of a place.
_CROSSES = (Role.CURVES, Role.COUNTS)


def _is_rational(operation: Operation) -> bool:
    row = operation.row
    if row.rational is not None:
        return row.rational
    return operation.kind in RATIONAL and row.role not in _CROSSES


# Asked several times for each equation.
_RATIONAL = frozenset(name for name, op in OPERATIONS.items() if _is_rational(op))
_KINDS = {name: each.kind for name, each in OPERATIONS.items()}
_ROLES = {name: each.row.role for name, each in OPERATIONS.items()}
_CHEAP = frozenset(name for name, each in OPERATIONS.items() if each.is_cheap)


def kind_of(name: str) -> Kind | None:
    """Returns the kind of a primitive, or None if it has no row."""
    return _KINDS.get(name)


def role_of(name: str) -> Role | None:
    """Returns the part that a primitive plays in a pattern, if any."""
    return _ROLES.get(name)


def is_rational(name: str) -> bool:
    """Whether a primitive is arithmetic: sums, products, quotients, roots, moves."""
    return name in _RATIONAL


def is_cheap(name: str) -> bool:
    """Whether a primitive is computed again in the backward pass, not saved."""
    return name in _CHEAP


# A lookup moves data, so it is not made again. An `iota` reads nothing: it is.
_MADE_AGAIN = (_CHEAP | {"iota"}) - {n for n, r in _ROLES.items() if r is Role.LOOKS_UP}


def is_made_again(name: str) -> bool:
    """Whether the backward pass may make the result of a primitive again."""
    return name in _MADE_AGAIN


_ONCE = frozenset(name for name, each in OPERATIONS.items() if each.row.once)


def is_computed_once(name: str) -> bool:
    """Whether XLA computes a primitive once for all that reads it."""
    return name in _ONCE
