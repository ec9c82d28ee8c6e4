"""What is read of a large program of the zoo as it is traced."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from benchmarks import compare_precision

from tests.zoo.case import Case


class Traced(NamedTuple):
    """A program, traced once.

    Attributes:
      products: matrix products and convolutions.
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
def traced(case: Case, dtype: str, program: str) -> Traced:
    """Returns what is read of value and gradient of a program."""
    loss = compare_precision.program_loss(case, dtype, program)
    found = compare_precision.traced(loss, case)
    ((_, value),) = types_of(found.value)
    products = compare_precision.traced_products(found.jaxpr)
    return Traced(products, value, types_of(found.gradient), found.saved_bytes)
