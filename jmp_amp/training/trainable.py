"""The leaves of a tree that an optimizer trains, and the form in which it sees them.

The wrappers of this library hand their inner optimizer a tree of float32, float64 and
complex leaves: half leaves are promoted, so that its moments are float32, and leaves
that are not trained are masked.

Flax's fp8 layers (`flax.linen.fp8_ops`) keep scales and histories of maxima in a
collection `_overwrite_with_gradient`. Their derivative rules return the next state in
place of a gradient: nothing may scale, check, cast, clip or accumulate it. Flax's
`TrainState.apply_gradients` does the same for such a collection at the top of a tree.

A leaf is known by its key path, so that the collection may lie at any depth and in any
mapping: dictionaries, `FrozenDict`, a tuple of several trees.
"""

import numbers
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.core import Tracer
from jax.tree_util import DictKey, KeyPath

from jmp_amp.plan.program.meshes import in_row_major
from jmp_amp.policies.dtypes import PyTree, is_fp8, is_half

Tree = TypeVar("Tree")


def is_overwritten(path: KeyPath) -> bool:
    """Returns whether the leaf at `path` is overwritten with its gradient."""
    return any(
        isinstance(key, DictKey) and key.key == OVERWRITE_WITH_GRADIENT for key in path
    )


def map_not_overwritten(of: Callable[[PyTree], PyTree], tree: Tree) -> Tree:
    """Returns `tree` with `of` each leaf that is not overwritten with its gradient.

    Those that are come back as the same objects.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_overwritten(path) else of(leaf), tree
    )


def is_inexact(leaf: PyTree) -> bool:
    """Returns whether a leaf is a float or complex number, or an array of them."""
    if isinstance(leaf, float | complex):
        return True
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def takes_part(path: KeyPath, leaf: PyTree) -> bool:
    """Returns whether an optimizer trains a leaf: floats and complex numbers, not fp8.

    `None`, integers, keys, strings and functions are not trained, nor is a leaf that is
    overwritten with its gradient.
    """
    is_number = is_inexact(leaf) and not is_fp8(getattr(leaf, "dtype", None))
    return is_number and not is_overwritten(path)


def promote_half(leaf: PyTree) -> PyTree:
    """Returns an f16 or bf16 leaf as float32, and any other as the same object."""
    half = is_half(getattr(leaf, "dtype", None))
    return jnp.asarray(leaf, jnp.float32) if half else leaf


def promote_gradient(leaf: PyTree) -> PyTree:
    """Casts a half gradient to f32; one that is traced is in row-major layout."""
    if isinstance(leaf, Tracer) and is_half(leaf.dtype):
        leaf = in_row_major(leaf)
    return promote_half(leaf)


def taking_part(tree: PyTree, of: Callable[[PyTree], PyTree] = promote_half) -> PyTree:
    """Returns `tree` with `of` each leaf that is trained and the others masked."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: of(leaf) if takes_part(path, leaf) else optax.MaskedNode(),
        tree,
    )


def untrained_update(path: KeyPath, gradient: PyTree, like: PyTree) -> PyTree:
    """Returns the update of a leaf that is not trained: zeros for numbers.

    Args:
      path: its key path.
      gradient: the leaf in place of a gradient; returned for strings, keys and None,
        and where it is the next state itself.
      like: the parameter, if it is known.
    """
    found = like if hasattr(like, "dtype") else gradient
    dtype = getattr(found, "dtype", np.dtype(object))
    is_number = any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))
    if not is_number or is_overwritten(path):
        return gradient
    return jnp.zeros(found.shape, dtype)


def updates_of(proposed: PyTree, gradients: PyTree, call: str) -> list[jax.Array]:
    """Returns the updates that an optimizer proposes, one for each gradient.

    None stands for no change, as in `optax.apply_updates`: zeros.

    Args:
      proposed: a tree like `gradients`.
      gradients: what the optimizer was given, a tree of `taking_part`.
      call: what errors begin with.

    Raises:
      ValueError: if there is another number of updates.
    """
    given, structure = jax.tree.flatten(gradients)
    leaves = jax.tree.leaves(proposed)
    if len(leaves) != len(given):
        try:
            leaves = structure.flatten_up_to(proposed)
        except ValueError as error:
            raise ValueError(
                f"{call}: inner returned {len(leaves)} updates for {len(given)} "
                f"gradients. Use an optimizer that returns a tree like theirs: {error}"
            ) from error
    return [
        jnp.zeros_like(gradient) if leaf is None else leaf
        for leaf, gradient in zip(leaves, given, strict=True)
    ]


def owned(tree: PyTree) -> PyTree:
    """Returns `tree` with copies of its arrays and numbers, all of strong dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | numbers.Number):
            dtype = jnp.result_type(leaf)
            is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
            if dtype != jax.dtypes.float0:
                # In place, so that each original can be freed before the next copy.
                leaves[index] = jnp.array(leaf, None if is_key else dtype, copy=True)
    return structure.unflatten(leaves)


def with_extra_args(
    inner: optax.GradientTransformation | optax.MultiSteps, call: str
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer as a transformation that takes extra arguments.

    Raises:
      TypeError: if `inner` is not an optimizer; the message begins with `call`.
    """
    if isinstance(inner, optax.MultiSteps):
        # Its own `gradient_transformation()` drops extra arguments.
        return optax.GradientTransformationExtraArgs(
            inner.init,
            inner.update,  # pyright: ignore[reportArgumentType]
        )
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{call}({inner!r}, ...): not an optax transformation. Pass the "
            "optimizer to wrap, such as optax.adamw(3e-4)."
        )
    return optax.with_extra_args_support(inner)
