"""Who asks for half precision: the policy, or the program itself.

What is in half whatever the policy says `explain` counts; `diagnose` and `tune` tell
what to do about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jmp_amp.plan.dataflow.values import traced_dtype
from jmp_amp.plan.plan import EquationPlan
from jmp_amp.plan.program.jaxprs import Atom, Eqn
from jmp_amp.plan.tables.operations import Also, Kind, kind_of, named
from jmp_amp.policies.dtypes import is_half
from jmp_amp.reports.rows import Asked, Equation
from jmp_amp.reports.tables import file_name, listed

PROGRAM = "the program itself"
_MOVES = named(Also.ONE_EACH)


def asked_for(row: Equation, eqn: Eqn, planned: EquationPlan) -> Equation:
    """Returns the row of an equation, and who asks for half precision there.

    Args:
      row: the row.
      eqn: its equation, not traced in the dtypes of the policy.
      planned: its plan.
    """
    if not (row.runs_in_half and _is_traced_in_half(eqn)):
        return row
    # What a call is that runs as traced, or why a product is not fp8, says more.
    if not (row.is_opaque or (row.matmuls and not _is_by_table(planned))):
        row = dataclasses.replace(row, reason=f"asked for by {PROGRAM}")
    return dataclasses.replace(row, asked_by=PROGRAM)


def _is_by_table(planned: EquationPlan) -> bool:
    """Whether the table alone decides an equation, and nothing else is told of it."""
    decision = planned.decision
    return (
        decision is not None
        and decision.words is None
        and planned.rule.group is not None
        and planned.option is None
        and not planned.f32_gradients
    )


def _is_traced_in_half(eqn: Eqn) -> bool:
    def is_so(atoms: Sequence[Atom]) -> bool:
        dtypes = [dtype for dtype in map(traced_dtype, atoms) if dtype is not None]
        return bool(dtypes) and all(map(is_half, dtypes))

    # A product of half operands may have an f32 result.
    return is_so(eqn.outvars) or is_so(eqn.invars)


def by_asker(equations: Sequence[Equation]) -> tuple[Asked, ...]:
    """Returns what is in half without the policy; empty if nothing is."""
    own = [each for each in equations if each.asked_by]
    found = Asked(
        PROGRAM,
        sum(each.is_in_half for each in own),
        sum(each.matmuls_in_half for each in own),
        sum(each.flops_in_half for each in own),
        tuple(dict.fromkeys(each.module for each in own)),
        tuple(dict.fromkeys(each.source for each in own if each.source)),
    )
    return (found,) if own else ()


def own_dtypes(rows: Sequence[Equation]) -> Iterator[str]:
    """Yields what no policy decides that is given to a function, and what to do."""
    if all(_copies(row) for row in rows if row.asked_by):
        return
    for each in by_asker(rows):
        yield (
            f"The program itself asks for half precision in {_many(each)}. That is "
            "half in the f32 run too, so its error does not show, and no policy "
            "reaches it. Remove dtype=, astype and half arrays there, and give the "
            "policy instead."
        )


def _copies(row: Equation) -> bool:
    """Whether an operation is no matter: a cache in half is written and read."""
    # A cast alone rounds.
    is_cast = row.operation == "convert_element_type"
    return is_cast or row.operation in _MOVES or kind_of(row.operation) is Kind.MOVE


def _many(asked: Asked) -> str:
    """Returns how many operations and products there are, and where."""
    modules = [path for path in asked.modules if path]
    lines = list(map(file_name, asked.sources))
    where = f" ({names})" if (names := listed(modules or lines)) else ""
    if asked.equations <= asked.matmuls:
        return f"{asked.matmuls} {_products(asked.matmuls)}{where}"
    told = f"{asked.equations} operation{'s' * (asked.equations != 1)}{where}"
    if not asked.matmuls:
        return told
    a = "a " * (asked.matmuls == 1)
    return f"{told}, {asked.matmuls} of them {a}{_products(asked.matmuls)}"


def _products(many: int) -> str:
    return "matrix product" + "s" * (many != 1)
