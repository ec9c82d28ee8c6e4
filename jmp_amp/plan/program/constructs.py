"""Loops, branches and sharded maps run again with functions as their bodies.

Such a function may close over values of the trace around it, as no staged body may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from jmp_amp.plan.program.jaxprs import (
    Eqn,
    Value,
    carried,
    is_branch,
    is_checkpoint,
    is_loop,
    is_while,
)

Carry = TypeVar("Carry")
Stacked = TypeVar("Stacked")
Slices = TypeVar("Slices")
Whole = TypeVar("Whole")


def scan(
    eqn: Eqn,
    turn: Callable[[Carry, Slices], tuple[Carry, Stacked]],
    init: Carry,
    xs: Slices,
) -> tuple[Carry, Stacked]:
    """Runs `turn` as often, in the order and unrolled as the `scan` equation `eqn`."""
    told = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return jax.lax.scan(turn, init, xs, **told)


def bind_functions(
    eqn: Eqn, functions: Sequence[Callable[..., list[Value]]], operands: Sequence[Value]
) -> list[Value]:
    """Runs the loop, branch or call `eqn` with functions as its bodies.

    What is not in `inner_bodies`, and a `custom_jvp`, is none of these.
    """
    if is_branch(eqn):
        index, *rest = operands
        return jax.lax.switch(index, functions, *rest)
    if is_while(eqn):
        condition, body = functions
        first, start = eqn.params["cond_nconsts"], carried(eqn).start
        return jax.lax.while_loop(
            lambda carry: condition(*operands[:first], *carry)[0],
            lambda carry: body(*operands[first:start], *carry),
            list(operands[start:]),
        )
    if is_loop(eqn):
        return _scan(eqn, functions[0], operands)
    (body,) = functions
    if is_checkpoint(eqn):
        told = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(body, **told)(*operands)
    return body(*operands)


def _scan(
    eqn: Eqn, body: Callable[..., list[Value]], operands: Sequence[Value]
) -> list[Value]:
    start, stop = carried(eqn).start, carried(eqn).stop

    def turn(carry: list[Value], xs: list[Value]) -> tuple[list[Value], list[Value]]:
        results = body(*operands[:start], *carry, *xs)
        return results[: stop - start], results[stop - start :]

    carry, stacked = scan(eqn, turn, list(operands[start:stop]), list(operands[stop:]))
    return [*carry, *stacked]


def mapped_axes(eqn: Eqn) -> tuple[str, ...]:
    """Returns the mesh axes that the `shard_map` equation `eqn` maps over."""
    return tuple(sorted(eqn.params["newly_manual_axes"]))


def bind_shard_map(
    eqn: Eqn, run: Callable[..., Sequence[Value]], operands: Sequence[Value]
) -> list[Value]:
    """Runs the `shard_map` equation `eqn` with the function `run` as its body.

    Args:
      eqn: the equation.
      run: a function of the shards of its operands.
      operands: whole arrays, or pytrees of those that are sharded alike; more than
        `eqn` has, at the end, reach every shard whole.
    """
    return bind_shard_map_with(eqn, lambda *shards: (run(*shards), ()), operands)[0]


def bind_shard_map_with(
    eqn: Eqn,
    run: Callable[..., tuple[Sequence[Value], Whole]],
    operands: Sequence[Value],
) -> tuple[list[Value], Whole]:
    """Runs `eqn` as `bind_shard_map`, with a body that returns more than results.

    That is a pytree of arrays, each the same on all shards.
    """
    params = eqn.params
    specs = tuple(params["in_specs"])
    whole = jax.sharding.PartitionSpec()

    def shard(*shards: Value) -> tuple[tuple[Value, ...], Whole]:
        outputs, more = run(*shards)
        return tuple(outputs), more

    outputs, more = jax.shard_map(
        shard,
        mesh=params["mesh"],
        in_specs=(*specs, *[whole] * (len(operands) - len(specs))),
        out_specs=(tuple(params["out_specs"]), whole),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )(*operands)
    return list(outputs), more


def varying(eqn: Eqn, value: Value) -> Value:
    """Returns an array that may differ between the shards of a `shard_map`."""
    if not eqn.params["check_vma"]:
        return value
    # Inside another `shard_map`, the shards vary over the axes of that one too.
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.pcast(value, axes, to="varying")
