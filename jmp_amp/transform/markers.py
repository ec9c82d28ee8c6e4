"""Regions: parts of a program that have another policy.

Outside `autocast` a marked function is the function that it marks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeGuard, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from jmp_amp.plan.program.scope_text import BY_POLICY, noted
from jmp_amp.policies.arguments import type_name, written
from jmp_amp.policies.dtypes import (
    F32,
    AnyFn,
    PyTree,
    floating_dtype,
    given_as_dtype,
    is_castable,
)
from jmp_amp.policies.policy import Policy, get_policy
from jmp_amp.transform import linen_modules, scopes
from jmp_amp.transform.functions import wraps
from jmp_amp.transform.nnx_modules import subclass

Marked = TypeVar("Marked")
P = ParamSpec("P")
R = TypeVar("R")


def with_policy(policy: Policy | str) -> Callable[[Marked], Marked]:
    """Returns a decorator that gives a function its own policy under autocast.

    It marks a function, a method, a Flax module class (the result is a subclass) or a
    module (the result shares its parameters), linen or nnx.

    The innermost policy wins: that of a marked function over that of `autocast`, and
    that of a marked function inside it over both. Results have the policy's
    `output_dtype`: operations that read a half result go on in half precision, and
    those that read an f32 result of activations run in f32.

    It holds under every transformation of JAX, and outside `autocast` it does nothing.

    Args:
      policy: a `Policy` or what `get_policy` understands.

    Raises:
      TypeError: if `policy` is no policy, or what is decorated none of these.
      ValueError: if the compute dtype is none of float16, bfloat16 and float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> head = amp.with_policy("p=f32,c=f32,o=f32")(lambda h, w: h @ w)
      >>> fn = amp.autocast(lambda x, w: head(x @ w, w))
      >>> x = jnp.ones((2, 2))
      >>> [str(e.invars[0].aval) for e in jax.make_jaxpr(fn)(x, x).eqns
      ...  if e.primitive.name == "dot_general"]
      ['bfloat16[2,2]', 'float32[2,2]']
    """
    if callable(policy) and given_as_dtype(policy) is None:
        raise TypeError(
            f"with_policy({_name(policy)}): the first argument is the policy. Write "
            '@with_policy("float32") above a definition, or with_policy("float32")(fn).'
        )
    policy = get_policy(policy)
    if not is_castable(policy.compute_dtype):
        raise ValueError(
            f"with_policy({str(policy)!r}): cannot compute in "
            f"{policy.compute_dtype.name}. Use a compute dtype of float16, bfloat16 or "
            "float32."
        )

    def mark(fn: Marked) -> Marked:
        if isinstance(fn, nn.Module | nnx.Module):
            return cast(Marked, _marked_module(fn, policy))
        if isinstance(fn, type) and issubclass(fn, nn.Module | nnx.Module):
            return cast(Marked, _marked_class(fn, policy))
        if not callable(fn) or isinstance(fn, type):
            raise TypeError(
                f"with_policy({str(policy)!r})({written(fn)}): it marks a function, a "
                f"method or a Flax module, found {type_name(fn)}. Write "
                "with_policy(policy)(fn)."
            )

        @wraps(fn)
        def marked(*args: object, **kwargs: object) -> object:
            with scopes.active_scope(policy):
                return fn(*args, **kwargs)

        return cast(Marked, marked)

    return mark


@functools.cache
def _marked_class(module: type, policy: Policy) -> type:
    """Returns a subclass of the same name whose methods run with `policy`."""
    if issubclass(module, nn.Module):
        # The interceptor of autocast opens the scope: linen wraps methods by itself.
        return subclass(module, {linen_modules.MODULE_POLICY: policy}, None)

    def enter(_: nnx.Module, method: str) -> contextlib.AbstractContextManager[None]:
        # A private method is called by the module itself, in the region of the caller.
        is_private = method.startswith("_") and method != "__call__"
        is_inside = is_private and scopes.active_policy() == policy
        return contextlib.nullcontext() if is_inside else scopes.active_scope(policy)

    return subclass(module, {}, enter)


def _marked_module(
    module: nn.Module | nnx.Module, policy: Policy
) -> nn.Module | nnx.Module:
    """Returns a module of a marked class that shares all state with `module`."""
    if isinstance(module, nnx.Module):
        marked = copy.copy(module)
    else:
        # A part of another module is known to that module by its identity.
        marked = module if module.parent is not None else module.clone()
    object.__setattr__(marked, "__class__", _marked_class(type(module), policy))
    return marked


def full_precision(fn: Marked) -> Marked:
    """Returns `fn` that computes in float32 under autocast: `with_policy("float32")`.

    In float32 code `x.astype(jnp.float32)` is no operation: mark the function instead.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> @amp.full_precision
      ... def energy(h):
      ...     return jnp.sum(h @ h)
      >>> x = jnp.full((2, 2), 1 + 2.0**-12)
      >>> bool(amp.autocast(energy)(x) == energy(x))
      True
    """
    return with_policy("float32")(fn)


def _name(fn: AnyFn) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def cast_inputs(fn: Callable[P, R], dtype: DTypeLike | None = None) -> Callable[P, R]:
    """Returns `fn` with its floating inputs cast to `dtype` under autocast.

    For functions that autocast does not look into: a `custom_vjp`, a Pallas kernel, an
    attention kernel that takes half precision only. They get half-precision arrays, and
    so do their derivative rules. Operations of autocast that follow read their results
    in half. Python code that asks for the dtype of a result sees float32, as it does
    without autocast.

    Only float32, bfloat16 and float16 arrays are cast. Outside autocast `fn` is called
    as it is.

    Args:
      fn: a function of pytrees.
      dtype: float16, bfloat16 or float32; by default the compute dtype of the policy in
        force. In a plan for a CPU (`autocast(fn, target="cpu")`) that is float32: `fn`
        is as it is, and its products are planned as any others, if autocast looks into
        it.

    Raises:
      TypeError: if `fn` is not callable.
      ValueError: if `dtype` is another one.

    Source: `torch.amp.custom_fwd(cast_inputs=...)`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> @jax.custom_vjp
      ... def double(x):
      ...     print("traced in", x.dtype)
      ...     return 2 * x
      >>> double.defvjp(lambda x: (double(x), None), lambda _, g: (2 * g,))
      >>> amp.autocast(amp.cast_inputs(double))(jnp.ones(3)).dtype
      traced in bfloat16
      dtype('float32')
    """
    if not callable(fn):
        raise TypeError(
            f"cast_inputs({written(fn)}): the first argument is a function, found "
            f"{type_name(fn)}. Write cast_inputs(fn)."
        )
    chosen = None if dtype is None else floating_dtype(dtype, "cast_inputs(fn, {})")
    if chosen is not None and not is_castable(chosen):
        raise ValueError(
            f"cast_inputs(fn, {dtype!r}): cannot cast to {chosen.name}. Use float16, "
            "bfloat16 or float32."
        )

    @wraps(fn)
    def cast_fn(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        active = scopes.active()
        if active is None or not active.casts_inputs:
            return fn(*args, **kwargs)
        policy = active.policy
        is_half = policy.compute_dtype != F32
        if chosen is None and active.cpu is not None and is_half:
            # A CPU computes in f32 all but the products that the plan finds.
            return fn(*args, **kwargs)
        target = policy.compute_dtype if chosen is None else chosen
        inputs = [leaf for leaf in jax.tree.leaves((args, kwargs)) if _is_cast(leaf)]
        lowers = target != F32 and any(leaf.dtype == F32 for leaf in inputs)

        def lowered(leaf: PyTree) -> PyTree:
            return jnp.asarray(leaf, target) if _is_cast(leaf) else leaf

        def raised(leaf: PyTree) -> PyTree:
            # The program goes on in f32; the plan knows that this scope hands on half.
            is_low = isinstance(leaf, jax.Array) and leaf.dtype == target
            return leaf.astype(F32) if lowers and is_low else leaf

        inside = dataclasses.replace(
            policy,
            compute_dtype=target,
            output_dtype=target,
            matmul=policy.matmul if target == policy.compute_dtype else None,
        )
        note = contextlib.nullcontext() if chosen else noted(BY_POLICY)
        with note, scopes.active_scope(inside):
            args, kwargs = jax.tree.map(lowered, (args, kwargs))
            return jax.tree.map(raised, fn(*args, **kwargs))

    return cast_fn


def _is_cast(leaf: object) -> TypeGuard[jax.Array]:
    return isinstance(leaf, jax.Array | np.ndarray) and is_castable(leaf.dtype)
