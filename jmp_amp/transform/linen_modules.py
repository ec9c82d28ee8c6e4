"""linen under autocast: every module that is called gets the policy that it should.

linen names its scopes itself, and `nn.intercept_methods` sees every call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from jmp_amp.policies.patterns import ModuleInfo
from jmp_amp.transform import nnx_modules, scopes

# The attribute of a linen module class that holds its own policy.
MODULE_POLICY = "_amp_policy"


CACHE = "cache"


class Variables:
    """The variables that linen modules have and write while a function is traced.

    Attributes:
      caches: the arrays that modules were given as decoding caches.
    """

    def __init__(self) -> None:
        self._roots: dict[int, Any] = {}
        self.caches: list[Any] = []

    def add(self, module: nn.Module) -> None:
        scope = module.scope
        if scope is not None and id(scope.root) not in self._roots:
            self._roots[id(scope.root)] = scope.root
            self.caches += jax.tree.leaves(scope.root.variables().get(CACHE))

    def written(self) -> dict[int, list[tuple[str, ...]]]:
        """Returns where the arrays in mutable collections are, by their identity.

        A place begins with the collection; then come the names of the modules and that
        of the variable.
        """
        found: dict[int, list[tuple[str, ...]]] = {}
        for root in self._roots.values():
            leaves = jax.tree_util.tree_leaves_with_path(root.mutable_variables())
            for path, leaf in leaves:
                found.setdefault(id(leaf), []).append(dict_keys(path))
        return found

    def forget(self) -> None:
        """Lets go of what was traced, so that it does not outlive the trace."""
        self._roots.clear()
        self.caches.clear()


def dict_keys(path: Iterable[Any]) -> tuple[str, ...]:
    """Returns the keys of dictionaries in the path of a leaf."""
    return tuple(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))


@contextlib.contextmanager
def intercepted() -> Iterator[Variables]:
    """While tracing inside, linen modules that are called open their scopes."""
    variables = Variables()
    # For every call that is running, what `nn.jit` in it has to know.
    calls: list[contextlib.ExitStack] = []

    def interceptor(
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module, method = context.module, context.method_name
        found = scopes.active()
        is_internal = method == "setup" or (
            method.startswith("__") and method != "__call__"
        )
        if found is None or is_internal or module.scope is None:
            return next_fun(*args, **kwargs)
        variables.add(module)
        path = module.path
        if not method.isidentifier():
            # The class is one that `nn.jit(Block)` made. Its `__call__` is no method to
            # linen, only what it asks the module before: JAX would trace the block once
            # for all its places, which a map may tell apart. So the place is part of
            # the key of JAX's cache from here to the next such call.
            if found.policies.sees_paths and calls and module.name:
                where = (*(scopes.running() or ()), module.name)
                calls[-1].close()
                calls[-1].enter_context(scopes.activate(found._replace(where=where)))
            return next_fun(*args, **kwargs)
        info = ModuleInfo(path, type(module), module.name, method)
        own = getattr(type(module), MODULE_POLICY, None)
        with scopes.module_scope(info, own), contextlib.ExitStack() as inside:
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


@contextlib.contextmanager
def _made_with_scopes(module: Any) -> Iterator[None]:
    """The nnx module that a bound `ToLinen` makes at every call opens its scopes."""
    cls = module.nnx_class
    if isinstance(cls, type) and issubclass(cls, nnx.Module):
        object.__setattr__(module, "nnx_class", nnx_modules.class_with_scopes(cls))
    try:
        yield
    finally:
        object.__setattr__(module, "nnx_class", cls)
