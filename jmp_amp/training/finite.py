"""Telling a step that overflowed, and taking back what it wrote.

Trees only: nothing here knows what a loss scale is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

# A reduction of its own for every leaf is two GPU kernels for every leaf: 36 for a
# 12-layer MLP, where the rest of its training step is 112. XLA fuses the checks of
# several leaves into one kernel, as long as it has few enough operands.
_LEAVES_PER_KERNEL = 16


def all_finite(tree: Any, axis_name: str | Sequence[str] | None = None) -> jax.Array:
    """Returns whether no leaf of `tree` holds an inf or a NaN: bool[].

    Only inexact leaves are looked at, complex and fp8 ones included; an empty tree is
    finite.

    Args:
      tree: any pytree.
      axis_name: mapped axes (of `shard_map`, `vmap`, `pmap`) to agree over: the answer
        is True only if it is so on all of them.

    Example:
      >>> import jmp_amp as amp
      >>> amp.all_finite({"w": jnp.array([1.0, jnp.inf]), "step": 3})
      Array(False, dtype=bool)
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    groups: dict[Any, list[Any]] = {}
    for path, leaf in leaves:
        if is_inexact(leaf):
            # `layers/0/kernel` and `layers/1/kernel`: one role, so one shape and one
            # sharding. Combining arrays of different shardings would move them.
            role = re.sub(r"\d+", "", jax.tree_util.keystr(path))
            groups.setdefault((role, jax.typeof(leaf)), []).append(leaf)
    flags = [
        functools.reduce(jnp.logical_and, map(jnp.isfinite, together)).all()
        for group in groups.values()
        for together in _batches(group)
    ]
    finite = functools.reduce(jnp.logical_and, flags, jnp.asarray(True))
    if axis_name is None:
        return finite
    axes = axis_name if isinstance(axis_name, str) else tuple(axis_name)
    return jax.lax.pmin(finite.astype(jnp.int32), axes) == 1


def select_tree(pred: ArrayLike, a: Any, b: Any) -> Any:
    """Returns `a` if `pred` holds and `b` otherwise, leaf by leaf.

    Both are computed; what is not chosen leaves no trace, not even as NaN.

    Args:
      pred: bool[].
      a: a pytree of arrays and numbers.
      b: a pytree of the same structure, shapes and dtypes. Leaves that are no arrays
        have to be equal.

    Raises:
      ValueError: if the two differ in structure or shape.
      TypeError: if they differ in dtype, or in a leaf that is no array.

    Example:
      >>> import jmp_amp as amp
      >>> amp.select_tree(False, {"mean": jnp.inf}, {"mean": jnp.zeros(())})
      {'mean': Array(0., dtype=float32)}
    """
    return choose(pred, a, b, "select_tree", ("a", "b"))


def choose(pred: ArrayLike, a: Any, b: Any, call: str, names: tuple[str, str]) -> Any:
    """`select_tree` for a caller that has its own names for the two trees."""
    pred = jnp.asarray(pred, bool)
    if pred.shape:
        raise ValueError(
            f"{call}: the condition has shape {pred.shape}, but one scalar decides for "
            "the whole tree. Use jax.vmap to decide for each element of a batch."
        )
    leaves_a, structure = jax.tree_util.tree_flatten_with_path(a)
    leaves_b, structure_b = jax.tree.flatten(b)
    if structure != structure_b:
        where = first_difference(key_paths(a), key_paths(b))
        raise ValueError(
            f"{call}: {names[0]} and {names[1]} differ in structure; first difference "
            f"at {where}. They have to be two versions of one tree."
        )
    chosen = []
    for (path, leaf_a), leaf_b in zip(leaves_a, leaves_b, strict=True):
        where = f"{call}: at {jax.tree_util.keystr(path) or 'the root'},"
        chosen.append(_choose_leaf(pred, leaf_a, leaf_b, where, names))
    return structure.unflatten(chosen)


def key_paths(tree: Any) -> tuple[str, ...]:
    """Returns the key path of every leaf, an nnx Variable being one leaf.

    Example:
      >>> from jmp_amp.training.finite import key_paths
      >>> key_paths({"decoder": {"bias": 0.0, "kernel": 1.0}})
      ("['decoder']['bias']", "['decoder']['kernel']")
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return tuple(jax.tree_util.keystr(path) for path, _ in leaves)


def first_difference(a: Sequence[str], b: Sequence[str]) -> str:
    """Returns the first key path that only one of the two has.

    Example:
      >>> from jmp_amp.training.finite import first_difference
      >>> first_difference(["['w']"], ["['b']", "['w']"])
      "['b']"
    """
    extra = [path for path in a if path not in set(b)]
    missing = [path for path in b if path not in set(a)]
    return (extra or missing or ["a container without leaves"])[0]


def _batches(leaves: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(leaves), _LEAVES_PER_KERNEL):
        yield leaves[start : start + _LEAVES_PER_KERNEL]


def is_inexact(leaf: Any) -> bool:
    """Returns whether a leaf is a float or complex number, or an array of them.

    Example:
      >>> from jmp_amp.training.finite import is_inexact
      >>> is_inexact(1.0), is_inexact(jnp.ones(3)), is_inexact(3), is_inexact("w")
      (True, True, False, False)
    """
    if isinstance(leaf, float | complex):
        return True
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _choose_leaf(
    pred: jax.Array, a: Any, b: Any, where: str, names: tuple[str, str]
) -> Any:
    both = (a, b)
    if all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in both):
        if a.shape != b.shape:
            raise ValueError(
                f"{where} {names[0]} has shape {a.shape} but {names[1]} has {b.shape}."
            )
        if a.dtype != b.dtype:
            raise TypeError(
                f"{where} {names[0]} is {a.dtype.name} but {names[1]} is "
                f"{b.dtype.name}. Cast one, so that the type of a step does not depend "
                "on its gradients."
            )
        if a.dtype == jax.dtypes.float0:
            return a
    elif not all(isinstance(leaf, jax.typing.ArrayLike) for leaf in both):
        if a is b or a == b:
            return a
        raise TypeError(
            f"{where} {names[0]} is {a!r} but {names[1]} is {b!r}: only arrays and "
            "numbers can be chosen while a program runs."
        )
    return jnp.where(pred, a, b)
