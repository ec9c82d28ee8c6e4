"""The tables of a report: modules, reasons, casts, opaque calls, equations."""

from __future__ import annotations

import collections
import difflib
from collections.abc import Callable, Iterable, Mapping

from jmp_amp.plan.rewrites.f32_gradients import NOTE
from jmp_amp.plan.tables.operations import OPERATIONS
from jmp_amp.plan.tables.rules import FUNCTION_RULES
from jmp_amp.reports.folding import flat, folded
from jmp_amp.reports.rows import Asked, Cast, Costs, Equation, Kept, Reason
from jmp_amp.reports.tables import Table, file_name, listed, quantity, shape_text

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
        quantity(costs.flops) if costs.flops else "",
        str(costs.casts or ""),
        quantity(costs.cast_elements) if costs.casts else "",
    ]
    sizes = (costs.saved, costs.saved_without) if saves else ()
    return figures + [f"{quantity(size)}B" if size else "" for size in sizes]


def of_reasons(reasons: Iterable[Reason], title: str = "What stays in f32") -> Table:
    """Returns why equations have their dtype and what it costs, a row for a reason."""
    numbers = ("equations", "elements", "FLOP")
    rows = [
        (
            r.reason,
            str(r.equations),
            quantity(r.elements),
            quantity(r.flops) if r.flops else "",
            " ".join(r.operations),
        )
        for r in reasons
    ]
    return Table(title, ("why", *numbers, "operations"), rows, numbers)


def of_f32_gradients(equations: Iterable[Equation]) -> Table:
    """Returns the operations in half whose gradients leave in f32, one row for each."""
    counts = collections.Counter(e.operation for e in equations if e.f32_gradients)
    rows = [(name, str(count)) for name, count in counts.most_common()]
    columns = ("operation", "equations")
    return Table(f"In half, and {NOTE}", columns, rows, ("equations",))


def of_kept(kept: Iterable[Kept]) -> Table:
    """Returns the three largest arrays that are kept for the backward pass."""
    rows = [
        (
            each.module or TOP_LEVEL,
            each.operation,
            shape_text(each.shape),
            each.dtype,
            f"{quantity(each.size)}B",
        )
        for each in [*kept][:3]
    ]
    columns = ("module", "operation", "shape", "dtype", "bytes")
    return Table("The largest kept for the backward pass", columns, rows, ("bytes",))


def of_asked(askers: Iterable[Asked]) -> Table:
    """Returns what is in half whatever the policy says, one row for each asker."""
    numbers = ("equations", "matmuls", "FLOP")
    rows = [
        (
            each.by,
            str(each.equations),
            str(each.matmuls or ""),
            quantity(each.flops) if each.flops else "",
            listed(path or TOP_LEVEL for path in each.modules),
            listed(map(file_name, each.sources)),
        )
        for each in askers
    ]
    note = (
        "The policy does not decide these. To see what it would do, explain the "
        "function without\ndtype=, astype and arrays in half precision."
    )
    columns = ("asked for by", *numbers, "modules", "source")
    return Table("In half whatever the policy", columns, rows, numbers, note)


def of_products(reasons: Iterable[Reason], note: str | None) -> Table:
    """Returns in which dtype matrix products run and why, under a policy of fp8."""
    numbers = ("products", "FLOP")
    rows = [(r.reason, str(r.equations), quantity(r.flops)) for r in reasons]
    return Table("Matrix products", ("why", *numbers), rows, numbers, note or "")


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
    numbers = ("products", "in half")
    rows = [
        (
            e.calls or e.operation,
            e.reason,
            e.module or TOP_LEVEL,
            file_name(e.source),
            str(e.matmuls or ""),
            str(e.matmuls_in_half) if e.matmuls else "",
        )
        for e in equations
    ]
    note = (
        "The plan does not look into these. amp.cast_inputs(fn) has a function of "
        "your own traced in\nhalf precision. Where a library calls yours, autocast "
        "yours: ODETerm(amp.autocast(field))."
    )
    if on_cpu:
        note = "The plan does not look into these."
    columns = ("call", "what", "module", "source", *numbers)
    return Table("Run as traced", columns, rows, numbers, note)


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
    shown: dict[str, Table] = {}
    columns = ("#", "source", "operation", "shape", "dtype", "class", "why", "casts")
    for equation in equations:
        path = equation.module or TOP_LEVEL
        times = f" x{equation.times}" if equation.times > 1 else ""
        shown.setdefault(path, Table(path, columns, [])).rows.append(
            (
                equation.identity,
                file_name(equation.source),
                _operation(equation) + times,
                " ".join(map(shape_text, equation.shapes)),
                equation.dtype,
                equation.op_class,
                equation.reason,
                _casts(equation.casts),
            )
        )
    return list(shown.values())


def _operation(equation: Equation) -> str:
    return f"{equation.operation} {equation.calls}".strip()


def _casts(casts: Iterable[Cast]) -> str:
    pairs = collections.Counter(f"{cast.source}>{cast.target}" for cast in casts)
    return " ".join(f"{pair} x{n}" if n > 1 else pair for pair, n in pairs.items())
