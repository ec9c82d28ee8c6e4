"""Who asks for half precision: the policy, the program, or an autocast inside of it.

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
# Before the policy of that autocast, `"an autocast inside, p=f32,c=f16,o=f32"`.
AUTOCAST = "an autocast inside"
_MOVES = named(Also.ONE_EACH)


def asked_for(
    row: Equation, eqn: Eqn, planned: EquationPlan, inside: str | None
) -> Equation:
    """Returns the row of an equation, and who asks for half precision there.

    Args:
      row: the row.
      eqn: its equation.
      planned: its plan.
      inside: as `scopes.decided_inside` tells.
    """
    if not _is_half(row):
        return row
    if inside:
        by = f"{AUTOCAST}, {inside}"
    elif inside is None and _is_traced_in_half(eqn):
        by = PROGRAM
    else:
        return row
    # What a call is that runs as traced, or why a product is not fp8, says more.
    if not (row.is_opaque or (row.matmuls and not _is_by_table(planned))):
        row = dataclasses.replace(row, reason=f"asked for by {by}")
    return dataclasses.replace(row, asked_by=by)


def _is_half(row: Equation) -> bool:
    return row.is_in_half or row.matmuls_in_half > 0


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
    """Returns what is in half without the policy, in the order of the program."""
    groups: dict[str, list[Equation]] = {}
    for each in equations:
        if each.asked_by:
            groups.setdefault(each.asked_by, []).append(each)
    return tuple(
        Asked(
            by,
            sum(each.is_in_half for each in group),
            sum(each.matmuls_in_half for each in group),
            sum(each.flops_in_half for each in group),
            tuple(dict.fromkeys(each.module for each in group)),
            tuple(dict.fromkeys(each.source for each in group if each.source)),
        )
        for by, group in groups.items()
    )


def own_dtypes(rows: Sequence[Equation], call: str) -> Iterator[str]:
    """Yields what no policy decides that is given to a function, and what to do.

    `call` is how to call it, `diagnose(fn, {})` with the policy for `{}`.
    """
    for each in by_asker(rows):
        if is_inside(each.by):
            policy = each.by.partition(", ")[2]
            yield (
                f"An autocast inside of the function has in half {_many(each)}, by its "
                f"own policy {policy}. No policy that is given here reaches that. "
                f"Pass the function without that autocast: {call.format(repr(policy))}."
            )
    own = [row for row in rows if row.asked_by and not is_inside(row.asked_by)]
    if not all(_copies(row) for row in own):
        for each in by_asker(own):
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


def is_inside(asked_by: str) -> bool:
    """Whether an autocast inside of the function asks for half precision."""
    return asked_by.startswith(AUTOCAST)


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
