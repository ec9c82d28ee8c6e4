"""Which operations run in half precision and which in float32: the table.

Four classes, as data. A class is looked up for one equation at a time; what a
*follow* equation does is decided by the plan, from where its values come from and
where they go.

Sources. [torch] the CUDA lists of `torch.amp` (aten/src/ATen/autocast_mode.h, torch
2.13); [paddle] python/paddle/amp/amp_lists.py; [mindspore] mindspore/train/amp.py;
[apex] apex/amp/lists; [xla] torch_xla/csrc/autocast_mode.cpp.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from jmp_amp.plan import jaxprs
from jmp_amp.policies.policy import Policy


class OpClass(enum.Enum):
    """What decides the dtype of an operation."""

    LOW = "low"  # the policy's compute dtype
    FULL = "full"  # float32
    FOLLOW = "follow"  # the plan: from its operands and its consumers
    KEEP = "keep"  # as traced


@dataclasses.dataclass(frozen=True)
class Rule:
    """The class of an operation and why; `decided_by` is the name that matched."""

    op_class: OpClass
    reason: str
    decided_by: str
    from_user: bool = False


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations that share a class for one reason."""

    op_class: OpClass
    reason: str
    names: tuple[str, ...]


PRIMITIVES = (
    Group(
        OpClass.LOW,
        "matrix units multiply half precision and accumulate in f32",
        # [torch] lower_precision_fp; [paddle] white list; [apex] FP16_FUNCS
        ("dot_general", "conv_general_dilated", "ragged_dot_general"),
    ),
    Group(
        OpClass.FULL,
        "grows or shrinks faster than its argument: f16 has no range for it",
        # [torch] fp32: exp, expm1, pow, reciprocal, sinh, cosh, tan; [apex] FP32_FUNCS
        ("exp", "exp2", "expm1", "pow", "rsqrt", "sinh", "cosh", "tan"),
    ),
    Group(
        OpClass.FULL,
        "ill-conditioned near the ends of its domain: half has no digits for it",
        # [torch] fp32: log*, acos, asin, erfinv; [paddle] black list: atanh
        ("log", "log2", "log1p", "acos", "asin", "acosh", "atanh", "erf_inv"),
    ),
    Group(
        OpClass.FULL,
        "its derivative squares its argument: above 255.9 the square overflows f16",
        ("asinh", "atan2"),
    ),
    Group(
        OpClass.FULL,
        "a special function, evaluated in f32 on every backend",
        (
            *("lgamma", "digamma", "polygamma", "zeta", "igamma", "igammac"),
            *("igamma_grad_a", "regularized_incomplete_beta"),
            *("bessel_i0e", "bessel_i1e"),
        ),
    ),
    Group(
        OpClass.FULL,
        "a sum or product of many terms loses digits, and overflows above 65504 in f16",
        # [torch] fp32_set_opt_dtype: sum, prod, cumsum, cumprod, norm
        (
            *("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp"),
            *("reduce_window_sum", "scatter-add", "scatter-sub", "scatter-mul"),
            *("select_and_scatter_add", "psum", "reduce_scatter"),
        ),
    ),
    Group(
        OpClass.FULL,
        "linear algebra and FFT have no half-precision kernels",
        # [xla] fp32: cholesky, qr, svd, triangular_solve, ...
        (
            *("cholesky", "cholesky_update", "eig", "eigh", "fft", "hessenberg"),
            *("householder_product", "lu", "lu_pivots_to_permutation", "qr", "schur"),
            *("svd", "symmetric_product", "triangular_solve", "tridiagonal"),
            *("tridiagonal_solve",),
        ),
    ),
)

# Exact in every dtype: they move values and never round, so a value may be cast before
# them as well as after.
STRUCTURAL = frozenset(
    (
        *("broadcast_in_dim", "broadcast_to", "reshape", "transpose", "squeeze"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter"),
        *("rev", "pad", "concatenate", "split", "stack", "unstack", "tile", "copy"),
        *("name", "stop_gradient", "optimization_barrier", "device_put"),
        *("sharding_constraint", "layout_constraint", "with_memory_space_constraint"),
        *("all_gather", "all_gather_invariant", "all_to_all", "ppermute"),
        *("pvary", "pbroadcast", "reshard"),
    )
)
# Exact as well, though not mere moves: their result is one of their operands, or its
# negative.
SELECTIONS = frozenset(
    (
        *("select_n", "max", "min", "clamp", "neg", "abs", "reduce_max", "reduce_min"),
        *("reduce_window_max", "reduce_window_min", "cummax", "cummin", "sort"),
        *("top_k", "approx_top_k", "select_and_gather_add", "pmax", "pmin"),
    )
)
# Each result is one of the operands, unchanged or in another order: nothing joins their
# dtypes.
PASSED_ON = frozenset(
    ("optimization_barrier", "device_put", "pvary", "pbroadcast", "sort")
)
# They read floats and decide: no result of theirs is rounded.
COMPARISONS = frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "is_finite"),
        *("argmax", "argmin"),
    )
)
ARITHMETIC = frozenset(
    (
        *("add", "add_any", "sub", "mul", "div", "rem", "sign", "square"),
        *("integer_pow", "sqrt", "cbrt", "tanh", "logistic", "sin", "cos", "atan"),
        *("erf", "erfc", "floor", "ceil", "round"),
        *("one_minus_square", "convert_element_type", "iota"),
    )
)
FOLLOW = STRUCTURAL | SELECTIONS | COMPARISONS | ARITHMETIC

FUNCTIONS = (
    Group(
        OpClass.FULL,
        "a softmax sums exponentials: f32 until after the division",
        # [torch] fp32_set_opt_dtype: softmax, log_softmax; fp32: logsumexp, softplus
        (
            *("softmax", "log_softmax", "logsumexp", "logmeanexp", "logaddexp"),
            *("logaddexp2", "softplus"),
        ),
    ),
    Group(
        OpClass.FULL,
        "squares and sums: above 255.9 the square overflows f16",
        # [torch] fp32: norm, layer_norm, ...; jnp.linalg.norm squares in its argument's
        # dtype.
        ("norm", "var", "std", "standardize", "global_norm", "vector_norm"),
    ),
    Group(
        OpClass.FULL,
        "a loss is where f16 gradients begin: in f32 it cannot overflow",
        # [torch] fp32: *_loss, kl_div, cosine_similarity; the names are optax's
        (
            *("l2_loss", "squared_error", "huber_loss", "log_cosh", "hinge_loss"),
            *("cosine_similarity", "cosine_distance", "sigmoid_binary_cross_entropy"),
            *("softmax_cross_entropy", "safe_softmax_cross_entropy"),
            *("softmax_cross_entropy_with_integer_labels", "poly_loss_cross_entropy"),
            *("ctc_loss", "ctc_loss_with_forward_probs", "kl_divergence"),
            *("kl_divergence_with_log_targets", "convex_kl_divergence"),
            *("generalized_kl_divergence", "sigmoid_focal_loss", "ntxent"),
            *("triplet_margin_loss", "ranking_softmax_loss", "perceptron_loss"),
            *("sparsemax_loss", "multiclass_hinge_loss", "multiclass_perceptron_loss"),
            *("multiclass_sparsemax_loss", "dice_loss", "binary_dice_loss"),
            *("multiclass_generalized_dice_loss",),
        ),
    ),
)


# Cheap enough to be computed again in the backward pass, instead of saving f32 values:
# `islands.py`.
RECOMPUTED = frozenset(
    (
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "rev", "pad"),
        *("concatenate", "split", "tile", "copy", "stop_gradient", "gather"),
        *("select_n", "max", "min", "clamp", "neg", "abs", "reduce_max", "reduce_min"),
        *("exp", "exp2", "expm1", "pow", "rsqrt", "sinh", "cosh", "tan", "log"),
        *("log1p", "reduce_sum"),
    )
) | (ARITHMETIC - {"iota"})
# What differentiation saves of them: their results or their operands.
SAVES_RESULT = frozenset(
    ("exp", "exp2", "expm1", "rsqrt", "sqrt", "tanh", "logistic", "tan", "cbrt")
)
SAVES_OPERANDS = frozenset(
    (
        *("mul", "div", "pow", "log", "log1p", "square", "integer_pow", "sin", "cos"),
        *("atan", "erf", "erfc", "sinh", "cosh", "one_minus_square", "rem"),
    )
)


def _by_name(groups: Iterable[Group]) -> Mapping[str, Rule]:
    return {
        name: Rule(group.op_class, group.reason, name)
        for group in groups
        for name in group.names
    }


_PRIMITIVE_RULES = {
    **{
        name: Rule(OpClass.FOLLOW, "elementwise or structural", name) for name in FOLLOW
    },
    **_by_name(PRIMITIVES),
}
_FUNCTION_RULES = _by_name(FUNCTIONS)


def rule_for(eqn: Any, policy: Policy, inherited: Rule | None) -> Rule | None:
    """Returns the rule of `eqn`, or None if it calls a body that decides for itself.

    The most specific name wins: the user's names before the built-in ones, and among
    each the primitive before the function, the inner function before the outer.

    Args:
      eqn: the equation.
      policy: the policy in force; its `low`, `full` and `follow` names are the user's.
      inherited: the rule that a function name gave to the call that `eqn` is inside of.
    """
    name = eqn.primitive.name
    user = {
        name: Rule(op_class, f"the policy says {op_class.value}", name, from_user=True)
        for op_class, names in (
            (OpClass.LOW, policy.low),
            (OpClass.FULL, policy.full),
            (OpClass.FOLLOW, policy.follow),
        )
        for name in names
    }
    called = jaxprs.function_name(eqn)
    code = jaxprs.calling_code(eqn)
    if user:
        for candidate in (name, _spelled(name), called):
            if candidate in user:
                return user[candidate]
        for frame in code:
            if frame.co_name in user:
                return user[frame.co_name]
        if inherited is not None and inherited.from_user:
            return inherited
    for frame in code:
        if frame.co_name in _FUNCTION_RULES and jaxprs.in_library(frame.co_filename):
            return _FUNCTION_RULES[frame.co_name]
    if inherited is not None:
        return inherited
    if jaxprs.inner_bodies(eqn):
        return None
    if name == "integer_pow" and eqn.params["y"] < 0:
        # [torch] fp32: reciprocal
        return dataclasses.replace(_PRIMITIVE_RULES["pow"], decided_by="reciprocal")
    return _PRIMITIVE_RULES.get(
        name, Rule(OpClass.KEEP, "not known to the table: as traced", name)
    )


def _spelled(name: str) -> str:
    # `scatter-add` is no identifier, so a policy spells it `scatter_add`.
    return name.replace("-", "_")
