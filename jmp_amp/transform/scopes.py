"""The tracing context of autocast, and the scope that each module opens in it.

Which policy a module gets depends on the map that autocast was given, on the module's
mark, and on the modules around it: `module_scope` decides. The name scopes that it
opens are in `jmp_amp.plan.program.scope_text`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

from jmp_amp.plan.program import scope_text
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.regions import Entries
from jmp_amp.plan.program.scope_text import policy_noted
from jmp_amp.policies.dtypes import F32
from jmp_amp.policies.patterns import ModuleInfo, inside_of, is_norm
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap, matching, matching_nearest

_FULL = Policy("float32", "float32", "float32")
# A module of one library that is made of one of the other: paths go on inside.
_BRIDGES = (nnx.bridge.ToLinen, nnx.bridge.ToNNX)


class Active(NamedTuple):
    """Tracing context of the innermost autocast.

    Attributes:
      policy: the policy in force.
      policies: the map that autocast was given.
      in_norm: whether a norm layer is running; it may call the layer that it
        normalises.
      base: the path of the bridge to the other library that is running.
      where: the path of the module that is running, if the map can tell paths apart.
      depth: the number of autocasts around this one; -1 before the outermost one.
      map_depth: the depth of the one that was given the map.
      notes_modules: whether name scopes say which module runs, see `module_of`.
      cpu: the CPU that the plan is for; None for a GPU or a TPU.
      root: the name or the class of the outermost module that is running, likewise.
      casts_inputs: whether `cast_inputs` casts.
      hands_on_f32: whether autocasts inside return f32 also where they return half;
        None unless the function is measured beside f32.
      plans_inside: whether autocasts inside plan themselves, see `plans_apart`.
    """

    policy: Policy
    policies: PolicyMap
    in_norm: bool = False
    base: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    depth: int = 0
    map_depth: int = 0
    notes_modules: bool = False
    cpu: Cpu | None = None
    root: str = ""
    casts_inputs: bool = True
    hands_on_f32: bool | None = None
    plans_inside: bool = False

    @property
    def tells_paths(self) -> bool:
        """Whether modules of one class and of two paths are to be traced apart."""
        return self.policies.sees_paths or self.notes_modules

    def plans(self, cpu: Cpu | None) -> bool:
        """Whether an autocast that is called here, for this CPU, plans itself.

        Else it is a region of the plan of the one around it.
        """
        itself = self.depth < 0 or self.plans_inside or cpu not in (None, self.cpu)
        return itself and self.hands_on_f32 is None

    def around(self, policies: PolicyMap) -> Active:
        """Returns the context of an autocast with these policies inside of this one.

        The map of this one goes on inside, as in a marked function, if the other has no
        entries of its own.
        """
        depth = self.depth + 1
        found = self._replace(policy=policies.default, in_norm=False, depth=depth)
        if not policies.entries:
            return found
        return found._replace(
            policies=policies, map_depth=depth, base=(), where=(), root=""
        )


# Before the outermost autocast.
OUTSIDE = Active(_FULL, PolicyMap(_FULL), depth=-1)

# Part of the key of every cache of JAX: a helper that was jitted and traced outside
# autocast is traced anew inside, where modules open scopes, and the other way round;
# and so it is under another map, for another target, or in another module if the map
# can tell.
_active = jax.make_user_context(None)


# The path of the module that is running.
_running: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "running", default=None
)


# The compute dtypes of the autocasts that ran, where somebody asks.
_dtypes: contextvars.ContextVar[set[np.dtype] | None] = contextvars.ContextVar(
    "dtypes", default=None
)


@contextlib.contextmanager
def autocast_dtypes() -> Iterator[set[np.dtype]]:
    """Collects the compute dtypes of the autocasts that run inside."""
    found: set[np.dtype] = set()
    token = _dtypes.set(found)
    try:
        yield found
    finally:
        _dtypes.reset(token)


def note_autocast(policies: PolicyMap) -> None:
    """Tells `autocast_dtypes` that an autocast runs."""
    if (found := _dtypes.get()) is not None:
        each = [policies.default, *(policy for _, policy in policies.entries)]
        found.update(policy.compute_dtype for policy in each)


def running() -> tuple[str, ...] | None:
    """Returns the path of the module that is running, or None outside of all."""
    return _running.get()


def active() -> Active | None:
    """Returns the context of the autocast that is tracing, or None outside."""
    return _active.value


def active_policy() -> Policy | None:
    """Returns the policy in force while autocast traces, or None outside."""
    found = active()
    return None if found is None else found.policy


def measuring(casts_inputs: bool = True) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which functions are traced to be measured beside f32.

    The program is f32 where autocasts of this package alone make it half.
    """
    return _active(OUTSIDE._replace(casts_inputs=casts_inputs, hands_on_f32=True))


@contextlib.contextmanager
def region(policies: PolicyMap, entries: Entries, is_planned: bool) -> Iterator[None]:
    """Opens the scopes of an autocast inside of another one.

    `entries` are those of its map that match named scopes; Flax modules say theirs.
    """
    note = scope_text.BY_POLICY if is_planned else scope_text.REGION
    own = contextlib.nullcontext()
    if policies.entries:
        map_in_scopes = PolicyMap(policies.default, entries)
        own = scope_text.text_noted("autocast", str(map_in_scopes))
    with policy_noted(policies.default), scope_text.noted(note), own:
        yield


def is_marked(scope: str, outer: bool) -> bool:
    """Whether `with_policy` or an autocast inside decides for an equation.

    Entries for modules reach the modules in it. A `cast_inputs` without a dtype is no
    mark.

    Args:
      scope: the name scopes of the equation.
      outer: the same of the equation that calls its body.
    """
    _, module, inside = scope.rpartition("amp_module_")
    marks = inside.count("amp[") > inside.count("amp_inputs()")
    return marks or (outer and not module)


def activate(state: Active) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `state` is the tracing context."""
    return _active(state)


@contextlib.contextmanager
def active_scope(policy: Policy) -> Iterator[None]:
    """While autocast traces inside, `policy` is in force; outside, nothing changes."""
    found = active()
    if found is None:
        yield
        return
    with _active(found._replace(policy=policy)), policy_noted(policy):
        yield


@contextlib.contextmanager
def module_scope(
    info: ModuleInfo,
    own: Policy | None = None,
    around: tuple[type, ...] = (),
    asks_for_f32: bool = False,
) -> Iterator[None]:
    """While a method of a module is traced inside, the module's policy is in force.

    | the module                        | its policy       | opens a region         |
    | --------------------------------- | ---------------- | ---------------------- |
    | is marked                         | the mark         | always                 |
    | matches an entry                  | that of the      | if it differs from     |
    |                                   | nearest match    | the policy in force    |
    | has `dtype=float32` of its own    | float32          | if it differs          |
    | is a part of modules that match   | that of the      | if it differs          |
    | an entry and do not run           | nearest match    |                        |
    | else                              | the one in force | no                     |

    Inside that region, `__call__` opens a second one for two kinds of modules:

    | the module                        | the policy of its `__call__`              |
    | --------------------------------- | ----------------------------------------- |
    | is a norm, if no entry names one  | `norm_policy` of its policy               |
    | has no region, in that of a norm  | its policy, with half-precision outputs   |

    The second kind is the layer whose weights `WeightNorm` or `SpectralNorm` normalise.

    Args:
      info: the module and the method; its path is relative to `Active.base`.
      own: the policy that the module is marked with.
      around: the classes of the modules that it is a part of, the outermost first, as
        far as they are known.
      asks_for_f32: whether it is a layer that is written to compute in float32.
    """
    found = active()
    if found is None:
        yield
        return
    info = info._replace(path=found.base + info.path)
    policy, names_norm, matched = own, False, []
    if found.policies.entries:
        if found.tells_paths and not info.path:
            found = found._replace(root=info.name or info.cls.__name__)
        matched = _matching(found, info, around)
        if own is None and matched:
            pattern, policy = found.policies.entries[matched[-1]]
            names_norm = is_norm(pattern)
    if own is None and asks_for_f32 and not _is_named(found, info):
        policy, names_norm = _FULL, False
    if found.tells_paths and _may_be_jitted(info.cls):
        found = found._replace(where=info.path)
    if issubclass(info.cls, _BRIDGES):
        found = found._replace(base=info.path)
    opened: list[Policy] = []
    # A glob may match a block and all that is in it: that is one region.
    if policy is not None and (own is not None or policy != found.policy):
        found = found._replace(policy=policy, in_norm=False)
        opened.append(policy)
    if info.method == "__call__":
        normalises = is_norm(info.cls) and not names_norm
        if normalises:
            opened.append(norm_policy(found.policy))
        elif found.in_norm:
            opened.append(found.policy.with_output_dtype(found.policy.compute_dtype))
        found = found._replace(in_norm=normalises)
    with contextlib.ExitStack() as stack:
        for each in opened:
            stack.enter_context(policy_noted(each))
        if matched:
            noted = scope_text.noted("entries", found.map_depth, *matched)
            stack.enter_context(noted)
        if found.policies.sees_paths:
            stack.enter_context(scope_text.noted(scope_text.FLAX))
        if found.notes_modules:
            path = "/".join(info.path)
            stack.enter_context(scope_text.text_noted("module", path))
        stack.enter_context(_active(found))
        stack.callback(_running.reset, _running.set(info.path))
        yield


def _matching(found: Active, info: ModuleInfo, around: tuple[type, ...]) -> list[int]:
    """Returns the entries of a module, and of the modules around it that do not run.

    A module that runs has passed its policy on already. Others may never be called:
    `self.encoder.layers[0]` may be called by the module that holds the encoder.
    """
    outer, inside = running(), inside_of(found.root)
    if outer is not None and info.path[: len(outer)] != outer:
        return matching(found.policies, info, inside)
    start = 0 if outer is None else len(outer) + 1
    return matching_nearest(found.policies, info, around, start, inside)


def _is_named(found: Active, info: ModuleInfo) -> bool:
    """Whether an entry matches a module itself, not one that it is a part of."""
    entries = found.policies.entries
    return bool(entries and matching(found.policies, info, inside_of(found.root)))


def noted(program: str, depth: int) -> set[int]:
    """Returns the entries that matched modules of a program, by its name stacks.

    JAX traces a jitted helper once, and gives its jaxpr to the next autocast with an
    equal map: only the name scopes in that jaxpr tell which entries matched. `program`
    has those; `depth` is that of the autocast.
    """
    found = [list(map(int, each)) for each in scope_text.notes("entries", program)]
    return {number for at, *matched in found if at == depth for number in matched}


def entry_of(scope: str) -> int | None:
    """Returns the entry that gave a module its policy, by name scopes.

    It is one of the map of the outermost autocast; None if none is noted.
    """
    found = [each for each in scope_text.notes("entries", scope) if each[0] == "0"]
    return int(found[-1][-1]) if found else None


def module_of(scope: str) -> str | None:
    """Returns the path of the module that an equation runs in, by its name scopes.

    The path is the one that the patterns of a `PolicyMap` see; "" is the outermost
    module. None if no module is noted, see `Active.notes_modules`.
    """
    return scope_text.text_of("module", scope)


def _may_be_jitted(cls: type) -> bool:
    """Whether a method may be one that JAX traces once for several modules.

    linen's own modules have none; an nnx module has its path with it.
    """
    return issubclass(cls, nn.Module) and not cls.__module__.startswith("flax.")


@functools.lru_cache(maxsize=256)
def norm_policy(policy: Policy) -> Policy:
    """Returns the policy of a norm module: compute in f32, hand on `policy`'s half."""
    return dataclasses.replace(
        policy, compute_dtype=F32, output_dtype=policy.compute_dtype, matmul=None
    )
