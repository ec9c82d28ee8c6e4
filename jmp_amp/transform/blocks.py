"""Running a block of a plan: differentiated as one, and some of it made again.

A block runs inside a `jax.checkpoint` whose policy keeps what the plan says, and what
cannot be made again. So every transformation of JAX goes through it, forward mode too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray

from jmp_amp.plan.plan import Block, Key
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Primitive, Value, Var
from jmp_amp.plan.tables.operations import is_made_again
from jmp_amp.plan.walk import Values, Walk


def run_block(
    values: Values[Value], block: Block, walk: Callable[[], Walk[Value]]
) -> None:
    """Runs a block of a body.

    Args:
      values: those of the body so far; what the block makes is added.
      block: the block.
      walk: returns what runs its equations.
    """
    plan, made, reads = values.plan, set[Var](), dict[Key, None]()
    span = slice(block.start, block.stop)
    for eqn, planned in zip(
        plan.body.jaxpr.eqns[span], plan.equations[span], strict=True
    ):
        for atom, dtype in zip(eqn.invars, planned.reads, strict=True):
            if isinstance(atom, Var):
                reads |= {(atom, None): None, (atom, dtype): None}
        made.update(eqn.outvars)
    given = {
        (v, dtype): values.values[v] if dtype is None else values.casts[v, dtype]
        for v, dtype in reads
        if (v not in made if dtype is None else (v, dtype) in values.casts)
    }
    apart = [key for key in given if key[0] not in block.around]
    around = [key for key in given if key[0] in block.around]
    leaving = list[Key]()

    # It holds no arrays: they would live as long as the function.
    def compute(inner: list[Value], outer: list[Value]) -> list[Value]:
        walked = walk()
        entered = Values(walked, plan)
        _write(entered, [*apart, *around], [*inner, *outer])
        walked.through(entered, block.start, block.stop)
        # What is read in the block and after it goes through the block. A derivative
        # may use a tangent twice, as that of `tanh` does. So the cotangents of all uses
        # are added up one by one, in the order of the program.
        held: dict[Key, Value] = {
            (v, None): x
            for v, x in entered.values.items()
            if v in made or jaxprs.is_floating(v)
        }
        held |= entered.casts
        leaving[:] = [k for k in held if plan.last_read.get(k, -1) >= block.stop]
        return [held[key] for key in leaving]

    # Where XLA would merge both computations, what is kept and the cotangents go
    # through a barrier, but parameters around it: a loop would stack them.
    prevent_cse: Any = (True, False) if block.apart else False
    run = jax.checkpoint(compute, prevent_cse=prevent_cse, policy=_policy(block))
    found = run([given[key] for key in apart], [given[key] for key in around])
    _write(values, leaving, found)


def _write(values: Values[Value], keys: list[Key], found: list[Value]) -> None:
    for (v, dtype), x in zip(keys, found, strict=True):
        if dtype is None:
            values.values[v] = x
        else:
            values.casts[v, dtype] = x


def _policy(block: Block) -> Callable[..., bool]:
    """Returns the policy of a block: which results of primitives are kept."""
    if not block.results:
        return _is_kept

    def policy(primitive: Primitive, *avals: ShapedArray, **params: object) -> bool:
        return _is_kept(primitive) or any(
            each.matches(primitive.name, avals) for each in block.results
        )

    return policy


def _is_kept(primitive: Primitive, *_: object, **__: object) -> bool:
    """Whether a result has a name, or cannot be made again."""
    return not is_made_again(primitive.name)
