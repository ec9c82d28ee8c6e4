"""Regions: a policy travels as a name scope, and the innermost `amp[...]` is in force.

A scope is text in the name stack of JAX, so it survives `jit`, `grad`, `vmap` and
`checkpoint`, needs no registry, and serves every library that runs on JAX.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

from jmp_amp.policies.policy import Policy, get_policy

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
    """Opens the name scope of `policy`: equations traced inside are in its region."""
    with jax.named_scope(f"amp[{policy}]"):
        yield


def region_of(scopes: str, outer: Region) -> Region:
    """Returns the region that the name scopes of an equation of `outer` say."""
    return outer if "amp[" not in scopes else _region_of(scopes, outer)


def without_policies(scopes: str) -> str:
    """Returns name scopes without policies and names of transformations."""
    return _TRANSFORM.sub("", _SCOPE.sub("", scopes))


@functools.lru_cache(maxsize=4096)
def _region_of(scopes: str, outer: Region) -> Region:
    plain = _TRANSFORM.sub("", scopes)
    *_, innermost = _SCOPE.finditer(plain)
    path = plain[: innermost.end()]
    return Region(
        f"{outer.path}/{path}" if outer.path else path, get_policy(innermost[1])
    )
