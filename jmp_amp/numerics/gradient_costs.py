"""What the matrix products of a gradient cost, by the module that they belong to.

The first layer of a network has two of three products: nobody asks for the gradient of
an input. So what a module costs is told by the program of the gradient alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from jmp_amp.plan import jaxprs
from jmp_amp.plan.jaxprs import Body, ClosedJaxpr
from jmp_amp.reports.costs import matmul_of
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
    _add(both, jaxprs.body_of(gradient), "", 1)
    return {
        row.identity: row.flops
        * both.get(row.module, forward[row.module])
        // forward[row.module]
        for row in rows
    }


def _add(found: dict[str, int], body: Body, path: str, times: int) -> None:
    """Adds the products of a body that runs `times` times in the module `path`."""
    for eqn in body.jaxpr.eqns:
        here = "/".join(filter(None, (path, *module_scopes(eqn))))
        dtypes = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        flops = matmul_of(eqn, dtypes, times).flops
        found[here] = found.get(here, 0) + flops
        if eqn.primitive.name == "pallas_call":
            continue  # written for one block of a grid
        for inner in jaxprs.running_bodies(eqn):
            _add(found, inner, here, times * jaxprs.repetitions(eqn))
