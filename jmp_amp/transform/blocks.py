"""Running a block of a plan: differentiated as one, and some of it made again.

A block runs inside a `jax.checkpoint` whose policy keeps what the plan says, and what
cannot be made again. So every transformation of JAX goes through it, forward mode too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray

from jmp_amp.plan.plan import Block, Key
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.plan.program.jaxprs import Atom, Eqn, Literal, Primitive, Value, Var
from jmp_amp.plan.saved.alike import inside, likeness
from jmp_amp.plan.tables.operations import is_made_again
from jmp_amp.plan.walk import Values, Walk
from jmp_amp.transform.stored_blocks import Keeper, named, stored_block

# Values, casts and quantised arrays, each by what it is of.
_Kinds = tuple[Mapping[Any, Value], Mapping[Any, Value], Mapping[Any, Value]]


class Run(NamedTuple):
    """What runs a block, and all blocks that are alike.

    Attributes:
      compute: what goes in -> what comes out.
      variables: those of the block that it was made for, see `Likeness`.
      outputs: what comes out is of these; filled when JAX traces `compute`.
    """

    compute: Callable[..., list[list[Value]]]
    variables: Sequence[Var]
    outputs: list[list[Any]]


def run_block(
    values: Values[Value],
    block: Block,
    walk: Callable[[Keeper], Walk[Value]],
    known: dict[Hashable, Run] | None,
) -> None:
    """Runs a block of a body.

    Args:
      values: those of the body so far; what the block makes is added.
      block: the block.
      walk: what runs its equations, given what keeps values.
      known: what runs the blocks so far, by their likeness; None if none are alike.
    """
    border = _Border(values, block)
    if known is None:
        run = _run_of(values, block, walk, border, (), values.plan.body.jaxpr.eqns)
        border.read(values, run, (), run.compute(*border.entering()))
        return
    like = likeness(values.plan, block)
    key = like.key and (like.key, border.numbered(like.variables))
    with binding.inside(like.scopes):
        if key is None or key not in known:
            eqns = {
                i: inside(like.scopes, values.plan.body.jaxpr.eqns[i])
                for i in range(block.start, block.stop)
            }
            run = _run_of(values, block, walk, border, like.variables, eqns)
            if key is not None:
                known[key] = run
        else:
            run = known[key]
        found = run.compute(*border.entering())
    border.read(values, run, like.variables, found)


def _run_of(
    values: Values[Value],
    block: Block,
    walk: Callable[[Keeper], Walk[Value]],
    border: _Border,
    variables: Sequence[Var],
    eqns: Sequence[Eqn] | Mapping[int, Eqn],
) -> Run:
    """Returns what runs a block; `eqns` are the equations of its body."""
    # Not `values`: its arrays would live as long as the function.
    plan, outputs = values.plan, list[list[Any]]()

    def compute(
        keeper: Keeper, apart: list[Value], around: list[Value]
    ) -> list[list[Value]]:
        walked = walk(keeper)
        entered = Values(walked, plan)
        border.write(entered, apart, around)
        walked.through(entered, block.start, block.stop, eqns)
        leaving = border.leaving(entered)
        outputs[:] = map(list, leaving)
        return [list(kind.values()) for kind in leaving]

    if block.stored is not None:
        made, entering = block.stored.made, border.formats_of(block.stored.entering)
        run = stored_block(compute, made, entering, block.apart)
        return Run(run, variables, outputs)
    # Where XLA would merge both computations, what is kept and the cotangents go
    # through a barrier, but parameters around it: a loop would stack them.
    prevent_cse: Any = (True, False) if block.apart else False
    run = jax.checkpoint(
        functools.partial(compute, named),
        prevent_cse=prevent_cse,
        policy=_policy(block),
    )
    return Run(run, variables, outputs)


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
            {k: x for k, x in values.quantised.items() if k[0] in self.reads},
        )
        self.outside = [list(kind) for kind in outside]
        self._given = [list(kind.values()) for kind in outside]

    def numbered(self, variables: Sequence[Var]) -> Hashable:
        """Returns what goes in and comes out, by the numbers of variables."""
        numbers = {var: i for i, var in enumerate(variables)}
        return (
            *(tuple(_renamed(key, numbers) for key in kind) for kind in self.outside),
            tuple(str(x.dtype) for x in self._given[0]),
            tuple(map(self._is_read_later, variables)),
            tuple(map(self._is_cast_later, self.casts)),
        )

    def entering(self) -> tuple[list[Value], list[Value]]:
        """Returns what goes through the barrier of a block, and what goes around it."""
        apart, around = list[Value](), list[Value]()
        for keys, values in zip(self.outside, self._given, strict=True):
            for key, value in zip(keys, values, strict=True):
                (around if _of(key) in self.around else apart).append(value)
        self._given = []
        return apart, around

    def formats_of(self, entering: Mapping[Key, str]) -> list[str | None]:
        """Returns in which format each of what goes in is kept, see `entering`."""
        apart, around = list[str | None](), list[str | None]()
        for keys, values in zip(self.outside, self._given, strict=True):
            for key, value in zip(keys, values, strict=True):
                at = key if isinstance(key, tuple) else (key, value.dtype)
                (around if _of(key) in self.around else apart).append(entering.get(at))
        return [*apart, *around]

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
        values, casts, quantised = _kinds(entered)
        return (
            {v: x for v, x in values.items() if self._leaves(v)},
            {key: x for key, x in casts.items() if self._is_cast_later(key)},
            {k: x for k, x in quantised.items() if self._is_read_later(k[0])},
        )

    def read(
        self,
        values: Values[Value],
        run: Run,
        variables: Sequence[Var],
        found: list[list[Value]],
    ) -> None:
        """Writes what came out to the values around the block."""
        names = dict(zip(run.variables, variables, strict=True))
        for kind, keys, results in zip(_kinds(values), run.outputs, found, strict=True):
            kind.update(
                (_renamed(key, names), x) for key, x in zip(keys, results, strict=True)
            )

    def _leaves(self, var: Var) -> bool:
        moves = var in self.made or jaxprs.is_floating(var)
        return moves and self._is_read_later(var)

    def _is_read_later(self, atom: Atom) -> bool:
        is_variable = not isinstance(atom, Literal)
        return is_variable and self.last_read.get((atom, None), -1) >= self.stop

    def _is_cast_later(self, key: Key) -> bool:
        return self.last_read.get(key, -1) >= self.stop


def _kinds(values: Values[Value]) -> tuple[dict[Any, Value], ...]:
    return values.values, values.casts, values.quantised


def _of(key: Any) -> Atom:
    """Returns what a value, a cast or a quantised array is of."""
    return key[0] if isinstance(key, tuple) else key


def _renamed(key: Any, names: Mapping[Var, Any]) -> Any:
    """Returns the same of another variable."""
    if isinstance(key, tuple):
        return (names.get(key[0], key[0]), *key[1:])
    return names.get(key, key)
