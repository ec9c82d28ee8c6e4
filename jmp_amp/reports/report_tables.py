"""The tables of a report: modules, reasons, casts, opaque calls, equations."""

from __future__ import annotations

import collections
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp_amp.plan.rewrites.f32_gradients import NOTE
from jmp_amp.plan.tables.operations import OPERATIONS
from jmp_amp.plan.tables.rules import FUNCTION_RULES
from jmp_amp.reports.folding import flat, folded
from jmp_amp.reports.rows import Asked, Cast, Costs, Equation, Kept, Reason
from jmp_amp.reports.tables import (
    Table,
    amount,
    file_name,
    listed,
    of_rows,
    quantity,
    shape_text,
)

TOP_LEVEL = "(top level)"


# What modules are sorted by, and the figures of each.
SORTS: dict[str, Callable[[Costs], int]] = {
    "flops": lambda costs: costs.flops,
    "saved": lambda costs: costs.saved,
    "casts": lambda costs: costs.cast_elements,
}


def of_modules(
    modules: Mapping[str, Costs], total: Costs, saves: bool, sort: str | None = None
) -> Table:
    """Returns one row for each module, below the module it is in, and one for all.

    Equal siblings are one row, see `folding`.

    Args:
      modules: the sums of each, by its path.
      total: the sums of all.
      saves: whether to show the bytes that are saved for the backward pass.
      sort: one of `SORTS`; then rows are whole paths, the largest first.
    """
    numbers = ("in half", "matmuls", "FLOP", "casts", "elements")
    numbers += ("saved", "without") if saves else ()
    rows = []
    tree = folded(modules)
    if sort is not None:
        figure = SORTS[sort]
        # All rows of `flat` have sums.
        tree = sorted(flat(tree), key=lambda row: -figure(row.costs or total))
    for depth, name, costs in tree:
        cells = [""] * len(numbers) if costs is None else _figures(costs, saves)
        rows.append(("  " * depth + (name or TOP_LEVEL), *cells))
    rows.append(("all", *_figures(total, saves)))
    note = "in half: operations, and how many there are; matmuls likewise."
    if saves:
        note += (
            " saved: bytes kept for the\nbackward pass, with autocast and without, "
            "half-precision copies of arguments too."
        )
    if any(" .. " in row.name for row in tree):
        note += "\n(12x): equal modules, added up; drill_down() tells them apart."
    return Table("Modules", ("module", *numbers), rows, numbers, note)


def _figures(costs: Costs, saves: bool) -> list[str]:
    figures = [
        f"{costs.in_half}/{costs.equations}" if costs.equations else "",
        f"{costs.matmuls_in_half}/{costs.matmuls}" if costs.matmuls else "",
        amount(costs.flops),
        str(costs.casts or ""),
        quantity(costs.cast_elements) if costs.casts else "",
    ]
    sizes = (costs.saved, costs.saved_without) if saves else ()
    return figures + [amount(size, "B") for size in sizes]


def of_reasons(reasons: Iterable[Reason], title: str = "What stays in f32") -> Table:
    """Returns why equations have their dtype and what it costs, a row for a reason."""
    cells: dict[str, Callable[[Reason], str]] = {
        "why": lambda each: each.reason,
        "equations": lambda each: str(each.equations),
        "elements": lambda each: quantity(each.elements),
        "FLOP": lambda each: amount(each.flops),
        "operations": lambda each: " ".join(each.operations),
    }
    return of_rows(title, reasons, cells, ("equations", "elements", "FLOP"))


def of_f32_gradients(equations: Iterable[Equation]) -> Table:
    """Returns the operations in half whose gradients leave in f32, one row for each."""
    counts = collections.Counter(e.operation for e in equations if e.f32_gradients)
    rows = [(name, str(count)) for name, count in counts.most_common()]
    columns = ("operation", "equations")
    return Table(f"In half, and {NOTE}", columns, rows, ("equations",))


def of_kept(kept: Sequence[Kept]) -> Table:
    """Returns the three largest arrays that are kept for the backward pass."""
    cells: dict[str, Callable[[Kept], str]] = {
        "module": lambda each: each.module or TOP_LEVEL,
        "operation": lambda each: each.operation,
        "shape": lambda each: shape_text(each.shape),
        "dtype": lambda each: each.dtype,
        "bytes": lambda each: f"{quantity(each.size)}B",
    }
    title = "The largest kept for the backward pass"
    return of_rows(title, kept[:3], cells, ("bytes",))


def of_asked(askers: Iterable[Asked]) -> Table:
    """Returns what is in half whatever the policy says, one row for each asker."""
    cells: dict[str, Callable[[Asked], str]] = {
        "asked for by": lambda each: each.by,
        "equations": lambda each: str(each.equations),
        "matmuls": lambda each: str(each.matmuls or ""),
        "FLOP": lambda each: amount(each.flops),
        "modules": lambda each: listed(path or TOP_LEVEL for path in each.modules),
        "source": lambda each: listed(map(file_name, each.sources)),
    }
    note = (
        "The policy does not decide these. To see what it would do, explain the "
        "function without\ndtype=, astype and arrays in half precision."
    )
    title, numbers = "In half whatever the policy", ("equations", "matmuls", "FLOP")
    return of_rows(title, askers, cells, numbers, note)


def of_products(reasons: Iterable[Reason], note: str | None) -> Table:
    """Returns in which dtype matrix products run and why, under a policy of fp8."""
    cells: dict[str, Callable[[Reason], str]] = {
        "why": lambda each: each.reason,
        "products": lambda each: str(each.equations),
        "FLOP": lambda each: quantity(each.flops),
    }
    numbers = ("products", "FLOP")
    return of_rows("Matrix products", reasons, cells, numbers, note or "")


def of_casts(pairs: Mapping[str, tuple[int, int]]) -> Table:
    """Returns how many casts the plan inserts, one row for each pair of dtypes."""
    numbers = ("casts", "elements")
    rows = [
        (pair, str(count), quantity(elements))
        for pair, (count, elements) in pairs.items()
    ]
    return Table("Casts inserted", ("cast", *numbers), rows, numbers)


def of_opaque(equations: Iterable[Equation], on_cpu: bool) -> Table:
    """Returns one row for each call that runs as traced."""
    cells: dict[str, Callable[[Equation], str]] = {
        "call": lambda each: each.calls or each.operation,
        "what": lambda each: each.reason,
        "module": lambda each: each.module or TOP_LEVEL,
        "source": lambda each: file_name(each.source),
        "products": lambda each: str(each.matmuls or ""),
        "in half": lambda each: str(each.matmuls_in_half) if each.matmuls else "",
    }
    note = (
        "The plan does not look into these. amp.cast_inputs(fn) has a function of "
        "your own traced in\nhalf precision. Where a library calls yours, autocast "
        "yours: ODETerm(amp.autocast(field))."
    )
    if on_cpu:
        note = "The plan does not look into these."
    return of_rows("Run as traced", equations, cells, ("products", "in half"), note)


def of_unused(names: Iterable[str]) -> Table:
    """Returns one row for each operation that the policy names in vain.

    A name that no table knows may be a function of the user, or misspelt.
    """
    known = sorted({name.replace("-", "_") for name in OPERATIONS} | {*FUNCTION_RULES})
    rows = []
    for name in names:
        close = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
        rows.append((name, "" if name in known else " or ".join(close)))
    columns = ("name", "did you mean") if any(hint for _, hint in rows) else ("name",)
    title = "Named by the policy, and decided nothing"
    return Table(title, columns, [row[: len(columns)] for row in rows])


def of_equations(equations: Iterable[Equation]) -> list[Table]:
    """Returns one row for each equation, one table for each module."""
    modules: dict[str, list[Equation]] = {}
    for equation in equations:
        modules.setdefault(equation.module or TOP_LEVEL, []).append(equation)
    return [of_rows(path, rows, _EQUATION) for path, rows in modules.items()]


def _operation(equation: Equation) -> str:
    times = f" x{equation.times}" if equation.times > 1 else ""
    return f"{equation.operation} {equation.calls}".strip() + times


def _casts(casts: Iterable[Cast]) -> str:
    pairs = collections.Counter(f"{cast.source}>{cast.target}" for cast in casts)
    return " ".join(f"{pair} x{n}" if n > 1 else pair for pair, n in pairs.items())


_EQUATION: dict[str, Callable[[Equation], str]] = {
    "#": lambda each: each.identity,
    "source": lambda each: file_name(each.source),
    "operation": _operation,
    "shape": lambda each: " ".join(map(shape_text, each.shapes)),
    "dtype": lambda each: each.dtype,
    "class": lambda each: each.op_class,
    "why": lambda each: each.reason,
    "casts": lambda each: _casts(each.casts),
}
