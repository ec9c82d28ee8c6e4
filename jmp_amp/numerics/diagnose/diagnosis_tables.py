"""Tables of a diagnosis: modules, the sites that make errors, gradients, sites."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp_amp.numerics.diagnose import wording
from jmp_amp.numerics.diagnose.suggestions import counterparts, in_half
from jmp_amp.numerics.locate.sites import (
    EightBits,
    Gradient,
    Numbers,
    Site,
    first_made,
    or_infinite,
)
from jmp_amp.policies.fp8 import FORMATS
from jmp_amp.reports.report_tables import TOP_LEVEL
from jmp_amp.reports.tables import Table, count, file_name, listed, shape_text

# What modules are sorted by, and the figures of each.
SORTS: dict[str, Callable[[Numbers], float]] = {
    "error": lambda numbers: or_infinite(numbers.error),
    "nonfinite": lambda numbers: numbers.nonfinite,
}
_FIGURES = ("amax", "amin", "zeros", "not finite")
_MOST_MODULES = 24
_BEGINS = " (begins here)"
_MOST_ROWS = 8
# A gradient below this part of the largest one may be nothing but rounding errors.
_SMALL = 2.0**-10


def is_rounding(gradient: Gradient, gradients: Mapping[str, Gradient]) -> bool:
    """Whether a gradient is small, and less than its error: 0 in exact arithmetic.

    The bias of the keys of an attention is such a parameter.
    """
    largest = max(each.amax for each in gradients.values())
    small = gradient.amax < _SMALL * largest and not gradient.nonfinite
    return small and gradient.error > 1


def of_modules(
    modules: Mapping[str, Numbers],
    sites: Sequence[Site],
    reference: Sequence[Site],
    sort: str | None = None,
    is_whole: bool = False,
) -> Table:
    """Returns one row for each module, in the order of the program.

    Args:
      modules, sites, reference: as of a `Diagnosis`.
      sort: one of `SORTS`: the largest first.
      is_whole: whether to show all modules, and not only those with the most trouble.
    """
    begins, first = None, first_made(sites)
    if first is not None and sum(x.nonfinite > 0 for x in modules.values()) > 1:
        # What follows it, and the backward pass, spread what is not finite.
        begins = first.module
        modules = {begins: modules[begins], **modules}
    order = list(modules.items())
    if sort is not None:
        order.sort(key=lambda each: -SORTS[sort](each[1]))
    lost = [_lost_by_module(sites, reference, d) for d in ("forward", "backward")]
    shown = set(modules) if is_whole else _worst(modules)
    numbers = (*_FIGURES, "lost", "lost bwd", "error")
    rows = [
        (
            (path or TOP_LEVEL) + _BEGINS * (path == begins),
            *_figures(each),
            *(wording.share(shares.get(path, 0.0)) for shares in lost),
            wording.number(each.error),
        )
        for path, each in order
        if path in shown
    ]
    notes = []
    if any(share for shares in lost for share in shares.values()):
        notes.append(
            "lost: the share of values that half precision turns into 0; lost bwd: in "
            "the backward pass, without a loss scale."
        )
    if any(site.is_constant for site in sites):
        notes.append("amax: without constants of the program, such as those of a mask.")
    if any(each.error is not None for each in modules.values()):
        notes.append("error: of the worst operation.")
    if more := len(modules) - len(rows):
        notes.append(f"{more} more modules are no worse: Diagnosis.table() shows them.")
    columns = ("module", *numbers)
    return _shown(Table("Modules", columns, rows, numbers, "\n".join(notes)))


def _figures(each: Site | Numbers) -> tuple[str, str, str, str]:
    """Returns the figures that `_FIGURES` name."""
    return (
        wording.number(each.amax),
        wording.number(each.amin),
        wording.share(each.zeros / each.size if each.size else 0.0),
        count(each.nonfinite),
    )


def _shown(table: Table) -> Table:
    """Returns a table without the columns of numbers that are empty everywhere."""
    kept = [
        i
        for i, name in enumerate(table.columns)
        if name not in table.numeric or any(row[i] for row in table.rows)
    ]
    return table._replace(
        columns=tuple(table.columns[i] for i in kept),
        rows=[tuple(row[i] for i in kept) for row in table.rows],
    )


def _worst(modules: Mapping[str, Numbers]) -> set[str]:
    """Returns the modules to show: all, or those with the most trouble."""

    def trouble(path: str) -> tuple[bool, float]:
        return modules[path].nonfinite > 0, or_infinite(modules[path].error)

    # Of equal ones the first, where what is not finite begins.
    return set(sorted(modules, key=trouble, reverse=True)[:_MOST_MODULES])


def _lost_by_module(
    sites: Sequence[Site], reference: Sequence[Site], direction: str
) -> dict[str, float]:
    """Returns the share of each module's values that run in half and underflow."""
    lost: defaultdict[str, float] = defaultdict(float)
    values: Counter[str] = Counter()
    for site, dtype in in_half(sites, reference, direction):
        lost[site.module] += site.underflow(dtype) * site.finite
        values[site.module] += site.finite
    return {module: lost[module] / max(values[module], 1) for module in lost}


def of_blame(blame: Iterable[Site]) -> Table:
    """Returns one row for each of the worst sites that make the error larger."""
    numbers = ("growth", "error")
    worse = [x for x in blame if or_infinite(x.amplification) > 1 and x.error]
    rows = [
        (
            wording.number(site.amplification),
            wording.number(site.error),
            site.operation,
            site.dtype,
            site.module or TOP_LEVEL,
            file_name(site.source),
        )
        for site in worse[:_MOST_ROWS]
    ]
    columns = (*numbers, "operation", "dtype", "module", "source")
    note = "growth: the error over the largest error of the operands."
    if left_out := len(worse) - len(rows):
        note += f"\n{left_out} more make no more of it: Diagnosis.blame has them."
    return Table("Where the error is made", columns, rows, numbers, note)


def of_quantised(found: Iterable[EightBits]) -> Table:
    """Returns one row for each of the arrays of which most underflows in 8 bits."""

    def lost(each: EightBits) -> float:
        return each.underflowed[each.site.dtype]

    ordered = sorted(found, key=lost, reverse=True)
    numbers = ("amax", "scale", "saturated", *(f"0 in {name}" for name in FORMATS))
    rows = [
        (
            wording.place(each.site),
            each.site.dtype,
            wording.number(each.site.amax),
            f"2**{math.frexp(each.scales[each.site.dtype])[1] - 1}",
            wording.share(each.saturated[each.site.dtype]),
            *(wording.share(each.underflowed[name]) for name in FORMATS),
        )
        for each in ordered[:_MOST_ROWS]
    ]
    notes = []
    if any(share for each in ordered for share in each.underflowed.values()):
        notes.append("0 in ...: the share of values that become 0.")
    if left_out := len(ordered) - len(rows):
        notes.append(
            f"{left_out} more arrays lose no larger share: Diagnosis.quantised has "
            "them."
        )
    columns = ("array", "", *numbers)
    return _shown(Table("In 8 bits", columns, rows, numbers, "\n".join(notes)))


def of_gradients(gradients: Mapping[str, Gradient]) -> Table:
    """Returns one row for each of the gradients with the most trouble.

    One row for all of them, if no number of any is finite.
    """
    title = "Gradients, unscaled"
    if len(gradients) > 1 and all(x.nonfinite == x.size for x in gradients.values()):
        every = count(sum(each.size for each in gradients.values()))
        row = f"all {len(gradients)}", every, every
        numbers = "not finite", "size"
        return Table(title, ("parameter", *numbers), [row], numbers)
    rounding = [k for k, each in gradients.items() if is_rounding(each, gradients)]

    def trouble(item: tuple[str, Gradient]) -> tuple[bool, bool, bool, float]:
        key, each = item
        error = or_infinite(each.error)
        return each.nonfinite > 0, each.is_lost, key not in rounding, error

    worst = sorted(gradients.items(), key=trouble, reverse=True)
    numbers = (*_FIGURES, "size", "error")
    rows = [
        (
            key or "(the argument)",
            *_figures(each),
            count(each.size),
            wording.number(each.error),
        )
        for key, each in worst[:_MOST_ROWS]
    ]
    notes = []
    if more := len(gradients) - len(rows):
        notes.append(
            f"{more} more gradients are no worse: Diagnosis.gradients has them."
        )
    if rounding:
        notes.append(f"0 but for rounding, whatever their error: {listed(rounding)}.")
    columns = ("parameter", *numbers)
    return _shown(Table(title, columns, rows, numbers, "\n".join(notes)))


def of_sites(sites: Sequence[Site], reference: Sequence[Site]) -> list[Table]:
    """Returns one row for each site, one table for each module."""
    same = counterparts(sites, reference)
    numbers = (*_FIGURES, "lost", "error", "growth")
    columns = ("#", "source", "operation", "", "dtype", "shape", *numbers)
    shown: dict[str, Table] = {}
    for site in sites:
        path, known = site.module or TOP_LEVEL, same(site)
        times = f" x{site.times}" if site.times > 1 else ""
        turn = "" if site.turn is None else f" (turn {site.turn})"
        amax, amin, zeros, nonfinite = _figures(site)
        lost = known.underflow(site.dtype) if known and site.is_in_half else 0.0
        shown.setdefault(path, Table(path, columns, [], numbers)).rows.append(
            (
                site.identity,
                file_name(site.source),
                site.operation + times,
                site.direction,
                site.dtype,
                shape_text(site.shape),
                amax + " (constant)" * site.is_constant,
                amin,
                zeros,
                nonfinite + turn,
                wording.share(lost),
                wording.number(site.error),
                wording.number(site.amplification),
            )
        )
    return list(map(_shown, shown.values()))
