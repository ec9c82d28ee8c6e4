"""Which rule decides an equation: the table's, that of a function name, or the user's.

`operations.py` has the row of every primitive. Here are the functions of JAX, Flax and
Optax whose name says more than their primitives do, and the order in which names win.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.dimensions import is_sum_of_products
from jmp_amp.plan.program.jaxprs import Eqn, Traceback
from jmp_amp.plan.program.regions import Region
from jmp_amp.plan.tables.operations import (
    OPERATIONS,
    PRODUCTS,
    Group,
    OpClass,
    Words,
)
from jmp_amp.policies.policy import Policy


@dataclasses.dataclass(frozen=True)
class Rule:
    """The class of an operation and why.

    Attributes:
      op_class: the class.
      reason: why, in words.
      decided_by: the name that matched.
      from_user: whether the policy has the name.
      group: the group of the table that the rule is from, if it is from there.
      in_bf16: why, where bf16 is asked for, if the words are others there.
    """

    op_class: OpClass
    reason: str
    decided_by: str
    from_user: bool = False
    group: Group | None = dataclasses.field(default=None, compare=False)
    in_bf16: str | None = dataclasses.field(default=None, compare=False)

    @functools.cached_property
    def for_bf16(self) -> Rule:
        """The same rule in words for bf16."""
        reason = self.in_bf16 or self.reason
        return dataclasses.replace(self, reason=reason, in_bf16=None)


# Functions that run in f32: the reason, and their names.
FULL_FUNCTIONS = (
    # [torch] fp32_set_opt_dtype: softmax, log_softmax; fp32: logsumexp, softplus
    (
        Words("a softmax sums exponentials: f32 until after the division"),
        "softmax log_softmax logsumexp logmeanexp logaddexp logaddexp2 softplus",
    ),
    # [torch] fp32: norm, layer_norm, ...; `jnp.linalg.norm` squares in half.
    (
        Words(
            "squares and sums: above 255.9 the square overflows f16",
            "squares and sums lose digits, and bf16 has three",
        ),
        "norm var std standardize global_norm vector_norm",
    ),
    (Words("a least-squares fit: half has no digits for it"), "polyfit"),
    # Their derivatives are products of elements.
    (OPERATIONS["cumprod"].group.words, "prod cumprod cumulative_prod reduce_prod"),
    (
        Words("a special function is a series whose terms cancel"),
        "betaln beta poch zeta polygamma multigammaln factorial spence expn expi exp1 "
        "hyp1f1 hyp2f1 bessel_jn",
    ),
    (
        Words("a histogram counts what lies between its edges, both ends too"),
        "histogram histogram_bin_edges histogram2d histogramdd",
    ),
    # [torch] fp32: *_loss, kl_div, cosine_similarity; the names are optax's
    (
        Words(
            "a loss is where f16 gradients begin: in f32 it cannot overflow",
            "a loss is a sum of small differences: bf16 has three digits for it",
        ),
        "l2_loss squared_error huber_loss log_cosh hinge_loss cosine_similarity "
        "cosine_distance sigmoid_binary_cross_entropy softmax_cross_entropy "
        "safe_softmax_cross_entropy softmax_cross_entropy_with_integer_labels "
        "poly_loss_cross_entropy ctc_loss ctc_loss_with_forward_probs kl_divergence "
        "kl_divergence_with_log_targets convex_kl_divergence "
        "generalized_kl_divergence sigmoid_focal_loss ntxent triplet_margin_loss "
        "ranking_softmax_loss perceptron_loss sparsemax_loss multiclass_hinge_loss "
        "multiclass_perceptron_loss multiclass_sparsemax_loss dice_loss "
        "binary_dice_loss multiclass_generalized_dice_loss",
    ),
)
FUNCTION_RULES = {
    name: Rule(OpClass.FULL, words.reason, name, in_bf16=words.in_bf16)
    for words, names in FULL_FUNCTIONS
    for name in names.split()
}
# XLA computes it where it makes a product, if both have one dtype.
EPILOGUE = Rule(OpClass.FOLLOW, "a gelu, the epilogue of a product", "gelu")
ONE_OPERATION = Rule(OpClass.FOLLOW, "part of one operation", "custom_jvp_call")
# What they name is half between half operands. What the table says is f32 stays f32.
ONE_DTYPE = (EPILOGUE, ONE_OPERATION)
FUNCTION_RULES |= dict.fromkeys(("gelu", "silu"), EPILOGUE)
# As `cumsum` and `cumprod` in the table. Matrix products inside stay products.
_SCAN = Rule(
    OpClass.FULL,
    "a sum or product over all earlier elements loses digits",
    "associative_scan",
)
_ALGEBRA = "linear algebra: an error grows by the condition number"
_RANDOM = "random numbers: half has no digits for the ends of a distribution"
# A public function of each module that runs in f32 whole, whatever it is made of; the
# reason; and the functions of the module that are products or moves.
_FULL_MODULES = (
    (
        jnp.linalg.pinv,
        _ALGEBRA,
        "matmul multi_dot _multi_dot tensordot vecdot outer diagonal matrix_transpose",
    ),
    (jax.scipy.linalg.expm, _ALGEBRA, ""),
    (jax.random.normal, _RANDOM, ""),
)
# Its products have HIGHEST precision unless the user says otherwise: nobody's wish.
_RESIZES = inspect.unwrap(jax.image.resize).__code__.co_filename
_RULE_OF_FILE = {
    inspect.unwrap(function).__code__.co_filename: (reason, frozenset(names.split()))
    for function, reason, names in _FULL_MODULES
}
PRIMITIVE_RULES = {
    name: Rule(
        group.op_class,
        group.words.reason,
        name,
        group=group,
        in_bf16=group.words.in_bf16,
    )
    for name, (_, group) in OPERATIONS.items()
}

# `einsum("i,j->ij")` multiplies as `*` does.
ELEMENTWISE_PRODUCT = dataclasses.replace(
    PRIMITIVE_RULES["mul"], decided_by="dot_general", group=None
)


def rule_for(eqn: Eqn, region: Region, inherited: Rule | None) -> Rule | None:
    """Returns the rule of `eqn`, or None if it calls a body that decides for itself.

    The most specific name wins: the user's names before the built-in ones, and among
    each the primitive before the function, the inner function before the outer.

    Args:
      eqn: the equation.
      region: where it is. The `low`, `full` and `follow` names of its policy are the
        user's, and the reason is in the words of the half format that it asks for.
      inherited: the rule that a function name gave to the call that `eqn` is inside of.
    """
    found = _rule_for(eqn, region.policy, inherited)
    if found is None or found.in_bf16 is None or not region.speaks_of_bf16:
        return found
    return found.for_bf16


def _rule_for(eqn: Eqn, policy: Policy, inherited: Rule | None) -> Rule | None:
    name = eqn.primitive.name
    user = _rules_of(policy)
    if user:
        # `scatter-add` is no identifier: a policy spells it `scatter_add`.
        spelled = name.replace("-", "_")
        if name in user or spelled in user:
            return user[name if name in user else spelled]
        code = _calls(eqn.source_info.traceback)
        functions = (source_code.function_name(eqn), *(frame.co_name for frame in code))
        for candidate in functions:
            # The name of a primitive is that of no function.
            if candidate in user and candidate not in OPERATIONS:
                return user[candidate]
        if inherited is not None and inherited.from_user:
            return inherited
    is_product = name in PRODUCTS
    found = _rule_of_calls(eqn.source_info.traceback, is_product)
    for each in (found, inherited):
        if each is not None and (each not in ONE_DTYPE or _may_follow(name)):
            return each
    if jaxprs.inner_bodies(eqn):
        return None
    if name in PRODUCTS:
        wish = asks_for_digits(eqn)
        if wish is not None and not _resizes(eqn):
            return Rule(OpClass.FULL, f"{wish} was asked for", "precision")
        if is_sum_of_products(eqn):
            reason = "a product without a free dimension is a sum"
            return Rule(OpClass.FULL, reason, name)
    if name == "integer_pow" and eqn.params["y"] < 0:
        # [torch] fp32: reciprocal
        return dataclasses.replace(PRIMITIVE_RULES["pow"], decided_by="reciprocal")
    return PRIMITIVE_RULES.get(
        name, Rule(OpClass.KEEP, "not known to the table: as traced", name)
    )


def _may_follow(name: str) -> bool:
    rule = PRIMITIVE_RULES.get(name)
    return rule is not None and rule.op_class is OpClass.FOLLOW


def rule_of_library(eqn: Eqn) -> Rule | None:
    """Returns the rule of the library's function that `eqn` calls, if it has one."""
    rule = FUNCTION_RULES.get(source_code.function_name(eqn) or "")
    return rule if rule is not None and source_code.is_of_library(eqn) else None


def _calls(traceback: Traceback | None) -> Sequence[CodeType]:
    """Returns the code of the Python calls that made an equation, innermost first.

    JAX cuts a traceback at the function being traced, so these are the calls between
    that function and the equation.
    """
    return () if traceback is None else traceback.raw_frames()[0]


def asks_for_digits(eqn: Eqn) -> str | None:
    """Returns `precision=HIGH` or `HIGHEST` if the product `eqn` asks for it, or None.

    `jax.default_matmul_precision` around the program is no wish of a product.
    """
    precision = eqn.params.get("precision")
    if not isinstance(precision, tuple):
        return None
    ambient = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009
    for each in (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH):
        if each in precision and not (ambient and _precision(ambient) == each):
            return f"precision={each.name}"
    return None


def _precision(name: str) -> jax.lax.Precision | None:
    try:
        return jax.lax.Precision(name)
    except ValueError:
        return None  # a dot algorithm


def _resizes(eqn: Eqn) -> bool:
    code = _calls(eqn.source_info.traceback)
    return any(each.co_filename == _RESIZES for each in code)


# The layers of a model are called from the same lines.
@functools.lru_cache(maxsize=4096)
def _rule_of_calls(traceback: Traceback | None, is_product: bool) -> Rule | None:
    """Returns the rule of the innermost function that has one, of those called."""
    for code in _calls(traceback):
        found = _KNOWN.get((id(code), is_product)) or _remembered(code, is_product)
        if found.rule is not None:
            return found.rule
    return None


class _Known(NamedTuple):
    """The rule of a function, and its code, whose identity is the key."""

    rule: Rule | None
    code: CodeType


# For products, and for all else; asked for every frame of every equation. To hash code
# is to hash all that is in it.
_KNOWN: dict[tuple[int, bool], _Known] = {}
_MOST_KNOWN = 8192


def _remembered(code: CodeType, is_product: bool) -> _Known:
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    found = _Known(_rule_of_function(code, is_product), code)
    return _KNOWN.setdefault((id(code), is_product), found)


def _rule_of_function(code: CodeType, is_product: bool) -> Rule | None:
    """Returns the rule of a library's function for what it calls, if it has one."""
    name, filename = code.co_name, code.co_filename
    if source_code.in_library(filename):
        if name == _SCAN.decided_by and not is_product:
            return _SCAN
        if name in FUNCTION_RULES:
            return FUNCTION_RULES[name]
    reason, products = _RULE_OF_FILE.get(filename, (None, frozenset()))
    if reason is None or name in products or not name.isidentifier():
        return None
    return Rule(OpClass.FULL, reason, name)


@functools.lru_cache(maxsize=256)
def _rules_of(policy: Policy) -> Mapping[str | None, Rule]:
    """Returns the rules that the names of a policy make."""
    named = {
        OpClass.LOW: policy.low,
        OpClass.FULL: policy.full,
        OpClass.FOLLOW: policy.follow,
    }
    return {
        name: Rule(op_class, f"the policy says {op_class.value}", name, from_user=True)
        for op_class, names in named.items()
        for name in names
    }
