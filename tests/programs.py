"""Reading what a transformed function computes in: the dtypes of its jaxpr."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it, calls before bodies."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def dtypes_of(
    fn: Callable[..., Any], *args: Any, primitive: str
) -> list[tuple[str, ...]]:
    """The dtypes of the float operands and then of the results of each `primitive`."""
    return [
        tuple(
            v.aval.dtype.name
            for v in (*eqn.invars, *eqn.outvars)
            if jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact)
        )
        for eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name == primitive
    ]


def products(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The dtype of the operands of each matrix product, in their order."""
    rows = dtypes_of(fn, *args, primitive="dot_general")
    assert all(row[0] == row[1] for row in rows)
    return [row[0] for row in rows]


def results_of(fn: Callable[..., Any], *args: Any, primitive: str) -> list[str]:
    """The dtypes of the first result of each `primitive`."""
    return [row[-1] for row in dtypes_of(fn, *args, primitive=primitive)]


def casts_of(fn: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    """The conversions between two float dtypes, as (shape, from, to)."""
    return [
        (str(eqn.outvars[0].aval.shape), *row)
        for eqn, row in (
            (eqn, [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)])
            for eqn in equations(jax.make_jaxpr(fn)(*args))
            if eqn.primitive.name == "convert_element_type"
        )
        if all(jax.numpy.issubdtype(d, jax.numpy.inexact) for d in row)
        and row[0] != row[1]
        for row in [[d.name for d in row]]
    ]
