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
from jmp_amp.plan.dataflow.values import traced_dtype
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.jaxprs import Body, ClosedJaxpr
from jmp_amp.plan.program.regions import Entries, plans_apart, scopes_in
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
from jmp_amp.transform.outputs import ARRAY, OBJECT, Input, Outputs, Unflatten
from jmp_amp.transform.refusals import (
    OtherParametersError,
    explain_traced_values,
    is_about_half,
)
from jmp_amp.transform.successors import Successor, successors


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

    def as_it_is(self, arrays: Sequence[PyTree]) -> list[PyTree]:
        """Runs the function as it was written, without a plan."""
        return binding.run_as_traced(jaxprs.body_of(self.jaxpr), self.as_traced(arrays))

    def as_traced(self, arrays: Sequence[PyTree]) -> list[PyTree]:
        """Returns inputs in the dtypes that the program was traced with."""
        # Parameters may be stored in half precision, and caches.
        return [
            jax.lax.convert_element_type(x, jaxprs.aval_of(v).dtype)
            if traced_dtype(v) is not None
            else x
            for x, v in zip(arrays, self.jaxpr.jaxpr.invars, strict=True)
        ]


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
      cpu: the CPU that it is traced for; None for a GPU or a TPU. Inside of another
        autocast, both are those of the other one unless this call has its own plan.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_node)
    leaves = [leaf for _, leaf in paths]
    nodes = [*filter(is_node, leaves), *find_objects(fn, is_node)]
    nodes = [node for node in nodes if not isinstance(node, nnx.GraphDef)]
    outer = scopes.active() or scopes.OUTSIDE
    active, plans = outer.around(policies), outer.plans(cpu)
    if plans or not active.depth:
        active = active._replace(notes_modules=notes_modules, cpu=cpu)
    with nnx.update_context(tag := object()):
        objects = Objects(nodes, active.depth, call, tag)
        keys = [dict_keys(path) for path, _ in paths]
        unflatten = functools.partial(jax.tree.unflatten, tree)
        with scopes.activate(active), intercepted() as variables:
            traced = _Call(fn, leaves, keys, unflatten, objects, variables)
            stores_half = is_half(policies.default.param_dtype)
            if stores_half:
                traced.widen(traced.may_widen)
            try:
                jaxpr = _traced(traced)
                if plans and plans_apart(jaxprs.body_of(jaxpr)):
                    with scopes.activate(active._replace(plans_inside=True)):
                        jaxpr = _traced(traced)
            except Exception as error:
                are_arrays = map(is_array, traced.values)
                known = [path for path, _ in paths] + [None] * len(objects.states)
                inputs = list(itertools.compress(known, are_arrays))
                explain_traced_values(error, call, fn, inputs)
                raise
            if stores_half:
                traced.keep_successors_half()
            if traced.leaked:
                raise TypeError(
                    f"{call}: the function writes to {min(traced.leaked)!r} of a linen "
                    "module around it, where nothing that is traced may stay. Write "
                    "autocast(model.apply, policy); with_policy(policy) marks a method."
                )
        entries = entries_of_scopes(policies, scopes_in(jaxprs.body_of(jaxpr)))
        if unmatched(policies):
            found = " ".join(_scopes(jaxprs.body_of(jaxpr), set()))
            matched = scopes.noted(found, active.depth)
            warn_of_unmatched(policies, matched=matched)
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


def _scopes(body: Body, seen: set[object]) -> Iterator[str]:
    """Yields the name scopes of the equations of a program, most of them once."""
    for eqn in body.jaxpr.eqns:
        yield from {jaxprs.scope_text(eqn)} - seen
        inner = [
            each for each in jaxprs.owned_bodies(eqn) if id(each.jaxpr) not in seen
        ]
        seen |= {jaxprs.scope_text(eqn), *(id(each.jaxpr) for each in inner)}
        for each in inner:
            yield from _scopes(each, seen)


def _traced(call: _Call) -> ClosedJaxpr:
    """Returns the jaxpr of a call, with as few of its arguments widened as it takes.

    What computes nothing that the call returns is left out.
    """
    try:
        return without_dead_code(binding.trace(call.run, call.inputs))
    except Exception as error:
        refused_half, was_wide = call.refused_half, any(call.stored)
        for which in (call.is_cache, call.may_widen):
            if refused_half and call.widen(which):
                with contextlib.suppress(TypeError, jax.dtypes.TypePromotionError):
                    return without_dead_code(binding.trace(call.run, call.inputs))
        found = scopes.active()
        if refused_half and found is not None and found.hands_on_f32:
            with scopes.activate(found._replace(hands_on_f32=False)):
                return without_dead_code(binding.trace(call.run, call.inputs))
        if was_wide and (refused_half or isinstance(error, OtherParametersError)):
            # Layers that ask for half, or a step whose optimizer began with half.
            call.narrow()
            return without_dead_code(binding.trace(call.run, call.inputs))
        raise


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
        keys: Sequence[tuple[str, ...]],
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
        each_is_cache = [*(CACHE in each for each in keys), *objects.caches]
        self.is_cache = list(itertools.compress(each_is_cache, are_arrays))
        position = itertools.count()
        # For each leaf, which of the arrays it is.
        self.places = [next(position) if each else None for each in are_arrays]
        self.keys = list(itertools.compress(keys, are_arrays))
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

    def narrow(self) -> None:
        """Traces all in the dtypes in which they are given."""
        self.stored = [None for _ in self.arrays]
        self.inputs = self.arrays

    def keep_successors_half(self) -> None:
        """Lets results be half that take the place of a half array.

        They have to be half in the function as it was written: it is traced once more,
        if it has such results. A state of a function that runs in f32 alone is stored
        as it was.
        """
        outputs = self.outputs
        if not outputs.successors:
            return
        written: list[np.dtype | None] = []
        with contextlib.suppress(Exception):
            avals = binding.trace(self.run, self.arrays).out_avals
            written = self.outputs.dtypes(self.arrays, avals)
        self.outputs = outputs
        position = itertools.count()
        for place, slot in enumerate(outputs.slots):
            i = next(position) if slot is ARRAY else None
            if i is None or place not in outputs.successors:
                continue
            dtypes, is_state = outputs.successors[place]
            if len(written) == len(outputs.slots):
                dtypes &= {written[place]}
            elif not is_state:
                continue
            outputs.states[i] = next(iter(dtypes), outputs.states[i])

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
        names = [_variable(collections, path, x) for path, x in paths]
        self.leaked |= self.variables.leaked()
        self.variables.forget()
        leaves: list[PyTree] = [
            without_scopes(x, self.objects.depth) if isinstance(x, nnx.GraphDef) else x
            for _, x in paths
        ]
        is_object = [is_node(x) and not isinstance(x, nnx.GraphDef) for x in leaves]
        written = split(list(itertools.compress(leaves, is_object)))
        slots = [
            OBJECT if object_ else ARRAY if is_array(x) else x
            for x, object_ in zip(leaves, is_object, strict=True)
        ]
        inputs = {id(x): Input(i) for i, x in enumerate(arrays)}
        slots += [
            inputs.get(id(x), ARRAY) if is_array(x) else x for x in written.leaves
        ]
        caches = set(map(id, written.caches))
        kinds = [each[0] if each else None for each in names]
        kinds += [CACHE if id(x) in caches else "state" for x in written.leaves]
        befores = list(map(self._stored_under, names))
        befores += list(map(self._stored_at, written.places))
        args, kwargs = self.unflatten(self.values[: self.count])
        given = [*args, *kwargs.values()] if any(self.stored) else []
        parts = successors(given, results, is_node)
        outputs, states, found = [], [], {}
        leaves += written.leaves
        each = zip(leaves, slots, kinds, befores, strict=True)
        for place, (x, slot, kind, before) in enumerate(each):
            if slot is ARRAY:
                if before is not None and x.dtype == F32:
                    found[place] = Successor(frozenset((before,)), is_state=True)
                elif place in parts:
                    found[place] = parts[place]
                outputs.append(x)
                states.append(self._dtype_of(x, kind))
        unflatten = functools.partial(jax.tree.unflatten, tree)
        self.outputs = Outputs(
            unflatten, len(paths), slots, states, found, written.merged
        )
        return outputs

    def _stored_under(self, variable: tuple[str, ...] | None) -> np.dtype | None:
        """Returns the half dtype in which a variable of linen was given, if it was.

        Of several arguments of its name, as of parameters without their collection, all
        have to be.
        """
        found: list[tuple[int, np.dtype | None]] = [
            (min(len(keys), len(variable)), dtype)
            for keys, dtype in zip(self.keys, self.stored, strict=False)
            if variable and _is_end(keys, variable)
        ]
        most = max((count for count, _ in found), default=0)
        dtypes = {dtype for count, dtype in found if count == most}
        return dtypes.pop() if len(dtypes) == 1 else None

    def _stored_at(self, place: int | None) -> np.dtype | None:
        """Returns the half dtype in which a leaf of an nnx object was given."""
        number = None if place is None else self.places[self.count + place]
        return None if number is None else self.stored[number]

    def _dtype_of(self, array: jax.Array, state: str | None) -> np.dtype | None:
        if state == CACHE and array.dtype == F32:
            widened = filter(None, itertools.compress(self.stored, self.is_cache))
            return next(widened, array.dtype)
        return None if state is None else array.dtype


def _variable(
    written: Mapping[int, Sequence[tuple[str, ...]]],
    path: jax.tree_util.KeyPath,
    leaf: object,
) -> tuple[str, ...] | None:
    """Returns the path of the linen variable that an output is, if it is one.

    The array that a variable holds may be another output too, for example if it is
    sown: a variable stands under its names.
    """
    keys = dict_keys(path)
    for variable in written.get(id(leaf), ()):
        if _is_end(keys, variable[1:]):
            return variable
    return None


def _is_end(keys: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether one of two paths ends as the other one does."""
    count = min(len(names), len(keys))
    return bool(count) and names[-count:] == keys[-count:]


def is_array(leaf: object) -> TypeGuard[jax.Array]:
    """Whether a leaf of an argument is an input of the program."""
    if isinstance(leaf, np.ndarray):
        # Arrays of text, objects and dates are no arrays to JAX. numpy's numbers are
        # Python's to a function: flags, sizes and indices.
        return leaf.dtype.kind not in "SUOMm"
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
