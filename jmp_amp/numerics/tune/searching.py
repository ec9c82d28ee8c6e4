"""The search: moves that the flagged program proposes, and real programs confirm.

The flagged program tells the error of any choice of moves without another compilation.
From it comes the cheapest choice that is expected to meet the bound. A real program is
compiled for that choice, for wider ones until the bound holds, and then for each choice
that lacks one of its moves.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp_amp.numerics.tune.groups import Group
from jmp_amp.numerics.tune.moves import Choice, Menu, Move
from jmp_amp.numerics.tune.tuning import Step
from jmp_amp.policies.dtypes import F32
from jmp_amp.policies.policy_map import PolicyMap

# A choice of more moves is looked for among coarser ones: each of them costs a
# compilation at least, which is to show that it is needed.
MOST_MOVES = 16
# No more real programs are compiled to make a choice smaller.
MOST_COMPILATIONS = 38
_ATTEMPTS = 6
# What is expected to miss the bound so many times is not compiled.
_HOPELESS = 3


@dataclasses.dataclass(eq=False)
class Search:
    """A search for the cheapest map of policies that meets a bound.

    Attributes:
      bound: of the gradient error.
      expected: the error that the flagged program has, for a level of each group.
      measured: what a real program measures.
      compilations: returns how many programs were compiled so far.
      sensitivity: the error that each group makes alone.
      steps: every map that was measured, in order.
      is_minimal: whether each move of the result was shown to be needed.
    """

    menu: Menu
    bound: float
    expected: Callable[[tuple[int, ...]], float]
    measured: Callable[[PolicyMap], Step]
    compilations: Callable[[], int]
    sensitivity: Mapping[Group, float]
    steps: dict[PolicyMap, Step] = dataclasses.field(default_factory=dict)
    is_minimal: bool = True

    def real(self, policies: PolicyMap) -> float:
        """Returns the error of a real program, compiled once for each map."""
        if policies not in self.steps:
            self.steps[policies] = self.measured(policies)
        return self.steps[policies].error

    def meets(self, choice: Choice) -> bool:
        """Whether the real program of a choice meets the bound."""
        return self.real(self.menu.policies(choice)) <= self.bound

    def found(self) -> PolicyMap | None:
        """Returns a map that meets the bound, or None if there is none."""
        if self.real(self.menu.start) <= self.bound:
            return self.menu.start
        tiers = self._tiers()
        for attempt in (self._proposed_by_flags, self._widest):
            for tier in tiers:
                choice = attempt(tier)
                if choice is not None:
                    return self.menu.policies(self._smaller(self._cheaper(choice)))
        for candidate in self.menu.candidates:
            whole = PolicyMap(candidate)
            if self.real(whole) <= self.bound:
                return whole
        return None

    def _tiers(self) -> list[list[Move]]:
        """Returns the moves to try, the narrowest first.

        Modules that contain no other come first. An entry for a parent reaches all that
        is in it, so what parents compute themselves gets f32 by the names of the
        operations, which cost no product. But a parent that breaks the bound alone has
        a fault of its own: it gets an entry.
        """
        menu = self.menu
        guilty = [
            move
            for move in menu.parents
            if self._weight_of(g for g in move.reaches if g.path in move.paths)
            > self.bound**2
        ]
        names = menu.outside if guilty else menu.everywhere
        wider = [*menu.leaves, *names, *menu.parents]
        return [[*menu.leaves, *names, *guilty], wider, [*wider, *menu.whole]]

    def _proposed_by_flags(self, tier: Sequence[Move]) -> Choice | None:
        """Returns the first choice of the flagged program that a real one confirms."""
        target = self.bound * self._optimism()
        for _ in range(_ATTEMPTS):
            if self._expected(self._all(tier)) > target:
                break
            choice = self._proposed(tier, target)
            error = self.real(self.menu.policies(choice))
            if error <= self.bound:
                return choice
            missed = self.bound / error if math.isfinite(error) else 0.0
            target *= min(0.9, max(0.95 * missed, 0.1))
        return None

    def _widest(self, tier: Sequence[Move]) -> Choice | None:
        """Returns a choice that only real programs were asked for."""
        coarse = sorted(self.menu.coarse(tier), key=lambda move: -self._weight(move))
        if not coarse or not self.meets(self._all(coarse)):
            return None
        return self._all(self._prefix(coarse, self.meets))

    def _optimism(self) -> float:
        """Returns how much less error the flagged program makes, 1.0 if not less."""
        real = self.real(self.menu.start)
        expected = self.expected((0,) * len(self.menu.groups))
        if not (math.isfinite(real) and math.isfinite(expected)):
            return 1.0
        return min(1.0, expected / real)

    def _expected(self, choice: Choice) -> float:
        return self.expected(self.menu.levels(choice))

    def _proposed(self, tier: Sequence[Move], target: float) -> Choice:
        """Returns a cheap choice expected to meet a target; all of a tier do."""
        fine = self.menu.joined(self._solved(tier, target))
        if len(fine) <= MOST_MOVES:
            return fine
        proposed = [fine]
        outermost = self.menu.outermost(tier)
        for moves in (outermost, self.menu.coarse(tier), self.menu.coarse(outermost)):
            if self._expected(self._all(moves)) <= target:
                proposed.append(self.menu.joined(self._solved(moves, target)))
        return min(
            proposed, key=lambda choice: (len(choice) > MOST_MOVES, self._cost(choice))
        )

    def _solved(self, moves: Sequence[Move], target: float) -> Choice:
        """Returns a cheap choice of moves expected to meet a target; all of them do."""
        orders = [
            sorted(moves, key=lambda move: -self._weight(move)),
            sorted(moves, key=lambda move: -self._weight(move) / (1 + move.flops)),
        ]
        return min((self._solved_in(order, target) for order in orders), key=self._cost)

    def _solved_in(self, order: Sequence[Move], target: float) -> Choice:
        def is_met(choice: Choice) -> bool:
            return self._expected(choice) <= target

        choice: Choice = self._all(self._prefix(order, is_met))
        choice = self._pruned(choice, target)
        for outer in sorted(choice, key=lambda move: -len(move.reaches)):
            inner = [move for move in order if move.reaches < outer.reaches]
            if inner and is_met(swapped := _without(choice, outer) | self._all(inner)):
                choice = self._pruned(swapped, target)
        for move in choice:
            for level in self._levels(move):
                if level < choice[move] and is_met(cheaper := {**choice, move: level}):
                    choice = cheaper
                    break
        return choice

    def _pruned(self, choice: Choice, target: float) -> Choice:
        """Returns a choice without the moves that are not needed, the last ones first.

        Errors of groups add up as squares. A move whose groups make far more error than
        there is room for is not tried.
        """
        error = self._expected(choice)
        for move in reversed([*choice]):
            less = _without(choice, move)
            room = target**2 - error**2
            # The groups that no move of the others reaches.
            left = move.reaches.difference(*(each.reaches for each in less))
            if self._weight_of(left) > 4 * room:
                continue
            if (of_less := self._expected(less)) <= target:
                choice, error = less, of_less
        return choice

    def _prefix(
        self, moves: Sequence[Move], is_met: Callable[[Choice], bool]
    ) -> Sequence[Move]:
        """Returns the first of some moves, as few as meet the bound; all of them do."""
        counts = range(len(moves))
        met = bisect_left(counts, True, key=lambda n: is_met(self._all(moves[:n])))
        return moves[:met]

    def _cheaper(self, choice: Choice) -> Choice:
        """Returns a choice whose moves got cheaper candidates where that will do."""
        for move in choice:
            for level in self._levels(move):
                cheaper = {**choice, move: level}
                if level >= choice[move] or not self._may_compile():
                    break
                is_hopeless = self._expected(cheaper) > _HOPELESS * self.bound
                if not is_hopeless and self.meets(cheaper):
                    choice = cheaper
                    break
        return choice

    def _smaller(self, choice: Choice) -> Choice:
        """Returns a choice of which every move is needed, as real programs show."""
        # For each move, after how many others were dropped it was last tried without.
        tried: dict[Move, int] = {}
        drops = 0
        while left := [move for move in choice if tried.get(move, -1) < drops]:
            if not self._may_compile():
                self.is_minimal = False
                break
            move = min(left, key=lambda each: (tried.get(each, -1), self._weight(each)))
            if self.meets(less := _without(choice, move)):
                choice, drops = less, drops + 1
            else:
                tried[move] = drops
        return choice

    def _cost(self, choice: Choice) -> tuple[int, int]:
        """Returns the products that leave half precision, and the number of moves."""
        dtypes = [each.compute_dtype for each in self.menu.candidates]
        lost = [move.flops for move in choice if dtypes[choice[move] - 1] == F32]
        return sum(lost), len(choice)

    def _may_compile(self) -> bool:
        return self.compilations() < MOST_COMPILATIONS

    def _all(self, moves: Iterable[Move]) -> dict[Move, int]:
        return {move: self._levels(move)[-1] for move in moves}

    def _levels(self, move: Move) -> list[int]:
        """Returns the candidates for a move, from cheap to dear."""
        dtypes = [each.compute_dtype for each in self.menu.candidates]
        if move.name:
            return [dtypes.index(F32) + 1]
        return list(range(1, len(dtypes) + 1))

    def _weight(self, move: Move) -> float:
        """Returns the squared error that the groups of a move make alone."""
        return self._weight_of(move.reaches)

    def _weight_of(self, groups: Iterable[Group]) -> float:
        return sum(self.sensitivity[group] ** 2 for group in groups)


def _without(choice: Choice, move: Move) -> dict[Move, int]:
    return {each: level for each, level in choice.items() if each != move}
