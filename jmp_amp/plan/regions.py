"""Regions: a policy travels as a name scope, and the innermost `amp[...]` is in force.

A scope is text in the name stack of JAX, so it survives `jit`, `grad`, `vmap` and
`checkpoint`, needs no registry, and serves every library that runs on JAX. It is one
whole name, `amp[p=f32,c=bf16,o=f32]`: a user's own `clamp[0]` is none.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

from jmp_amp.policies.policy import Policy, get_policy

# The whole of a name, with all three dtypes. Names stand between slashes, and between
# the parentheses of transformations.
_SCOPE = re.compile(r"(?<![^/(])amp\[(p=\w+,c=\w+,o=\w+[\w,=+]*)\](?![^/)])")
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
    found = list(_SCOPE.finditer(plain))
    if not found:
        return outer
    innermost = found[-1]
    path = plain[: innermost.end()]
    return Region(
        f"{outer.path}/{path}" if outer.path else path, get_policy(innermost[1])
    )
