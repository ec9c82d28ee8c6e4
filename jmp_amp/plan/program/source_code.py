"""Of which function and which line an equation is, and whose they are.

The code of a library, JAX, Flax or Optax, is told from that of a user by its folder.
"""

from __future__ import annotations

import contextlib
import functools
import os

import flax
import jax
import optax

import jmp_amp
from jmp_amp.plan.program.jaxprs import (
    Eqn,
    Jaxpr,
    Traceback,
    body_of,
    inner_bodies,
    is_jit,
)

# A jitted function of a library with at most so many equations runs in place of its
# call: `jnp.where` has 3 equations, `jax.nn.log_softmax` 10. Larger ones stay calls, so
# that a function that is called often is in the program once.
_HELPER_SIZE = 24

_LIBRARY_FOLDERS = tuple(
    os.path.join(os.path.dirname(str(module.__file__)), "")
    for module in (jax, flax, optax)
)
# This package, and modules of the standard library that only call a user's function.
_NOT_A_USERS = (
    os.path.join(os.path.dirname(str(jmp_amp.__file__)), ""),
    *(str(module.__file__) for module in (contextlib, functools)),
)

# Of each call the identity of the code, and the instruction that calls.
Calls = tuple[tuple[int, int], ...]


def function_name(eqn: Eqn) -> str | None:
    """Returns the name of the Python function that a call equation stands for."""
    bodies = inner_bodies(eqn)
    if not bodies:
        return None
    name = eqn.params.get("name") or bodies[-1].body.jaxpr.debug_info.func_name
    return name if isinstance(name, str) and name.isidentifier() else None


def is_of_library(eqn: Eqn) -> bool:
    """Whether the function that a call equation stands for is one of a library."""
    bodies = inner_bodies(eqn)
    return bool(bodies) and _is_of_library(bodies[-1].body.jaxpr)


def is_helper(eqn: Eqn) -> bool:
    """Whether `eqn` calls a few operations that a library jits for itself.

    `jnp.where` and `jnp.take` are jitted functions of JAX. Run without the call, their
    derivative keeps no array of zeros for the operand that has none.
    """
    if not is_jit(eqn) or any(eqn.params["donated_invars"]):
        return False
    jaxpr = body_of(eqn.params["jaxpr"]).jaxpr
    return len(jaxpr.eqns) <= _HELPER_SIZE and _is_of_library(jaxpr)


def _is_of_library(jaxpr: Jaxpr) -> bool:
    return in_library(jaxpr.debug_info.func_filename or "")


def in_library(filename: str) -> bool:
    """Whether a source file belongs to JAX, Flax or Optax."""
    return filename.startswith(_LIBRARY_FOLDERS)


def users_calls(eqn: Eqn) -> Calls:
    """Returns the calls outside of JAX that made an equation, innermost first.

    JAX makes a derivative of an equation by the calls that made the equation.
    """
    return _users_calls(eqn.source_info.traceback)


# The layers of a model are called from the same lines.
@functools.lru_cache(maxsize=4096)
def _users_calls(traceback: Traceback | None) -> Calls:
    if traceback is None:
        return ()
    jax_folder, *_ = _LIBRARY_FOLDERS
    return tuple(
        (id(code), instruction)
        for code, instruction in zip(*traceback.raw_frames(), strict=True)
        if not code.co_filename.startswith(jax_folder)
    )


def source_line(eqn: Eqn) -> str | None:
    """Returns `file:line` of the user's code that made `eqn`, or None.

    The innermost call outside of JAX, Flax, Optax and this package; if there is none,
    the innermost one in Flax or Optax.
    """
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    jax_folder, *_ = _LIBRARY_FOLDERS
    for passed_over in (
        (*_LIBRARY_FOLDERS, *_NOT_A_USERS),
        (jax_folder, *_NOT_A_USERS),
    ):
        for frame in frames:
            if not frame.file_name.startswith(passed_over):
                return f"{frame.file_name}:{frame.line_num}"
    return None


def jitted_name(eqn: Eqn) -> str | None:
    """Returns the name of the function if `eqn` calls one that the user jitted."""
    if not is_jit(eqn):
        return None
    name, jaxpr = eqn.params["name"], body_of(eqn.params["jaxpr"]).jaxpr
    return name if name.isidentifier() and not _is_of_library(jaxpr) else None
