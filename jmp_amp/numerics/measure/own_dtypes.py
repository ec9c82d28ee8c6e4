"""What is in half whatever the policy says, in words: `diagnose` and `tune` tell it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from jmp_amp.numerics.measure.measuring import MOVES
from jmp_amp.plan.tables.operations import Kind, kind_of
from jmp_amp.reports.askers import AUTOCAST, by_asker
from jmp_amp.reports.report_tables import listed
from jmp_amp.reports.rows import Asked, Equation


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
    return is_cast or row.operation in MOVES or kind_of(row.operation) is Kind.MOVE


def is_inside(asked_by: str) -> bool:
    """Whether an autocast inside of the function asks for half precision."""
    return asked_by.startswith(AUTOCAST)


def _many(asked: Asked) -> str:
    """Returns how many operations and products there are, and where."""
    modules = [path for path in asked.modules if path]
    lines = [os.path.basename(source) for source in asked.sources]
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
