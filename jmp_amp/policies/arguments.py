"""How errors write arguments, what a flag is, and whose line a warning is about."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

import jax
import numpy as np


def written(value: object) -> str:
    """Returns an argument as an error writes it.

    That is its `repr`; for an array, or what holds arrays, its type alone.
    """
    return f"<{type_name(value)}>" if holds_arrays(value) else repr(value)


def holds_arrays(value: object) -> bool:
    """Whether a value is an array or a tree of arrays, as batches are."""
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # a dictionary whose keys have no order
        leaves = []
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return any(isinstance(leaf, kinds) for leaf in leaves)


def type_name(value: object) -> str:
    """Returns the name of the type of an argument, without those private to JAX."""
    if isinstance(value, jax.Array):
        return "array"
    return "type" if isinstance(value, type) else type(value).__name__


def checked_flag(value: object, call: str) -> bool:
    """Returns a flag as a Python bool; numpy's bools are flags too.

    Every other value is true or false to Python, "False" is true: it is refused.

    Args:
      value: the argument of the caller.
      call: the caller's call as written, with `{}` for the value, for the error.

    Raises:
      TypeError: if it is neither True nor False.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(
        f"{call.replace('{}', repr(value))}: neither True nor False, but of type "
        f"{type(value).__name__}. Give a bool."
    )


@contextlib.contextmanager
def quoting(call: str) -> Iterator[None]:
    """Begins the errors inside with the user's call as written."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{call}: {error}") from None


def warn(message: str) -> None:
    """Warns of the line of the caller: the first one outside of this package."""
    level, frame = 1, sys._getframe()
    inside = "jmp_amp.", "contextlib"
    while frame and str(frame.f_globals.get("__name__")).startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
