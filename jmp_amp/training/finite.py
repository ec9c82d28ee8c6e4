"""Telling a step that overflowed, and taking back the values that it wrote.

Trees only: nothing here knows of loss scales.
"""

import functools
import re
from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_amp.policies.dtypes import PyTree
from jmp_amp.training.structures import first_difference, key_paths
from jmp_amp.training.trainable import is_inexact, is_overwritten

# One reduction a leaf is two GPU kernels a leaf: 36 for a 12-layer MLP, where the rest
# of its training step is 112. XLA fuses the checks of several leaves into one kernel,
# as long as it has few enough operands.
_LEAVES_PER_KERNEL = 16


def all_finite(tree: PyTree, axis_name: str | Sequence[str] | None = None) -> jax.Array:
    """Returns whether no leaf of `tree` holds an inf or a NaN: bool[].

    Only inexact leaves are checked, complex and fp8 ones too; an empty tree is finite.
    The collection `_overwrite_with_gradient` of flax's fp8 layers is ignored: an inf in
    a history of maxima is no overflow of a gradient.

    Args:
      tree: any pytree.
      axis_name: mapped axes (of `shard_map`, `vmap`, `pmap`) to agree over: the answer
        is True only if it is so on all of them.

    Raises:
      TypeError: if `axis_name` is neither a name nor several.
      NameError: if there is no mapped axis of that name here.

    Example:
      >>> import jmp_amp as amp
      >>> amp.all_finite({"w": jnp.array([1.0, jnp.inf]), "step": 3})
      Array(False, dtype=bool)
    """
    axes = checked_axes(axis_name, "all_finite(tree, axis_name={})")
    check_mapped(axes, f"all_finite(tree, axis_name={axis_name!r})")
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    groups: dict[tuple[str, object], list[jax.Array]] = {}
    for path, leaf in leaves:
        if is_inexact(leaf) and not is_overwritten(path):
            # `layers/0/kernel` and `layers/1/kernel` have one role, so one shape and
            # one sharding. Combining arrays of different shardings would move them.
            role = re.sub(r"\d+", "", jax.tree_util.keystr(path))
            groups.setdefault((role, jax.typeof(leaf)), []).append(leaf)
    flags = []
    for group in groups.values():
        for start in range(0, len(group), _LEAVES_PER_KERNEL):
            together = map(jnp.isfinite, group[start : start + _LEAVES_PER_KERNEL])
            flags.append(functools.reduce(jax.lax.bitwise_and, together).all())
    finite = functools.reduce(jnp.logical_and, flags, jnp.asarray(True))
    return jax.lax.pmin(finite.astype(jnp.int32), axes) == 1 if axes else finite


def checked_axes(axis_name: object, call: str) -> tuple[Hashable, ...]:
    """Returns the names of mapped axes; none for None.

    Args:
      axis_name: one name, several, or None.
      call: the caller's call as written, with `{}` for the names, for the error.

    Raises:
      TypeError: if it is none of these, such as the number of an axis.
    """
    names: tuple[object, ...] = (axis_name,)
    if isinstance(axis_name, Iterable) and not isinstance(axis_name, str):
        names = tuple(axis_name)
    for name in names:
        if isinstance(name, int | np.integer) or not isinstance(name, Hashable):
            raise TypeError(
                f"{call.replace('{}', repr(axis_name))}: {name!r} is not the name of a "
                'mapped axis. Give the name that the mesh of shard_map has, "data", or '
                'the one of vmap, jax.vmap(fn, axis_name="data").'
            )
    return () if axis_name is None else names


def check_mapped(axes: Sequence[Hashable], call: str) -> None:
    """Raises a NameError if no mapped axis around has one of these names.

    JAX's own collectives fail without a word inside of `shard_map`.
    """
    for name in axes:
        try:
            jax.lax.axis_size(name)
        except NameError as error:
            mesh = ", ".join(map(repr, jax.sharding.get_abstract_mesh().axis_names))
            there = f" The mesh here has {mesh}." if mesh else ""
            raise NameError(
                f"{call}: no mapped axis is called {name!r} here.{there} Call it "
                "inside of jax.shard_map over a mesh with that axis, or of jax.vmap "
                f"with axis_name={name!r}."
            ) from error


def select_tree(pred: ArrayLike, a: PyTree, b: PyTree) -> PyTree:
    """Returns `a` if `pred` holds and `b` otherwise, leaf by leaf.

    Both are computed. A NaN in the other one has no effect.

    Args:
      pred: bool[].
      a: a pytree of arrays and numbers.
      b: a pytree of the same structure, shapes and dtypes. Leaves that are not arrays
        have to be equal.

    Raises:
      ValueError: if the two differ in structure or shape; if `pred` is no scalar.
      TypeError: if they differ in dtype, or in a leaf that is not an array; if `pred`
        is not boolean.

    Example:
      >>> import jmp_amp as amp
      >>> amp.select_tree(False, {"mean": jnp.inf}, {"mean": jnp.zeros(())})
      {'mean': Array(0., dtype=float32)}
    """
    return choose(pred, a, b, "select_tree", ("a", "b"))


def choose(
    pred: ArrayLike, a: PyTree, b: PyTree, call: str, names: tuple[str, str]
) -> PyTree:
    """Returns `select_tree` of `a` and `b`; errors speak of `call` and `names`."""
    pred = checked_condition(pred, call)
    if jax.tree.structure(a) != jax.tree.structure(b):
        where = first_difference(key_paths(a), key_paths(b))
        raise ValueError(
            f"{call}: {names[0]} and {names[1]} differ in structure; first difference "
            f"at {where}. They have to be two versions of one tree."
        )

    def of(path: jax.tree_util.KeyPath, a: PyTree, b: PyTree) -> PyTree:
        if a is b:
            return a
        if all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in (a, b)):
            if (a.shape, a.dtype) == (b.shape, b.dtype):
                is_float0 = a.dtype == jax.dtypes.float0
                # Traces faster than `jnp.where`.
                return a if is_float0 else jax.lax.select(pred, a, b)
        elif isinstance(a, ArrayLike) and isinstance(b, ArrayLike):
            return jnp.where(pred, a, b)
        elif a == b:
            return a
        shown = [jax.typeof(x) if hasattr(x, "dtype") else repr(x) for x in (a, b)]
        kind = TypeError if np.shape(a) == np.shape(b) else ValueError
        raise kind(
            f"{call}: at {jax.tree_util.keystr(path) or 'the root'}, {names[0]} is "
            f"{shown[0]} but {names[1]} is {shown[1]}. Numbers and arrays of one shape "
            "and dtype can be chosen while a program runs. Cast one."
        )

    return jax.tree_util.tree_map_with_path(of, a, b)


def checked_condition(condition: ArrayLike, call: str) -> jax.Array:
    """Returns a condition as an array: bool[]. Errors begin with `call`.

    Raises:
      TypeError: if it is not boolean. Text and numbers are true or false to Python,
        "False" is true.
      ValueError: if it is no scalar.
    """
    is_bool = isinstance(condition, bool)
    if not is_bool and getattr(condition, "dtype", None) != jnp.bool_:
        raise TypeError(
            f"{call}: the condition is {condition!r}, which is not boolean. Use True, "
            "False or an array of them, such as all_finite(grads)."
        )
    found = jnp.asarray(condition)
    if found.shape:
        raise ValueError(
            f"{call}: the condition has shape {found.shape}, but one scalar decides "
            "for a whole step. Use jnp.all of it, or jax.vmap to decide for each "
            "element of a batch."
        )
    return found
