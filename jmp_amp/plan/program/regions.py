"""Regions: a policy travels as a name scope, and the innermost one is in force."""

from __future__ import annotations

import functools
from typing import NamedTuple

from jmp_amp.plan.program import scope_text
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.policies.dtypes import is_half
from jmp_amp.policies.policy import Policy, get_policy


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
    """

    path: str
    policy: Policy
    asked: Policy
    cpu: Cpu | None = None
    saved: str = "all"

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
    return Region(path, policy, asked, cpu, saved)


def region_of(scopes: str, outer: Region) -> Region:
    """Returns the region that the name scopes of an equation of `outer` say."""
    return outer if "amp[" not in scopes else _region_of(scopes, outer)


@functools.lru_cache(maxsize=4096)
def _region_of(scopes: str, outer: Region) -> Region:
    region = outer
    for path, text in scope_text.policies(scopes):
        path = f"{outer.path}/{path}" if outer.path else path
        region = region_at(path, get_policy(text), outer.cpu, region)
    return region
