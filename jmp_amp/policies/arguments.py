"""How errors write arguments, and whose line a warning is about."""

import sys
import warnings

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


def warn(message: str) -> None:
    """Warns of the line of the caller: the first one outside of this package."""
    level, frame = 1, sys._getframe()
    inside = "jmp_amp.", "contextlib"
    while frame and str(frame.f_globals.get("__name__")).startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
