"""Functions that are given half parameters in float32.

The function is traced with half arrays, as it was written. Its program runs with
float32 parameters, and each use casts them to half: the results are the same, bit for
bit, and JAX adds up the gradients of all uses in float32.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from jmp_amp.plan.program import binding, jaxprs
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
from jmp_amp.plan.program.meshes import in_mesh_of, in_row_major
from jmp_amp.plan.rewrites.f32_gradients import is_repeated, with_f32_gradients
from jmp_amp.plan.tables.operations import Also, Kind, is_cheap, kind_of, named
from jmp_amp.policies.dtypes import F32, AnyFn, PyTree, is_half

# Moves whose gradients are sums.
_REPEATS = named(Also.REPEATS)


def promote_half_params(fn: AnyFn, halves: Mapping[int, PyTree]) -> AnyFn:
    """Returns `fn`, to be given float32 in place of some half leaves of its arguments.

    `fn` is called once and sees half arrays; nothing runs before it returns.

    Args:
      fn: a function of pytrees.
      halves: by its position, each argument with such leaves, as `fn` has it.
    """

    def promoted(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten([args[i] for i in halves])
        dtypes = [
            half.dtype if is_half(getattr(half, "dtype", None)) else None
            for half in jax.tree.leaves([*halves.values()])
        ]
        wide = [i for i, dtype in enumerate(dtypes) if dtype and leaves[i].dtype == F32]
        slots: list[PyTree] = []

        def program(*arrays: jax.Array) -> list[jax.Array]:
            filled = dict(enumerate(leaves)) | dict(zip(wide, arrays, strict=True))
            given = dict(enumerate(args))
            given |= zip(halves, structure.unflatten(filled.values()), strict=True)
            found, returned = jax.tree.flatten(fn(*given.values(), **kwargs))
            # What is no tracer goes around the program.
            slots[:] = [None if isinstance(x, Tracer) else x for x in found], returned
            return [x for x in found if isinstance(x, Tracer)]

        avals = [jax.typeof(leaves[i]).update(dtype=dtypes[i]) for i in wide]
        body = jaxprs.body_of(binding.trace(program, avals))
        arrays = [leaves[i] for i in wide]
        outputs = iter(_Program().outputs(body, [True for _ in wide], *arrays))
        found, returned = slots
        return returned.unflatten([next(outputs) if x is None else x for x in found])

    return promoted


def through_trees(
    fn: AnyFn, args: Sequence[PyTree], transform: Callable[[AnyFn], AnyFn]
) -> PyTree:
    """Returns `fn(*args)` of a transformed `fn`; the arguments may hold nnx objects.

    `transform` is given a function of trees of arrays in place of `fn`. What `fn`
    writes to its objects reaches those of the caller.
    """
    tag = object()

    def pure(*trees: PyTree) -> PyTree:
        given = nnx.from_tree(trees, ctxtag=tag, is_inner=True)
        return nnx.to_tree((given, fn(*given)), ctxtag=tag)

    with nnx.update_context(tag):
        outputs = transform(pure)(*nnx.to_tree(tuple(args), ctxtag=tag))
        return nnx.from_tree(outputs, ctxtag=tag, is_inner=False)[1]


class _Program:
    """Runs a program whose half parameters, and exact moves of them, are in f32.

    What comes in half into a body stays half where it has one use: its gradient is not
    a sum, and residuals stay in half. A body is staged once for all its calls.
    """

    def __init__(self) -> None:
        self.staged: dict[tuple[object, ...], ClosedJaxpr] = {}

    def outputs(
        self, body: Body, are_params: Sequence[bool], *args: Value
    ) -> list[jax.Array]:
        """Returns the outputs of a body, in its dtypes.

        Args:
          body: the body.
          are_params: which of its inputs are half parameters.
          *args: its inputs; parameters are in f32 or in half.
        """
        jaxpr, values = body.jaxpr, {}
        params = set(itertools.compress(jaxpr.invars, are_params))
        atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
        uses = Counter(jaxprs.variables([*atoms]))

        def write(variables: Sequence[Var], found: Iterable[Value]) -> None:
            for v, x in zip(variables, found, strict=True):
                values[v] = _in_f32(x, v in params and uses[v] > 1)

        def read(atoms: Sequence[Atom]) -> tuple[list[Value], list[bool]]:
            found = [v.val if isinstance(v, Literal) else values[v] for v in atoms]
            return found, [isinstance(v, Var) and v in params for v in atoms]

        write(jaxpr.constvars, map(_constant, body.consts))
        write(jaxpr.invars, args)
        for eqn in jaxpr.eqns:
            operands, reads = read(eqn.invars)
            with binding.source_of(eqn):
                if _moves(eqn, reads):
                    params.update(eqn.outvars)
                    results = binding.bind(eqn, [*map(_in_f32, operands, reads)])
                else:
                    results = self._results(eqn, operands, reads)
                write(eqn.outvars, results)
        found = map(_in_half, jaxpr.outvars, *read(jaxpr.outvars))
        return list(map(binding.as_output, found, map(aval_of, jaxpr.outvars)))

    def _results(
        self, eqn: Eqn, operands: list[Value], params: list[bool]
    ) -> Sequence[Value]:
        if not any(params):
            return binding.bind(eqn, operands)
        halves = list(map(_in_half, eqn.invars, operands, params))
        # A `while` has no gradient, a `custom_jvp` one of its own.
        is_opaque = jaxprs.is_while(eqn) or jaxprs.is_custom_jvp(eqn)
        if jaxprs.inner_bodies(eqn) and not is_opaque:
            return self._call(eqn, operands, halves, params)
        if eqn.primitive.name == "conv_general_dilated" and params[1]:
            halves[1] = in_row_major(halves[1])
        sums = [i for i, p in enumerate(params) if p and is_repeated(eqn, i)]
        if not sums:
            return binding.bind(eqn, halves)
        held = {i: _in_f32(operands[i]) for i in sums}
        return with_f32_gradients(eqn, partial(binding.bind, eqn), halves, held)

    def _call(
        self, eqn: Eqn, operands: list[Value], halves: list[Value], params: list[bool]
    ) -> list[Value]:
        whole, carry = jaxprs.read_every_turn(eqn), jaxprs.carried(eqn)
        # Of slices, and of what branches and checkpoints read, there would be f32
        # copies in memory.
        given = operands if jaxprs.is_jit(eqn) or jaxprs.is_shard_map(eqn) else halves
        for i in whole:
            given[i] = _in_f32(operands[i], params[i])
        params = [p and i not in carry for i, p in enumerate(params)]
        inner = jaxprs.inner_bodies(eqn)
        if jaxprs.is_shard_map(eqn):
            run = partial(self.outputs, inner[0].body, params)
            return bind_shard_map(eqn, run, given)
        dtypes = [x.dtype if p else None for x, p in zip(given, params, strict=True)]
        staged = [
            self._staged(each.body, [dtypes[i] for i in each.operands])
            for each in inner
        ]
        return binding.bind_staged(eqn, staged, given)

    def _staged(self, body: Body, dtypes: Sequence[np.dtype | None]) -> ClosedJaxpr:
        key = id(body.jaxpr), *dtypes
        if key not in self.staged:
            run = partial(self.outputs, body, [each is not None for each in dtypes])
            self.staged[key] = binding.trace(run, binding.retyped_avals(body, dtypes))
        return self.staged[key]


def _constant(value: Value) -> Value:
    # A custom rule may index it by a tracer, which arrays of numpy refuse.
    return jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value


def _in_half(atom: Atom, value: Value, is_param: bool) -> Value:
    return _cast(value, aval_of(atom).dtype) if is_param else value


def _in_f32(value: Value, is_param: bool = True) -> Value:
    return _cast(value, F32) if is_param else value


def _cast(value: Value, dtype: np.dtype) -> Value:
    with in_mesh_of(value):
        return binding.converted(value, dtype)


def _moves(eqn: Eqn, params: list[bool]) -> bool:
    """Whether `eqn` moves parameters alone on their device, or casts one to f32."""
    name = eqn.primitive.name
    moves = kind_of(name) is Kind.MOVE and (is_cheap(name) or name in _REPEATS)
    widens = jaxprs.is_conversion(eqn) and aval_of(eqn.outvars[0]).dtype == F32
    are_floats = list(map(jaxprs.is_floating, eqn.invars))
    return (moves or widens) and any(params) and are_floats == params
