"""What users ask a report to show: the errors of a request that it cannot meet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from jmp_amp.policies.patterns import paths_matching


class _InModule(Protocol):
    @property
    def module(self) -> str: ...


R = TypeVar("R", bound=_InModule)


def of_modules(
    rows: Sequence[R], modules: Iterable[str], pattern: str, what: str
) -> tuple[list[R], str]:
    """Returns the rows whose module a glob matches, and how many of `what` they are."""
    known = paths_matching(modules, pattern)
    chosen = [row for row in rows if row.module in known]
    heading = f"{len(chosen)} of {len(rows)} {what}"
    if not chosen:
        paths = ", ".join(path or '""' for path in modules)
        heading += f": {pattern!r} matches no module. There are {paths}."
    return chosen, heading


def check_module(module: object, call: str) -> None:
    """Raises a TypeError if `module` is no text."""
    if not isinstance(module, str):
        raise TypeError(
            f"{call}({module!r}): the path of a module is text. Write a glob such as "
            '"encoder/*/attention", or "**" for all modules.'
        )


def check_width(width: object, call: str, usual: int) -> None:
    """Raises a TypeError if `width` is no int, and a ValueError if it is below 1."""
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise (ValueError if type(width) is int else TypeError)(
            f"{call}(width={width!r}): a width is a number of characters, at least 1. "
            f"Use an int, such as {usual}."
        )


def check_sort(sort: object, call: str, figures: Collection[str]) -> None:
    """Raises a ValueError if `sort` is neither None nor one of the figures."""
    if sort is not None and sort not in list(figures):
        *others, last = map(repr, figures)
        raise ValueError(
            f"{call}(sort={sort!r}): the table has no such figure. Use "
            f"{', '.join(others)} or {last}, the largest first, or None for the order "
            "of the program."
        )
