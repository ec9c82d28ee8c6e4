"""Sites from what was measured: counts as numbers, equations as modules and lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jmp_amp.numerics.locate.frames import FORWARD, Entry, Path
from jmp_amp.numerics.locate.sites import Site
from jmp_amp.numerics.locate.written import Magnitudes, is_written, written
from jmp_amp.numerics.measure.lockstep import Errors
from jmp_amp.numerics.measure.measuring import NEVER, Count, Measured, is_scaled_cast
from jmp_amp.numerics.measure.programs import Program
from jmp_amp.numerics.measure.statistics import Figures, Layout
from jmp_amp.plan.plan import Identity
from jmp_amp.plan.program import jaxprs, source_code
from jmp_amp.plan.program.jaxprs import Body, ClosedJaxpr, aval_of
from jmp_amp.policies.dtypes import short_name
from jmp_amp.reports.reading import module_scopes
from jmp_amp.reports.rows import Equation
from jmp_amp.transform.scopes import module_of


class Places:
    """Where the equations of a program are: their modules and source lines.

    Args:
      rows: what `read_plan` tells of them.
      program: the function as it was traced, with notes of its modules.
    """

    def __init__(self, rows: Sequence[Equation], program: ClosedJaxpr):
        self.rows = {row.identity: row for row in rows}
        self.paths: dict[str, str | None] = {}
        self.sources: dict[str, str | None] = {}
        self.constants = written(program)
        self._note(jaxprs.body_of(program), (), None, None)

    def _note(
        self, body: Body, path: Path, around: str | None, called: str | None
    ) -> None:
        for index, eqn in enumerate(body.jaxpr.eqns):
            found = module_of(jaxprs.scope_text(eqn))
            found = around if found is None else found
            source = source_code.source_line(eqn) or called
            self.paths[str(Identity((*path, index)))] = found
            self.sources[str(Identity((*path, index)))] = source
            for number, each in enumerate(jaxprs.inner_bodies(eqn)):
                self._note(each.body, (*path, index, number), found, source)

    def row_of(self, identity: Path) -> Equation | None:
        """Returns the row of an equation, or of the one that it is in."""
        for end in range(len(identity), 0, -1):
            if (row := self.rows.get(str(Identity(identity[:end])))) is not None:
                return row
        return None

    def module_of(self, entry: Entry) -> str:
        row = self.row_of(entry.identity)
        if row is not None:
            return row.module
        return "/".join(module_scopes(entry.eqn))

    def path_of(self, entry: Entry) -> str | None:
        return self._noted(self.paths, entry)

    def _noted(self, notes: Mapping[str, str | None], entry: Entry) -> str | None:
        for end in range(len(entry.identity), 0, -1):
            text = str(Identity(entry.identity[:end]))
            if text in notes:
                return notes[text]
        return None

    def constants_of(self, entry: Entry) -> Magnitudes:
        """Returns the large constants that a site may hold: a forward one."""
        is_forward = entry.direction == FORWARD
        text = str(Identity(entry.identity))
        return self.constants.get(text, frozenset()) if is_forward else frozenset()

    def source_of(self, entry: Entry) -> str | None:
        row = self.row_of(entry.identity) if entry.is_marked else None
        source = source_code.source_line(entry.eqn) if row is None else row.source
        # A function that a library jitted has no lines of the user's: where it is
        # called has one.
        return source or self._noted(self.sources, entry)


def sites_of(
    program: Program, places: Places, errors: Errors | None, roundoff: float
) -> tuple[Site, ...]:
    """Returns the sites of a program: forward, then backward, in its order.

    Args:
      program: it was run.
      places: of its equations.
      errors: of the forward sites; None if they are not known.
      roundoff: errors of operands count as no smaller than this.
    """
    found: list[tuple[tuple[bool, Path], Site]] = []
    for path, table in program.measure.tables.items():
        measured = program.statistics[path]
        if measured is None or not _number(measured.runs):
            continue
        made = dict(zip(table.makers, measured.made.tolist(), strict=True))
        nans = dict(zip(table.makers, measured.nans.tolist(), strict=True))
        for number, (where, entry) in enumerate(table.entries):
            rows = []
            for source in table.sources[number]:
                group, row = table.row[where, id(source.atom)]
                layout = table.groups[group][0]
                rows.append(_Row(measured, group, row, layout, source.times))
            never = int(NEVER)
            site = _site(
                entry,
                places,
                rows,
                _number(measured.runs),
                (made.get(number, never), nans.get(number, never)),
                _in_loop(program, where),
                _error_of(entry, errors, roundoff),
            )
            order = entry.direction != FORWARD, (*where, entry.index)
            found.append((order, site))
    return tuple(site for _, site in sorted(found, key=lambda each: each[0]))


def scaled_casts(program: Program, places: Places) -> tuple[Site, ...]:
    """Returns the sites of what the backward pass casts to f16, before the cast.

    A plan inserts these casts; the reference has none that they could be compared with.
    """
    found = []
    for path, table in program.measure.tables.items():
        measured = program.statistics[path]
        if measured is None or not _number(measured.runs):
            continue
        rows = [
            _Row(measured, group, row, layout, 1)
            for group, (layout, atoms) in enumerate(table.groups)
            for row in range(len(atoms))
        ]
        casts = zip(table.makers, table.reads, table.results, strict=True)
        for number, operands, results in casts:
            where, entry = table.entries[number]
            if is_scaled_cast(entry):
                # The operand may be a literal, which is not measured.
                of = [rows[place] for place in operands or results]
                runs, loop = _number(measured.runs), _in_loop(program, where)
                never = int(NEVER), int(NEVER)
                found.append(_site(entry, places, of, runs, never, loop, None))
    return tuple(found)


class _Row(Figures):
    """The figures of one value; those of what repeats it so many `times`.

    Attributes:
      bad: the first run in which not all of it was finite, or `NEVER`.
    """

    def __init__(
        self, measured: Measured, group: int, row: int, layout: Layout, times: int
    ):
        rows = measured.rows[group]
        low, high = (np.asarray(x[row], np.int64) for x in rows.counts)
        counts = (low + (high << 32)) * times
        super().__init__(counts, np.asarray(rows.extremes[row]), layout)
        self.bad = int(rows.bad[row])


def _site(
    entry: Entry,
    places: Places,
    rows: Sequence[_Row],
    runs: int,
    first_made: tuple[int, int],
    in_loop: bool,
    error: tuple[float, float] | None,
) -> Site:
    exponents: Counter[int] = Counter()
    for row in rows:
        exponents.update(row.exponents)
    never = int(NEVER)
    made, nan = first_made
    bad = next((x for x in first_made if x != never), min(row.bad for row in rows))
    first = aval_of(entry.results[0])
    amax = max(row.amax for row in rows)
    # A complex number is two.
    size = sum(
        math.prod(aval_of(v).shape) * (1 + (aval_of(v).dtype.kind == "c"))
        for v in entry.results
    )
    return Site(
        module=places.module_of(entry),
        operation=entry.operation,
        source=places.source_of(entry),
        direction=entry.direction,
        dtype=entry.format or short_name(first.dtype),
        shape=tuple(first.shape),
        size=size * runs,
        times=runs,
        amax=amax,
        amin=min((row.amin for row in rows if row.amin), default=0.0),
        zeros=sum(row.zeros for row in rows),
        nonfinite=sum(row.nonfinite for row in rows),
        turn=bad if in_loop and bad != never else None,
        exponents=dict(sorted(exponents.items())),
        error=None if error is None else error[0],
        amplification=None if error is None else error[1],
        makes_nonfinite=made != never,
        nans=sum(row.nans for row in rows),
        makes_nan=nan != never,
        path=places.path_of(entry),
        identity=str(entry.identity),
        scales=entry.scales,
        is_constant=is_written(amax, places.constants_of(entry)),
        reads_floats=any(map(jaxprs.is_floating, entry.eqn.invars)),
    )


def _error_of(
    entry: Entry, errors: Errors | None, roundoff: float
) -> tuple[float, float] | None:
    """Returns the error of a forward site, and its amplification."""
    key = tuple(entry.identity), entry.cast
    error = None if errors is None else errors.at(key)
    if errors is None or error is None or entry.direction != FORWARD:
        return None
    before = max(errors.of_operands(key), roundoff)
    amplified = 1.0 if math.isinf(before) else error / before
    return error, amplified


def _in_loop(program: Program, path: Path) -> bool:
    """Whether a body runs in the turns of a loop."""
    frames = program.frames
    return any(
        jaxprs.is_loop(frames[path[:end]].body.jaxpr.eqns[path[end]])
        for end in range(0, len(path), 2)
    )


def _number(count: Count) -> int:
    return int(count.low) + (int(count.high) << 32)
