"""A tree of modules as rows: equal siblings, the layers of a model, are one row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jmp_amp.reports.rows import Costs

# Two layers are two rows.
_FEWEST = 3


class Row(NamedTuple):
    """A module, or several that are equal, in a table.

    Attributes:
      depth: the number of modules around it.
      name: of the module; of several "block_0 .. block_11 (12x)".
      costs: its sums, or those of all; None if it has none of its own.
    """

    depth: int
    name: str
    costs: Costs | None


class _Node(NamedTuple):
    name: str
    costs: Costs | None
    inside: tuple[_Node, ...]

    def times(self, count: int) -> _Node:
        costs = self.costs and Costs(*(count * each for each in self.costs))
        return _Node(self.name, costs, tuple(x.times(count) for x in self.inside))


def folded(modules: Mapping[str, Costs]) -> list[Row]:
    """Returns the rows of a table of modules: parents first, in their order.

    Siblings fold if their names differ in the number at the end, their sums are equal,
    and so is all that is inside.

    Args:
      modules: the sums of each, by its path.
    """
    costly = {path: costs for path, costs in modules.items() if any(costs)}
    return list(_rows(_nodes(costly), 0))


def flat(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields the rows that have sums, each with its whole path as its name.

    Args:
      rows: of a tree, as `folded` returns them.
    """
    around: list[str] = []
    for depth, name, costs in rows:
        around[depth:] = [name]
        if costs is not None and any(costs):
            yield Row(0, "/".join(around), costs)


def _nodes(modules: Mapping[str, Costs]) -> tuple[_Node, ...]:
    """Returns the modules of a level, each with what is inside of it."""
    inside: dict[str, dict[str, Costs]] = {}
    for path, costs in modules.items():
        name, _, rest = path.partition("/")
        inside.setdefault(name, {})[rest] = costs
    return _folded(
        [_Node(name, x.pop("", None), _nodes(x)) for name, x in inside.items()]
    )


def _folded(nodes: list[_Node]) -> tuple[_Node, ...]:
    """Returns siblings with one in the place of several that are equal."""
    runs: dict[tuple[str, Costs | None, tuple[_Node, ...]], list[list[int]]] = {}
    numbers = {}
    for place, node in enumerate(nodes):
        if (found := re.fullmatch(r"(.*?)(\d+)", node.name)) is None:
            continue
        numbers[place] = int(found[2])
        alike = runs.setdefault((found[1], node.costs, node.inside), [[]])
        if alike[-1] and numbers[alike[-1][-1]] + 1 != numbers[place]:
            alike.append([])
        alike[-1].append(place)
    kept = dict(enumerate(nodes))
    for run in (run for alike in runs.values() for run in alike):
        if len(run) >= _FEWEST:
            first, last = nodes[run[0]], nodes[run[-1]]
            name = f"{first.name} .. {last.name} ({len(run)}x)"
            kept[run[0]] = first.times(len(run))._replace(name=name)
            for place in run[1:]:
                del kept[place]
    return tuple(kept.values())


def _rows(nodes: Iterable[_Node], depth: int) -> Iterable[Row]:
    for node in nodes:
        yield Row(depth, node.name, node.costs)
        yield from _rows(node.inside, depth + 1)
