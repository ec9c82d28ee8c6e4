"""Sites from what was measured: counts as numbers, equations as modules and lines."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jmp_amp.numerics.locate.frames import FORWARD, Entry, Path
from jmp_amp.numerics.locate.sites import Site
from jmp_amp.numerics.locate.written import is_written, written
from jmp_amp.numerics.measure import measuring
from jmp_amp.numerics.measure.lockstep import Errors
from jmp_amp.numerics.measure.measuring import NEVER, Count, Measured, Table
from jmp_amp.numerics.measure.programs import Program
from jmp_amp.numerics.measure.statistics import Figures
from jmp_amp.plan.plan import Identity
from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.jaxprs import Body, ClosedJaxpr, aval_of
from jmp_amp.policies.dtypes import short_name
from jmp_amp.reports.reading import module_scopes
from jmp_amp.reports.rows import Equation
from jmp_amp.transform.scopes import module_of

# Of an equation: its row, the path of its module, and its source line.
_Note = tuple[Equation | None, str | None, str | None]


class Places:
    """Where the equations of a program are: their modules and source lines.

    `rows` are what `read_plan` tells of them, `program` is the function as it was
    traced, with notes of its modules.
    """

    def __init__(self, rows: Sequence[Equation], program: ClosedJaxpr):
        self.constants = written(program)
        self.notes: dict[Path, _Note] = {}
        known = {row.identity: row for row in rows}
        self._note(jaxprs.body_of(program), known, (), (None, None, None))

    def _note(
        self, body: Body, rows: Mapping[str, Equation], path: Path, around: _Note
    ) -> None:
        for index, eqn in enumerate(body.jaxpr.eqns):
            here = (*path, index)
            row, module, source = around
            row = rows.get(str(Identity(here)), row)
            found = module_of(jaxprs.scope_text(eqn))
            module = module if found is None else found
            note = row, module, source_code.source_line(eqn) or source
            self.notes[here] = note
            for number, each in enumerate(jaxprs.inner_bodies(eqn)):
                self._note(each.body, rows, (*here, number), note)

    def of(self, entry: Entry) -> dict[str, str | None]:
        """Returns the module, the path and the source line of a site."""
        # Of what the function has not, those of the equation that it is in.
        around = (entry.identity[:end] for end in range(len(entry.identity), 0, -1))
        noted = (self.notes[each] for each in around if each in self.notes)
        row, path, called = next(noted, (None, None, None))
        module = "/".join(module_scopes(entry.at.eqn)) if row is None else row.module
        source = source_code.source_line(entry.at.eqn)
        if row is not None and entry.at.marked is not None:
            source = row.source
        # A function that a library jitted has no lines of the user's: where it is
        # called has one.
        return {"module": module, "path": path, "source": source or called}


def sites_of(
    program: Program, places: Places, errors: Errors | None, roundoff: float
) -> tuple[Site, ...]:
    """Returns the sites of a program that ran: forward, then backward, in its order.

    `errors` are those of the forward sites, if they are known; errors of operands count
    as no smaller than `roundoff`.
    """
    found: list[tuple[tuple[bool, Path], Site]] = []
    for body in _bodies(program):
        for number, (where, entry) in enumerate(body.table.entries):
            error = _error_of(entry, errors, roundoff)
            site = _site(body, number, body.table.sources[number], places, *error)
            found.append(((entry.direction != FORWARD, (*where, entry.at.index)), site))
    return tuple(site for _, site in sorted(found, key=lambda each: each[0]))


def scaled_casts(program: Program, places: Places) -> tuple[Site, ...]:
    """Returns the sites of what the backward pass casts to f16, before the cast.

    A plan inserts these casts; the reference has none that they could be compared with.
    """
    return tuple(
        # The operand may be a literal, which is not measured.
        _site(body, i, [(at, 1) for at in reads] or body.table.sources[i], places)
        for body in _bodies(program)
        for i, reads in body.table.makers.items()
        if measuring.is_scaled_cast(body.table.entries[i][1])
    )


class _Body(NamedTuple):
    """A body that ran: what was measured in it, the figures, and how often it ran.

    Attributes:
      rows: the layouts of the values that were counted, by number, and their rows.
      firsts: `made` and `nans` of `Measured`, by the number of the site.
    """

    table: Table
    measured: Measured
    rows: list[tuple[int, int]]
    firsts: dict[int, tuple[int, int]]
    runs: int

    def figures(self, position: int, times: int) -> tuple[Figures, int]:
        """Returns the figures of a value that is there so many `times`.

        Also the first run in which not all of it was finite, or `NEVER`.
        """
        group, row = self.rows[position]
        counts = Count(*(x[row] for x in self.measured.counts[group])).numbers() * times
        extremes = np.asarray(self.measured.extremes[group][row])
        figures = Figures(counts, extremes, self.table.groups[group][0])
        return figures, int(self.measured.bad[position])


def _bodies(program: Program) -> Iterator[_Body]:
    for path, table in program.measure.tables.items():
        measured = program.statistics[path]
        if not (runs := int(measured.runs.numbers())):
            continue
        rows = [
            (group, row)
            for group, (_, atoms) in enumerate(table.groups)
            for row in range(len(atoms))
        ]
        firsts = zip(measured.made.tolist(), measured.nans.tolist(), strict=True)
        by_site = dict(zip(table.makers, firsts, strict=True))
        yield _Body(table, measured, rows, by_site, runs)


def _site(
    body: _Body,
    number: int,
    sources: Iterable[tuple[int, int]],
    places: Places,
    error: float | None = None,
    amplification: float | None = None,
) -> Site:
    """Returns the site of a number, with the figures of `sources`."""
    _, entry = body.table.entries[number]
    found = list(itertools.starmap(body.figures, sources))
    rows, bad = [each for each, _ in found], min(bad for _, bad in found)
    exponents: Counter[int] = Counter()
    for row in rows:
        exponents.update(row.exponents)
    made, nan = body.firsts.get(number, (NEVER, NEVER))
    first_bad = int(next((x for x in (made, nan) if x != NEVER), bad))
    avals = list(map(aval_of, entry.results))
    # A complex number is two.
    size = sum(math.prod(x.shape) * (1 + (x.dtype.kind == "c")) for x in avals)
    amax, identity = max(row.amax for row in rows), str(entry.identity)
    # Only forward a site holds constants of the program.
    constants = places.constants.get(identity, ()) if entry.direction == FORWARD else ()
    return Site(
        **places.of(entry),  # pyright: ignore[reportArgumentType]
        operation=entry.operation,
        direction=entry.direction,
        dtype=entry.format or short_name(avals[0].dtype),
        shape=tuple(avals[0].shape),
        size=size * body.runs,
        times=body.runs,
        amax=amax,
        amin=min((row.amin for row in rows if row.amin), default=0.0),
        zeros=sum(row.zeros for row in rows),
        nonfinite=sum(row.nonfinite for row in rows),
        turn=first_bad if entry.at.place.in_loop and first_bad != NEVER else None,
        exponents=dict(sorted(exponents.items())),
        error=error,
        amplification=amplification,
        makes_nonfinite=bool(made != NEVER),
        nans=sum(row.nans for row in rows),
        makes_nan=bool(nan != NEVER),
        identity=identity,
        scales=entry.scales,
        is_constant=is_written(amax, constants),
        reads_floats=any(map(jaxprs.is_floating, entry.at.eqn.invars)),
    )


def _error_of(
    entry: Entry, errors: Errors | None, roundoff: float
) -> tuple[float | None, float | None]:
    """Returns the error of a forward site, and its amplification."""
    key = tuple(entry.identity), entry.at.cast
    error = None if errors is None else errors.at(key)
    if errors is None or error is None or entry.direction != FORWARD:
        return None, None
    before = max(errors.of_operands(key), roundoff)
    return error, 1.0 if math.isinf(before) else error / before
