"""Moves: what a map of policies may say besides the one that it starts from.

A move gives another policy to modules, by path; or f32 to operations outside of
modules, by name; or another default to everything.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jmp_amp.numerics.tune.groups import Group, Member
from jmp_amp.plan.tables.operations import PRODUCTS
from jmp_amp.policies.dtypes import F32
from jmp_amp.policies.patterns import Pattern, matches_path
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap


@dataclasses.dataclass(frozen=True)
class Move:
    """One entry of a map, or one name of its default, without the policy.

    Attributes:
      pattern: what the map has in its place.
      reaches: the groups that it changes.
      flops: of their matrix products.
      paths: the modules that it names; empty for a name of the default.
      name: of a function or an operation that is to run in f32; "" for modules.
    """

    pattern: Pattern
    reaches: frozenset[Group]
    flops: int
    paths: frozenset[str] = frozenset()
    name: str = ""


# The number of a candidate for each move, from 1; 0 is the policy at the start.
Choice = Mapping[Move, int]


@dataclasses.dataclass(frozen=True)
class Menu:
    """The moves of a program.

    Attributes:
      start: the map that everything starts from.
      candidates: the policies that modules may get instead.
      groups: the groups of the program, by number.
      known: the paths that a glob might match: those of modules, and those above.
      leaves: the modules that contain no other group.
      outside: names of what is in no module but the outermost one.
      everywhere: names of the same, and of what the other modules compute themselves.
      parents: the modules that contain other groups, the deepest first.
      whole: the outermost module, if there is one.
    """

    start: PolicyMap
    candidates: tuple[Policy, ...]
    groups: tuple[Group, ...]
    known: frozenset[str]
    leaves: tuple[Move, ...]
    outside: tuple[Move, ...]
    everywhere: tuple[Move, ...]
    parents: tuple[Move, ...]
    whole: tuple[Move, ...]

    def levels(self, choice: Choice) -> tuple[int, ...]:
        """Returns the candidate that each group gets."""
        paths = {path: level for move, level in choice.items() for path in move.paths}
        named = {
            group: level
            for move, level in choice.items()
            if move.name
            for group in move.reaches
        }
        return tuple(named.get(g, 0) or _nearest(paths, g.path) for g in self.groups)

    def policies(self, choice: Choice) -> PolicyMap:
        """Returns the map that a choice of moves makes."""
        names = sorted(move.name for move in choice if move.name)
        default = self.start.default.with_full(*names)
        chosen = {
            move.pattern: self.candidates[level - 1]
            for move, level in choice.items()
            if not move.name
        }
        kept = [(p, each) for p, each in self.start.entries if p not in chosen]
        return PolicyMap(default, [*kept, *chosen.items()])

    def joined(self, choice: Choice) -> dict[Move, int]:
        """Returns the same choice with siblings joined into globs."""
        made = {move: level for move, level in choice.items() if move.name}
        for level in sorted({*choice.values()}):
            alike = [m for m in choice if choice[m] == level and not m.name]
            paths = {path: m for m in alike for path in m.paths}
            for pattern, members in _joined(paths, self.known):
                made[_together(pattern, [paths[each] for each in members])] = level
        return made

    def coarse(self, moves: Iterable[Move]) -> list[Move]:
        """Returns moves of which those of siblings are one."""
        return list(self.joined(dict.fromkeys(moves, 1)))

    def outermost(self, moves: Iterable[Move]) -> list[Move]:
        """Returns the moves that are in no other parent than the outermost module."""
        return [
            move
            for move in moves
            if not any(move.reaches < parent.reaches for parent in self.parents)
        ]


def menu_of(
    start: PolicyMap,
    candidates: Sequence[Policy],
    found: Sequence[Member],
    found_modules: Iterable[str],
    flops: Mapping[str, int],
) -> Menu:
    """Returns the moves of a program.

    `found` are the equations that its plan runs in half precision, `found_modules` the
    paths of all modules, and `flops` those of each equation, by identity.
    """
    paths = list(dict.fromkeys(each.group.path for each in found))
    leaves = {x for x in paths if x and not any(_is_below(each, x) for each in paths)}
    cost = Counter[Group]()
    for (path, name), identity in found:
        cost[Group(path, "" if path in leaves else name)] += flops.get(identity, 0)

    def move(pattern: Pattern, reached: Iterable[Group], **which: Any) -> Move:
        groups = frozenset(reached)
        return Move(pattern, groups, sum(cost[group] for group in groups), **which)

    def module(path: str) -> Move:
        reached = (g for g in cost if path in ("", g.path) or _is_below(g.path, path))
        return move(_literal(path), reached, paths=frozenset((path,)))

    def named(name: str, those: Iterable[Group]) -> Move:
        return move(name, (group for group in those if group.name == name), name=name)

    names = dict.fromkeys(group.name for group in cost)
    names = [x for x in names if _may_be_named(x, start.default, candidates)]
    known = {*found_modules, *filter(None, paths)}
    # A path has one slash more for each module around.
    parents = [path for path in paths if path and path not in leaves]
    parents.sort(key=lambda path: -path.count("/"))
    outside = [named(name, [g for g in cost if not g.path]) for name in names]
    return Menu(
        start=start,
        candidates=tuple(candidates),
        groups=tuple(cost),
        known=frozenset(known.union(*map(_around, known))),
        leaves=tuple(module(path) for path in paths if path in leaves),
        outside=tuple(each for each in outside if each.reaches),
        # A product by name is one in every module.
        everywhere=tuple(
            named(x, cost) for x in names if x not in PRODUCTS or not any(paths)
        ),
        parents=tuple(map(module, parents)),
        whole=(module(""),) if "" in known else (),
    )


def _around(path: str) -> list[str]:
    """Returns the paths of the modules around one."""
    names = path.split("/")
    return ["/".join(names[:end]) for end in range(1, len(names))]


def _may_be_named(name: str, default: Policy, candidates: Sequence[Policy]) -> bool:
    """Whether a name may get f32: the user has not given it a class."""
    if all(each.compute_dtype != F32 for each in candidates):
        return False
    spelled = name.replace("-", "_")
    taken = default.low | default.follow | default.full
    return spelled.isidentifier() and spelled not in taken


def _together(pattern: Pattern, moves: Sequence[Move]) -> Move:
    if len(moves) == 1:
        return moves[0]
    reached = frozenset().union(*(move.reaches for move in moves))
    paths = frozenset().union(*(move.paths for move in moves))
    return Move(pattern, reached, sum(move.flops for move in moves), paths)


def _joined(
    paths: Iterable[str], known: Iterable[str]
) -> list[tuple[Pattern, list[str]]]:
    """Returns patterns and the paths that they match; each path is in one.

    A glob stands for several paths only if it matches exactly those of them.
    """
    remaining = list(paths)
    deepest = max((path.count("/") for path in remaining), default=0)
    found: list[tuple[Pattern, list[str]]] = []
    for place in (None, *range(deepest + 1)):
        alike: dict[str, list[str]] = {}
        for path in remaining:
            alike.setdefault(_generalised(path, place), []).append(path)
        for glob, members in alike.items():
            matched = {each for each in known if matches_path(each, glob)}
            if len(members) > 1 and matched == set(members):
                found.append((glob, members))
                remaining = [path for path in remaining if path not in matched]
    return found + [(_literal(path), [path]) for path in remaining]


def _generalised(path: str, place: int | None) -> str:
    """Returns a glob with `*` for the numbers in a path, or in one of its names."""
    return "/".join(
        re.sub(r"\d+", "*", name) if place in (None, i) else name
        for i, name in enumerate(map(_escaped, path.split("/")))
    )


def _escaped(name: str) -> str:
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def _literal(path: str) -> Pattern:
    """Returns a pattern that matches one path."""
    if ";" in path or path.startswith("<") or path != path.strip():
        return re.compile(re.escape(path))
    return "/".join(map(_escaped, path.split("/")))


def _nearest(levels: Mapping[str, int], path: str) -> int:
    """Returns the level of a module, or of the nearest one around it."""
    while path not in levels and path:
        path = path.rpartition("/")[0]
    return levels.get(path, 0)


def _is_below(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}/")
