"""What this package writes into the name stacks of JAX, and what it reads there.

A name scope is text, so it survives `jit`, `grad`, `vmap` and `checkpoint`, needs no
registry, and serves every library that runs on JAX. These are all of them:

| name                        | what it says                                         |
| --------------------------- | ---------------------------------------------------- |
| `amp[p=f32,c=bf16,o=f32]`   | the policy in force                                  |
| `amp_autocast_<hex>()`      | the map of an autocast inside of another one: the    |
|                             | entries that match named scopes                      |
| `amp_region()`              | an autocast that the autocast around it plans        |
| `amp_inputs()`              | the dtypes of the trace are those of the policy      |
| `amp_entries_<depth>_<n>()` | the entries of a map that matched a module           |
| `amp_module_<hex>()`        | the path of a module, as a `PolicyMap` sees it       |
| `amp_flax()`                | a Flax module runs, and its map has text patterns    |
| `amp_eqn_<body>_<n>()`      | the equation of a plan                               |
| `amp_cast_<which>()`        | which inserted cast of that equation                 |
| `amp_quantised_0()`         | what makes 8-bit floats of an operand                |
| `amp_scaling()`             | what is done to a loss for its scale                 |

All but the first are written as JAX writes transformations: `module_names` leaves out
both.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator

import jax

FLAX, REGION, BY_POLICY = "flax", "region", "inputs"
_INNER = "amp_autocast_"
# What JAX writes: in the backward pass, where a checkpoint computes again, and around
# the body of one.
BACKWARD, AGAIN = "transpose(", "rematted_computation"
_DERIVED = "jvp("
_NO_MODULES = ("", "checkpoint", AGAIN)
# The whole of a name, with all three dtypes: a user's own `clamp[0]` is none. Names
# stand between slashes, and between the parentheses of transformations.
_POLICY = re.compile(r"(?<![^/(])amp\[(p=\w+,c=\w+,o=\w+[\w,=+]*)\](?![^/)])")
_NAME = re.compile(r"[^/]+")
# The name stack of a derivative reads `transpose(jvp(Block_0))/Dense_0`.
_TRANSFORM = re.compile(r"\w+\(|\)")


def policy_noted(policy: object) -> contextlib.AbstractContextManager[object]:
    """Returns the scope of a policy."""
    return jax.named_scope(f"amp[{policy}]")


def parts(scopes: str) -> list[tuple[str, str]]:
    """Returns the names of policies, modules and scopes, each with its path.

    The notes of autocasts inside of others are among them, see `autocast_in`.
    """
    plain = _TRANSFORM.sub(_as_name, scopes)
    found = [(plain[: each.end()], each[0]) for each in _NAME.finditer(plain)]
    return [(path, name) for path, name in found if _is_module(name)]


def _as_name(transform: re.Match[str]) -> str:
    return transform[0][:-1] if transform[0].startswith(_INNER) else ""


def autocast_in(name: str) -> str | None:
    """Returns the map that the note of an inner autocast says, if it is one."""
    if not name.startswith(_INNER):
        return None
    return bytes.fromhex(name.removeprefix(_INNER)).decode()


def of_innermost(scopes: str) -> str:
    """Returns the name scopes in the innermost autocast that has its own map."""
    return scopes.rpartition(_INNER)[2]


def policy_in(name: str) -> str | None:
    """Returns the policy that a name says; None if it is that of a scope."""
    found = _POLICY.fullmatch(name)
    return found and found[1]


def without_policies(scopes: str) -> str:
    """Returns name scopes without policies and names of transformations."""
    return _TRANSFORM.sub("", _POLICY.sub("", scopes))


def module_names(scopes: str) -> list[str]:
    """Returns the names of modules and of the user's own scopes."""
    return [*filter(_is_module, without_policies(scopes).split("/"))]


def is_derived(scopes: str) -> bool:
    """Whether JAX says that what has these scopes was differentiated."""
    return _DERIVED in scopes


# The equations of one scope have one text.
@functools.lru_cache(maxsize=4096)
def backward_depth(scopes: str) -> int:
    """Returns how many backward passes of its body an equation is inside of.

    What a checkpoint computes again in a backward pass belongs to the forward pass.
    """
    return scopes.count(BACKWARD) - (AGAIN in scopes)


def _is_module(name: str) -> bool:
    # `jnp.einsum` opens a scope of the name of its subscripts.
    return name not in _NO_MODULES and "->" not in name


def noted(kind: str, *values: object) -> contextlib.AbstractContextManager[object]:
    """Returns the scope of a kind, "module", that says some values."""
    return jax.named_scope(f"amp_{'_'.join(map(str, [kind, *values]))}()")


def notes(kind: str, scopes: str) -> Iterator[list[str]]:
    """Yields the values of each scope of a kind, the outermost first."""
    for each in _pattern(kind).findall(scopes):
        yield each.split("_")[1:]


def is_noted(kind: str, scopes: str) -> bool:
    return _pattern(kind).search(scopes) is not None


@functools.cache
def _pattern(kind: str) -> re.Pattern[str]:
    return re.compile(rf"amp_{kind}((?:_\w*)?)\(\)")


def text_noted(kind: str, text: str) -> contextlib.AbstractContextManager[object]:
    """Returns the scope of a kind that says a text of any characters."""
    return noted(kind, text.encode().hex())


def text_of(kind: str, scopes: str) -> str | None:
    """Returns the text that the innermost scope of a kind says; None without one."""
    found = [*notes(kind, scopes)]
    return bytes.fromhex(found[-1][0]).decode() if found else None
