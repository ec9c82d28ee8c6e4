"""A call of a function as a program from arrays to arrays, and back.

Arguments and results may hold anything: values that are not arrays go around the
program, nnx objects go through it as their arrays.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import jax
import numpy as np
from flax import errors, nnx

from jmp_amp.plan.dataflow.dead_code import without_dead_code
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.jaxprs import ClosedJaxpr
from jmp_amp.plan.program.regions import Entries, scopes_in
from jmp_amp.policies.dtypes import F32, AnyFn, PyTree, is_half
from jmp_amp.policies.policy_map import (
    PolicyMap,
    entries_of_scopes,
    unmatched,
    warn_of_unmatched,
)
from jmp_amp.transform import scopes
from jmp_amp.transform.closures import Closures, find_objects
from jmp_amp.transform.linen_modules import CACHE, Variables, dict_keys, intercepted
from jmp_amp.transform.nnx_modules import (
    Objects,
    Written,
    bound_with_scopes,
    is_node,
    method_with_scopes,
    with_scopes,
    without_scopes,
)
from jmp_amp.transform.refusals import (
    check_result,
    explain_traced_values,
    is_about_half,
)
from jmp_amp.transform.successors import Successor, successors

Unflatten = Callable[[Sequence[object]], PyTree]


class TracedCall(NamedTuple):
    """A call of a function, traced.

    Attributes:
      jaxpr: the closed jaxpr of the function as written, from arrays to arrays.
      arrays: the arrays among the arguments, and those of the nnx objects that the
        function is given or closes over: the inputs of the program.
      stored: for every input that is traced in f32 although it is half, its dtype;
        None for the other inputs.
      states: for every output that linen or nnx keeps as state, the dtype in which it
        comes back; None for the other outputs.
      returned: given the outputs of the program, returns the results of the call, and
        writes to nnx objects.
      seen: the same, and writes nothing: objects come back as they are.
      numbered: returns the arguments, positional and others, as they would be if every
        array were its number among `arrays`, an array of numpy.
      entries: those of the map that match name scopes outside of Flax modules.
    """

    jaxpr: ClosedJaxpr
    arrays: list[PyTree]
    stored: list[np.dtype | None]
    states: list[np.dtype | None]
    returned: Callable[[Sequence[PyTree]], PyTree]
    seen: Callable[[Sequence[PyTree]], PyTree]
    numbered: Callable[[], tuple[tuple[PyTree, ...], dict[str, PyTree]]]
    entries: Entries = ()


@contextlib.contextmanager
def traced_call(
    fn: AnyFn,
    policies: PolicyMap,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    call: str,
    notes_modules: bool = False,
    cpu: Cpu | None = None,
) -> Iterator[TracedCall]:
    """Traces `fn(*args, **kwargs)`; nothing is executed.

    Half arguments are traced as f32 (1) if `param_dtype` is half; else, only if tracing
    raises a dtype error: (2) caches, then (3) all. Array leaves of arguments may be
    `jax.ShapeDtypeStruct`s; leaves that are not arrays, and numpy's numbers, reach `fn`
    unchanged.

    Args:
      fn: the function.
      policies: the policies of its modules, and of the rest.
      args, kwargs: pytrees.
      call: the caller's call as written, for errors.
      notes_modules: whether name scopes say which module runs, see `scopes.module_of`.
      cpu: the CPU that it is traced for; None for a GPU or a TPU.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_node)
    leaves = [leaf for _, leaf in paths]
    nodes = [*filter(is_node, leaves), *find_objects(fn, is_node)]
    nodes = [node for node in nodes if not isinstance(node, nnx.GraphDef)]
    outer = scopes.active()
    depth = 0 if outer is None else outer.depth + 1
    active = scopes.Active(
        policies.default, policies, depth=depth, notes_modules=notes_modules, cpu=cpu
    )
    with nnx.update_context(tag := object()):
        objects = Objects(nodes, depth, call, tag)
        in_cache = [CACHE in dict_keys(path) for path, _ in paths]
        unflatten = functools.partial(jax.tree.unflatten, tree)
        with scopes.activate(active), intercepted() as variables:
            traced = _Call(fn, leaves, in_cache, unflatten, objects, variables)
            is_widened = is_half(policies.default.param_dtype) and traced.widen(
                traced.may_widen
            )
            try:
                jaxpr = _traced(traced)
            except Exception as error:
                are_arrays = map(is_array, traced.values)
                known = [path for path, _ in paths] + [None] * len(objects.states)
                inputs = list(itertools.compress(known, are_arrays))
                explain_traced_values(error, call, fn, inputs)
                raise
            if is_widened:
                traced.keep_successors_half()
            if traced.leaked:
                raise TypeError(
                    f"{call}: the function writes to {min(traced.leaked)!r} of a linen "
                    "module around it, where nothing that is traced may stay. Write "
                    "autocast(model.apply, policy); with_policy(policy) marks a method."
                )
        entries = entries_of_scopes(policies, scopes_in(jaxprs.body_of(jaxpr)))
        if unmatched(policies):
            program = jaxpr.pretty_print(name_stack=True, use_color=False)
            warn_of_unmatched(policies, matched=scopes.noted(program, depth))
        outputs = traced.outputs
        yield TracedCall(
            jaxpr,
            traced.arrays,
            traced.stored,
            outputs.states,
            returned=functools.partial(outputs.returned, call, traced.arrays),
            seen=functools.partial(outputs.seen, traced.arrays),
            numbered=traced.numbered,
            entries=entries,
        )


def _traced(call: _Call) -> ClosedJaxpr:
    """Returns the jaxpr of a call, with as few of its arguments widened as it takes.

    What computes nothing that the call returns is left out.
    """
    try:
        return without_dead_code(binding.trace(call.run, call.inputs))
    except Exception:
        refused_half = call.refused_half
        for which in (call.is_cache, call.may_widen):
            if refused_half and call.widen(which):
                with contextlib.suppress(TypeError, jax.dtypes.TypePromotionError):
                    return without_dead_code(binding.trace(call.run, call.inputs))
        how = scopes.measured()
        if refused_half and how is not None and how.hands_on_f32:
            with scopes.measuring(how._replace(hands_on_f32=False)):
                return without_dead_code(binding.trace(call.run, call.inputs))
        raise


# In the slot of an output: the next result of the program, the next nnx object.
_ARRAY, _OBJECT = object(), object()


class _Input(NamedTuple):
    """In the slot of an output that is one of the inputs."""

    position: int


class Outputs(NamedTuple):
    """What a trace found out about the results of a call; holds no tracers.

    Attributes:
      unflatten: makes the results of their leaves.
      width: the number of these leaves.
      slots: for every leaf of the results, and then for every leaf of the nnx objects,
        where its value comes from: `_ARRAY`, `_OBJECT`, an `_Input`, or the value.
      states: as in `TracedCall`.
      successors: the parts of the results that may take the place of an argument.
      merged: as in `nnx_modules.Written`.
    """

    unflatten: Unflatten
    width: int
    slots: list[object]
    states: list[np.dtype | None]
    successors: list[Successor]
    merged: Callable[[Sequence[object]], list[object]]

    def returned(
        self, call: str, inputs: Sequence[PyTree], results: Sequence[PyTree]
    ) -> PyTree:
        """Returns the results of the call, and writes to nnx objects.

        Args:
          call: the caller's call as written, for errors.
          inputs, results: those of the program.
        """
        for slot in self.slots[: self.width]:
            if slot is not _ARRAY and slot is not _OBJECT:
                check_result(slot, call)
        filled = self._filled(inputs, results)
        made = iter(self.merged(filled[self.width :]))
        leaves = [next(made) if x is _OBJECT else x for x in filled[: self.width]]
        return self.unflatten(leaves)

    def seen(self, inputs: Sequence[PyTree], results: Sequence[PyTree]) -> PyTree:
        """Returns the results of the call, and None in place of nnx objects."""
        filled = self._filled(inputs, results)[: self.width]
        return self.unflatten([None if x is _OBJECT else x for x in filled])

    def _filled(
        self, inputs: Sequence[PyTree], results: Sequence[PyTree]
    ) -> list[PyTree]:
        """Returns what is in the slots."""
        remaining = iter(results)
        return [
            next(remaining)
            if slot is _ARRAY
            else inputs[slot.position]
            if isinstance(slot, _Input)
            else slot
            for slot in self.slots
        ]


class _Call:
    """A call to trace; `run` may be traced several times.

    Attributes:
      values: the leaves of the arguments, then those of the nnx objects.
      arrays: the arrays among them: the inputs of the program.
      inputs: the same, in the dtypes in which they are traced.
      stored: as in `TracedCall`.
      is_cache: which of the arrays are decoding caches, as far as is known.
      may_widen: which of them may be traced in another dtype: all but those variables
        of nnx that are no parameters.
      outputs: what the last trace found.
      leaked: the collections of linen that the function wrote to outside of itself.
      refused_half: whether JAX refused a half dtype in the last trace.
    """

    outputs: Outputs
    refused_half: bool = False

    def __init__(
        self,
        fn: AnyFn,
        leaves: Sequence[object],
        in_cache: Sequence[bool],
        unflatten: Unflatten,
        objects: Objects,
        variables: Variables,
    ):
        self.fn, self.count, self.unflatten = fn, len(leaves), unflatten
        self.objects, self.variables = objects, variables
        self.values = [*leaves, *objects.states]
        are_arrays = list(map(is_array, self.values))
        self.arrays: list[PyTree] = list(itertools.compress(self.values, are_arrays))
        self.inputs = self.arrays
        each_is_cache = [*in_cache, *objects.caches]
        self.is_cache = list(itertools.compress(each_is_cache, are_arrays))
        each_may_widen = [*(True for _ in leaves), *objects.parameters]
        self.may_widen = list(itertools.compress(each_may_widen, are_arrays))
        self.stored: list[np.dtype | None] = [None] * len(self.arrays)
        self.leaked: set[str] = set()

    def widen(self, which: Sequence[bool]) -> bool:
        """Traces these in f32 too if they are half; says if any was not so far."""
        before = self.stored
        self.stored = [
            x.dtype if dtype or (each and is_half(x.dtype)) else None
            for dtype, each, x in zip(before, which, self.arrays, strict=True)
        ]
        self.inputs = [
            x if dtype is None else jax.ShapeDtypeStruct(x.shape, F32)
            for x, dtype in zip(self.arrays, self.stored, strict=True)
        ]
        return self.stored != before

    def keep_successors_half(self) -> None:
        """Lets results be half that take the place of a half argument.

        They have to be half in the function as it was written: it is traced once more,
        if it has such results.
        """
        outputs = self.outputs
        if not outputs.successors:
            return
        try:
            written = binding.trace(self.run, self.arrays).out_avals
        except Exception:  # It runs in f32 alone, and returns nothing in half.
            return
        finally:
            self.outputs = outputs
        position = itertools.count()
        # For each leaf of the results, which output it is.
        leaves = [
            next(position) if slot is _ARRAY else None
            for slot in outputs.slots[: outputs.width]
        ]
        for start, dtypes in outputs.successors:
            found = leaves[start : start + len(dtypes)]
            if dtypes == tuple(None if i is None else written[i].dtype for i in found):
                for i, dtype in zip(found, dtypes, strict=True):
                    if i is not None and is_half(dtype):
                        outputs.states[i] = dtype

    def numbered(self) -> PyTree:
        """The arguments, with the number of each array in its place."""
        numbers = itertools.count()
        filled = [np.asarray(next(numbers)) if is_array(x) else x for x in self.values]
        leaves, states = filled[: self.count], filled[self.count :]
        copies = self.objects.replaced(states)
        return self.unflatten([copies.get(id(x), x) for x in leaves])

    def run(self, *arrays: jax.Array) -> list[jax.Array]:
        """The program: the call, from arrays to arrays."""
        self.refused_half = False
        remaining = iter(arrays)
        filled = [next(remaining) if is_array(x) else x for x in self.values]
        leaves, states = filled[: self.count], filled[self.count :]
        copies = self.objects.copied(states)

        def swap(node: object) -> object:
            described = isinstance(node, nnx.GraphDef)
            return with_scopes(node) if described else copies[id(node)]

        given = [swap(x) if is_node(x) else x for x in leaves]
        args, kwargs = self.unflatten(given)
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
        except Exception as error:
            self.refused_half = is_about_half(error)
            raise
        finally:
            # Caches are known by their path, or once a module has got them.
            known = set(map(id, self.variables.caches))
            for i, x in enumerate(arrays):
                self.is_cache[i] |= id(x) in known
        closures.write_back()
        return self._returned(
            results, arrays, functools.partial(self.objects.split, copies, states)
        )

    def _returned(
        self,
        results: PyTree,
        arrays: Sequence[jax.Array],
        split: Callable[[Sequence[object]], Written],
    ) -> list[jax.Array]:
        """Returns the outputs of the program, and keeps `outputs`."""
        paths, tree = jax.tree_util.tree_flatten_with_path(results, is_leaf=is_node)
        collections = self.variables.written()
        leaves: list[tuple[PyTree, str | None]] = [
            (
                without_scopes(x, self.objects.depth)
                if isinstance(x, nnx.GraphDef)
                else x,
                _collection(collections, path, x),
            )
            for path, x in paths
        ]
        self.leaked |= self.variables.leaked()
        self.variables.forget()
        is_object = [is_node(x) and not isinstance(x, nnx.GraphDef) for x, _ in leaves]
        written = split([x for _, x in itertools.compress(paths, is_object)])
        slots = [
            _OBJECT if object_ else _ARRAY if is_array(x) else x
            for (x, _), object_ in zip(leaves, is_object, strict=True)
        ]
        inputs = {id(x): _Input(i) for i, x in enumerate(arrays)}
        slots += [
            inputs.get(id(x), _ARRAY) if is_array(x) else x for x in written.leaves
        ]
        caches = set(map(id, written.caches))
        leaves += [(x, CACHE if id(x) in caches else "state") for x in written.leaves]
        outputs = [
            each for each, slot in zip(leaves, slots, strict=True) if slot is _ARRAY
        ]
        states = [self._dtype_of(x, state) for x, state in outputs]
        unflatten = functools.partial(jax.tree.unflatten, tree)
        args, kwargs = self.unflatten(self.values[: self.count])
        given = [*args, *kwargs.values()] if any(self.stored) else []
        parts = successors(given, results, is_node)
        self.outputs = Outputs(
            unflatten, len(paths), slots, states, parts, written.merged
        )
        return [x for x, _ in outputs]

    def _dtype_of(self, array: jax.Array, state: str | None) -> np.dtype | None:
        if state == CACHE and array.dtype == F32:
            widened = filter(None, itertools.compress(self.stored, self.is_cache))
            return next(widened, array.dtype)
        return None if state is None else array.dtype


def _collection(
    written: Mapping[int, Sequence[tuple[str, ...]]],
    path: jax.tree_util.KeyPath,
    leaf: object,
) -> str | None:
    """Returns the linen collection that an output is a variable of, if it is one.

    The array that a variable holds may be another output too, for example if it is
    sown: a variable stands under its names.
    """
    keys = dict_keys(path)
    for collection, *names in written.get(id(leaf), ()):
        count = min(len(names), len(keys))
        if count and tuple(names[-count:]) == keys[-count:]:
            return collection
    return None


def is_array(leaf: object) -> TypeGuard[jax.Array]:
    """Whether a leaf of an argument is an input of the program."""
    if isinstance(leaf, np.ndarray):
        # Arrays of text, objects and dates are no arrays to JAX. numpy's numbers are
        # Python's to a function: flags, sizes and indices.
        return leaf.dtype.kind not in "SUOMm"
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
