"""Arguments in errors: how they are written, and those that other libraries have."""

from collections.abc import Mapping

import jax
import numpy as np


def written(value: object) -> str:
    """Returns an argument as an error writes it.

    That is its `repr`; for an array, or what holds arrays, its type alone.
    """
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # a dictionary whose keys have no order
        leaves = []
    holds_arrays = any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    return f"<{type_name(value)}>" if holds_arrays else repr(value)


def type_name(value: object) -> str:
    """Returns the name of the type of an argument, without those private to JAX."""
    if isinstance(value, jax.Array):
        return "array"
    return "type" if isinstance(value, type) else type(value).__name__


def refuse_keywords(
    call: str, given: Mapping[str, object], remedies: Mapping[str, str]
) -> None:
    """Raises if a call was given keywords that it does not have.

    Args:
      call: the name of what was called.
      given: the keywords and their values.
      remedies: what to write instead of keywords that are usual elsewhere.
    """
    for key in sorted(given, key=lambda key: key not in remedies):
        if key in remedies:
            raise TypeError(f"{call}(..., {key}=...): {remedies[key]}")
        raise TypeError(f"{call}() got an unexpected keyword argument {key!r}")
