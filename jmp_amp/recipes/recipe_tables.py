"""A recipe as a table of one row, with its exceptions below."""

from __future__ import annotations

from collections.abc import Sequence

from jax.core import Tracer

from jmp_amp.plan.tables.operations import ARITHMETIC
from jmp_amp.policies.dtypes import F32, short_name
from jmp_amp.policies.patterns import IfPresent, Pattern, is_optional
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.reports.tables import Table, scale_text
from jmp_amp.training.loss_scale import LossScale

_COLUMNS = "parameters compute outputs norms masters".split()


def of_recipe(
    policy: Policy | PolicyMap,
    loss_scale: LossScale,
    *,
    norms: str | None,
    masters: str,
    losses: str,
    note: str,
) -> Table:
    """Returns the table of a recipe, in the words of its readers.

    Args:
      policy: of the recipe.
      loss_scale: its first one.
      norms: the dtype of norm parameters; None for that of the others.
      masters: whether there are any.
      losses: the number of losses.
      note: what stands first below the row.
    """
    entries = policy.entries if isinstance(policy, PolicyMap) else ()
    default = policy.default if isinstance(policy, PolicyMap) else policy
    stored = short_name(default.param_dtype)
    products = "" if default.matmul is None else ", products fp8"
    value = loss_scale.value
    value = "traced" if isinstance(value, Tracer) else scale_text(float(value))
    row = (
        stored,
        f"{short_name(default.compute_dtype)}{products}",
        short_name(default.output_dtype),
        norms or stored,
        masters,
        f"dynamic, {value}" if loss_scale.dynamic else value,
        losses,
    )
    notes = [note, *_layers(entries), *_operations(default), *_backward(default)]
    columns = (*_COLUMNS, "loss scale", "losses")
    return Table("", columns, [row], ("losses",), " ".join(filter(None, notes)))


def _layers(entries: Sequence[tuple[Pattern, Policy]]) -> list[str]:
    """Returns a sentence for each dtype that layers are excluded to."""
    layers: dict[str, list[str]] = {}
    for pattern, policy in entries:
        # That an excluded layer is so with all that is in it goes without saying.
        is_inside = is_optional(pattern) and policy.compute_dtype == F32
        if not is_inside:
            names = layers.setdefault(short_name(policy.compute_dtype), [])
            names.append(_pattern_name(pattern))
    return [f"In {dtype}: {', '.join(names)}." for dtype, names in layers.items()]


def _operations(policy: Policy) -> list[str]:
    """Returns a sentence for each class that operations are moved to."""
    return [
        f"Operations in {where}: {', '.join(sorted(names))}."
        for names, where in ((policy.low, "half"), (policy.full, "f32"))
        # OD names nearly all operations, which its name says.
        if names and not names >= ARITHMETIC - policy.low
    ]


def _backward(policy: Policy) -> list[str]:
    """Returns sentences on the backward pass, where it is not the default."""
    saved = [f"Saved for backward: {policy.saved}."] if policy.says_saved else []
    reduced = ["Gradients are made and summed in f32 (of half: amp.value_and_grad)."]
    return saved + reduced * (policy.reduce_dtype is not None)


def _pattern_name(pattern: Pattern) -> str:
    if isinstance(pattern, IfPresent):
        return _pattern_name(pattern.function)
    return getattr(pattern, "__name__", str(pattern))
