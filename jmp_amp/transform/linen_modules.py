"""linen under autocast: every module that is called opens the scope of its policy.

linen names its scopes itself, and `nn.intercept_methods` sees every call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import jax
from flax import linen as nn
from flax import nnx
from flax.core import Scope, tracers
from jax.core import Tracer

from jmp_amp.policies.dtypes import AnyFn
from jmp_amp.policies.patterns import ModuleInfo
from jmp_amp.transform import nnx_modules, scopes
from jmp_amp.transform.layer_dtypes import asks_for_f32, linen_modules_around

# The attribute of a marked linen module class that holds its policy.
MODULE_POLICY = "_amp_policy"

# The collection of decoding caches.
CACHE = "cache"


class Variables:
    """The variables that linen modules have and write while a function is traced.

    Attributes:
      caches: the arrays that modules were given as decoding caches.
    """

    def __init__(self) -> None:
        self._roots: dict[int, Scope] = {}
        self._level = tracers.current_trace()
        # What the scopes held that were made before the function was traced.
        self._outside: dict[int, list[object]] = {}
        self.caches: list[object] = []

    def add(self, module: nn.Module) -> None:
        scope = module.scope
        if scope is not None and id(scope.root) not in self._roots:
            self._roots[id(scope.root)] = scope.root
            self.caches += jax.tree.leaves(scope.root.variables().get(CACHE))
            if scope.root.trace_level == self._level:
                held = jax.tree.leaves(scope.root.mutable_variables())
                self._outside[id(scope.root)] = held

    def written(self) -> dict[int, list[tuple[str, ...]]]:
        """Returns the paths of the arrays in mutable collections, by their identity.

        A path begins with the collection; then come the names of the modules and that
        of the variable.
        """
        found: dict[int, list[tuple[str, ...]]] = {}
        for root in self._roots.values():
            leaves = jax.tree_util.tree_leaves_with_path(root.mutable_variables())
            for path, leaf in leaves:
                found.setdefault(id(leaf), []).append(dict_keys(path))
        return found

    def leaked(self) -> set[str]:
        """Returns the collections outside of the function that hold its tracers."""
        found = set()
        for key, held in self._outside.items():
            known = set(map(id, held))
            for collection, tree in self._roots[key].mutable_variables().items():
                new = (leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in known)
                if any(isinstance(leaf, Tracer) for leaf in new):
                    found.add(collection)
        return found

    def forget(self) -> None:
        """Lets go of what was traced, so that it does not outlive the trace."""
        self._roots.clear()
        self._outside.clear()
        self.caches.clear()


def initialises(fn: AnyFn, args: tuple[object, ...]) -> bool:
    """Whether `fn` is a linen module or its method, and is to make parameters."""
    modules = [fn, getattr(fn, "__self__", None), *args[:1]]
    return any(
        isinstance(each, nn.Module)
        and each.scope is not None
        and each.is_initializing()
        for each in modules
    )


def dict_keys(path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    """Returns the keys of dictionaries in the path of a leaf."""
    return tuple(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))


@contextlib.contextmanager
def intercepted() -> Iterator[Variables]:
    """While tracing inside, linen modules that are called open their scopes."""
    variables = Variables()
    # For every call that is running, the context that an `nn.jit` in it is traced in.
    calls: list[contextlib.ExitStack] = []

    def interceptor(
        next_fun: AnyFn,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        context: nn.module.InterceptorContext,
    ) -> object:
        module, method = context.module, context.method_name
        is_internal = method == "setup" or (
            method.startswith("__") and method != "__call__"
        )
        if scopes.active() is None or is_internal or module.scope is None:
            return next_fun(*args, **kwargs)
        variables.add(module)
        if not method.isidentifier():
            # The class is one that `nn.jit(Block)` made. Its `__call__` is no method to
            # linen, only what it asks the module before.
            if calls and module.name:
                _enter_jitted(calls[-1], module.name)
            return next_fun(*args, **kwargs)
        info = ModuleInfo(module.path, type(module), module.name, method)
        own = getattr(type(module), MODULE_POLICY, None)
        is_f32 = asks_for_f32(module, linen_modules_around(module))
        scope = scopes.module_scope(info, own, asks_for_f32=is_f32)
        with scope, contextlib.ExitStack() as inside:
            if isinstance(module, nnx.bridge.ToLinen):
                inside.enter_context(_made_with_scopes(module))
            calls.append(inside)
            try:
                return next_fun(*args, **kwargs)
            finally:
                calls.pop()

    try:
        with nn.intercept_methods(interceptor):
            yield variables
    finally:
        variables.forget()


def _enter_jitted(call: contextlib.ExitStack, name: str) -> None:
    """Makes the path of an `nn.jit` module a part of the key of JAX's cache.

    JAX would trace the module once for all its paths, which a map may tell apart. The
    path is a part of the key from here to the next such module of the same call.
    """
    found = scopes.active()
    if found is not None and found.tells_paths:
        where = (*(scopes.running() or ()), name)
        call.close()
        call.enter_context(scopes.activate(found._replace(where=where)))


@contextlib.contextmanager
def _made_with_scopes(module: nnx.bridge.ToLinen) -> Iterator[None]:
    """The nnx module that a bound `ToLinen` makes at every call opens its scopes."""
    cls = module.nnx_class
    if isinstance(cls, type) and issubclass(cls, nnx.Module):
        object.__setattr__(module, "nnx_class", nnx_modules.class_with_scopes(cls))
    try:
        yield
    finally:
        object.__setattr__(module, "nnx_class", cls)
