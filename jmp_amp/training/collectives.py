"""What devices agree on: whether a step is finite, and sums in float32.

A ring that adds up half-precision numbers rounds at each hop: at 512 devices a sum is
wrong by percents. Here each device adds up its part of all arrays in float32.
"""

import functools
import re
from collections.abc import Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.policies.dtypes import F32, PyTree, is_half
from jmp_amp.training.structures import is_inexact, is_overwritten

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
    call = f"all_finite(tree, axis_name={axis_name!r})"
    axes = mapped_axes(axis_name, call)
    groups: dict[tuple[str, object], list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_inexact(leaf) and not is_overwritten(path):
            # `layers/0/kernel` and `layers/1/kernel` have one role, so one shape and
            # one sharding. Combining arrays of different shardings would move them.
            role = re.sub(r"\d+", "", jax.tree_util.keystr(path))
            groups.setdefault((role, jax.typeof(leaf)), []).append(leaf)
    finite = jnp.asarray(True)
    for group in groups.values():
        for start in range(0, len(group), _LEAVES_PER_KERNEL):
            together = map(jnp.isfinite, group[start : start + _LEAVES_PER_KERNEL])
            finite &= functools.reduce(jax.lax.bitwise_and, together).all()
    return jax.lax.pmin(finite.astype(jnp.int32), axes) == 1 if axes else finite


def checked_axes(axis_name: object, call: str) -> tuple[Hashable, ...]:
    """Returns the names of mapped axes, of one or several; none for None."""
    several = isinstance(axis_name, Iterable) and not isinstance(axis_name, str)
    names: tuple[object, ...] = tuple(axis_name) if several else (axis_name,)  # pyright: ignore
    for name in names:
        if isinstance(name, int | np.integer) or not isinstance(name, Hashable):
            raise TypeError(
                f"{call}: {name!r} is not the name of a mapped axis. Give the name "
                'that the mesh of shard_map has, "data", or the one of vmap, '
                'jax.vmap(fn, axis_name="data").'
            )
    return () if axis_name is None else names


def mapped_axes(axis_name: object, call: str) -> tuple[Hashable, ...]:
    """Returns `checked_axes`; raises a NameError if one is not mapped around.

    JAX's own collectives fail without a word inside of `shard_map`.
    """
    axes = checked_axes(axis_name, call)
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
    return axes


def psum_in_f32(tree: PyTree, axis_name: Hashable | Sequence[Hashable]) -> PyTree:
    """Returns the sums of a tree over an axis of devices, added up in float32.

    Call it where `jax.lax.psum` is called: inside of `shard_map`, `pmap` or `vmap`.
    Each device receives one part of a half-precision leaf from all others, adds it up
    in float32, and sends the sum to the others, rounded once. Messages are as small as
    those of `psum` in half precision (reduce-scatter and all-gather, Rabenseifner
    2004), and the error does not grow with the number of devices. A sum beyond the
    range of float16 is infinite.

    Args:
      tree: a pytree of arrays, such as gradients.
      axis_name: the name of the axis, or several.

    Returns:
      A tree like `tree`. The sums of bfloat16 and float16 leaves are float32, those of
      all others what `jax.lax.psum` returns.

    Raises:
      TypeError: if `axis_name` is no name, such as the number of an axis, or none.
      NameError: if there is no axis of that name here.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> gradients = jnp.full((4, 3), 1.5, jnp.bfloat16)  # of 4 devices
      >>> total = jax.vmap(lambda x: amp.psum_in_f32(x, "data"), axis_name="data")
      >>> total(gradients)[0]
      Array([6., 6., 6.], dtype=float32)
    """
    call = f"psum_in_f32(tree, {axis_name!r})"
    if not (axes := mapped_axes(axis_name, call)):
        remedy = 'Give the name that the mesh of shard_map has, "data", or several.'
        raise TypeError(f"{call}: there is no axis to add up over. {remedy}")
    return jax.tree.map(lambda leaf: _sum(leaf, axes), tree)


def _sum(leaf: jax.Array, axis_name: tuple[Hashable, ...]) -> jax.Array:
    dtype, size = jnp.result_type(leaf), jnp.size(leaf)
    if not is_half(dtype) or size == 0:
        total = jax.lax.psum(leaf, axis_name)
        return total.astype(F32) if is_half(dtype) else total
    devices = jax.lax.axis_size(axis_name)
    share = -(-size // devices)
    flat = jnp.pad(jnp.reshape(leaf, -1), (0, devices * share - size))
    parts = flat.reshape(devices, share)
    # Row i is for device i; afterwards it is from device i.
    received = jax.lax.all_to_all(parts, axis_name, 0, 0)
    mine = jnp.sum(received.astype(F32), axis=0).astype(dtype)
    # Only a `shard_map` that checks it knows along which axes values differ.
    differs = bool(jax.typeof(mine).manual_axis_type.varying)
    to = "invarying" if differs else "varying"
    total = jax.lax.all_gather(mine, axis_name, tiled=True, to=to)
    return total[:size].reshape(jnp.shape(leaf)).astype(F32)
