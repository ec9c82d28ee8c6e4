"""The tracing context of autocast, and the scope that each module opens in it.

Which policy a module gets depends on the map that autocast was given, on the module's
own mark, and on the modules around it: `module_scope` decides. The name scopes that it
opens are read by `jmp_amp.plan.regions`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jmp_amp.plan.regions import scope
from jmp_amp.policies.patterns import NORM_MODULES, ModuleInfo, Pattern, names_a_norm
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap

# A module of one library that is made of one of the other: paths go on inside.
_BRIDGES = (nnx.bridge.ToLinen, nnx.bridge.ToNNX)


class Active(NamedTuple):
    """What decides, while autocast traces, the policy of a module that is called.

    Attributes:
      policy: the policy in force.
      policies: the map that autocast was given.
      in_norm: inside of a norm layer, which may call the layer that it normalises.
      base: the path of the module of the other library that wraps what is called.
      where: the path of the module that is running, if the map may tell paths apart.
      depth: how many other autocasts this one is inside of.
    """

    policy: Policy
    policies: PolicyMap
    in_norm: bool = False
    base: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    depth: int = 0


# Part of the key of every cache of JAX: a helper that was jitted and traced outside
# autocast is traced anew inside, where modules open scopes, and the other way round;
# and so it is under another map, or in another module if the map can tell.
_active = jax.make_user_context(None)


# The path of the module that is running.
_running: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "running", default=None
)


def running() -> tuple[str, ...] | None:
    """Returns the path of the module that is running, or None outside of all."""
    return _running.get()


def active() -> Active | None:
    """Returns what the autocast that is tracing has set, or None outside."""
    return _active.value


def active_policy() -> Policy | None:
    """Returns the policy in force while autocast traces, or None outside."""
    found = active()
    return None if found is None else found.policy


@contextlib.contextmanager
def activate(state: Active) -> Iterator[None]:
    """While tracing inside, `state` is what decides."""
    with _active(state):
        yield


@contextlib.contextmanager
def active_scope(policy: Policy) -> Iterator[None]:
    """As `scope`, and the policies of modules inside derive from `policy`."""
    found = active()
    assert found is not None
    with _active(found._replace(policy=policy)), scope(policy):
        yield


@contextlib.contextmanager
def module_scope(
    info: ModuleInfo, own: Policy | None = None, around: tuple[type, ...] = ()
) -> Iterator[None]:
    """What a method of a module traces has the policy that the module should have.

    Args:
      info: the module and the method; its path is relative to `Active.base`.
      own: the policy that the module itself is marked with, if it is.
      around: the classes of the modules that it is a part of, the outermost first, as
        far as they are known.
    """
    found = active()
    if found is None:
        yield
        return
    info = info._replace(path=found.base + info.path)
    marked, literal = own is not None, False
    if found.policies.entries:
        entry = _entry_of(found.policies, info, around)
        if own is None and entry is not None:
            pattern, own = entry
            literal = names_a_norm(pattern)
        if found.policies.sees_paths and _may_be_jitted(info.cls):
            found = found._replace(where=info.path)
    is_norm = issubclass(info.cls, NORM_MODULES) and not literal
    if issubclass(info.cls, _BRIDGES):
        found = found._replace(base=info.path)
    with contextlib.ExitStack() as stack:
        # A glob may match a block and all that is in it: that is one region.
        if own is not None and (marked or own != found.policy):
            found = found._replace(policy=own, in_norm=False)
            stack.enter_context(scope(own))
        policy = found.policy
        if info.method == "__call__" and is_norm:
            found = found._replace(in_norm=True)
            stack.enter_context(scope(norm_policy(policy)))
        elif info.method == "__call__" and found.in_norm:
            # WeightNorm and SpectralNorm call the layer whose weights they normalise:
            # it has its own policy, not theirs.
            found = found._replace(in_norm=False)
            stack.enter_context(scope(policy.with_output_dtype(policy.compute_dtype)))
        stack.enter_context(_active(found))
        stack.callback(_running.reset, _running.set(info.path))
        yield


def _entry_of(
    policies: PolicyMap, info: ModuleInfo, around: tuple[type, ...]
) -> tuple[Pattern, Policy] | None:
    """The entry of a module, or of what it is a part of and that was never called.

    A module that is running has passed its policy on already; `self.encoder.layers[0]`
    may be called by what the encoder is a part of.
    """
    outer = running()
    if outer is None:
        return policies.match_nearest(info, around)
    if info.path[: len(outer)] != outer:
        return policies.match(info)
    return policies.match_nearest(info, around, len(outer) + 1)


def _may_be_jitted(cls: type) -> bool:
    """Whether a method may be one that JAX traces once for several modules.

    linen's own modules have none; an nnx module has its path with it.
    """
    return issubclass(cls, nn.Module) and not cls.__module__.startswith("flax.")


def norm_policy(policy: Policy) -> Policy:
    """Returns the policy of a norm module: compute in f32, hand on `policy`'s half."""
    return dataclasses.replace(
        policy, compute_dtype=jnp.float32, output_dtype=policy.compute_dtype
    )
