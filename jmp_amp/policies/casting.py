"""Casting the floating-point leaves of a tree.

`cast_floating` is explicit: its caller has named the dtype, so f64 leaves follow too.
The library itself casts fewer dtypes, see `dtypes.is_castable`.
"""

from typing import TypeVar

import jax
from jax.typing import DTypeLike

from jmp_amp.policies.dtypes import F32, cast_leaf, floating_dtype, half_dtype

Tree = TypeVar("Tree")


def cast_floating(tree: Tree, dtype: DTypeLike) -> Tree:
    """Returns `tree` with its floating-point leaves cast to `dtype`.

    Leaves of f16, bf16, f32 and f64 are cast: JAX arrays (they keep their sharding) and
    tracers, numpy arrays and numpy scalars (they stay numpy, on the host), and
    `jax.ShapeDtypeStruct`.

    Integer, boolean, complex, PRNG-key and non-array leaves come back as the same
    objects, and so does a floating leaf that already has `dtype`. Non-array leaves
    are, for example, strings, functions and Python's own `float`, which takes the dtype
    of the array it meets anyway. fp8 leaves come back as they are, because their values
    mean nothing without a scale that this function does not see.

    Values beyond the range of `dtype` become inf; in an fp8 `dtype`, of which most have
    no inf, they become its largest value.

    Args:
      tree: any pytree; array leaves of any shape.
      dtype: a floating dtype, or anything `jnp.dtype` accepts, or one of the names
        that `get_policy` knows ("bf16", "half", "f8_e4m3").

    Returns:
      A pytree of the same structure; every leaf keeps its shape.

    Raises:
      TypeError: if `dtype` is not a floating dtype.
      ValueError: if it is text that names no dtype.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> batch = {"x": jnp.ones((2, 3)), "label": jnp.arange(2)}
      >>> batch = amp.cast_floating(batch, "bfloat16")
      >>> jax.tree.map(lambda leaf: leaf.dtype.name, batch)
      {'label': 'int32', 'x': 'bfloat16'}
    """
    wanted = floating_dtype(dtype, "cast_floating(tree, {})")
    return jax.tree.map(lambda leaf: cast_leaf(leaf, wanted), tree)


def cast_to_half(tree: Tree) -> Tree:
    """Returns `tree` with its floating-point leaves in `half_dtype()`.

    See `cast_floating` for which leaves are cast.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> amp.cast_to_half(jnp.ones(2)).dtype == amp.half_dtype()
      True
    """
    return cast_floating(tree, half_dtype())


def cast_to_full(tree: Tree) -> Tree:
    """Returns `tree` with its floating-point leaves in f32.

    See `cast_floating` for which leaves are cast. f64 leaves become f32 as well.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> amp.cast_to_full({"w": jnp.ones(2, jnp.float16), "step": 3})
      {'step': 3, 'w': Array([1., 1.], dtype=float32)}
    """
    return cast_floating(tree, F32)
