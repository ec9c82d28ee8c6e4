"""Rewrites: how an equation is bound, if not as traced.

A decision gives an equation dtypes. A rewrite gives it another computation, or another
derivative, for the same operands. To add one, write it in a file and add its row: a
function that returns the rewrite of an equation where it stands, or None. An equation
of parameters, inputs and constants alone is bound as traced, but for a product.
"""

from __future__ import annotations

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.rewrites.cpu import cpu_product
from jmp_amp.plan.rewrites.f32_results import f32_result
from jmp_amp.plan.rewrites.fp8 import fp8_product
from jmp_amp.plan.rewrites.lookups import summed_lookup
from jmp_amp.plan.rewrites.pick_rewrite import pick_from_rows
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.rewrites.shifted_scores import shifted_scores

# The first one that applies to an equation is taken.
_REWRITES = (
    cpu_product,
    f32_result,
    fp8_product,
    pick_from_rows,
    summed_lookup,
    shifted_scores,
)


def rewrite_of(at: Standing) -> Rewrite | None:
    """Returns the rewrite of an equation, if it has one."""
    found = (rewrite(at) for rewrite in _REWRITES)
    return next((each for each in found if each is not None), None)
