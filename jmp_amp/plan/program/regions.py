"""Regions: a policy travels as a name scope, and the innermost one is in force."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from jmp_amp.plan.program import jaxprs, scope_text
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.jaxprs import Body
from jmp_amp.policies.dtypes import BF16, is_half
from jmp_amp.policies.patterns import Pattern, matches_names
from jmp_amp.policies.policy import Policy, get_policy
from jmp_amp.policies.policy_map import as_policy_map

# Entries of a `PolicyMap` whose patterns are text.
Entries = tuple[tuple[Pattern, Policy], ...]


class Region(NamedTuple):
    """Where an equation is: the scope's path, and the policy in force there.

    Attributes:
      path: of the scope. It is empty outside every scope; a region inside another one
        has its path as a prefix.
      policy: as the operations run that are no products.
      asked: as the caller wrote it.
      cpu: the CPU that the plan is for; None for a GPU or a TPU, whose `policy` is
        what was asked.
      saved: what is kept for the backward pass. A policy in f32 that does not say it,
        as that of a norm, has that of the region around it.
      entries: the entries of a map that match scopes, outside of Flax modules.
      names: of the scopes around it, as the patterns of these entries see them.
      norms: the policies that only norms have.
    """

    path: str
    policy: Policy
    asked: Policy
    cpu: Cpu | None = None
    saved: str = "all"
    entries: Entries = ()
    names: tuple[str, ...] = ()
    norms: frozenset[Policy] = frozenset()

    @property
    def speaks_of_bf16(self) -> bool:
        """Whether reasons speak of bf16; a norm hands on the half dtype around it."""
        return BF16 in (self.asked.compute_dtype, self.asked.output_dtype)

    def holds(self, other: Region) -> bool:
        """Whether `other` is this region or lies inside it."""
        return (
            not self.path
            or other.path == self.path
            or other.path.startswith(self.path + "/")
        )


def region_at(
    path: str, asked: Policy, cpu: Cpu | None, outer: Region | None = None
) -> Region:
    """Returns the region of a scope whose policy is `asked`, inside of `outer`."""
    policy = asked if cpu is None else cpu.runs(asked)
    saved = policy.saved
    if outer is not None and not is_half(asked.compute_dtype) and not asked.says_saved:
        saved = outer.saved
    region = outer or Region(path, policy, asked)
    return region._replace(path=path, policy=policy, asked=asked, cpu=cpu, saved=saved)


def outermost(
    asked: Policy,
    cpu: Cpu | None,
    entries: Entries,
    norms: frozenset[Policy] = frozenset(),
) -> Region:
    """Returns the region of a program, outside of every scope."""
    return region_at("", asked, cpu)._replace(entries=entries, norms=norms)


def region_of(scopes: str, outer: Region) -> Region:
    """Returns the region that the name scopes of an equation of `outer` say."""
    return outer if not (outer.entries or "amp[" in scopes) else _of(scopes, outer)


@functools.lru_cache(maxsize=4096)
def _of(scopes: str, outer: Region) -> Region:
    # In a Flax module patterns are for modules.
    inner = scope_text.of_innermost(scopes)
    in_flax = scope_text.is_noted(scope_text.FLAX, inner)
    region = outer._replace(entries=()) if in_flax else outer
    for path, name in scope_text.parts(scopes):
        path = f"{outer.path}/{path}" if outer.path else path
        text, policies = scope_text.policy_in(name), scope_text.autocast_in(name)
        found = get_policy(text) if text else None
        if policies is not None:
            # Inside of it the patterns of its own map hold, and no others.
            entries = as_policy_map(policies, "autocast(fn, {})").entries
            region = region._replace(entries=() if in_flax else entries, names=())
        elif region.entries and text is None:
            region = region._replace(names=(*region.names, name))
            found = policy_of(region.entries, region.names)
        if found is not None and (text or found != region.asked):
            region = region_at(path, found, outer.cpu, region)
    return region


def policy_of(entries: Entries, names: tuple[str, ...]) -> Policy | None:
    """Returns the policy of the latest entry that matches the names of scopes."""
    return next(
        (policy for each, policy in reversed(entries) if matches_names(each, names)),
        None,
    )


def scopes_in(body: Body, around: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the names of each scope of a program that patterns are for.

    A scope of a Flax module is none, nor is one of another autocast. The names are
    those that lead to the scope; those `around` the body come first.
    """
    seen: dict[int, tuple[str, ...] | None] = {}
    for eqn in body.jaxpr.eqns:
        stack = id(eqn.source_info.name_stack)
        if stack not in seen:
            seen[stack] = names = _names_of(jaxprs.scope_text(eqn), around)
            for end in range(len(around), len(names or ())):
                yield (names or ())[: end + 1]
        names = seen[stack]
        if names is not None:
            for inner in jaxprs.inner_bodies(eqn):
                yield from scopes_in(inner.body, names)


def plans_apart(body: Body, apart: bool = False) -> bool:
    """Whether an autocast inside of a program needs a plan of its own.

    It does where the program differentiates it: the backward pass is traced already,
    and no plan of the program decides what it keeps. It does in a call that runs as
    traced, too.

    Args:
      body: of the program.
      apart: whether the body is differentiated, or part of a call that runs as traced.
    """
    # A function that is called often has one jaxpr.
    inner: dict[tuple[int, bool], Body] = {}
    for eqn in body.jaxpr.eqns:
        scopes = jaxprs.scope_text(eqn)
        around, note, _ = scopes.rpartition(f"amp_{scope_text.REGION}()")
        here = apart or scope_text.is_derived(around if note else scopes)
        if here and note:
            return True
        here = here or not jaxprs.inner_bodies(eqn)
        inner |= {(id(each.jaxpr), here): each for each in jaxprs.owned_bodies(eqn)}
    return any(plans_apart(each, here) for (_, here), each in inner.items())


def _names_of(scopes: str, around: tuple[str, ...]) -> tuple[str, ...] | None:
    is_of_flax = scope_text.is_noted(scope_text.FLAX, scopes)
    if is_of_flax or scope_text.of_innermost(scopes) != scopes:
        return None
    return (*around, *scope_text.module_names(scopes))
