"""Tables of text, printed as lines or as HTML."""

from __future__ import annotations

import abc
import html
import io
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

R = TypeVar("R")


class Table(NamedTuple):
    """A table of text.

    Attributes:
      title: the line above it.
      columns: the headings.
      rows: one text for each column.
      numeric: the headings of the columns of numbers, which are aligned right.
      note: the lines below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numeric: Collection[str] = ()
    note: str = ""


def of_rows(
    title: str,
    rows: Iterable[R],
    cells: Mapping[str, Callable[[R], str]],
    numeric: Collection[str] = (),
    note: str = "",
) -> Table:
    """Returns a table with a row for each of `rows`.

    Args:
      title, numeric, note: as of a `Table`.
      rows: what the rows are about.
      cells: by the heading of a column, the text of its cell.
    """
    texts = [tuple(cell(row) for cell in cells.values()) for row in rows]
    return Table(title, tuple(cells), texts, numeric, note)


class Shown(abc.ABC):
    """A result that is text in a terminal and tables in a notebook."""

    @property
    @abc.abstractmethod
    def summary(self) -> str:
        """What it says in one sentence."""

    @property
    def _notes(self) -> Sequence[str]:
        """Sentences between the summary and the tables."""
        return ()

    @abc.abstractmethod
    def _tables(self) -> list[Table]: ...

    def __str__(self) -> str:
        heading = "\n".join([self.summary, *(f"* {each}" for each in self._notes)])
        return as_text(heading, self._tables(), 100)

    def __init_subclass__(cls) -> None:
        # IPython takes the `repr` of a class before this method of its bases.
        cls._repr_pretty_ = Shown._repr_pretty_

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # IPython calls it where it shows no HTML; `repr` has all that it holds.
        printer.text("..." if cycle else str(self))

    def _repr_html_(self) -> str:
        return as_html(self.summary, self._tables(), self._notes)


def as_text(heading: str, tables: Sequence[Table], width: int) -> str:
    """Returns tables as lines of at most `width` characters."""
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
            is_number = column in table.numeric
            shown.add_column(
                Text(column),
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


def as_html(
    heading: str, tables: Sequence[Table], sentences: Sequence[str] = ()
) -> str:
    """Returns tables below a heading and a list, as HTML; all text is escaped."""
    parts = [f"<p>{html.escape(heading)}</p>"]
    if sentences:
        items = [f"<li>{html.escape(each)}</li>" for each in sentences]
        parts += ["<ul>", *items, "</ul>"]
    for table in tables:
        parts.append("<table>")
        if table.title:
            # Else it is in the middle, and touches the table above.
            style = "text-align: left; padding-top: 1em"
            title = html.escape(table.title)
            parts.append(f'<caption style="{style}">{title}</caption>')
        parts.append(_html_row("th", table.columns, table))
        parts += [_html_row("td", row, table) for row in table.rows]
        parts.append("</table>")
        if table.note:
            parts.append(f"<p>{html.escape(table.note)}</p>")
    return "\n".join(parts)


def _html_row(tag: str, cells: Sequence[str], table: Table) -> str:
    sides = ["right" if name in table.numeric else "left" for name in table.columns]
    written = []
    for cell, side in zip(cells, sides, strict=True):
        style = f"text-align: {side}; padding: 0 0.6em"
        if cell.startswith(" "):  # It is indented: HTML folds spaces.
            style += "; white-space: pre"
        written.append(f'<{tag} style="{style}">{html.escape(cell)}</{tag}>')
    return f"<tr>{''.join(written)}</tr>"


def scale_text(scale: float) -> str:
    """Returns a loss scale as a program may write it: "2**16", "1", "1000"."""
    fraction, exponent = math.frexp(scale)
    is_power = fraction == 0.5 and exponent != 1
    return f"2**{exponent - 1}" if is_power else f"{scale:g}"


def shape_text(shape: Sequence[int]) -> str:
    """Returns a shape as programs of JAX show it: "[8,16]"."""
    return f"[{','.join(map(str, shape))}]"


def quantity(number: float) -> str:
    """Returns a number with three digits and a prefix for a unit: "1.23 M", "512 "."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while number >= 999.5 and len(prefixes) > 1:
        number /= 1000
        prefixes.pop(0)
    return f"{number:.3g} {prefixes[0]}"


def amount(number: float, unit: str = "") -> str:
    """Returns a quantity with its unit; "" for none."""
    return f"{quantity(number)}{unit}" if number else ""


def count(value: int) -> str:
    """Returns a count: exact below 10000; "" for none."""
    if not value:
        return ""
    return str(value) if value < 10000 else quantity(value).strip()


def listed(names: Iterable[str], between: str = ", ") -> str:
    """Returns the first three names, and how many more there are."""
    first, more = (names := [*names])[:3], len(names) - 3
    return between.join(first) + f" and {more} more" * (more > 0)


def file_name(source: str | None) -> str:
    """Returns the `file:line` of a path and its line; "" for none."""
    return "" if source is None else os.path.basename(source)
