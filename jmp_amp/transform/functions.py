"""The functions that users give: which are refused, and what a wrapper takes over."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax import nnx

from jmp_amp.policies.arguments import type_name, written
from jmp_amp.policies.dtypes import AnyFn, given_as_dtype, is_half, short_name
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import as_policy_map


def wraps(fn: AnyFn) -> Callable[[AnyFn], Any]:
    """Returns `functools.wraps(fn)`, with the attributes of `fn` if it is plain.

    linen marks methods by attributes, as `nn.compact` does. Those of a module are its
    parameters, and `jax.pmap(fn).lower` compiles what is not the wrapper.
    """
    is_plain = isinstance(fn, types.FunctionType) and not hasattr(fn, "lower")
    return functools.wraps(fn, updated=("__dict__",) if is_plain else ())


def check_function(fn: object, name: str, purpose: str, then: str = "") -> None:
    """Raises if `fn` cannot be called, or is a class, whose call makes an object.

    Args:
      fn: the first argument of the caller.
      name: of what was called, such as "autocast".
      purpose: what it does to a function, such as "transform".
      then: what follows the call in the remedy, such as "(*args)".
    """
    policy = _as_policy(fn)
    if isinstance(fn, type) and policy is None:
        remedy = _instead_of_class(fn, name, then)
        raise TypeError(f"{name}({fn.__name__}): a class, not a function. {remedy}")
    if isinstance(fn, nn.Module) and fn.scope is None:
        raise TypeError(
            f"{name}({type(fn).__name__}(...)): a linen module holds no parameters, "
            f"so it cannot be called. Write {name}(model.apply, policy){then}."
        )
    if callable(fn) and policy is None:
        return
    remedy = f"Write {name}(loss_fn, policy){then}."
    if policy is not None:
        remedy = f"Write {name}(fn, {policy!r}){then}"
        remedy += "." if then else f" or, as a decorator, @{name}(policy={policy!r})."
    raise TypeError(
        f"{name}({written(fn)}): the first argument is the function to {purpose}, "
        f"found {type_name(fn)}. {remedy}"
    )


def _as_policy(fn: object) -> str | Policy | None:
    """Returns the policy that was given as a function, or None."""
    if (dtype := given_as_dtype(fn)) is not None:
        return f"mixed_{dtype.name}" if is_half(dtype) else short_name(dtype)
    if not isinstance(fn, str | Policy):
        return None
    try:
        as_policy_map(fn, "")
    except (TypeError, ValueError):  # another word, such as torch's "cuda"
        return None
    return fn


def _instead_of_class(cls: type, name: str, then: str) -> str:
    """Returns the sentences that say what to write in place of a class."""
    if issubclass(cls, nn.Module):
        remedy = f"For a model of it write {name}(model.apply, policy){then}."
    elif issubclass(cls, nnx.Module):
        remedy = (
            f"For a model of it write {name}(model, policy){then}, or pass the "
            "function that calls it."
        )
    else:
        return f"Write {name}(fn, policy){then} for the function that uses it."
    return f"{remedy} @with_policy(policy) gives the class a policy inside of autocast."
