"""Policies travel as name scopes: the innermost `amp[...]` scope is the policy.

A scope is text in the name stack of JAX, so it survives `jit`, `grad`, `vmap` and
`checkpoint`, needs no registry, and serves every library that runs on JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jmp_amp.policy import Policy, get_policy

# Linen modules that compute in f32 whatever surrounds them, and hand on the compute
# dtype: a mean and a variance over many values need f32 (Micikevicius et al. 2018,
# arXiv:1710.03740, section 3.3), the values that they normalise do not.
NORM_MODULES: tuple[type[nn.Module], ...] = (
    nn.BatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.InstanceNorm,
    nn.WeightNorm,
    nn.SpectralNorm,
)

# The attribute of a linen module class that holds its own policy.
MODULE_POLICY = "_amp_policy"

# Part of the key of every cache of JAX: a helper that was jitted and traced outside
# autocast is traced anew inside, where `linen_norms` opens scopes, and the other way
# round.
_active_policy = jax.make_user_context(None)

_SCOPE = re.compile(r"amp\[([^\]]*)\]")
# The name stack of a derivative reads `transpose(jvp(Block_0))/Dense_0`.
_TRANSFORM = re.compile(r"\w+\(|\)")


class Region(NamedTuple):
    """Where an equation is: the scope's path, and the policy in force there.

    `path` is empty outside every scope; a region inside another one has its path as a
    prefix.
    """

    path: str
    policy: Policy

    def holds(self, other: Region) -> bool:
        """Whether `other` is this region or lies inside it."""
        return (
            not self.path
            or other.path == self.path
            or other.path.startswith(self.path + "/")
        )


@contextlib.contextmanager
def scope(policy: Policy) -> Iterator[None]:
    """What is traced inside has `policy`."""
    with jax.named_scope(f"amp[{policy}]"):
        yield


@contextlib.contextmanager
def active_scope(policy: Policy) -> Iterator[None]:
    """As `scope`, and the policies of norms inside derive from `policy`."""
    with _active_policy(policy), scope(policy):
        yield


def active_policy() -> Policy | None:
    """Returns the policy of the autocast that is tracing, or None outside."""
    return _active_policy.value


@contextlib.contextmanager
def activate(policy: Policy) -> Iterator[None]:
    """While tracing inside, `policy` is the active one and norm modules open scopes."""
    with _active_policy(policy), _linen_norms():
        yield


def region_of(scopes: str, outer: Region) -> Region:
    """Returns the region that the name scopes of an equation of `outer` say."""
    return outer if "amp[" not in scopes else _region_of(scopes, outer)


@functools.lru_cache(maxsize=4096)
def _region_of(scopes: str, outer: Region) -> Region:
    plain = _TRANSFORM.sub("", scopes)
    *_, innermost = _SCOPE.finditer(plain)
    path = plain[: innermost.end()]
    return Region(
        f"{outer.path}/{path}" if outer.path else path, get_policy(innermost[1])
    )


def norm_policy(policy: Policy) -> Policy:
    """Returns the policy of a norm module: compute in f32, hand on `policy`'s half."""
    return dataclasses.replace(
        policy, compute_dtype=jnp.float32, output_dtype=policy.compute_dtype
    )


def _linen_norms() -> Any:
    """Opens the scope of `norm_policy` around each call of a linen norm module."""
    wrapped: list[str] = []

    def interceptor(
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        own = getattr(context.module, MODULE_POLICY, None)
        if own is not None and active_policy() is not None:
            with active_scope(own):
                return norms(next_fun, args, kwargs, context)
        return norms(next_fun, args, kwargs, context)

    def norms(
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        policy = active_policy()
        if context.method_name != "__call__" or policy is None:
            return next_fun(*args, **kwargs)
        if not isinstance(context.module, NORM_MODULES):
            if not wrapped:
                return next_fun(*args, **kwargs)
            # WeightNorm and SpectralNorm call the layer whose weights they normalise:
            # it has its own policy, not theirs.
            with scope(policy.with_output_dtype(policy.compute_dtype)):
                return next_fun(*args, **kwargs)
        wrapped.append(context.method_name)
        try:
            with scope(norm_policy(policy)):
                return next_fun(*args, **kwargs)
        finally:
            wrapped.pop()

    return nn.intercept_methods(interceptor)
