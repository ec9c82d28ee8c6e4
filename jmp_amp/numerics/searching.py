"""The search: moves that the flagged program proposes, and real programs confirm.

The flagged program tells the error of any choice of moves without another compilation.
From it comes the cheapest choice that is expected to meet the bound. A real program is
compiled for that choice, for wider ones until the bound holds, and then for each choice
that lacks one of its moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp_amp.numerics.groups import Group
from jmp_amp.numerics.measuring import Measured
from jmp_amp.numerics.moves import Choice, Menu, Move
from jmp_amp.policies.dtypes import F32
from jmp_amp.policies.policy_map import PolicyMap

# A choice of more moves is looked for among coarser ones: each of them costs a
# compilation at least, which is to show that it is needed.
MOST_MOVES = 12
# No more real programs are compiled to make a choice smaller.
MOST_COMPILATIONS = 38
_ATTEMPTS = 4


class Search:
    """A search for the cheapest map of policies that meets a bound.

    Attributes:
      menu: the moves.
      bound: of the gradient error.
      expected: the error that the flagged program has, for a level of each group.
      measured: what a real program measures.
      compilations: returns how many programs were compiled so far.
      sensitivity: the error that each group makes alone.
      steps: every map that was measured, in order.
      is_minimal: whether each move of the result was shown to be needed.
    """

    def __init__(
        self,
        menu: Menu,
        bound: float,
        expected: Callable[[tuple[int, ...]], float],
        measured: Callable[[PolicyMap], Measured],
        compilations: Callable[[], int],
        sensitivity: Mapping[Group, float],
    ):
        self.menu = menu
        self.bound = bound
        self.expected = expected
        self.measured = measured
        self.compilations = compilations
        self.sensitivity = sensitivity
        self.steps: dict[PolicyMap, Measured] = {}
        self.is_minimal = True
        self.dearest = len(menu.candidates)

    def real(self, policies: PolicyMap) -> float:
        """Returns the error of a real program."""
        self.steps[policies] = found = self.measured(policies)
        return found.error

    def meets(self, choice: Choice) -> bool:
        """Whether the real program of a choice meets the bound."""
        return self.real(self.menu.policies(choice)) <= self.bound

    def found(self) -> PolicyMap | None:
        """Returns a map that meets the bound, or None if there is none."""
        if self.real(self.menu.start) <= self.bound:
            return self.menu.start
        for tier in self._tiers():
            choice = self._within(tier)
            if choice is not None:
                return self.menu.policies(self._smaller(self._cheaper(choice)))
        for candidate in self.menu.candidates:
            whole = PolicyMap(candidate)
            if self.real(whole) <= self.bound:
                return whole
        return None

    def _tiers(self) -> list[tuple[Move, ...]]:
        """Returns the moves to try, the narrowest first.

        A parent whose own equations break the bound alone is among the first.
        """
        first, *wider = self.menu.tiers
        every = [move for tier in wider for move in tier if move not in first]
        guilty = {
            move: None
            for move in every
            for path in move.paths
            if path and self.sensitivity[Group(path)] > self.bound
        }
        return [(*first, *guilty), *wider]

    def _within(self, tier: Sequence[Move]) -> Choice | None:
        """Returns a choice among some moves whose real program meets the bound."""
        target = self.bound * self._optimism()
        # What a parent computes itself follows its children into f32, which the flagged
        # program does not see.
        floor = self.expected(self.menu.levels(self._all(tier)))
        for _ in range(_ATTEMPTS if math.isfinite(floor) else 0):
            reached = target if floor <= target else math.hypot(target, floor)
            choice = self.menu.joined(self._proposed(tier, reached))
            error = self.real(self.menu.policies(choice))
            if error <= self.bound:
                return choice
            missed = self.bound / error if math.isfinite(error) else 0.0
            target *= min(0.5, max(0.9 * missed, 0.1))
        coarse = self.menu.coarse(tier)
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

    def _proposed(self, tier: Sequence[Move], target: float) -> Choice:
        """Returns the cheapest choice expected to meet a target; all of them do."""
        fine = self._solved(tier, target)
        if len(self.menu.joined(fine)) <= MOST_MOVES:
            return fine
        return self._solved(self.menu.coarse(tier), target)

    def _solved(self, moves: Sequence[Move], target: float) -> Choice:
        def is_met(choice: Choice) -> bool:
            return self.expected(self.menu.levels(choice)) <= target

        orders = [
            sorted(moves, key=lambda move: -self._weight(move)),
            sorted(moves, key=lambda move: -self._weight(move) / (1 + move.flops)),
        ]
        return min(
            (self._solved_in(order, is_met) for order in orders),
            key=lambda choice: (sum(move.flops for move in choice), len(choice)),
        )

    def _solved_in(
        self, order: Sequence[Move], is_met: Callable[[Choice], bool]
    ) -> Choice:
        choice = self._all(self._prefix(order, is_met, ordered=True))
        for move in reversed([*choice]):
            if is_met(less := _without(choice, move)):
                choice = less
        for move in choice:
            for level in self._levels(move):
                if level < choice[move] and is_met(cheaper := {**choice, move: level}):
                    choice = cheaper
                    break
        return choice

    def _prefix(
        self,
        moves: Sequence[Move],
        is_met: Callable[[Choice], bool],
        ordered: bool = False,
    ) -> Sequence[Move]:
        """Returns the moves that weigh most, as few as meet the bound; all do."""
        if not ordered:
            moves = sorted(moves, key=lambda move: -self._weight(move))
        low, high = 0, len(moves)
        while low < high:
            middle = (low + high) // 2
            if is_met(self._all(moves[:middle])):
                high = middle
            else:
                low = middle + 1
        return moves[:high]

    def _cheaper(self, choice: Choice) -> Choice:
        """Returns a choice whose moves got cheaper candidates where that will do."""
        for move in choice:
            for level in self._levels(move):
                if level >= choice[move] or not self._may_compile():
                    break
                if self.meets(cheaper := {**choice, move: level}):
                    choice = cheaper
                    break
        return choice

    def _smaller(self, choice: Choice) -> Choice:
        """Returns a choice of which every move is needed, as real programs show."""
        needed: set[Move] = set()
        while unknown := [move for move in choice if move not in needed]:
            if not self._may_compile():
                self.is_minimal = False
                break
            move = min(unknown, key=self._weight)
            if self.meets(less := _without(choice, move)):
                choice, needed = less, set()
            else:
                needed.add(move)
        return choice

    def _may_compile(self) -> bool:
        return self.compilations() < MOST_COMPILATIONS

    def _all(self, moves: Iterable[Move]) -> dict[Move, int]:
        return {move: self._levels(move)[-1] for move in moves}

    def _levels(self, move: Move) -> list[int]:
        """Returns the candidates for a move, from cheap to dear."""
        if not move.name:
            return list(range(1, self.dearest + 1))
        dtypes = [each.compute_dtype for each in self.menu.candidates]
        return [dtypes.index(F32) + 1]

    def _weight(self, move: Move) -> float:
        """Returns the squared error that the groups of a move make alone."""
        alone = [self.sensitivity[g] ** 2 for g in move.reaches]
        return sum(alone)


def _without(choice: Choice, move: Move) -> dict[Move, int]:
    return {each: level for each, level in choice.items() if each != move}
