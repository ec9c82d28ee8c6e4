"""nnx under autocast: objects go in and out as state, modules get their policies.

Copy, hook, trace, unhook, write back. `split_objects` splits the nnx objects that a
function is given or closes over; `Objects.copied` makes copies of them, of tracers.
nnx has neither scopes nor interceptors: `_hook` gives every module of a copy its
address in the model, and makes it one of a subclass whose methods open name scopes. The
function is traced with the copies. `Copies.split` takes subclasses and addresses away
and returns the leaves of what was written, which are outputs of the program.
`Written.merged` writes their values to the caller's objects, as `nnx.jit` does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from flax import errors, nnx
from flax import linen as nn

from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.patterns import ModuleInfo
from jmp_amp.transform import scopes

# The attribute of a traced copy of a module that holds its `_Address`. nnx takes what
# is called so for no part of the model: `ToNNX` does not hand it to linen.
_ADDRESS = "_pytree__amp_address"

# The attribute of a class whose methods open scopes.
_OPENS_SCOPES = "_amp_opens_scopes"


class _Address:
    """Where a module is, as data that nnx and JAX compare when they compare modules.

    Modules whose addresses a map cannot tell apart are alike: two layers of one class
    can be stacked, or returned by two branches, and are traced once.

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
        return isinstance(other, _Address) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def is_node(value: object) -> bool:
    """Whether a value is an object of nnx, or the description of one."""
    return isinstance(value, nnx.Pytree | nnx.Variable | nnx.GraphDef)


@contextlib.contextmanager
def split_objects(nodes: Sequence[object], depth: int, call: str) -> Iterator[Objects]:
    """Splits the nnx objects that a function is given, while it is traced and run.

    Args:
      nodes: the objects. Descriptions of objects are left out.
      depth: that of the autocast that traces.
      call: the caller's call as written, for errors.
    """
    tag = object()
    objects = [node for node in nodes if not isinstance(node, nnx.GraphDef)]
    with nnx.update_context(tag):
        yield Objects(objects, depth, call, tag)


class Objects:
    """The nnx objects that a function is given, split.

    Attributes:
      depth: that of the autocast that traces.
      states: the arrays and other leaves of the objects.
      caches: which of the leaves are those of an `nnx.Cache`.
      parameters: which of the leaves are those of an `nnx.Param`.
    """

    def __init__(self, nodes: Sequence[object], depth: int, call: str, tag: Hashable):
        self.depth, self.call, self.tag = depth, call, tag
        can_be_written = [_can_be_written(node) for node in nodes]
        written = list(itertools.compress(nodes, can_be_written))
        fixed = [x for x, each in zip(nodes, can_be_written, strict=True) if not each]
        with nnx.split_context(tag) as context:
            parts = [context.split(node) for node in written]
        parts += [nnx.split(node) for node in fixed]
        self.nodes, self.count = [*written, *fixed], len(written)
        self.graphdefs = [graphdef for graphdef, _ in parts]
        states = [state for _, state in parts]
        self.states, self.structure = jax.tree.flatten(states)
        self.caches = _leaves_of(nnx.Cache, states)
        self.parameters = _leaves_of(nnx.Param, states)

    def copied(self, states: Sequence[object]) -> Copies:
        """Returns, while tracing, copies of the objects with other leaves."""
        trees = jax.tree.unflatten(self.structure, states)
        parts = list(zip(self.graphdefs, trees, strict=True))
        with nnx.merge_context(self.tag, inner=True) as context:
            copies = [context.merge(*part) for part in parts[: self.count]]
        copies += [nnx.merge(*part) for part in parts[self.count :]]
        _hook(copies)
        return Copies(self, copies, states)


class Written(NamedTuple):
    """The values that a traced function leaves in nnx objects.

    Attributes:
      leaves: the leaves of the objects that can be written, then of the outputs.
      caches: those of them that are in an `nnx.Cache`.
      merged: given the values of the leaves, writes them to the caller's objects, and
        returns the outputs.
    """

    leaves: list[object]
    caches: list[object]
    merged: Callable[[Sequence[object]], list[object]]


class Copies(NamedTuple):
    """The copies of nnx objects that a function is traced with.

    Attributes:
      objects: the objects.
      nodes: a copy of each.
      given: the leaves of the copies before the function ran.
    """

    objects: Objects
    nodes: list[PyTree]
    given: Sequence[object]

    def by_identity(self) -> dict[int, object]:
        """Returns the copies by the identities of the objects."""
        return {id(a): b for a, b in zip(self.objects.nodes, self.nodes, strict=True)}

    def split(self, outputs: Sequence[object]) -> Written:
        """Returns, while tracing, what the function wrote to the copies.

        Args:
          outputs: the nnx objects that the function returned.

        Raises:
          flax.errors.TraceContextError: if one was written that must not be.
        """
        count, tag = self.objects.count, self.objects.tag
        _unhook([*self.nodes, *outputs], self.objects.depth)
        with nnx.split_context(tag) as context:
            parts = [context.split(node) for node in [*self.nodes[:count], *outputs]]
        self._refuse_writes()
        # The tracers must not outlive the trace: `merged` holds none.
        graphdefs = [graphdef for graphdef, _ in parts]
        states = [state for _, state in parts]
        leaves, structure = jax.tree.flatten(states)

        def merged(values: Sequence[object]) -> list[object]:
            trees = jax.tree.unflatten(structure, values)
            with nnx.merge_context(tag, inner=False) as context:
                return list(map(context.merge, graphdefs, trees))[count:]

        caches = list(itertools.compress(leaves, _leaves_of(nnx.Cache, states)))
        return Written(leaves, caches, merged)

    def _refuse_writes(self) -> None:
        """Raises an error if an object was written that belongs to another trace."""
        given = set(map(id, self.given))
        for node in self.nodes[self.objects.count :]:
            for path, variable in nnx.iter_graph(node):
                if isinstance(variable, nnx.Variable) and any(
                    id(leaf) not in given for leaf in jax.tree.leaves(variable)
                ):
                    name = "/".join(map(str, path)) or type(variable).__name__
                    raise errors.TraceContextError(
                        f"{self.objects.call}: the function writes {name!r} of a "
                        f"{type(node).__name__} that belongs to another trace. Pass "
                        "the module to the transformed function around it (nnx.jit, "
                        "nnx.grad, ...) as an argument, instead of closing over it."
                    )


def method_with_scopes(fn: AnyFn, args: Sequence[object]) -> AnyFn | None:
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


def bound_with_scopes(node: object, fn: AnyFn) -> types.MethodType:
    """Returns a method of a copy, the one that opens scopes if the class has it."""
    return types.MethodType(method_with_scopes(fn, (node,)) or fn, node)


def with_scopes(graphdef: nnx.GraphDef) -> nnx.GraphDef:
    """Returns the description of the module whose methods open scopes."""
    return _rebuilt(graphdef, _hook)


def without_scopes(graphdef: nnx.GraphDef, depth: int) -> nnx.GraphDef:
    """Returns the description of the module as it was outside of this autocast."""
    return _rebuilt(graphdef, functools.partial(_unhook, depth=depth))


Enter = Callable[[nnx.Module, str], contextlib.AbstractContextManager[None]]


def subclass(cls: type, attributes: Mapping[str, object], enter: Enter | None) -> type:
    """Returns a subclass of a module class, of the same name, for autocast's own use.

    Its objects have the same layout: an object of `cls` can become one of it.

    Args:
      cls: a module class of linen or nnx.
      attributes: added to the class.
      enter: the methods run in the context that it returns, given the object and the
        method's name. These are `__call__` and all methods of the user, private ones
        and ones with decorators too; not static methods, class methods, properties,
        and the other methods with two underscores.
    """
    methods = {} if enter is None else _methods_in(cls, enter)
    kept = {n: getattr(cls, n) for n in ("__module__", "__qualname__", "__doc__")}
    options = {}
    if issubclass(cls, nnx.Module):
        is_leaf = jax.tree_util.all_leaves([object.__new__(cls)])
        options = {"pytree": not is_leaf}
    body = {**kept, **methods, **attributes}
    metaclass = cast(Callable[..., type], type(cls))
    new = metaclass(cls.__name__, (_quiet_base(cls), cls), body, **options)
    # Subclasses of the new class are the user's again.
    new.__bases__ = (cls,)
    return new


def _quiet_base(cls: type) -> type:
    """Returns a class that keeps `__init_subclass__` of the user from running.

    That is for classes of the user: it may count them, or want arguments. It stands
    before `cls` while a subclass is made, and has the layout of modules, so that it can
    be taken out of the bases afterwards.
    """

    def quiet(new: type, **options: bool) -> None:
        library = nn.Module if issubclass(cls, nn.Module) else nnx.Module
        library.__init_subclass__.__func__(new, **options)  # pyright: ignore

    has_layout = cls
    while "__dict__" not in vars(has_layout):
        has_layout = cast(type, has_layout.__base__)
    bases = (cast(type, has_layout.__base__),)
    return type("Quiet", bases, {"__init_subclass__": quiet})


def _methods_in(cls: type, enter: Enter) -> dict[str, AnyFn]:
    """The methods of a class, each in its context."""

    def inside(name: str, method: AnyFn | functools.singledispatchmethod) -> AnyFn:
        @functools.wraps(cast(AnyFn, method))
        def scoped(self: nnx.Module, *args: object, **kwargs: object) -> object:
            bound = method.__get__(self, type(self))
            with enter(self, name):
                return bound(*args, **kwargs)

        return scoped

    of_the_library = vars(nnx.Module).keys() | vars(nnx.Pytree).keys()
    no_methods = staticmethod | classmethod | property | type
    return {
        name: inside(name, method)
        for name, method in inspect.getmembers_static(cls)
        if hasattr(method, "__get__")
        and (callable(method) or isinstance(method, functools.singledispatchmethod))
        and not isinstance(method, no_methods)
        and not (name.startswith("__") and name != "__call__")
        and (name not in of_the_library or name == "__call__")
    }


@functools.cache
def class_with_scopes(cls: type) -> type:
    """Returns a subclass of the same name whose methods open name scopes."""
    enter = functools.partial(_scopes_of, cls)
    return subclass(cls, {_OPENS_SCOPES: True}, enter)


@contextlib.contextmanager
def _scopes_of(cls: type, module: nnx.Module, method: str) -> Iterator[None]:
    """While a method of a module of `cls` is traced inside, the scopes of both."""
    if scopes.active() is None:
        yield
        return
    if _ADDRESS not in vars(module):
        # It was made of the class itself, and is the outermost one.
        _hook([module])
    address = vars(module)[_ADDRESS]
    own_name = address.path[-1] if address.path else None
    info = ModuleInfo(address.path, cls, own_name, method)
    with (
        jax.named_scope(_scope_name(info, scopes.running())),
        scopes.module_scope(info, around=address.around),
    ):
        yield


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


def _leaves_of(kind: type[nnx.Variable], states: PyTree) -> list[bool]:
    """Which of the leaves of states are those of a kind of Variables."""
    variables = jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [
        isinstance(variable, kind)
        for variable in variables
        for _ in jax.tree.leaves(variable)
    ]


def _can_be_written(node: object) -> bool:
    """Whether nnx lets the variables of a node be written where we are."""
    try:
        for _, variable in nnx.iter_graph(node):
            if isinstance(variable, nnx.Variable):
                variable.set_raw_value(variable.get_raw_value())
    except errors.TraceContextError:
        return False
    return True


def _modules(node: object) -> list[tuple[tuple[str, ...], nnx.Module]]:
    """The modules that are parts of `node`, or `node` itself, with their paths."""
    return [
        (tuple(map(str, path)), each)
        for path, each in nnx.iter_graph(node)
        if isinstance(each, nnx.Module)
    ]


def _hook(nodes: Sequence[object]) -> None:
    found = []
    for node in nodes:
        modules = _modules(node)
        classes = {path: _original(type(module)) for path, module in modules}
        for path, module in modules:
            around = (classes.get(path[:end], nnx.Module) for end in range(len(path)))
            found.append((path, tuple(around), module))
    # What is given by itself and as a part of another has the path in the other.
    for path, around, module in sorted(found, key=lambda each: not each[0]):
        if _ADDRESS in vars(module):
            continue
        object.__setattr__(module, _ADDRESS, _Address(path, around))
        if not _opens_scopes(type(module)):
            hooked = class_with_scopes(type(module))
            object.__setattr__(module, "__class__", hooked)


def _unhook(nodes: Sequence[object], depth: int) -> None:
    for _, module in itertools.chain.from_iterable(map(_modules, nodes)):
        address = vars(module).get(_ADDRESS)
        # What an autocast around this one gave scopes keeps them.
        if address is None or address.depth == depth:
            vars(module).pop(_ADDRESS, None)
            object.__setattr__(module, "__class__", _original(type(module)))


def _original(cls: type) -> type:
    return cls.__bases__[0] if _opens_scopes(cls) else cls


def _opens_scopes(cls: type) -> bool:
    return _OPENS_SCOPES in vars(cls)


def _rebuilt(
    graphdef: nnx.GraphDef, change: Callable[[Sequence[object]], None]
) -> nnx.GraphDef:
    try:
        node = nnx.graph.unflatten(graphdef, [np.zeros(())] * graphdef.num_leaves)
        if nnx.graphdef(node) != graphdef:
            return graphdef
    except (ValueError, TypeError, RuntimeError, AttributeError):
        # What it describes cannot be made of zeros; its modules open no scopes.
        return graphdef
    change([node])
    return nnx.graphdef(node)
