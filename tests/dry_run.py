"""What a function compiles and runs, without compiling or running any of it.

What is given to `jax.jit` is traced, and its results are zeros. So a training goes
through its steps in seconds, and its programs are known.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import jmp_amp as amp

_ARRAY = jax.Array | np.ndarray


def programs_of(run: Callable[[], Any], modules: Sequence[types.ModuleType]) -> str:
    """Returns the text of all programs that `run` compiles, in their order.

    The text has hashes of the arrays that a program closes over, and of those that it
    is called with first.

    Args:
      run: called once. It must bear zeros as results.
      modules: those whose cached functions may hold jitted functions. The caches are
        emptied before and after.
    """
    # The library imports its modules late: what they jit is to be theirs, not dry.
    for name in amp.__all__:
        getattr(amp, name)
    texts: dict[str, None] = {}
    with _empty_caches(modules), _recorded(texts):
        run()
    assert texts, "nothing was jitted"
    return "\n".join(texts)


@contextlib.contextmanager
def _empty_caches(modules: Sequence[types.ModuleType]) -> Iterator[None]:
    cached = [
        value
        for module in modules
        for value in vars(module).values()
        if hasattr(value, "cache_clear")
    ]
    for each in cached:
        each.cache_clear()
    try:
        yield
    finally:
        for each in cached:
            each.cache_clear()


@contextlib.contextmanager
def _recorded(texts: dict[str, None]) -> Iterator[None]:
    jit, known, dry = jax.jit, dict[Any, Any](), [True]

    def dry_jit(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return functools.partial(dry_jit, **options)
        jitted = jit(fn, **options)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = jax.tree.flatten((args, kwargs))
            # What was made here may outlive this, in a module that was imported here.
            if not dry or any(isinstance(leaf, Tracer) for leaf in leaves):
                return jitted(*args, **kwargs)
            # What is static is a leaf too.
            key = jitted, structure, tuple(map(_type_of, leaves))
            if key not in known:
                traced = jitted.trace(*args, **kwargs)
                given = [x for x in leaves if isinstance(x, _ARRAY)]
                arrays = list(map(_digest, (*traced.jaxpr.consts, *given)))
                texts[f"{traced.jaxpr} {arrays} {sorted(options)}"] = None
                known[key] = jax.tree.map(_zeros, traced.out_info)
            return known[key]

        for name in ("lower", "trace", "eval_shape"):
            setattr(call, name, getattr(jitted, name))
        return call

    with mock.patch.object(jax, "jit", dry_jit):
        try:
            yield
        finally:
            dry.clear()


def _digest(array: Any) -> str:
    """Returns a hash of an array: the text of a program has none of its numbers."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16]


def _type_of(leaf: Any) -> Any:
    return jax.typeof(leaf) if isinstance(leaf, _ARRAY) else leaf


def _zeros(like: Any) -> jax.Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), like.shape)
    return jnp.zeros(like.shape, like.dtype)
