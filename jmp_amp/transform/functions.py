"""The functions that users give: which are refused, and what a wrapper takes over."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax import nnx

from jmp_amp.policies.arguments import type_name, written
from jmp_amp.policies.dtypes import AnyFn
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
    if isinstance(fn, type):
        remedy = _instead_of_class(fn, name, then)
        raise TypeError(f"{name}({fn.__name__}): a class, not a function. {remedy}")
    if isinstance(fn, nn.Module) and fn.scope is None:
        raise TypeError(
            f"{name}({type(fn).__name__}(...)): a linen module holds no parameters, "
            f"so it cannot be called. Write {name}(model.apply, policy){then}."
        )
    if callable(fn):
        return
    remedy = f"Write {name}(loss_fn, policy){then}."
    if isinstance(fn, str | Policy) and _is_policy(fn):
        remedy = f"Write {name}(fn, {fn!r}){then}"
        remedy += "." if then else f" or, as a decorator, @{name}(policy={fn!r})."
    raise TypeError(
        f"{name}({written(fn)}): the first argument is the function to {purpose}, "
        f"found {type_name(fn)}. {remedy}"
    )


def _is_policy(policy: str | Policy) -> bool:
    """Whether it is a policy, and not another word, such as torch's "cuda"."""
    try:
        as_policy_map(policy, "")
    except (TypeError, ValueError):
        return False
    return True


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
