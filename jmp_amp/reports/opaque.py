"""Calls that a plan does not look into: what they are, and what may be done.

They run in the dtypes that they were traced with: a derivative or batching rule of the
user belongs to them, or their inside is no program of JAX.
"""

from __future__ import annotations

import re

from jmp_amp.plan.program import source_code
from jmp_amp.plan.program.jaxprs import Eqn
from jmp_amp.reports.costs import Matmuls

# Beginnings of the names of primitives, what they call, and whether `cast_inputs`
# changes what is inside.
_KINDS = (
    ("custom_vjp", "a custom_vjp", True),
    ("custom_vmap", "a custom_vmap", True),
    ("custom_lin", "a custom derivative", True),
    ("pallas_call", "a Pallas kernel", True),
    ("pure_callback", "a callback to Python", False),
    ("io_callback", "a callback to Python", False),
    ("debug_callback", "a callback to Python", False),
    ("ffi_call", "a foreign function", True),
)
_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)[/\\]")


def reason_of(eqn: Eqn, matmuls: Matmuls, on_cpu: bool = False) -> str:
    """Returns what an opaque call is, and what to do about the products in f32.

    Args:
      eqn: an equation that runs as traced.
      matmuls: the products inside of it.
      on_cpu: whether the plan is for a CPU, which would not gain.
    """
    name = eqn.primitive.name
    kind, takes_half = f"{name}, unknown to the plan", True
    for beginning, words, may_be_cast in _KINDS:
        if name.startswith(beginning):
            kind, takes_half = words, may_be_cast
    found = _PACKAGE.search(source_code.source_line(eqn) or "")
    if found:
        kind += f" of {found[1]}"
    in_full = matmuls.total - matmuls.in_half
    if not in_full:
        return f"{kind}: as traced"
    told = f"{kind}: as traced, with {in_full} product{'s' * (in_full > 1)} in f32"
    if found:
        return f"{told}; autocast the function that it calls"
    gains = takes_half and not on_cpu
    return f"{told}; amp.cast_inputs has it in half" if gains else told
