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
Values = list[tuple[Value, Value]]


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


def apart(pairs: Sequence[Pair]) -> Values:
    """Returns the values of pairs; where they come from is not traced."""
    return [(pair.low, pair.full) for pair in pairs]


def paired(values: Sequence[tuple[Value, Value]], made: Sequence[Keys]) -> list[Pair]:
    """Returns values as pairs that come from the sites `made`."""
    return [Pair(*each, keys) for each, keys in zip(values, made, strict=True)]


def united(keys: Sequence[Keys]) -> Keys:
    """Returns all keys of several tuples, each once, in their order."""
    return tuple(dict.fromkeys(key for each in keys for key in each))
