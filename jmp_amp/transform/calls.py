"""A call of a function as a program from arrays to arrays, and back.

Arguments and results may hold anything: what is no array goes around the program, nnx
objects go through it as their arrays.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import errors, nnx

from jmp_amp.plan import jaxprs
from jmp_amp.policies.dtypes import F32, is_half
from jmp_amp.policies.policy_map import PolicyMap, warn_of_unmatched
from jmp_amp.transform import scopes
from jmp_amp.transform.closures import Closures
from jmp_amp.transform.linen_modules import CACHE, Variables, dict_keys, intercepted
from jmp_amp.transform.nnx_modules import (
    Objects,
    bound_with_scopes,
    is_node,
    method_with_scopes,
    with_scopes,
    without_scopes,
)

# In the place of an output: the next result of the program, the next nnx object.
_ARRAY, _OBJECT = object(), object()


class TracedCall(NamedTuple):
    """A call of a function, traced.

    Attributes:
      jaxpr: the closed jaxpr of the function as it is, from arrays to arrays.
      arrays: the arrays among the arguments, and those of the nnx objects that the
        function is given or closes over: the inputs of the program.
      held: for every input that is traced in f32 although it is half, its dtype; None
        for the other inputs.
      states: for every output that linen or nnx keeps as state, the dtype in which it
        comes back; None for the other outputs.
      returned: returns what the call does, given the outputs of the program, and writes
        what it wrote to nnx objects.
    """

    jaxpr: Any
    arrays: list[Any]
    held: list[np.dtype | None]
    states: list[np.dtype | None]
    returned: Callable[[Sequence[Any]], Any]


@contextlib.contextmanager
def traced_call(
    fn: Callable[..., Any],
    policies: PolicyMap,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: str,
) -> Iterator[TracedCall]:
    """Traces `fn(*args, **kwargs)`; nothing is executed.

    Arguments may be in half precision where the program was written for f32. If the
    policy stores parameters so, it is traced with all of them in f32; otherwise if it
    refuses them, as a decoding cache, or in a scan that goes on in f32: caches first.

    Args:
      fn: the function.
      policies: the policies of its modules, and of the rest.
      args: pytrees. Array leaves may be `jax.ShapeDtypeStruct`s; leaves that are no
        arrays reach `fn` unchanged.
      kwargs: likewise.
      call: the caller's call as written, for errors.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_node)
    leaves = [leaf for _, leaf in paths]
    nodes = [leaf for leaf in leaves if is_node(leaf)]
    Closures(is_node, lambda x: nodes.append(x) or x, lambda _, fn: fn).exchange(fn)
    outer = scopes.active()
    depth = 0 if outer is None else outer.depth + 1
    active = scopes.Active(policies.default, policies, depth=depth)
    with Objects(nodes, depth, call) as objects:
        caches = [CACHE in dict_keys(path) for path, _ in paths]
        stored = [True for _ in leaves] + objects.parameters
        traced = _Call(fn, leaves, tree, objects, caches + objects.caches, stored)
        with scopes.activate(active), intercepted() as traced.variables:
            if is_half(policies.default.param_dtype):
                # Half-precision arguments are f32 ones, stored.
                traced.widen(traced.is_stored)
            jaxpr = _traced(traced)
        warn_of_unmatched(policies)
        yield TracedCall(
            jaxpr, traced.arrays, traced.held, traced.states, traced.returned
        )


def _traced(call: _Call) -> Any:
    """The jaxpr of a call, with as few of its arguments widened as it takes."""
    # Two dtypes that do not meet: in a loop, and under strict promotion.
    refusals = (TypeError, jax.dtypes.TypePromotionError)
    try:
        return jaxprs.trace(call.run, call.inputs)
    except refusals:
        if call.widen(call.is_cache):
            with contextlib.suppress(*refusals):
                return jaxprs.trace(call.run, call.inputs)
        if call.widen(call.is_stored):
            with contextlib.suppress(*refusals):
                return jaxprs.trace(call.run, call.inputs)
        raise


class _Input(NamedTuple):
    """In the place of an output that is one of the inputs."""

    position: int


class _Call:
    """A call while it is traced.

    Attributes:
      arrays: the inputs of the program.
      inputs: the same, in the dtypes in which they are traced.
      is_cache, is_stored: which of them are decoding caches, and which may be traced in
        another dtype than they are stored in: not what nnx modules write.
      held, states: as in `TracedCall`.
      variables: what linen modules write.
    """

    variables: Variables

    def __init__(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        tree: Any,
        objects: Objects,
        is_cache: Sequence[bool],
        is_stored: Sequence[bool],
    ):
        self.fn, self.tree, self.objects = fn, tree, objects
        self.leaves = list(leaves)
        self.values = self.leaves + objects.states
        self.arrays = self.inputs = [x for x in self.values if _is_array(x)]
        self.is_cache, self.is_stored = (
            [each for each, x in zip(which, self.values, strict=True) if _is_array(x)]
            for which in (is_cache, is_stored)
        )
        self.held: list[np.dtype | None] = [None] * len(self.arrays)
        self.states: list[np.dtype | None] = []

    def widen(self, which: Sequence[bool]) -> bool:
        """Traces these in f32 too if they are half; says if any was not so far."""
        before = self.held
        self.held = [
            x.dtype if dtype or (each and is_half(x.dtype)) else None
            for dtype, each, x in zip(before, which, self.arrays, strict=True)
        ]
        self.inputs = [
            x if dtype is None else jax.ShapeDtypeStruct(x.shape, F32)
            for x, dtype in zip(self.arrays, self.held, strict=True)
        ]
        return self.held != before

    def run(self, *arrays: Any) -> list[Any]:
        """What is traced: the call, from arrays to arrays."""
        remaining = iter(arrays)
        filled = [next(remaining) if _is_array(x) else x for x in self.values]
        copies = self.objects.inside(filled[len(self.leaves) :])

        def swap(node: Any) -> Any:
            described = isinstance(node, nnx.GraphDef)
            return with_scopes(node) if described else copies[id(node)]

        given = [swap(x) if is_node(x) else x for x in filled[: len(self.leaves)]]
        args, kwargs = jax.tree.unflatten(self.tree, given)
        closures = Closures(is_node, swap, bound_with_scopes)
        fn = method_with_scopes(self.fn, args) or closures.exchange(self.fn)
        try:
            results = fn(*args, **kwargs)
        except errors.TraceContextError as error:
            error.add_note(
                "autocast: pass the module that is written to the function as an "
                "argument, or let it close over the module; what other Python objects "
                "hold is not searched."
            )
            raise
        finally:
            # Caches are known by their place, or once a module has got them.
            given = set(map(id, self.variables.caches))
            self.is_cache = [
                each or id(x) in given
                for each, x in zip(self.is_cache, arrays, strict=True)
            ]
        closures.write_back()
        return self._arrays_of(results, arrays)

    def _arrays_of(self, results: Any, arrays: Sequence[Any]) -> list[Any]:
        """The outputs of the program; keeps the places of all outputs."""
        with_paths, self.output_tree = jax.tree_util.tree_flatten_with_path(
            results, is_leaf=is_node
        )
        outputs = [
            without_scopes(x, self.objects.depth) if isinstance(x, nnx.GraphDef) else x
            for _, x in with_paths
        ]
        is_object = [is_node(x) and not isinstance(x, nnx.GraphDef) for x in outputs]
        made = list(itertools.compress(outputs, is_object))
        written, caches = self.objects.after(made)
        self.count = len(outputs)
        inputs = {id(x): _Input(i) for i, x in enumerate(arrays)}
        # Tracers must not outlive the trace: keep their places only.
        self.places = [
            _OBJECT if object_ else _ARRAY if _is_array(x) else x
            for x, object_ in zip(outputs, is_object, strict=True)
        ]
        self.places += [
            inputs.get(id(x), _ARRAY) if _is_array(x) else x for x in written
        ]
        collections = self.variables.written()
        self.variables.forget()
        states = [_collection(collections, path, x) for path, x in with_paths]
        ids = set(map(id, caches))
        states += [CACHE if id(x) in ids else "state" for x in written]
        returned = [
            (x, state)
            for x, place, state in zip(
                outputs + written, self.places, states, strict=True
            )
            if place is _ARRAY
        ]
        self.states = [self._dtype_of(*each) for each in returned]
        return [x for x, _ in returned]

    def _dtype_of(self, array: Any, state: str | None) -> np.dtype | None:
        if state == CACHE and array.dtype == F32:
            widened = filter(None, itertools.compress(self.held, self.is_cache))
            return next(widened, array.dtype)
        return None if state is None else array.dtype

    def returned(self, results: Sequence[Any]) -> Any:
        """As `TracedCall.returned`."""
        remaining = iter(results)
        filled = [
            next(remaining)
            if place is _ARRAY
            else self.arrays[place.position]
            if isinstance(place, _Input)
            else place
            for place in self.places
        ]
        made = iter(self.objects.outside(filled[self.count :]))
        outputs = [next(made) if x is _OBJECT else x for x in filled[: self.count]]
        return jax.tree.unflatten(self.output_tree, outputs)


def _collection(
    written: dict[int, list[tuple[str, ...]]], path: Any, leaf: Any
) -> str | None:
    """The collection that an output is a variable of, if it is one.

    The array that a variable holds may be another output too, as what is sown may be:
    a variable stands under its names.
    """
    keys = dict_keys(path)
    for collection, *names in written.get(id(leaf), ()):
        count = min(len(names), len(keys))
        if count and tuple(names[-count:]) == keys[-count:]:
            return collection
    return None


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        # Arrays of text, objects and dates are no arrays to JAX.
        return leaf.dtype.kind not in "SUOMm"
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
