"""What the plan knows of a value, in words: one sentence for each trait and each bit.

The plan keeps these as an enumeration, `Trait`, and as the bits of `Made` and `Ends`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jmp_amp.plan.dataflow.ends import Ends
from jmp_amp.plan.dataflow.facts import Made
from jmp_amp.plan.dataflow.values import Origin, Trait

ORIGINS = {
    Origin.FREE: "made of arguments and constants alone",
    Origin.LOW: "made in half",
    Origin.FULL: "made in f32",
}
TRAITS = {
    Trait.PARAMETER: "it is an argument, or an argument moved around",
    Trait.LOOKED_UP: "it holds rows of a table, or is made of them",
    Trait.SLICE: "each turn of a loop has another one",
    Trait.SUMS_ARGUMENT: "an argument is a term of it",
    Trait.CARRIED: "a loop keeps it in f32 over its turns",
    Trait.OVERSIZED: "it holds a constant that half has no place for",
    Trait.SOLUTION: "it is a solution of linear algebra or made of one: terms cancel",
    Trait.SHARED: "it has several readers",
    Trait.SAVED_IN_F32: "the backward pass keeps it in f32, whatever reads it",
    Trait.JOINS_STREAM: "a value that the backward pass keeps in f32 joins a half one",
    Trait.BETWEEN: "it is f32, of half values, between products",
    Trait.BIASED: "it is a product and its bias",
    Trait.PINNED: "a pin keeps it in f32, or what it is made of",
    Trait.TANGENT: "it is made of a tangent of a derivative rule",
}
MADE = {
    Made.SOLUTION: "it is a solution of a linear system, or a product with one",
    Made.SQUARE: "a value times itself is in it",
    Made.TIMES: "a value times another one is in it",
    Made.SQUARES: "a sum of squares is in it",
    Made.SUM: "a sum of elements is in it",
    Made.PRODUCT: "a sum of products is in it",
    Made.MOMENT: "a second moment is in it: a value summed against itself",
    Made.MIXED_MOMENT: "a sum of products of values that were multiplied is in it",
    Made.SQUARED_MEAN: "the square of a sum or of a product is in it",
    Made.TWO_TOTALS: "two sums or products, multiplied, are in it",
    Made.TWO_SUMS: "two sums, multiplied, are in it",
    Made.REDUCED: "a reduction made it",
    Made.SUM_OR_TERM: "it is a reduction, or a sum of one and another value",
    Made.NORMALIZER: "it is the factor of a norm",
    Made.NORMALIZED: "the factor of a norm scales it",
    Made.BROADCAST: "it is a smaller value, broadcast",
}
ENDS = {
    Ends.INDEX: "it becomes an index",
    Ends.SOLVED: "linear algebra reads it, which makes errors larger",
    Ends.FACTOR: "a product that leads to linear algebra reads it",
    Ends.STREAM: "a layer that does not lead to linear algebra reads it",
    Ends.DISTANCE: "it is a term beside a sum of squares, as in a distance",
    Ends.MOMENT: "it is a term beside squared means, or their factor",
}


def words_of(bits: int, table: Mapping[int, str]) -> list[str]:
    """Returns the sentences of the bits of a set."""
    return [words for bit, words in table.items() if bits & bit]


def words_of_traits(traits: Iterable[Trait]) -> list[str]:
    """Returns the sentences of traits, in the order of the table."""
    found = frozenset(traits)
    return [words for trait, words in TRAITS.items() if trait in found]
