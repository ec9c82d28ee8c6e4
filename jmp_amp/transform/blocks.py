"""Running a block of a plan: differentiated as one, and some of it made again.

A block runs inside a `jax.checkpoint` whose policy keeps what the plan says, and what
cannot be made again. So every transformation of JAX goes through it, forward mode too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.core import ShapedArray

from jmp_amp.plan.plan import Block, Key
from jmp_amp.plan.program import jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Literal, Primitive, Value, Var
from jmp_amp.plan.tables.operations import is_made_again
from jmp_amp.plan.walk import Values, Walk

# Values and casts, each by what it is of.
_Kinds = tuple[Mapping[Any, Value], Mapping[Any, Value]]


def run_block(
    values: Values[Value], block: Block, walk: Callable[[], Walk[Value]]
) -> None:
    """Runs a block of a body.

    Args:
      values: those of the body so far; what the block makes is added.
      block: the block.
      walk: returns what runs its equations.
    """
    border = _Border(values, block)
    # Not `values`: its arrays would live as long as the function.
    plan, names = values.plan, list[list[Any]]()

    def compute(apart: list[Value], around: list[Value]) -> list[list[Value]]:
        walked = walk()
        entered = Values(walked, plan)
        border.write(entered, apart, around)
        walked.through(entered, block.start, block.stop)
        leaving = border.leaving(entered)
        names[:] = map(list, leaving)
        return [list(kind.values()) for kind in leaving]

    # Where XLA would merge both computations, what is kept and the cotangents go
    # through a barrier, but parameters around it: a loop would stack them.
    prevent_cse: Any = (True, False) if block.apart else False
    run = jax.checkpoint(compute, prevent_cse=prevent_cse, policy=_policy(block))
    found = run(*border.entering())
    for kind, keys, results in zip(_kinds(values), names, found, strict=True):
        kind.update(zip(keys, results, strict=True))


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


class _Border:
    """What goes into a block, and what comes out of it."""

    def __init__(self, values: Values[Value], block: Block):
        plan = values.plan
        self.around, self.stop = block.around, block.stop
        self.last_read = plan.last_read
        self.made: set[Var] = set()
        self.reads: dict[Var, None] = {}
        self.casts: dict[Key, None] = {}
        span = slice(block.start, block.stop)
        for eqn, planned in zip(
            plan.body.jaxpr.eqns[span], plan.equations[span], strict=True
        ):
            for atom, dtype in zip(eqn.invars, planned.reads, strict=True):
                if not isinstance(atom, Literal):
                    self.reads[atom] = None
                    self.casts[atom, dtype] = None
            self.made.update(eqn.outvars)
        outside: _Kinds = (
            {v: values.values[v] for v in self.reads if v not in self.made},
            {key: values.casts[key] for key in self.casts if key in values.casts},
        )
        self.outside = [list(kind) for kind in outside]
        self._given = [list(kind.values()) for kind in outside]

    def entering(self) -> tuple[list[Value], list[Value]]:
        """Returns what goes through the barrier of a block, and what goes around it."""
        apart, around = list[Value](), list[Value]()
        for keys, values in zip(self.outside, self._given, strict=True):
            for key, value in zip(keys, values, strict=True):
                (around if _of(key) in self.around else apart).append(value)
        self._given = []
        return apart, around

    def write(
        self, entered: Values[Value], apart: list[Value], around: list[Value]
    ) -> None:
        """Writes what went in to the values inside of the block."""
        inner, outer = iter(apart), iter(around)
        for kind, keys in zip(_kinds(entered), self.outside, strict=True):
            for key in keys:
                kind[key] = next(outer if _of(key) in self.around else inner)

    def leaving(self, entered: Values[Value]) -> _Kinds:
        """Returns what is read after the block.

        What is read in the block and after it goes through the block. A derivative may
        use a tangent twice, as that of `tanh` does. So the cotangents of all uses are
        added up one by one, in the order of the program.
        """
        return (
            {v: x for v, x in entered.values.items() if self._leaves(v)},
            {key: x for key, x in entered.casts.items() if self._is_cast_later(key)},
        )

    def _leaves(self, var: Var) -> bool:
        moves = var in self.made or jaxprs.is_floating(var)
        return moves and self._is_cast_later((var, None))

    def _is_cast_later(self, key: Key) -> bool:
        return self.last_read.get(key, -1) >= self.stop


def _kinds(values: Values[Value]) -> tuple[dict[Any, Value], ...]:
    return values.values, values.casts


def _of(key: Any) -> Atom:
    """Returns what a value or a cast is of."""
    return key[0] if isinstance(key, tuple) else key
