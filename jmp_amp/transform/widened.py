"""Functions some of whose half arguments are held in float32.

Such a function is traced with half arguments, as it was written, and its program runs
with float32 values in their place. Every use rounds the value anew: the program
computes the same numbers, and JAX sums the gradients of all uses in float32. An exact
move of the value (a lookup, a reshape, a broadcast) moves its float32 form, for the
gradient of a move is a sum too. Calls, branches and loops hand that form to their
bodies. Where `Policy.reduce_dtype` is float32, as name scopes say, products make the
gradient of the value in float32.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import ShapedArray, Tracer

from jmp_amp.plan.program import binding, jaxprs, scope_text
from jmp_amp.plan.program.constructs import bind_shard_map
from jmp_amp.plan.program.jaxprs import (
    Atom,
    Body,
    ClosedJaxpr,
    Eqn,
    Literal,
    Value,
    Var,
    aval_of,
)
from jmp_amp.plan.program.meshes import explicit_sharding, in_mesh_of, in_row_major
from jmp_amp.plan.rewrites.f32_gradients import with_f32_gradients
from jmp_amp.plan.tables.operations import (
    Also,
    Kind,
    Role,
    is_cheap,
    kind_of,
    named,
    role_of,
)
from jmp_amp.policies.dtypes import F32, F64, AnyFn, PyTree
from jmp_amp.policies.policy import get_policy

Dtypes = tuple[np.dtype | None, ...]

# The kind of scope that says which gradients leave a `custom_jvp` of autocast in f32.
F32_GRADIENTS = "f32"

# In the slot of a result: the next output of the program.
_OUTPUT = object()


def held_in_f32(fn: AnyFn, dtypes: Mapping[int, Sequence[np.dtype | None]]) -> AnyFn:
    """Returns `fn`, to be given float32 in place of some half leaves of its arguments.

    Its results are those of the half values, bit for bit. `fn` is called once and sees
    half arrays; nothing is executed before it returns.

    Args:
      fn: a function of pytrees.
      dtypes: by the position of an argument, the dtype in which `fn` has each of its
        leaves that is float32 in place of half; None for the other leaves.
    """

    def held(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten([args[i] for i in dtypes])
        halves = [dtype for each in dtypes.values() for dtype in each]
        wide = [
            _Wide(x, dtype)
            for x, dtype in zip(leaves, halves, strict=True)
            if dtype is not None
        ]
        slots: list[PyTree] = []

        def program(*arrays: jax.Array) -> list[jax.Array]:
            remaining = iter(arrays)
            filled = [
                x if dtype is None else next(remaining)
                for x, dtype in zip(leaves, halves, strict=True)
            ]
            given = dict(
                zip(dtypes, jax.tree.unflatten(structure, filled), strict=True)
            )
            results = fn(*(given.get(i, x) for i, x in enumerate(args)), **kwargs)
            # What is no tracer goes around the program.
            found, returned = jax.tree.flatten(results)
            slots[:] = [_OUTPUT if _is_traced(x) else x for x in found], returned
            return list(filter(_is_traced, found))

        avals = [jax.typeof(x.value).update(dtype=x.dtype) for x in wide]
        traced = binding.trace(program, avals)
        outputs = iter(_Replay().outputs(jaxprs.body_of(traced), wide))
        found, returned = slots
        return jax.tree.unflatten(
            returned, [next(outputs) if x is _OUTPUT else x for x in found]
        )

    return held


def through_trees(
    fn: AnyFn, args: Sequence[PyTree], run: Callable[[AnyFn, PyTree], PyTree]
) -> PyTree:
    """Returns `fn(*args)`, as `run` calls it; the arguments may hold nnx objects.

    `run(pure, trees)` is given trees of arrays in place of the arguments, and calls
    `pure(*trees)`, or a transformed `pure`, in place of `fn`. What `fn` writes to its
    objects reaches those of the caller.
    """
    tag = object()

    def is_object(value: object) -> bool:
        return isinstance(value, nnx.Pytree | nnx.Variable)

    def pure(*trees: PyTree) -> PyTree:
        given = nnx.from_tree(trees, ctxtag=tag, is_inner=True)
        results = fn(*given)
        written = filter(is_object, jax.tree.leaves(given, is_leaf=is_object))
        return nnx.to_tree((list(written), results), ctxtag=tag)

    with nnx.update_context(tag):
        outputs = run(pure, nnx.to_tree(tuple(args), ctxtag=tag))
        _, results = nnx.from_tree(outputs, ctxtag=tag, is_inner=False)
    return results


class _Wide(NamedTuple):
    """A half value of a program that is held in f32, and rounded by each use.

    What comes in half into a body stays half where it has one use: that is no sum.

    Attributes:
      value: it, in f32, or in half so far.
      dtype: that which it has in the program.
    """

    value: Value
    dtype: np.dtype


class _Staged(NamedTuple):
    """A staged body; `wide` are the dtypes of those of its results that are `_Wide`."""

    closed: ClosedJaxpr
    wide: Dtypes


class _Replay:
    """Runs a program; a body is staged once for all its calls.

    `reduces` says whether products make gradients in f32, where no scope says it.
    """

    def __init__(self) -> None:
        self.staged: dict[tuple[object, ...], _Staged] = {}

    def outputs(
        self, body: Body, args: Sequence[Value], reduces: bool = False
    ) -> list[jax.Array]:
        """Returns the outputs of a body in their dtypes; inputs may be `_Wide`."""
        return _as_outputs(body, map(_rounded, self.results(body, args, reduces)))

    def results(self, body: Body, args: Sequence[Value], reduces: bool) -> list[Value]:
        """Returns the outputs of a body, some of them `_Wide`."""
        jaxpr = body.jaxpr
        eqns = list(filter(jaxprs.runs, jaxpr.eqns))
        uses = Counter(jaxprs.variables(jaxpr.outvars))
        for eqn in eqns:
            uses.update(jaxprs.variables(eqn.invars))
        values: dict[Atom, Value] = {}

        def write(variables: Sequence[Var], found: Iterable[Value]) -> None:
            for var, x in zip(variables, found, strict=True):
                values[var] = _widened(x) if uses[var] > 1 else x

        def read(atom: Atom) -> Value:
            return _constant(atom.val) if isinstance(atom, Literal) else values[atom]

        write(jaxpr.constvars, map(_constant, body.consts))
        write(jaxpr.invars, args)
        for eqn in eqns:
            with binding.source_of(eqn):
                found = self._equation(eqn, list(map(read, eqn.invars)), reduces)
                write(eqn.outvars, found)
        return list(map(read, jaxpr.outvars))

    def _equation(
        self, eqn: Eqn, operands: list[Value], reduces: bool
    ) -> Iterable[Value]:
        wide = next((x for x in operands if isinstance(x, _Wide)), None)
        if wide is None:
            return binding.bind(eqn, operands)
        if jaxprs.is_conversion(eqn) and aval_of(eqn.outvars[0]).dtype in (F32, F64):
            return binding.bind(eqn, [wide.value])
        if _moves(eqn, operands):
            if wide.value.dtype == F32 or eqn.primitive.name in _REPEATS:
                operands = list(map(_in_f32, eqn.invars, operands))
            return (_Wide(x, wide.dtype) for x in binding.bind(eqn, _held(operands)))
        if not _is_entered(eqn):
            if role_of(eqn.primitive.name) in _SPREADS:
                operands = [_spread(x, aval_of(eqn.outvars[0])) for x in operands]
            rounded = list(map(_rounded, operands))
            if eqn.primitive.name == "conv_general_dilated" and wide is operands[1]:
                rounded[1] = in_row_major(rounded[1])
            if not _reduces(eqn, reduces):
                return binding.bind(eqn, rounded)
            return _with_f32_gradients(eqn, operands, rounded)
        reduces = _reduces(eqn, reduces)
        if jaxprs.is_shard_map(eqn):
            return self._shard_map(eqn, operands, reduces)
        return self._call(eqn, operands, reduces)

    def _call(
        self, eqn: Eqn, operands: Sequence[Value], reduces: bool
    ) -> Iterable[Value]:
        every_turn, carry = jaxprs.read_every_turn(eqn), jaxprs.carried(eqn)
        is_call = not (
            jaxprs.is_loop(eqn) or jaxprs.is_branch(eqn) or jaxprs.is_checkpoint(eqn)
        )

        def given(position: int, x: Value) -> Value:
            if position in every_turn:
                return _widened(x)
            if not isinstance(x, _Wide) or position in carry:
                return _rounded(x)
            # What a loop goes through, and what a branch or a checkpoint reads, would
            # be f32 copies in memory. Each turn, or call, is one use of them.
            return x if is_call else _Wide(_rounded(x), x.dtype)

        operands = list(itertools.starmap(given, enumerate(operands)))
        staged = [
            self._staged(
                inner.body, [operands[i] for i in inner.operands], is_call, reduces
            )
            for inner in jaxprs.inner_bodies(eqn)
        ]
        closed = [each.closed for each in staged]
        results = binding.bind_staged(eqn, closed, _held(operands))
        return map(_wide_if, results, staged[0].wide)

    def _staged(
        self, body: Body, args: Sequence[Value], is_call: bool, reduces: bool
    ) -> _Staged:
        """Returns a body, staged for such arguments; only a call returns `_Wide`."""
        wide = _dtypes(args)
        reads = tuple(x.value.dtype if isinstance(x, _Wide) else None for x in args)
        key = id(body.jaxpr), wide, reads, is_call, reduces
        if key not in self.staged:
            returned: list[Dtypes] = []

            def run_body(*arrays: Value) -> list[jax.Array]:
                given = list(map(_wide_if, arrays, wide))
                results = self.results(body, given, reduces)
                if not is_call:
                    results = list(map(_rounded, results))
                returned.append(_dtypes(results))
                return _as_outputs(body, _held(results))

            closed = binding.trace(run_body, binding.retyped_avals(body, reads))
            self.staged[key] = _Staged(closed, returned[0])
        return self.staged[key]

    def _shard_map(
        self, eqn: Eqn, operands: Sequence[Value], reduces: bool
    ) -> list[Value]:
        (inner,), wide = jaxprs.inner_bodies(eqn), _dtypes(operands)

        def run_body(*shards: Value) -> list[jax.Array]:
            return self.outputs(inner.body, list(map(_wide_if, shards, wide)), reduces)

        return bind_shard_map(eqn, run_body, _held(operands))


def _is_traced(value: object) -> bool:
    return isinstance(value, Tracer)


def _constant(value: Value) -> Value:
    # A custom rule may index it by a tracer, which arrays of numpy refuse.
    return jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value


def _wide_if(value: Value, dtype: np.dtype | None) -> Value:
    return value if dtype is None else _Wide(value, dtype)


def _dtypes(values: Sequence[Value]) -> Dtypes:
    return tuple(x.dtype if isinstance(x, _Wide) else None for x in values)


def _held(values: Sequence[Value]) -> list[Value]:
    """Returns arrays; those of `_Wide` values in the dtype in which they are held."""
    return [x.value if isinstance(x, _Wide) else x for x in values]


def _rounded(value: Value) -> Value:
    return _cast(value.value, value.dtype) if isinstance(value, _Wide) else value


def _widened(value: Value) -> Value:
    if isinstance(value, _Wide):
        return _Wide(_cast(value.value, F32), value.dtype)
    return value


def _in_f32(atom: Atom, value: Value) -> Value:
    """Returns an operand of a move of `_Wide` values."""
    if isinstance(value, _Wide) or not jaxprs.is_floating(atom):
        return _widened(value)
    return np.asarray(value).astype(F32)


def _cast(value: Value, dtype: np.dtype) -> Value:
    with in_mesh_of(value):
        return binding.converted(value, dtype)


def _as_outputs(body: Body, values: Iterable[Value]) -> list[jax.Array]:
    return list(map(binding.as_output, values, map(aval_of, body.jaxpr.outvars)))


# Moves that read an element many times, or on many devices: their gradients are sums.
_REPEATS = named(Also.REPEATS)


# They broadcast dimensions of size 1 too. Others save their operands for a gradient:
# they would save them as large as the result.
_SPREADS = (Role.ADDS, Role.SUBTRACTS)


def _spread(value: Value, like: ShapedArray) -> Value:
    """Returns an operand in the shape of the result, if it is `_Wide`."""
    is_smaller = isinstance(value, _Wide) and value.value.shape != like.shape
    # Of explicit axes the result would have to be told how it is sharded.
    if not is_smaller or explicit_sharding(value.value) is not None:
        return value
    wide = _cast(value.value, F32)
    axes = range(wide.ndim)
    return _Wide(jax.lax.broadcast_in_dim(wide, like.shape, axes), value.dtype)


def _with_f32_gradients(
    eqn: Eqn, operands: Sequence[Value], rounded: list[Value]
) -> Sequence[Value]:
    """Runs an equation. If it is a product, gradients of `_Wide` operands are f32.

    Args:
      eqn: the equation.
      operands: its operands.
      rounded: the same in half.
    """
    product, others = _product_of(eqn)
    if product is None:
        return binding.bind(eqn, rounded)
    count = len(product.invars)
    held = dict(zip(others, rounded[count:], strict=True))
    for i, x in enumerate(operands):
        if isinstance(x, _Wide):
            held[i] = _cast(x.value, F32)
    bound = functools.partial(binding.bind, product)
    return with_f32_gradients(product, bound, rounded[:count], held)


def _product_of(eqn: Eqn) -> tuple[Eqn | None, list[int]]:
    """Returns the product that `eqn` is, and the operands whose gradients are f32.

    None if it is no product. Autocast makes a `custom_jvp` of one that reads f32 arrays
    in half: their gradients are f32, and they are operands behind those of the product.
    """
    found: list[int] = []
    if jaxprs.is_custom_jvp(eqn):
        notes = [*scope_text.notes(F32_GRADIENTS, str(eqn.source_info.name_stack))]
        (inner,) = jaxprs.inner_bodies(eqn)
        jaxpr = inner.body.jaxpr
        if not notes or len(jaxpr.eqns) != 1:
            return None, []
        found, (eqn,) = list(map(int, notes[-1])), jaxpr.eqns
        is_all = eqn.outvars == jaxpr.outvars
        if not is_all or eqn.invars != jaxpr.invars[: len(eqn.invars)]:
            return None, []
    is_product = kind_of(eqn.primitive.name) is Kind.PRODUCT
    return (eqn if is_product and not jaxprs.is_fixed(eqn) else None), found


def _reduces(eqn: Eqn, around: bool) -> bool:
    """Whether the policy of an equation has a `reduce_dtype`.

    Args:
      eqn: the equation.
      around: whether that of the equation around it has one.
    """
    noted = scope_text.policies(str(eqn.source_info.name_stack))
    return get_policy(noted[-1][1]).reduce_dtype is not None if noted else around


def _moves(eqn: Eqn, operands: Sequence[Value]) -> bool:
    """Whether `eqn` moves `_Wide` values alone, and sends nothing to other devices."""
    name = eqn.primitive.name
    return (
        kind_of(name) is Kind.MOVE
        and (is_cheap(name) or name in _REPEATS)
        and all(
            isinstance(x, _Wide) or isinstance(atom, Literal)
            for atom, x in zip(eqn.invars, operands, strict=True)
            if jaxprs.is_floating(atom)
        )
    )


def _is_entered(eqn: Eqn) -> bool:
    """Whether the bodies of `eqn` are given `_Wide` values.

    A `while` has no gradient, a `custom_jvp` one of its own. An argument that is given
    away must not be read again.
    """
    return (
        bool(jaxprs.inner_bodies(eqn))
        and not (jaxprs.is_while(eqn) or jaxprs.is_custom_jvp(eqn))
        and not any(eqn.params.get("donated_invars", ()))
    )
