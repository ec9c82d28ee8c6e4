"""Reading what a transformed function computes in: the dtypes of its jaxpr."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

import jmp_amp as amp


def with_rule(product: Callable[..., Any]) -> Any:
    """A product with a derivative rule of its own, which is two such products."""

    @jax.custom_jvp
    def ruled(x, w):
        return product(x, w)

    @ruled.defjvp
    def derivative(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return ruled(x, w), product(dx, w) + product(x, dw)

    return ruled


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


def planned(
    fn: Callable[..., Any], *args: Any, primitive: str, policy: Any = "mixed_bfloat16"
) -> list[str]:
    """The dtypes of the first float result of each `primitive` under a policy."""
    rows = dtypes_of(amp.autocast(fn, policy), *args, primitive=primitive)
    return [row[-1] for row in rows if row]


def reason_of(
    fn: Callable[..., Any], *args: Any, operation: str, policy: Any = "mixed_bfloat16"
) -> str:
    """Why the last equation of a name has its dtype under a policy."""
    report = amp.explain(fn, policy)(*args)
    return [e.reason for e in report.equations if e.operation == operation][-1]


def saved(fn: Callable[..., Any], arg: Any, shape: tuple[int, ...]) -> list[str]:
    """The dtypes of the arrays of a shape that a backward pass keeps; none is made."""
    backward = jax.eval_shape(lambda x: jax.vjp(fn, x)[1], arg)
    return [x.dtype.name for x in jax.tree.leaves(backward) if x.shape == shape]


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
