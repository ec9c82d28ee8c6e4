"""Pairs: a value under the policy and as it is, and where it may come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jmp_amp.numerics.measure.distances import Distance
from jmp_amp.plan.program.jaxprs import Value

# Which site: the identity of an equation, and which of its inserted casts.
Key = tuple[tuple[int, ...], str | None]
Keys = tuple[Key, ...]
# Values under the policy, and as they are: what a body of JAX takes and returns.
Values = tuple[list[Value], list[Value]]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value under the policy, as it is, and the sites that it may come from."""

    low: Value
    full: Value
    made: Keys = ()


class Frame(NamedTuple):
    """One run of a body: its results, the distances in it, and whose they are."""

    results: list[Pair]
    distances: list[Distance]
    keys: list[Keys]

    @property
    def origins(self) -> Origins:
        return Origins(self.keys, [pair.made for pair in self.results])


class Origins(NamedTuple):
    """What is known of a run when its trace has ended, and its values are gone.

    Attributes:
      keys: whose the distances are.
      made: for each result, the sites that it may come from.
    """

    keys: list[Keys]
    made: list[Keys]


def apart(pairs: Sequence[Pair]) -> Values:
    """Returns the values of pairs; where they come from is not traced."""
    return [pair.low for pair in pairs], [pair.full for pair in pairs]


def paired(values: Values, made: Sequence[Keys] | None = None) -> list[Pair]:
    """Returns values as pairs that come from the sites `made`."""
    low, full = values
    made = [()] * len(low) if made is None else made
    return [Pair(*each) for each in zip(low, full, made, strict=True)]


def united(keys: Sequence[Keys]) -> Keys:
    """Returns all keys of several tuples, each once, in their order."""
    return tuple(dict.fromkeys(key for each in keys for key in each))
