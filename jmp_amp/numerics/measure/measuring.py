"""Measures the sites of a program while it runs, and tells what was measured.

`Measure` is an observer: its statistic of a body has one row for every value that is
measured there. A value that only moves another one, or repeats it, is not measured
again: its site reads the row of the other, as often as it repeats it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmp_amp.numerics.locate.frames import Entry, Frame, Path
from jmp_amp.numerics.measure import statistics
from jmp_amp.numerics.measure.statistics import Counted, Layout, Worst, layout_of
from jmp_amp.numerics.measure.watch import Run, bodies_inside
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Var, aval_of
from jmp_amp.plan.tables.operations import Also, named
from jmp_amp.policies.dtypes import F16

# Operations whose results have the magnitudes of their operand.
MOVES = named(Also.ONE_EACH)
# Operations whose results a mutable array held before: others made them.
_HELD = frozenset("get swap freeze".split())


class Count(NamedTuple):
    """An integer of 64 bits in two of 32, which jax has without x64."""

    low: jax.Array
    high: jax.Array

    @classmethod
    def of(cls, value: jax.Array) -> Count:
        low = value.astype(jnp.uint32)
        return cls(low, jnp.zeros_like(low))

    def plus(self, other: Count) -> Count:
        low = self.low + other.low
        carry = (low < self.low).astype(jnp.uint32)
        return Count(low, self.high + other.high + carry)

    def numbers(self) -> np.ndarray:
        """Returns int64 of numpy."""
        low, high = (np.asarray(each, np.int64) for each in self)
        return low + (high << 32)

    def across(self, axes: Sequence[str]) -> Count:
        """Returns the sum over shards."""
        # In 16 bits each, so that no sum of 2**16 shards wraps.
        half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
        lower = jax.lax.psum(self.low & mask, axes)
        upper = jax.lax.psum(self.low >> half, axes)
        high = jax.lax.psum(self.high, axes)
        low = lower + (upper << half)
        carried = (low < lower).astype(jnp.uint32)
        return Count(low, high + (upper >> half) + carried)


# The number of a run that never was.
NEVER = np.uint32(0xFFFFFFFF)


class Measured(NamedTuple):
    """The statistic of a body.

    Attributes:
      counts: for each layout, those of `statistics.Counted`, of all runs.
      extremes: as there.
      bad: uint32[n]: for each value that is counted, the first run in which not all of
        it was finite, or `NEVER`.
      made: uint32[m]: for each site that makes something, the first run in which its
        operands were finite and its results not, or `NEVER`.
      nans: uint32[m]: the first run in which its results held NaN and its operands, at
        worst, infinities, or `NEVER`.
      runs: how often the body ran, on all shards.
      turns: how often it ran on one shard.
    """

    counts: tuple[Count, ...]
    extremes: tuple[jax.Array, ...]
    bad: jax.Array
    made: jax.Array
    nans: jax.Array
    runs: Count
    turns: Count


# A value: the way to its body, and what the body calls it.
_Value = tuple[Path, Atom]
_Key = tuple[Path, int]
# Where a value is measured: among all rows of a body.
_Position = int


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What is measured in a body.

    Attributes:
      entries: the sites, each with the way to the body that it is in.
      groups: for each layout, the values that are counted: results, and what a cast of
        the backward pass reads. Each has a row.
      others: operands from outside: only whether they are finite is of interest. Their
        rows come last.
      sources: for each site, where the values are whose statistics its results have,
        and how many times over.
      makers: the sites that make something, those that do more than move: where their
        operands are.
    """

    entries: Sequence[tuple[Path, Entry]]
    groups: Sequence[tuple[Layout, Sequence[_Value]]]
    others: Sequence[_Value]
    sources: Sequence[Sequence[tuple[_Position, int]]]
    makers: dict[int, list[_Position]]


class Measure:
    """An observer that measures the sites of a program.

    Attributes:
      tables: what to measure in each body that is seen, see `watch.bodies_inside`.
      mesh: of the devices that the program runs on, see `meshes.mesh_of`.
    """

    def __init__(self, frames: Mapping[Path, Frame], mesh: Mesh | None):
        self.frames, self.mesh = frames, mesh
        self.tables: dict[Path, Table] = {}
        seen: set[Path] = set()
        for path, frame in frames.items():
            if path not in seen:
                inside = bodies_inside(frame.body, path)
                seen.update(inside)
                here = {p: frames[p] for p in inside if p in frames}
                if (table := _table(here)).entries:
                    self.tables[path] = table

    @property
    def size(self) -> int:
        """How many values are measured, those of a `while` in one turn."""
        return sum(
            self.frames[path].place.turns * math.prod(aval_of(atom).shape)
            for table in self.tables.values()
            for _, atoms in table.groups
            for path, atom in atoms
        )

    def skips(self, path: Path, index: int) -> bool:
        return path in self.frames and index in self.frames[path].repeated

    def nothing(self, path: Path) -> Measured | None:
        if (table := self.tables.get(path)) is None:
            return None
        found = [statistics.none_counted(len(x), layout) for layout, x in table.groups]
        bad = jnp.full(sum(len(atoms) for _, atoms in table.groups), NEVER, jnp.uint32)
        made = jnp.full(len(table.makers), NEVER, jnp.uint32)
        return _measured(found, bad, made, made, 0)

    def seen(self, path: Path, run: Run) -> Measured | None:
        if (table := self.tables.get(path)) is None:
            return None

        def read(measured: _Value) -> jax.Array:
            where, atom = measured
            value = atom.val if isinstance(atom, Literal) else run[where][atom]
            return jnp.asarray(value, aval_of(atom).dtype)

        def first(is_now: jax.Array) -> jax.Array:
            return jnp.where(is_now, jnp.uint32(0), NEVER)

        found = [
            statistics.counted(list(map(read, atoms)), layout, self.mesh)
            for layout, atoms in table.groups
        ]
        pairs = zip(found, table.groups, strict=True)
        worst = [statistics.worst_counted(x.counts, layout) for x, (layout, _) in pairs]
        none = jnp.zeros(1, jnp.int32)
        bad = first(jnp.concatenate([none, *worst])[1:] > Worst.FINITE)
        worst.append(statistics.worst_of(list(map(read, table.others)), self.mesh))
        worst = jnp.concatenate([*worst, none])
        made = nans = jnp.zeros(0, jnp.uint32)
        if table.makers:
            results = [[at for at, _ in table.sources[i]] for i in table.makers]
            before, after = (
                worst[_matrix(each, len(worst) - 1)].max(axis=1)
                for each in ([*table.makers.values()], results)
            )
            made = first((after > Worst.FINITE) & (before == Worst.FINITE))
            nans = first((after == Worst.NAN) & (before < Worst.NAN))
        return _measured(found, bad, made, nans, 1)

    def merged(self, before: Measured, after: Measured) -> Measured:
        def first(a: jax.Array, b: jax.Array) -> jax.Array:
            later = jnp.where(b == NEVER, NEVER, b + before.turns.low)
            return jnp.where(a == NEVER, later, a)

        return Measured(
            tuple(map(Count.plus, before.counts, after.counts)),
            tuple(map(jnp.maximum, before.extremes, after.extremes)),
            first(before.bad, after.bad),
            first(before.made, after.made),
            first(before.nans, after.nans),
            before.runs.plus(after.runs),
            before.turns.plus(after.turns),
        )

    def across(self, statistic: Measured, axes: Sequence[str]) -> Measured:
        counts = tuple(each.across(axes) for each in statistic.counts)
        extremes, turns = jax.lax.pmax((statistic.extremes, statistic.turns), axes)
        firsts = statistic.bad, statistic.made, statistic.nans
        bad, made, nans = jax.lax.pmin(firsts, axes)
        runs = statistic.runs.across(axes)
        return Measured(counts, extremes, bad, made, nans, runs, turns)


def _measured(
    found: Sequence[Counted],
    bad: jax.Array,
    made: jax.Array,
    nans: jax.Array,
    runs: int,
) -> Measured:
    counts = tuple(Count.of(each.counts) for each in found)
    extremes = tuple(each.extremes for each in found)
    often = Count.of(jnp.full((), runs, jnp.uint32))
    return Measured(counts, extremes, bad, made, nans, often, often)


def _matrix(reads: Sequence[Sequence[int]], nothing: int) -> np.ndarray:
    """Returns positions in rows of one length, filled up with that of `nothing`."""
    columns = [*itertools.zip_longest(*reads, fillvalue=nothing)] or [
        [nothing] * len(reads)
    ]
    return np.asarray(columns, np.int32).T


def _table(frames: Mapping[Path, Frame]) -> Table:
    """Returns what to measure in a body and in those that are seen with it."""
    entries = [(path, each) for path, frame in frames.items() for each in frame.entries]
    makers_of = {
        path: {v: eqn for eqn in frame.body.jaxpr.eqns for v in eqn.outvars}
        for path, frame in frames.items()
    }

    def sources(path: Path, atoms: Iterable[Atom]) -> list[tuple[_Value, int]]:
        found = (_source(atom, makers_of[path]) for atom in atoms)
        return [((path, atom), times) for atom, times in found]

    results = [sources(path, entry.results) for path, entry in entries]
    operands: dict[int, list[_Value]] = {}
    for number, (path, entry) in enumerate(entries):
        own = {id(atom) for (_, atom), _ in results[number]}
        if entry.operation not in _HELD and own.intersection(map(id, entry.results)):
            read = (value for value, _ in sources(path, entry.operands))
            operands[number] = [each for each in read if not _is_finite(each[1])]
    wanted = [value for each in results for value, _ in each]
    for number, read in operands.items():
        if is_scaled_cast(entries[number][1]):
            wanted += read
    groups: dict[Layout, dict[_Key, _Value]] = {}
    for value in wanted:
        group = groups.setdefault(layout_of(aval_of(value[1]).dtype), {})
        group.setdefault(_key(value), value)
    counted = {key for group in groups.values() for key in group}
    read_alone = {_key(x): x for read in operands.values() for x in read}
    others = {key: x for key, x in read_alone.items() if key not in counted}
    keys = [*itertools.chain(*groups.values(), others)]
    position = {key: index for index, key in enumerate(keys)}
    return Table(
        entries,
        [(layout, [*group.values()]) for layout, group in groups.items()],
        [*others.values()],
        [[(position[_key(x)], times) for x, times in each] for each in results],
        {number: [position[_key(x)] for x in operands[number]] for number in operands},
    )


def _key(value: _Value) -> _Key:
    path, atom = value
    return path, id(atom)  # a literal has no hash


def is_scaled_cast(entry: Entry) -> bool:
    """Whether a site casts to f16 what a loss scale multiplies."""
    is_cast = entry.scales and jaxprs.is_conversion(entry.at.eqn)
    return is_cast and aval_of(entry.results[0]).dtype == F16


def _is_finite(atom: Atom) -> bool:
    return isinstance(atom, Literal) and bool(np.isfinite(atom.val).all())


def _source(atom: Atom, makers: Mapping[Var, Eqn]) -> tuple[Atom, int]:
    """Returns what `atom` moves or repeats, else itself, and how many times over."""
    times = 1
    while not isinstance(atom, Literal) and atom in makers:
        eqn = makers[atom]
        if len(eqn.invars) != 1 or not jaxprs.is_floating(eqn.invars[0]):
            break
        (operand,) = eqn.invars
        if eqn.primitive.name == "broadcast_in_dim":
            size = math.prod(aval_of(operand).shape)
            times *= math.prod(aval_of(atom).shape) // size if size else 0
        elif eqn.primitive.name == "convert_element_type":
            held, wanted = aval_of(operand).dtype, aval_of(atom).dtype
            if not np.can_cast(held, wanted) or layout_of(held) != layout_of(wanted):
                break
            if wanted.kind == "c" != held.kind:
                break  # a complex number is two
        elif eqn.primitive.name not in MOVES or jnp.issubdtype(
            aval_of(operand).dtype, jnp.complexfloating
        ):
            break
        if times == 0:
            break
        atom = operand
    return atom, times
