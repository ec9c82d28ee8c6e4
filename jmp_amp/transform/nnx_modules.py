"""nnx under autocast: objects go in and out as state, modules get their policies.

A function is traced with copies of the nnx objects that it is given or closes over,
made of tracers; what it does to them reaches the caller's objects afterwards, as with
`nnx.jit`. The copies are of subclasses whose methods open name scopes: nnx has neither
scopes nor interceptors of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import errors, nnx

from jmp_amp.policies.patterns import ModuleInfo
from jmp_amp.transform import scopes

# The attribute of a traced copy of a module that holds its `_Place`. nnx takes what is
# called so for no part of the model: `ToNNX` does not hand it to linen.
_PLACE = "_pytree__amp_place"

# The attribute of a class whose methods open scopes.
_OPENS_SCOPES = "_amp_opens_scopes"


class _Place:
    """Where a module is, as data that nnx and JAX compare when they compare modules.

    Modules whose places a map cannot tell apart are alike: two layers of one class can
    be stacked, or returned by two branches, and are traced once.

    Attributes:
      path: the names that lead to it.
      around: the classes of the modules around it.
      depth: that of the autocast that gave it scopes.
    """

    __slots__ = ("around", "depth", "key", "path")

    def __init__(self, path: tuple[str, ...], around: tuple[type, ...]):
        found = scopes.active()
        assert found is not None
        self.path, self.around, self.depth = path, around, found.depth
        # What tells a map apart: an entry may be for what the module is a part of.
        told_by = path if found.policies.sees_paths else ()
        self.key = found.depth, told_by, around if found.policies.entries else ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def is_node(value: Any) -> bool:
    """Whether a value is an object of nnx, or the description of one."""
    return isinstance(value, nnx.Pytree | nnx.Variable | nnx.GraphDef)


class Objects:
    """The nnx objects that a function is given, while it is traced and run.

    Use it as a context, and its methods in their order.

    Attributes:
      depth: that of the autocast which traces.
      states: the arrays and other leaves of the objects; what takes their place, and
        what they are afterwards, are lists of the same kind.
      caches: which of the leaves are those of an `nnx.Cache`.
      parameters: which of the leaves are those of an `nnx.Param`.
    """

    def __init__(self, nodes: Sequence[Any], depth: int, call: str):
        self.depth, self._call = depth, call
        self._nodes = [node for node in nodes if not isinstance(node, nnx.GraphDef)]
        self._written = [_can_be_written(node) for node in self._nodes]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Objects:
        self._stack.enter_context(nnx.update_context(self))
        with nnx.split_context(self) as context:
            written = [context.split(node) for node in self._of(self._nodes, True)]
        fixed = [nnx.split(node) for node in self._of(self._nodes, False)]
        self._parts = [graphdef for graphdef, _ in [*written, *fixed]]
        states = [state for _, state in [*written, *fixed]]
        self.states, self._structure = jax.tree.flatten(states)
        self.caches = _leaves_of(nnx.Cache, states)
        self.parameters = _leaves_of(nnx.Param, states)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def inside(self, states: Sequence[Any]) -> dict[int, Any]:
        """Returns, while tracing, the copies of the nodes by the nodes' identities."""
        trees = jax.tree.unflatten(self._structure, states)
        count = sum(self._written)
        with nnx.merge_context(self, inner=True) as context:
            copies = [
                context.merge(*part)
                for part in zip(self._parts[:count], trees[:count], strict=True)
            ]
        copies += [
            nnx.merge(*part)
            for part in zip(self._parts[count:], trees[count:], strict=True)
        ]
        _hook(copies)
        originals = self._of(self._nodes, True) + self._of(self._nodes, False)
        self._copies, self._given = copies, list(states)
        return {id(a): b for a, b in zip(originals, copies, strict=True)}

    def after(self, outputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns, while tracing, the leaves of the nodes and those in the outputs.

        The second list is of those that are in an `nnx.Cache`.

        Raises:
          flax.errors.TraceContextError: if one was written that must not be.
        """
        _unhook([*self._copies, *outputs], self.depth)
        count = sum(self._written)
        with nnx.split_context(self) as context:
            parts = [context.split(node) for node in [*self._copies[:count], *outputs]]
        given = set(map(id, self._given))
        for node in self._copies[count:]:
            for path, variable in nnx.iter_graph(node):
                if isinstance(variable, nnx.Variable) and any(
                    id(leaf) not in given for leaf in jax.tree.leaves(variable)
                ):
                    name = "/".join(map(str, path)) or type(variable).__name__
                    raise errors.TraceContextError(
                        f"{self._call}: the function writes {name!r} of a "
                        f"{type(node).__name__} that belongs to another trace. Pass "
                        "the module to the transformed function around it (nnx.jit, "
                        "nnx.grad, ...) as an argument, instead of closing over it."
                    )
        self._results = [graphdef for graphdef, _ in parts]
        # Their tracers must not outlive the trace.
        del self._copies, self._given
        states = [state for _, state in parts]
        leaves, self._result_structure = jax.tree.flatten(states)
        return leaves, list(itertools.compress(leaves, _leaves_of(nnx.Cache, states)))

    def outside(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the outputs, and writes what the function wrote.

        Args:
          leaves: the values of what `after` returned.
        """
        trees = jax.tree.unflatten(self._result_structure, leaves)
        with nnx.merge_context(self, inner=False) as context:
            nodes = [
                context.merge(*part) for part in zip(self._results, trees, strict=True)
            ]
        return nodes[sum(self._written) :]

    def _of(self, values: Sequence[Any], written: bool) -> list[Any]:
        pairs = zip(values, self._written, strict=True)
        return [value for value, each in pairs if each == written]


def method_with_scopes(fn: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Returns what opens scopes in place of `Model.__call__`, if `fn` is such a method.

    Args:
      fn: the function that is called.
      args: the positional arguments: the first may be a copy of a module.
    """
    if not args or not isinstance(args[0], nnx.Module):
        return None
    name = getattr(fn, "__name__", "")
    is_method = getattr(_original(type(args[0])), name, None) is fn
    return getattr(type(args[0]), name) if is_method else None


def bound_with_scopes(node: Any, fn: Any) -> Any:
    """Returns a method of a copy, the one that opens scopes if the class has it."""
    return types.MethodType(method_with_scopes(fn, (node,)) or fn, node)


def with_scopes(graphdef: Any) -> Any:
    """Returns the description of the module whose methods open scopes."""
    return _rebuilt(graphdef, _hook)


def without_scopes(graphdef: Any, depth: int) -> Any:
    """Returns the description of the module as it was outside of this autocast."""
    return _rebuilt(graphdef, functools.partial(_unhook, depth=depth))


class _Quiet:
    """Keeps a subclass from its user's `__init_subclass__`: it is none of theirs.

    As a base it would change the layout, and no object could become one of the class.
    """

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any):
        nnx.Module.__init_subclass__.__func__(cls, **kwargs)  # pyright: ignore


@functools.cache
def class_with_scopes(cls: type) -> type:
    """Returns a subclass of the same name whose methods open name scopes."""
    base = vars(nnx.Module).keys() | vars(nnx.Pytree).keys()
    no_methods = staticmethod | classmethod | property | type
    methods = {
        name: _with_scope(name, method, cls)
        for name, method in inspect.getmembers_static(cls)
        if hasattr(method, "__get__")
        and (callable(method) or isinstance(method, functools.singledispatchmethod))
        and not isinstance(method, no_methods)
        and (name == "__call__" or not (name.startswith("__") or name in base))
    }
    names = "__module__", "__qualname__", "__doc__"
    kept = {name: getattr(cls, name) for name in names}
    body = {**kept, **methods, _OPENS_SCOPES: True}
    metaclass = _quiet_metaclass(type(cls))
    is_pytree = not jax.tree_util.all_leaves([object.__new__(cls)])
    return metaclass(cls.__name__, (cls,), body, pytree=is_pytree)


@functools.cache
def _quiet_metaclass(metaclass: Any) -> Any:
    """Returns a metaclass whose classes have `_Quiet` before what they derive from."""

    def mro(cls: Any) -> list[type]:
        own, *others = metaclass.mro(cls)
        return [own, _Quiet, *others]

    return type(metaclass.__name__, (metaclass,), {"mro": mro})


def _leaves_of(kind: type[nnx.Variable], states: Any) -> list[bool]:
    """Which of the leaves of states are those of a kind of Variables."""
    variables = jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [
        isinstance(variable, kind)
        for variable in variables
        for _ in jax.tree.leaves(variable)
    ]


def _can_be_written(node: Any) -> bool:
    """Whether nnx lets the variables of a node be written where we are."""
    variables = (each for _, each in nnx.iter_graph(node))
    try:
        for variable in variables:
            if isinstance(variable, nnx.Variable):
                variable.set_raw_value(variable.get_raw_value())
    except errors.TraceContextError:
        return False
    return True


def _modules(node: Any) -> list[tuple[tuple[str, ...], Any]]:
    """The modules that are parts of `node`, or `node` itself, with their paths."""
    return [
        (tuple(map(str, path)), each)
        for path, each in nnx.iter_graph(node)
        if isinstance(each, nnx.Module)
    ]


def _hook(nodes: Sequence[Any]) -> None:
    found = []
    for node in nodes:
        modules = _modules(node)
        classes = {path: _original(type(module)) for path, module in modules}
        for path, module in modules:
            around = (classes.get(path[:end], nnx.Module) for end in range(len(path)))
            found.append((path, tuple(around), module))
    # What is given by itself and as a part of another has the path in the other.
    for path, around, module in sorted(found, key=lambda each: not each[0]):
        if _PLACE in vars(module):
            continue
        object.__setattr__(module, _PLACE, _Place(path, around))
        if not _opens_scopes(type(module)):
            hooked = class_with_scopes(type(module))
            object.__setattr__(module, "__class__", hooked)


def _unhook(nodes: Sequence[Any], depth: int) -> None:
    for _, module in itertools.chain.from_iterable(map(_modules, nodes)):
        place = vars(module).get(_PLACE)
        # What an autocast around this one gave scopes keeps them.
        if place is None or place.depth == depth:
            vars(module).pop(_PLACE, None)
            object.__setattr__(module, "__class__", _original(type(module)))


def _original(cls: type) -> type:
    return cls.__bases__[0] if _opens_scopes(cls) else cls


def _opens_scopes(cls: type) -> bool:
    return _OPENS_SCOPES in vars(cls)


def _rebuilt(graphdef: Any, change: Callable[[Sequence[Any]], None]) -> Any:
    try:
        node = nnx.graph.unflatten(graphdef, [np.zeros(())] * graphdef.num_leaves)
        if nnx.graphdef(node) != graphdef:
            return graphdef
    except (ValueError, TypeError, RuntimeError, AttributeError):
        # What it describes cannot be made of zeros; its modules open no scopes.
        return graphdef
    change([node])
    return nnx.graphdef(node)


def _with_scope(name: str, method: Any, cls: type) -> Callable[..., Any]:
    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        if scopes.active() is None:
            return bound(*args, **kwargs)
        if _PLACE not in vars(self):
            # It was made of the class itself, and is the outermost one.
            _hook([self])
        place = vars(self)[_PLACE]
        own_name = place.path[-1] if place.path else None
        info = ModuleInfo(place.path, cls, own_name, name)
        with (
            jax.named_scope(_scope_name(info, scopes.running())),
            scopes.module_scope(info, around=place.around),
        ):
            return bound(*args, **kwargs)

    return scoped


def _scope_name(info: ModuleInfo, outer: tuple[str, ...] | None) -> str:
    """As linen's: the name in the module around it, and the method if it has a name."""
    found = scopes.active()
    if outer is not None and found is not None:
        outer = outer[len(found.base) :]
    path = info.path
    if outer and path[: len(outer)] == outer:
        path = path[len(outer) :] or path[-1:]
    name = "/".join(path) if path else info.cls.__name__
    return name if info.method == "__call__" else f"{name}.{info.method}"
