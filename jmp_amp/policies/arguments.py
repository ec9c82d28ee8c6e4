"""How errors write arguments."""

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
