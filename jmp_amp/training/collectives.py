"""Sums over devices in float32, of messages in half precision.

A ring that adds up half-precision numbers rounds at each hop: at 512 devices a sum is
wrong by percents. Here each device adds up its part of all arrays in float32.
"""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from jmp_amp.policies.dtypes import F32, PyTree, is_half
from jmp_amp.training.finite import check_mapped, checked_axes


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
    axes = checked_axes(axis_name, "psum_in_f32(tree, {})")
    if not axes:
        raise TypeError(
            f"psum_in_f32(tree, {axis_name!r}): there is no axis to add up over. Give "
            'the name that the mesh of shard_map has, "data", or several.'
        )
    check_mapped(axes, f"psum_in_f32(tree, {axis_name!r})")
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
