"""What the matrix products of a gradient cost, by the module that they belong to.

A layer has three products: one forward, and one for each gradient. The first layer has
two: nobody asks for the gradient of the input. So the program of the gradient is read.
"""

from __future__ import annotations

from collections.abc import Iterable

from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import ClosedJaxpr
from jmp_amp.reports.costs import products_as_traced
from jmp_amp.reports.reading import module_scopes
from jmp_amp.reports.rows import Equation


def gradient_flops(rows: Iterable[Equation], gradient: ClosedJaxpr) -> dict[str, int]:
    """Returns what each product of a function costs in its gradient, by identity.

    The products of a module share what its products in the gradient cost.

    Args:
      rows: the equations of the function.
      gradient: the program of its gradient.
    """
    rows = [row for row in rows if row.flops]
    forward: dict[str, int] = {}
    for row in rows:
        forward[row.module] = forward.get(row.module, 0) + row.flops
    both: dict[str, int] = {}
    for around, cost in products_as_traced(jaxprs.body_of(gradient), 1):
        path = "/".join(name for eqn in around for name in module_scopes(eqn))
        both[path] = both.get(path, 0) + cost.flops
    return {
        row.identity: row.flops
        * both.get(row.module, forward[row.module])
        // forward[row.module]
        for row in rows
    }
