"""Binding equations again: with other operands, dtypes, parameters or bodies.

How a call is bound again with another body, and how a name scope is opened, depends on
how JAX spells an equation. It is in this file, and what reads equations is in `jaxprs`:
no other file touches `jax.extend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.core import ShapedArray
from jax.extend import core, source_info_util
from jax.extend.core import primitives

from jmp_amp.plan.program.jaxprs import (
    Body,
    ClosedJaxpr,
    Eqn,
    Value,
    aval_of,
    body_of,
    holding,
    is_checkpoint,
    is_custom_vjp,
)
from jmp_amp.plan.program.source_code import source_line
from jmp_amp.policies.dtypes import AnyFn


def trace(fn: AnyFn, args: Sequence[Value]) -> ClosedJaxpr:
    """Returns the closed jaxpr of `fn(*args)`; `args` are arrays or avals."""
    return jax.make_jaxpr(fn)(*args)


def bind(eqn: Eqn, operands: Sequence[Value], **changed: object) -> list[Value]:
    """Runs `eqn` on `operands`, as traced or with `changed` parameters."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    try:
        results = eqn.primitive.bind(*operands, **params)
    except jax.errors.UnexpectedTracerError as error:
        if is_custom_vjp(eqn):
            error.add_note(
                f"autocast: the custom_vjp function called at {source_line(eqn)} uses "
                "an array of the function around it, of which its gradient rule knows "
                "nothing when it runs. Pass the array as an argument of the custom_vjp "
                "function."
            )
        raise
    return list(results) if eqn.primitive.multiple_results else [results]


def as_output(value: Value, aval: ShapedArray) -> jax.Array:
    """Returns a result as an array, weakly typed if it was traced so.

    A literal holds a numpy value, which has lost the weak type of a Python number.
    """
    dtype = getattr(value, "dtype", aval.dtype)
    weak = aval.weak_type and dtype == aval.dtype
    if isinstance(value, jax.Array) and jax.typeof(value).weak_type == weak:
        return value
    return primitives.convert_element_type_p.bind(
        value, new_dtype=dtype, weak_type=weak, sharding=None
    )


def converted(value: Value, dtype: np.dtype) -> Value:
    """Returns a value in a dtype, and not weakly typed."""
    if not isinstance(value, jax.core.Tracer):
        return jax.lax.convert_element_type(value, dtype)
    # Of a traced value, `jax.lax` asks much before it does the same.
    aval: Any = value.aval
    if aval.dtype == dtype and not aval.weak_type:
        return value
    return primitives.convert_element_type_p.bind(
        value, new_dtype=dtype, weak_type=False, sharding=None
    )


def retyped_avals(body: Body, dtypes: Sequence[np.dtype | None]) -> list[ShapedArray]:
    """Returns the avals of the inputs of `body`, some of them of another dtype."""
    return [
        aval
        if dtype is None or aval.dtype == dtype
        else aval.update(dtype=dtype, weak_type=False)
        for aval, dtype in zip(map(aval_of, body.jaxpr.invars), dtypes, strict=True)
    ]


def bind_staged(
    eqn: Eqn, staged: Sequence[ClosedJaxpr], operands: Sequence[Value]
) -> list[Value]:
    """Runs `eqn` with the closed jaxprs `staged` as its bodies."""
    if not is_checkpoint(eqn):
        return bind(eqn, operands, **holding(eqn, staged))
    (body,) = staged
    jaxpr, consts = body_of(body)
    if consts and eqn.params["differentiated"]:
        # A differentiated checkpoint holds no constants: they become operands.
        operands, count = [*consts, *operands], len(consts)
        opened = trace(
            lambda *xs: run_as_traced(Body(jaxpr, xs[:count]), xs[count:]), operands
        )
        return bind(eqn, operands, jaxpr=body_of(opened).jaxpr)
    if not consts:
        return bind(eqn, operands, jaxpr=jaxpr)
    told = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    return list(jax.checkpoint(core.jaxpr_as_fun(body), **told)(*operands))


class source_of:
    """A context: equations bound in it have the name scopes and the source of `eqn`."""

    # Entered for each equation: a generator would take several times as long.
    __slots__ = ("_settings", "_source")

    def __init__(self, eqn: Eqn):
        info = eqn.source_info
        stack = source_info_util.current_name_stack() + info.name_stack
        self._source = source_info_util.user_context(info.traceback, name_stack=stack)
        self._settings = eqn.ctx.manager

    def __enter__(self) -> None:
        self._source.__enter__()
        self._settings.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._settings.__exit__(*error)
        self._source.__exit__(*error)


def run_as_traced(body: Body, args: Sequence[Value]) -> list[Value]:
    """Runs a body in the dtypes that it was traced with."""
    return jax.core.eval_jaxpr(body.jaxpr, body.consts, *args)
