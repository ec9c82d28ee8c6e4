"""A row of the table: a program, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tests.rounding import ROUNDINGS, mean_square

TAGS = {
    "forward": "a loop of unknown length: JAX has its derivatives in forward mode only",
    "value": "no derivative is asked of it",
    "inside": "its gradient is taken inside of autocast too, and that along a line",
    "slow inside": "another row shows fast what its derivatives inside are",
    "half": "all its matrix products are half, and those of its derivative",
    "some half": "it computes something as traced, and has a product in half beside it",
    "own rule": "a `custom_vjp`: its rule is in the program, and is called",
    "f32 algebra": "a routine of linear algebra, which has no half precision",
    "once": "autocast twice is autocast once",
    "mapped": "`vmap` and `linearize` go through it",
    "transformed": "all transformations of JAX go through it, from either side",
    "slow": "it compiles for seconds, or another row shows fast what it shows",
    "slow transformations": "another row shows fast what transformations do to it",
}


class Row(NamedTuple):
    """A program of the table.

    Attributes:
      fn: a function of the weights, 16 by 16, to arrays; or to a loss, a scalar.
      tags: what is known of it, of `TAGS`.
      roundings: how many roundings of half precision its results may differ by.
    """

    fn: Callable[[jax.Array], Any]
    tags: frozenset[str] = frozenset()
    roundings: int = ROUNDINGS

    @property
    def loss(self) -> Callable[[jax.Array], jax.Array]:
        """The program as a loss: the mean squares of all arrays that it returns."""

        def loss(w: jax.Array) -> jax.Array:
            results = jax.tree.leaves(self.fn(w))
            means = [mean_square(x) if jnp.ndim(x) else x for x in results]
            return sum(means[1:], start=means[0])

        return loss


def row(fn: Callable[[jax.Array], Any], *tags: str, roundings: int = ROUNDINGS) -> Row:
    """Returns a row with tags."""
    assert not set(tags) - TAGS.keys(), tags
    return Row(fn, frozenset(tags), roundings)
