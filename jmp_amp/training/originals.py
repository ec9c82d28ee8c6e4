"""The f32 originals of half-precision parameters, with which an optimizer may begin."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jmp_amp.policies.dtypes import F32, PyTree, is_castable, is_half
from jmp_amp.training.digits import DIGIT_STATES
from jmp_amp.training.structures import key_paths, leaves_by_path


def first_values(params: PyTree, init_from: PyTree | None, call: str) -> PyTree:
    """Returns `params` with its half leaves as new float32 arrays.

    Args:
      params: the tree that `init` was given.
      init_from: the tree (or nnx module) that the half leaves were cast from, and whose
        digits the new arrays have; or None.
      call: the optimizer's name, to begin errors with.

    Raises:
      ValueError: if a leaf is missing in `init_from`, or rounds to another number.
    """
    if isinstance(init_from, nnx.Module):
        init_from = nnx.state(init_from)
    found = dict(leaves_by_path(nnx.as_pure(init_from)))
    leaves, structure = jax.tree.flatten(params)
    call = f"{call}(inner, init_from=...)"
    for index, path in enumerate(key_paths(nnx.as_pure(params))):
        leaf = leaves[index]
        if is_half(getattr(leaf, "dtype", None)):
            if init_from is not None:
                _check_original(leaf, found.get(path), path, call)
            leaves[index] = _new_float32(found.get(path, leaf), leaf)
    return structure.unflatten(leaves)


def begin_with(opt_state: PyTree, params: PyTree, originals: PyTree) -> PyTree:
    """Returns a new optimizer state that has all digits of the original parameters.

    As `init_from=` of `with_master_weights` and `with_kahan`, for a state that began
    without it.

    Args:
      opt_state: any optimizer's state. `nnx.Variable`s in it are changed in place.
      params: the half-precision parameters.
      originals: the parameters before they were cast.
    """
    stored = dict(leaves_by_path(nnx.as_pure(params)))
    found = dict(leaves_by_path(nnx.as_pure(originals)))

    def begun(node: PyTree) -> PyTree:
        if not isinstance(node, DIGIT_STATES):
            return node

        def first(path: str) -> jax.Array:
            leaf = stored[path]
            return node.first(leaf, _new_float32(found[path], leaf))

        return node.with_kept(_replaced(node.kept, first))

    return jax.tree.map(
        begun, opt_state, is_leaf=lambda node: isinstance(node, DIGIT_STATES)
    )


def _replaced(tree: PyTree, of: Callable[[str], jax.Array]) -> PyTree:
    """Returns `tree` with `of` the key path of each leaf in its place."""
    paths = iter(key_paths(nnx.as_pure(tree)))
    leaves, structure = jax.tree.flatten(
        tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for index, leaf in enumerate(leaves):
        if not jax.tree.leaves(leaf):
            continue  # A Variable whose value is masked.
        value = of(next(paths))
        if isinstance(leaf, nnx.Variable):
            leaf.set_value(value)
        else:
            leaves[index] = value
    return structure.unflatten(leaves)


def _check_original(leaf: jax.Array, original: PyTree, path: str, call: str) -> None:
    dtype = getattr(original, "dtype", None)
    if not is_castable(dtype) or np.shape(original) != leaf.shape:
        fact = "nothing" if dtype is None else jax.typeof(original)
        raise ValueError(
            f"{call}: the parameter at {path} is {jax.typeof(leaf)}, but there it "
            f"is {fact}. Give the tree that the parameters were cast from."
        )
    if not (_is_at_hand(leaf) and _is_at_hand(original := _beside(original, leaf))):
        return
    rounded = jnp.asarray(original).astype(leaf.dtype)
    if not jnp.array_equal(rounded, leaf, equal_nan=True):
        raise ValueError(
            f"{call}: the parameter at {path} is not the one there, rounded to "
            f"{leaf.dtype.name}. Give the tree that the parameters were cast from."
        )


def _new_float32(original: PyTree, leaf: PyTree) -> jax.Array:
    return jnp.array(_beside(original, leaf), F32, copy=True)


def _beside(original: PyTree, leaf: PyTree) -> PyTree:
    """Returns `original` on the devices of `leaf`, with the same sharding."""
    if isinstance(original, Tracer) or not _is_at_hand(leaf):
        return original
    # An array that was put somewhere is committed to that place. A step that is given
    # one is compiled for it, and again if its result is not committed.
    return jax.device_put(original, leaf.sharding) if leaf.committed else original


def _is_at_hand(array: PyTree) -> bool:
    is_known = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return is_known and array.is_fully_addressable
