"""Numbers as plain data: what strict JSON can say, and read back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.policies.dtypes import PyTree

_WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def written(value: PyTree) -> Any:
    """Returns a pytree as dictionaries, lists, text and finite numbers.

    Arrays are nested lists, a complex number is a pair, and a number that is not finite
    is "inf", "-inf" or "nan". A node that is no dictionary, list or tuple is a
    dictionary from key paths to leaves.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): written(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [written(each) for each in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array | complex):
        return written(_numbers(value))
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if len(leaves) == 1 and leaves[0][1] is value:
        return str(value)
    return {jax.tree_util.keystr(path): written(leaf) for path, leaf in leaves}


def read(data: Any) -> Any:
    """Returns what `written` wrote, with numbers that are not finite as numbers."""
    if isinstance(data, str):
        return _WORDS.get(data, data)
    if isinstance(data, Mapping):
        return {key: read(each) for key, each in data.items()}
    return [read(each) for each in data] if isinstance(data, list) else data


def _number(number: float) -> float | str:
    # `str` says inf, -inf and nan.
    return number if math.isfinite(number) else str(float(number))


def _numbers(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
    array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    if np.issubdtype(array.dtype, np.complexfloating):
        array = np.stack([np.real(array), np.imag(array)], axis=-1)
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(np.float64)  # bf16 has no numbers of Python
    return array.tolist()


def is_finite(tree: PyTree) -> bool:
    """Returns whether all floating and complex leaves of a pytree are finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not isinstance(leaf, str)]
    return all(np.isfinite(_numbers(leaf)).all() for leaf in leaves)
