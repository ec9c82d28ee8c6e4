"""Every product of a program in half, and nothing else: an interpreter of jaxprs.

Recipe "OD" is the library's own and leaves some products in f32 for reasons of its own.
This asks the library only how JAX writes a loop: what it says of one does not change.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jmp_amp.plan.program.jaxprs import body_of, carried
from tests.idioms.measure import Program

HALF = jnp.bfloat16


def products_in_half(fn: Program) -> Program:
    """Returns `fn` with each f32 `dot_general` between casts to half and back."""

    def program(params: Any, inputs: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(params, inputs)
        results = _run(closed, *jax.tree.leaves((params, inputs)))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return program


def _run(closed: Any, *args: Any) -> list[Any]:
    jaxpr, consts = body_of(closed)
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        results = _equation(eqn, [read(v) for v in eqn.invars])
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, args: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general" and args[0].dtype == jnp.float32:
        a, b = (x.astype(HALF) for x in args)
        wanted = params | {"preferred_element_type": jnp.dtype(HALF)}
        return [eqn.primitive.bind(a, b, **wanted).astype(jnp.float32)]
    if name == "scan":
        return _scan(params, args, carried(eqn))
    if name == "while":
        return _while(params, args)
    if name == "cond":
        branches = [lambda *x, b=b: _run(b, *x) for b in params["branches"]]
        return jax.lax.switch(args[0], branches, *args[1:])
    if name in ("jit", "pjit", "checkpoint", "remat2"):
        return _run(params["jaxpr"], *args)
    found = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return found if eqn.primitive.multiple_results else [found]


def _scan(params: Any, args: list[Any], carry_of: range) -> list[Any]:
    consts, carries = carry_of.start, len(carry_of)

    def turn(carry: Any, xs: Any) -> Any:
        found = _run(params["jaxpr"], *args[:consts], *carry, *xs)
        return found[:carries], found[carries:]

    start, xs = args[consts : consts + carries], args[consts + carries :]
    options = {key: params[key] for key in ("length", "reverse")}
    carry, ys = jax.lax.scan(turn, start, xs, **options)
    return [*carry, *ys]


def _while(params: Any, args: list[Any]) -> list[Any]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = args[:first], args[first : first + second]

    def goes_on(carry: Any) -> Any:
        return _run(params["cond_jaxpr"], *of_cond, *carry)[0]

    def turn(carry: Any) -> Any:
        return _run(params["body_jaxpr"], *of_body, *carry)

    return jax.lax.while_loop(goes_on, turn, args[first + second :])
