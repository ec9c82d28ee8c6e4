"""nnx under autocast: objects go in and out as state, modules get their policies.

Copy, hook, trace, unhook, write back. `Objects` splits the nnx objects that a function
is given or closes over; `Objects.copied` makes copies of them, of tracers. nnx has
neither scopes nor interceptors: `_hook` gives every module of a copy its address in the
model, and makes it one of a subclass whose methods open name scopes. The function is
traced with the copies. `Objects.split` unhooks them, and returns the leaves that they
have then: outputs of the program. `Written.merged` writes their values to the caller's
objects, as `nnx.jit` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from flax import errors, nnx
from flax import linen as nn

from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.policies.patterns import ModuleInfo
from jmp_amp.transform import scopes
from jmp_amp.transform.layer_dtypes import asks_for_f32

# The attribute of a traced copy of a module that holds its `_Address`. nnx takes what
# is called so for no part of the model: `ToNNX` does not hand it to linen.
_ADDRESS = "_pytree__amp_address"

# The attribute of a class whose methods open scopes.
_OPENS_SCOPES = "_amp_opens_scopes"


@dataclasses.dataclass(frozen=True)
class _Address:
    """Where a module is in a model, as nnx and JAX compare it.

    Modules whose addresses a map cannot tell apart are alike: two layers of one class
    can be stacked, or returned by two branches, and are traced once.

    Attributes:
      path: the names that lead to it.
      around: the classes of the modules around it.
      asks_for_f32: whether it is a layer that is written to compute in float32.
      depth: that of the autocast that gave it scopes.
      told_by: what a map may tell of both: an entry may be for what it is a part of.
    """

    path: tuple[str, ...] = dataclasses.field(compare=False)
    around: tuple[type, ...] = dataclasses.field(compare=False)
    asks_for_f32: bool
    depth: int
    told_by: tuple[tuple[str, ...], tuple[type, ...]]


def is_node(value: object) -> bool:
    """Whether a value is an object of nnx, or the description of one."""
    return isinstance(value, nnx.Pytree | nnx.Variable | nnx.GraphDef)


class Objects:
    """The nnx objects that a function is given, split; for use in `update_context`.

    Attributes:
      nodes: the objects, those first that can be written here.
      depth: that of the autocast that traces.
      states: the arrays and other leaves of the objects.
      caches, parameters: which of them are those of `nnx.Cache` and `nnx.Param`.

    Args:
      nodes: the objects.
      depth: as above.
      call: the caller's call as written, for errors.
      tag: that of the `nnx.update_context`.
    """

    def __init__(self, nodes: Iterable[object], depth: int, call: str, tag: Hashable):
        self.depth, self.call, self.tag = depth, call, tag
        distinct = list({id(node): node for node in nodes}.values())
        written = [node for node in distinct if _can_be_written(node)]
        known = set(map(id, written))
        fixed = [node for node in distinct if id(node) not in known]
        with nnx.split_context(tag) as context:
            parts = [context.split(node) for node in written]
        parts += [nnx.split(node) for node in fixed]
        self.nodes, self.count = [*written, *fixed], len(written)
        self.graphdefs = [graphdef for graphdef, _ in parts]
        states = [state for _, state in parts]
        self.states, self.structure = jax.tree.flatten(states)
        self.caches = _leaves_of(nnx.Cache, states)
        self.parameters = _leaves_of(nnx.Param, states)

    def copied(self, states: Sequence[object]) -> dict[int, PyTree]:
        """Returns, while tracing, copies with other leaves, by identity of nodes."""
        with nnx.merge_context(self.tag, inner=True) as context:
            copies = self._merged(states, context.merge)
        _hook([*copies.values()])
        return copies

    def replaced(self, leaves: Sequence[object]) -> dict[int, PyTree]:
        """Returns copies with other leaves, by identity of nodes, for no trace."""
        with nnx.merge_context() as context:
            return self._merged(leaves, context.merge)

    def _merged(
        self, leaves: Sequence[object], merge: Callable[..., PyTree]
    ) -> dict[int, PyTree]:
        trees = jax.tree.unflatten(self.structure, leaves)
        parts = list(zip(self.graphdefs, trees, strict=True))
        copies = [merge(*part) for part in parts[: self.count]]
        copies += [nnx.merge(*part) for part in parts[self.count :]]
        return {id(a): b for a, b in zip(self.nodes, copies, strict=True)}

    def split(
        self,
        copies: Mapping[int, PyTree],
        states: Sequence[object],
        outputs: Sequence[object],
    ) -> Written:
        """Returns, while tracing, the leaves of the copies and of the outputs.

        `copies` were made of `states`; `outputs` are the nnx objects that the function
        returned. Raises an error if an object was written that must not be.
        """
        count, tag, nodes = self.count, self.tag, list(copies.values())
        _unhook([*nodes, *outputs], self.depth)
        with nnx.split_context(tag) as context:
            parts = [context.split(node) for node in [*nodes[:count], *outputs]]
        self._refuse_writes(nodes[count:], states)
        # The tracers must not outlive the trace: `merged` holds none.
        graphdefs = [graphdef for graphdef, _ in parts]
        trees = [state for _, state in parts]
        leaves, structure = jax.tree.flatten(trees)

        def merged(values: Sequence[object]) -> list[object]:
            states = jax.tree.unflatten(structure, values)
            with nnx.merge_context(tag, inner=False) as context:
                return list(map(context.merge, graphdefs, states))[count:]

        caches = list(itertools.compress(leaves, _leaves_of(nnx.Cache, trees)))
        before = jax.tree.unflatten(self.structure, range(len(states)))[:count]
        places: list[int | None] = []
        for old, new in zip(before, trees[:count], strict=True):
            known = dict(jax.tree_util.tree_leaves_with_path(old))
            paths = jax.tree_util.tree_leaves_with_path(new)
            places += [known.get(path) for path, _ in paths]
        places += [None] * (len(leaves) - len(places))
        return Written(leaves, caches, places, merged)

    def _refuse_writes(self, fixed: Sequence[PyTree], states: Sequence[object]) -> None:
        """Raises an error if a copy has other leaves than it was made with."""
        given = set(map(id, states))
        for node in fixed:
            for path, variable in nnx.iter_graph(node):
                if isinstance(variable, nnx.Variable) and any(
                    id(leaf) not in given for leaf in jax.tree.leaves(variable)
                ):
                    name = "/".join(map(str, path)) or type(variable).__name__
                    raise errors.TraceContextError(
                        f"{self.call}: the function writes {name!r} of a "
                        f"{type(node).__name__} that belongs to another trace. Pass "
                        "the module to the transformed function around it (nnx.jit, "
                        "nnx.grad, ...) as an argument, instead of closing over it."
                    )


class Written(NamedTuple):
    """The values that a traced function leaves in nnx objects.

    Attributes:
      leaves: those of the objects that can be written, then those of the outputs.
      caches: those of them that are in an `nnx.Cache`.
      places: for each, the place of what it was before among the leaves that were given
        to the objects; None if it is new.
      merged: given values of the leaves, writes them to the caller's objects, and
        returns the outputs.
    """

    leaves: list[object]
    caches: list[object]
    places: list[int | None]
    merged: Callable[[Sequence[object]], list[object]]


def method_with_scopes(fn: AnyFn, args: Sequence[object]) -> AnyFn | None:
    """Returns the method that opens scopes in place of `fn`, if `fn` is one of args[0].

    The first argument may be a copy of a module: `fn` is `Model.__call__`, for example.
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
    """Returns a subclass of a module class, of the same name and the same layout.

    An object of `cls` can become one of it.

    Args:
      cls: a module class of linen or nnx.
      attributes: added to the class.
      enter: given an object and the name of a method, returns the context in which the
        method runs. It is asked for `__call__` and all methods of the user, private and
        decorated ones too; not for static methods, class methods, properties and other
        names with two underscores.
    """
    methods = {} if enter is None else _methods_in(cls, enter)
    kept = {n: getattr(cls, n) for n in ("__module__", "__qualname__", "__doc__")}
    options = {}
    if issubclass(cls, nnx.Module):
        # An abstract class has no objects; its subclasses say `pytree=` themselves.
        is_leaf = not inspect.isabstract(cls) and jax.tree_util.all_leaves(
            [object.__new__(cls)]
        )
        options = {"pytree": not is_leaf}
    body = {**kept, **methods, **attributes}
    metaclass = cast(Callable[..., type], type(cls))
    if not _has_hook(cls):
        return metaclass(cls.__name__, (cls,), body, **options)
    new = metaclass(cls.__name__, (_quiet_base(cls), cls), body, **options)
    # Subclasses of the new class are the user's again.
    new.__bases__ = (cls,)
    return new


def _has_hook(cls: type) -> bool:
    """Whether a class of the user has an `__init_subclass__`."""
    return any(
        "__init_subclass__" in vars(each)
        and each.__module__.partition(".")[0] not in ("builtins", "typing", "flax")
        for each in cls.__mro__
    )


class _Empty:
    """A class of the layout of `object`, whose `__bases__` may be changed."""

    __slots__ = ()


def _quiet_base(cls: type) -> type:
    """Returns a base that keeps the user's `__init_subclass__` from running.

    That is for classes of the user: it may count them, or want arguments. The base has
    the layout of `cls`, so that it can be taken out when the subclass is made.
    """

    def quiet(new: type, **options: bool) -> None:
        library = nn.Module if issubclass(cls, nn.Module) else nnx.Module
        library.__init_subclass__.__func__(new, **options)  # pyright: ignore

    has_layout = cls
    while "__dict__" not in vars(has_layout):
        has_layout = cast(type, has_layout.__base__)
    layout = cast(type, has_layout.__base__)
    start = () if layout is object else (_Empty,)
    base = type("Quiet", start, {"__init_subclass__": quiet})
    # Given afterwards, so that no hook of the user sees this class either.
    base.__bases__ = (layout,)
    return base


def _methods_in(cls: type, enter: Enter) -> dict[str, AnyFn]:
    """The methods of a class, each in its context."""

    def inside(name: str, method: AnyFn | functools.singledispatchmethod) -> AnyFn:
        @functools.wraps(cast(AnyFn, method))
        def scoped(self: nnx.Module, *args: object, **kwargs: object) -> object:
            bound = method.__get__(self, type(self))
            with enter(self, name):
                return bound(*args, **kwargs)

        # A jitted, cached or dispatched method has more: `lower`, `register`.
        for other in dir(method):
            if not other.startswith("_"):
                setattr(scoped, other, getattr(method, other))
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
        scopes.module_scope(info, None, address.around, address.asks_for_f32),
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
    active = scopes.active()
    assert active is not None
    policies, found = active.policies, []
    for node in nodes:
        modules = dict(_modules(node))
        for path, module in modules.items():
            around = [modules.get(path[:end]) for end in range(len(path))]
            found.append((path, around, module))
    # What is given by itself and as a part of another has the path in the other, which
    # is the longer one; and so have its own parts.
    for path, around, module in sorted(found, key=lambda each: -len(each[0])):
        if _ADDRESS in vars(module):
            continue
        classes = tuple(nnx.Module if m is None else _original(type(m)) for m in around)
        told_by = (
            path if policies.sees_paths else (),
            classes if policies.entries else (),
        )
        is_f32 = asks_for_f32(module, [m for m in around if m is not None])
        address = _Address(path, classes, is_f32, active.depth, told_by)
        object.__setattr__(module, _ADDRESS, address)
        hooked = class_with_scopes(_original(type(module)))
        object.__setattr__(module, "__class__", hooked)


def _unhook(nodes: Sequence[object], depth: int) -> None:
    for _, module in itertools.chain.from_iterable(map(_modules, nodes)):
        address = vars(module).get(_ADDRESS)
        # What an autocast around this one gave scopes keeps them.
        if address is None or address.depth == depth:
            vars(module).pop(_ADDRESS, None)
            object.__setattr__(module, "__class__", _original(type(module)))


def _original(cls: type) -> type:
    return cls.__bases__[0] if _OPENS_SCOPES in vars(cls) else cls


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
