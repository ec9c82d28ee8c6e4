"""Rewrites: how an equation is bound, if not as traced.

A decision gives an equation dtypes. A rewrite gives it another computation, or another
derivative, for the same operands. To add one, write it in a file and add its row.
"""

from __future__ import annotations

from jmp_amp.plan.f32_results import F32_RESULT
from jmp_amp.plan.picks import PICK
from jmp_amp.plan.rewriting import Rewrite as Rewrite

# The first one that applies to an equation is taken.
REWRITES = (F32_RESULT, PICK)
