"""Which large numbers of a program are constants of it, such as a mask's -1e9.

A constant travels through operations that move values or choose one of them. A sum with
it is nearly the constant too, and so is its product with a mask of zeros and ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp

from jmp_amp.plan.dataflow.constants import bounds_of_constant
from jmp_amp.plan.plan import Identity
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Body, ClosedJaxpr, Eqn, Literal
from jmp_amp.plan.tables.operations import Kind, Role, kind_of, role_of

Magnitudes = frozenset[float]

_NOTHING: Magnitudes = frozenset()
# A constant below it takes none of f16's range from other values.
_SMALLEST = 2.0**13
# Sums of constants are constants; of many, these are enough.
_MOST = 16


def written(program: ClosedJaxpr) -> dict[str, Magnitudes]:
    """Returns the magnitudes of large constants that reach each equation of a function.

    They are of what it reads and of what it makes, by its identity.
    """
    found: dict[str, Magnitudes] = {}
    body = jaxprs.body_of(program)
    _follow(body, [_NOTHING] * len(body.jaxpr.invars), (), found)
    return found


def is_written(amax: float, constants: Iterable[float]) -> bool:
    """Whether a largest magnitude is that of one of the constants, but for rounding."""
    rounding = float(jnp.finfo(jnp.bfloat16).eps)
    return any(abs(amax - c) <= rounding * c for c in constants)


def _follow(
    body: Body,
    inputs: Iterable[Magnitudes],
    path: tuple[int, ...],
    found: dict[str, Magnitudes],
) -> list[Magnitudes]:
    """Notes what reaches the equations of a body; returns what reaches its outputs."""
    jaxpr = body.jaxpr
    known: dict[Atom, Magnitudes] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= zip(jaxpr.constvars, map(_of_constant, body.consts), strict=False)

    def read(atom: Atom) -> Magnitudes:
        if isinstance(atom, Literal):
            return _of_constant(atom.val)
        return known.get(atom, _NOTHING)

    for index, eqn in enumerate(jaxpr.eqns):
        identity = (*path, index)
        operands = [read(v) for v in eqn.invars]
        results = [_result(eqn, operands)] * len(eqn.outvars)
        for number, inner in enumerate(jaxprs.inner_bodies(eqn)):
            given = [operands[i] for i in inner.operands]
            made = _follow(inner.body, given, (*identity, number), found)
            if len(made) == len(results):
                results = [a | b for a, b in zip(results, made, strict=True)]
        known |= zip(eqn.outvars, results, strict=True)
        if reached := _NOTHING.union(*operands, *results):
            found[str(Identity(identity))] = reached
    return [read(v) for v in jaxpr.outvars]


def _of_constant(value: object) -> Magnitudes:
    bounds = bounds_of_constant(value)  # pyright: ignore[reportArgumentType]
    return frozenset(abs(b) for b in bounds or () if abs(b) >= _SMALLEST)


def _result(eqn: Eqn, operands: list[Magnitudes]) -> Magnitudes:
    """Returns which of the constants that an equation reads its results may be."""
    name, role = eqn.primitive.name, role_of(eqn.primitive.name)
    if not any(operands):
        return _NOTHING
    if role in (Role.ADDS, Role.SUBTRACTS):
        return _sums(*operands)
    moves = kind_of(name) in (Kind.MOVE, Kind.SELECTION)
    if moves or role is Role.MULTIPLIES or name == "convert_element_type":
        return _NOTHING.union(*operands)
    return _NOTHING


def _sums(first: Magnitudes, second: Magnitudes) -> Magnitudes:
    """Returns the constants themselves, and what two of them make together."""
    both = {abs(a + sign * b) for a in first for b in second for sign in (1, -1)}
    sums = sorted((each for each in both if _SMALLEST <= each < jnp.inf), reverse=True)
    return first | second | frozenset(sums[:_MOST])
