"""The sentence above the tables of a report."""

from __future__ import annotations

from collections.abc import Sequence

from jmp_amp.reports.rows import Asked, Costs
from jmp_amp.reports.tables import quantity


def plan(total: Costs, asked: Sequence[Asked], asks_for_fp8: bool) -> list[str]:
    """Returns how much is in half and who asks for it, and the casts.

    Args:
      total, asked, asks_for_fp8: as of a `Report`.
    """
    others = sum(each.equations for each in asked)
    parts = [
        f"{total.in_half - others} of {total.equations} equations in half"
        + (f" by the policy, {others} by {asked[0].by}" if asked else "")
    ]
    if total.matmuls:
        share = 100 * total.flops_in_half / total.flops if total.flops else 0.0
        others = sum(each.matmuls for each in asked)
        parts.append(
            f"{total.matmuls_in_half - others} of {total.matmuls} matmuls in half"
            + (f" by the policy, {others} otherwise" if others else "")
            + f" ({share:.0f}% of {quantity(total.flops)}FLOP)"
        )
    if asks_for_fp8:
        share = 100 * total.fp8_flops / total.flops if total.flops else 0.0
        parts.append(
            f"{total.fp8_matmuls} of {total.matmuls} matmuls in fp8 ({share:.0f}%) of "
            f"{total.quantisations} quantised arrays"
        )
    elements = quantity(total.cast_elements).strip()
    return [*parts, f"{total.casts} casts of {elements} elements"]


def saved(total: Costs, arguments: int, arguments_without: int) -> list[str]:
    """Returns the bytes kept for the backward pass: activations, then arguments.

    Copies of weights in half precision do not grow with the batch, as activations do,
    and without autocast the weights themselves are kept.

    Args:
      total, arguments, arguments_without: as of a `Report`.
    """
    kept = total.saved - total.copies
    without = total.saved_without - total.copies_without
    text = f"saved for backward {quantity(kept)}B of {quantity(without)}B"
    if without:
        text += f" ({kept / without:.2f}x)"
    held = total.copies + arguments
    held_without = total.copies_without + arguments_without
    if held + held_without:
        text += f", and of arguments {quantity(held)}B of {quantity(held_without)}B"
    if not total.recomputed:
        return [text]
    plural = "" if total.recomputed == 1 else "s"
    return [text, f"{total.recomputed} equation{plural} made again"]
