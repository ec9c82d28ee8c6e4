"""What is read of a large program of the zoo as it is traced.

A program that is written by hand is known by the code of the zoo: its figures are kept,
see `tests/kept.py`. That of the library is traced.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
from benchmarks import compare_precision

from tests import kept, measures, zoo
from tests.zoo.case import Case


class Traced(NamedTuple):
    """A program, traced once.

    Attributes:
      products: without their sources, if they are kept.
      value: the text of its type.
      gradient: path and type of each leaf, as texts.
      saved_bytes: see `measures.Traced`.
    """

    products: list[compare_precision.Product]
    value: str
    gradient: list[list[str]]
    saved_bytes: int


def types_of(tree: Any) -> list[list[str]]:
    """Returns path and type of each leaf, as texts."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [[jax.tree_util.keystr(p), f"{x.dtype}{x.shape}"] for p, x in leaves]


@functools.cache
def traced(name: str, case: Case, dtype: str, program: str) -> Traced:
    """Returns what is read of value and gradient of a program."""
    if not zoo.is_by_hand(name, program):
        return _traced(case, dtype, program)

    def read(found: Traced) -> Any:
        return found._replace(products=counted(found.products))

    found = kept.outcome(
        f"traced {name} {dtype} {program}",
        lambda: _traced(case, dtype, program),
        read,
        [compare_precision, measures],
        sources=zoo.SOURCES,
        of_library=kept.nothing,
    )
    found = Traced(*found)
    return found._replace(products=each_of(found.products))


def _traced(case: Case, dtype: str, program: str) -> Traced:
    loss = compare_precision.program_loss(case, dtype, program)
    found = compare_precision.traced(loss, case)
    ((_, value),) = types_of(found.value)
    products = compare_precision.traced_products(found.jaxpr)
    return Traced(products, value, types_of(found.gradient), found.saved_bytes)


def counted(products: list[compare_precision.Product]) -> list[Any]:
    """Returns each kind of product once, with how many there are."""
    counts = Counter(p._replace(source="") for p in products)
    return sorted([*p[:3], n] for p, n in counts.items())


def each_of(counts: list[Any]) -> list[compare_precision.Product]:
    """Returns the products that were counted."""
    return [
        compare_precision.Product(kind, tuple(operands), tuple(elements), "")
        for kind, operands, elements, count in counts
        for _ in range(count)
    ]
