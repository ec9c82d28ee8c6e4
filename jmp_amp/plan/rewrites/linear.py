"""A linear function with a transpose of its own.

To JAX it is the solution of linear equations, as many as unknowns: `u = moving` and
`v - function(u) = 0`. So forward mode, linearisation, second derivatives and `vmap` go
through it, and only its transpose is another function than JAX would derive.
(`custom_transpose` is not public, and `linear_call` has no rule for `vmap`.)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jmp_amp.plan.program.meshes import explicit_sharding, varying_axes
from jmp_amp.policies.dtypes import F32

Arrays = list[jax.Array]
_Both = tuple[Arrays, Arrays]
_Typed = jax.Array | jax.ShapeDtypeStruct


def linear_function(
    function: Callable[[Arrays], Arrays],
    transpose: Callable[[Arrays], Arrays],
    moving: Sequence[jax.Array],
    others: Sequence[jax.Array],
) -> Arrays:
    """Returns the results of a linear function.

    Args:
      function: it is linear in its arguments.
      transpose: from the cotangents of its results to those of its arguments.
      moving: the arguments.
      others: what else the function reads, floating: second derivatives are taken with
        respect to these.
    """

    def scaled(arrays: Arrays) -> Arrays:
        # JAX differentiates no equations some of which do not depend on the others.
        zero = nothing(others)
        return [x * (1 + zero(x)).astype(x.dtype) for x in arrays]

    def equations(unknown: _Both) -> _Both:
        us, vs = unknown
        return scaled(us), [*map(operator.sub, scaled(vs), function(us))]

    def solve(_: object, known: _Both) -> _Both:
        us, vs = known
        return us, [*map(operator.add, vs, function(us))]

    def solve_transposed(_: object, known: _Both) -> _Both:
        us, vs = known
        return [*map(operator.add, us, transpose(vs))], vs

    # Both sides have to be linear in the tangents, and both solutions be used.
    zero = nothing(moving)
    sides = [_zeros(zero, made) for made in jax.eval_shape(function, list(moving))]
    us, vs = jax.lax.custom_linear_solve(
        equations, (list(moving), sides), solve, solve_transposed
    )
    zero = nothing(us)
    return [v + zero(v).astype(v.dtype) for v in vs]


def nonzero(tangents: Iterable[tuple[int, Any]]) -> dict[int, jax.Array]:
    """Returns the tangents that are not zero, by the positions of their operands."""
    return {i: t for i, t in tangents if not isinstance(t, SymbolicZero)}


def nothing(arrays: Sequence[jax.Array]) -> Callable[[_Typed], jax.Array]:
    """Returns what makes zero in f32: a sum of no elements of arrays.

    XLA leaves it out. It is the same in all shards of a `shard_map` in which its
    argument is, and made once for all arguments that are the same in the same shards.
    """
    made: dict[frozenset[Any], jax.Array] = {}

    def zero(like: _Typed) -> jax.Array:
        axes = varying_axes(like)
        if axes not in made:
            sums = [
                jnp.sum(jax.lax.slice(x, (0,) * x.ndim, (0,) * x.ndim).astype(F32))
                for x in (jnp.atleast_1d(x) for x in arrays if varying_axes(x) <= axes)
            ]
            made[axes] = functools.reduce(jnp.add, sums, jnp.zeros((), F32))
        return made[axes]

    return zero


def _zeros(
    zero: Callable[[_Typed], jax.Array], like: jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns zeros of the type of `like`."""
    zeros = jax.lax.broadcast_in_dim(
        zero(like).astype(like.dtype),
        like.shape,
        (),
        out_sharding=explicit_sharding(like),
    )
    missing = tuple(varying_axes(like) - varying_axes(zeros))
    return jax.lax.pcast(zeros, missing, to="varying") if missing else zeros
