"""Tables of what happens in a program, as text and as HTML."""

from __future__ import annotations

import collections
import html
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from jmp_amp.reports.rows import Cast, Costs, Equation, Reason

TOP_LEVEL = "(top level)"


class Table(NamedTuple):
    """A table of text.

    Attributes:
      title: what it shows.
      columns: the headings; one that begins with a space is of a column of numbers.
      rows: one text for each column.
      note: what else there is to say, below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def of_modules(modules: Mapping[str, Costs], total: Costs, saves: bool) -> Table:
    """Returns one row for each module, below the module it is in, and one for all.

    Args:
      modules: their sums.
      total: the sums of all.
      saves: whether there is something to say of what is saved.
    """
    columns = ("module", " in half", " matmuls", " FLOP", " casts", " elements")
    columns += (" saved", " without") if saves else ()
    rows = []
    for path in _as_tree(path for path, costs in modules.items() if any(costs)):
        *above, name = path.split("/")
        costs = modules.get(path)
        cells = [""] * (len(columns) - 1) if costs is None else _figures(costs, saves)
        rows.append(("  " * len(above) + (name or TOP_LEVEL), *cells))
    rows.append(("all", *_figures(total, saves)))
    note = "in half: operations, and how many there are; matmuls likewise."
    if saves:
        note += " saved: bytes kept for the\nbackward pass, with autocast and without."
    return Table("Modules", columns, rows, note)


def _as_tree(paths: Iterable[str]) -> list[str]:
    """The paths and those above them, each after the one above, in their order."""
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        place: tuple[int, ...] = ()
        above = ""
        for name in path.split("/"):
            above = f"{above}/{name}" if above else name
            place = found.setdefault(above, (*place, len(found)))
    return sorted(found, key=found.__getitem__)


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


def of_reasons(reasons: Iterable[Reason]) -> Table:
    """Returns why equations stay in f32, one row for each reason."""
    columns = ("why", " equations", " elements", "operations")
    rows = [
        (r.reason, str(r.equations), quantity(r.elements), " ".join(r.operations))
        for r in reasons
    ]
    return Table("What stays in f32", columns, rows)


def of_casts(pairs: Mapping[str, tuple[int, int]]) -> Table:
    """Returns how many casts the plan inserts, one row for each pair of dtypes."""
    rows = [
        (pair, str(count), quantity(elements))
        for pair, (count, elements) in pairs.items()
    ]
    return Table("Casts inserted", ("cast", " casts", " elements"), rows)


def of_opaque(equations: Iterable[Equation]) -> Table:
    """Returns one row for each call that runs as traced."""
    columns = ("call", "module", "source", " FLOP in it", " in half")
    rows = [
        (
            f"{e.operation} {e.calls}".strip(),
            e.module or TOP_LEVEL,
            _place(e.source),
            quantity(e.flops) if e.flops else "",
            quantity(e.flops_in_half) if e.flops else "",
        )
        for e in equations
    ]
    note = (
        "The plan does not look into these. amp.cast_inputs(fn) has such a function "
        "traced in half precision."
    )
    return Table("Run as traced", columns, rows, note)


def of_equations(equations: Iterable[tuple[int, Equation]]) -> list[Table]:
    """Returns one row for each equation and its number, one table for each module."""
    shown: dict[str, Table] = {}
    columns = ("#", "source", "operation", "shape", "dtype", "class", "why", "casts")
    for index, equation in equations:
        path = equation.module or TOP_LEVEL
        times = f" x{equation.times}" if equation.times > 1 else ""
        shown.setdefault(path, Table(path, columns, [])).rows.append(
            (
                str(index),
                _place(equation.source),
                f"{equation.operation} {equation.calls}".strip() + times,
                " ".join(equation.shapes),
                equation.dtype,
                equation.op_class,
                equation.reason,
                _casts(equation.casts),
            )
        )
    return list(shown.values())


def as_text(heading: str, tables: Sequence[Table], width: int) -> str:
    """Returns tables as lines of at most `width` characters.

    Example:
      >>> from jmp_amp.reports.tables import Table, as_text
      >>> table = Table("", ("what", " sides"), [("square", "4")])
      >>> print(as_text("Shapes", [table], 40))
      Shapes
      <BLANKLINE>
       what     sides
      ────────────────
       square       4
    """
    written = io.StringIO()
    # In a notebook, Rich would show the tables as HTML and write nothing.
    console = Console(
        file=written,
        width=width,
        color_system=None,
        highlight=False,
        force_jupyter=False,
    )
    console.print(heading, markup=False)
    for table in tables:
        console.print()
        if table.title:
            console.print(table.title, markup=False)
        shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False)
        for column in table.columns:
            is_number = column.startswith(" ")
            shown.add_column(
                Text(column.strip()),
                justify="right" if is_number else "left",
                no_wrap=is_number,
                overflow="fold",
            )
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
        if table.note:
            console.print(table.note, markup=False)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def as_html(heading: str, tables: Sequence[Table]) -> str:
    """Returns tables as HTML.

    Example:
      >>> from jmp_amp.reports.tables import Table, as_html
      >>> as_html("a < b", [])
      '<p>a &lt; b</p>'
    """
    parts = [f"<p>{html.escape(heading)}</p>"]
    for table in tables:
        parts.append("<table>")
        if table.title:
            parts.append(f"<caption>{html.escape(table.title)}</caption>")
        numeric = [column.startswith(" ") for column in table.columns]
        parts.append(_row("th", [column.strip() for column in table.columns], numeric))
        parts += [_row("td", row, numeric) for row in table.rows]
        parts.append("</table>")
        if table.note:
            parts.append(f"<p>{html.escape(table.note)}</p>")
    return "\n".join(parts)


def quantity(number: float) -> str:
    """Returns a number with a decimal prefix: what a unit can be written behind.

    Example:
      >>> from jmp_amp.reports.tables import quantity
      >>> quantity(512), quantity(1_234_567) + "B"
      ('512 ', '1.23 MB')
    """
    prefixes = ["", "k", "M", "G", "T", "P"]
    while number >= 999.5 and len(prefixes) > 1:
        number /= 1000
        prefixes.pop(0)
    return f"{number:.3g} {prefixes[0]}"


def _row(tag: str, cells: Sequence[str], numeric: Sequence[bool]) -> str:
    written = [
        f'<{tag} style="text-align: {"right" if is_number else "left"}">'
        f"{html.escape(cell)}</{tag}>"
        for cell, is_number in zip(cells, numeric, strict=True)
    ]
    return f"<tr>{''.join(written)}</tr>"


def _place(source: str | None) -> str:
    return "" if source is None else os.path.basename(source)


def _casts(casts: Iterable[Cast]) -> str:
    pairs = collections.Counter(f"{cast.source}>{cast.target}" for cast in casts)
    return " ".join(f"{pair} x{n}" if n > 1 else pair for pair, n in pairs.items())
