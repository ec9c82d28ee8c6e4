"""Meshes: which devices an array is on, and what computes with it there.

The axes of a mesh are of a type. Of *auto* axes the compiler decides how arrays are
sharded. Of *explicit* ones it is a part of the type of a traced array. In a
`shard_map` they are *manual*: an array is the part of one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from jmp_amp.plan.program.jaxprs import Value


def mesh_of(arrays: Sequence[Value]) -> Mesh | None:
    """Returns the mesh of several devices that arrays are on; None for one device.

    None also if its axes are explicit: then a traced value knows its own.
    """
    for each in arrays:
        sharding = getattr(each, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            explicit = AxisType.Explicit in sharding.mesh.axis_types
            return None if explicit else cast(Mesh, sharding.mesh)
    return None


def explicit_sharding(x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding | None:
    """Returns the sharding that is a part of the type of an array; None if none is."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def before_transpose(x: jax.Array, order: Sequence[int]) -> NamedSharding | None:
    """Returns the sharding of an array that a transpose makes one like `x`."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return None
    spec = dict(zip(order, sharding.spec, strict=True))
    return sharding.update(spec=PartitionSpec(*(spec[d] for d in range(x.ndim))))


def are_partitioned(arrays: Sequence[Value]) -> bool:
    """Whether XLA partitions what is computed of traced arrays over several devices.

    In a `shard_map` it does not. A traced array knows the mesh that its argument is on,
    or that `jax.set_mesh` sets, and not that of the `in_shardings` of `jax.jit`.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return any(
        kind != AxisType.Manual and size > 1
        for mesh in meshes
        for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    )


def varying_axes(x: jax.Array | jax.ShapeDtypeStruct) -> frozenset[Any]:
    """Returns the axes of a mesh along which an array is another one in each shard."""
    return jax.typeof(x).manual_axis_type.varying


def in_mesh_of(value: Value) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which a traced value can be computed with: its own mesh.

    `jax.sharding.auto_axes` changes the types of the axes of a mesh inside. An equation
    that leads in or out has its operand in one mesh, and runs in the other.
    """
    mesh = jax.typeof(value).sharding.mesh
    if mesh.empty or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def replicated(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Returns a traced array that each device has whole; in a sharded map, as it is.

    It is of the mesh of the equations around then.

    On a mesh with explicit axes JAX refuses to flatten a sharded array. On others XLA
    counts wrongly: a `scatter` of a size that the devices do not divide adds what fills
    it up (all versions from 0.10 to 0.12).

    Args:
      x: the array.
      mesh: see `mesh_of`.
    """
    held = jax.typeof(x).sharding.mesh
    if AxisType.Manual in held.axis_types:
        return x
    explicit = explicit_sharding(x)
    if not held.empty:
        with in_mesh_of(x):
            if explicit is not None:
                x = reshard(x, explicit.update(spec=PartitionSpec()))
            else:
                x = jax.lax.with_sharding_constraint(x, PartitionSpec())
        return here(x)
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def here(x: jax.Array) -> jax.Array:
    """Returns a traced array in the mesh of the equations around, see `in_mesh_of`.

    In a sharded map it stays as it is, and without a mesh. Else each device gets it
    whole.
    """
    mesh, others = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
    types = {*mesh.axis_types, *others.axis_types}
    if mesh.empty or others.empty or mesh == others or AxisType.Manual in types:
        return x
    return reshard(x, PartitionSpec())


def in_row_major(x: jax.Array) -> jax.Array:
    """Returns a traced array, pinned to row-major layout if it may be a kernel's.

    GPU convolutions permute the dimensions of their kernels. XLA lets that layout
    spread: with half parameters it transposes moments and masters before the model
    runs, computes the update in the permuted layout, and transposes the results back.
    A half gradient in row-major layout stops the spread at the gradient. (f32 kernels
    are transposed too, but inside the GPU kernel that updates them.)
    """
    # 1-D convolutions have kernels of rank 3, position embeddings are (1, n, d).
    is_kernel = x.ndim > 3 or (x.ndim == 3 and x.shape[0] != 1)
    if not is_kernel or not _is_whole(x):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _is_whole(x: jax.Array) -> bool:
    """Returns whether every device holds the whole array.

    XLA gathers an array whose layout is constrained. While a program is traced, the
    layout over the devices of an automatically sharded array is unknown.
    """
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    unknown = any(kind == AxisType.Auto and size > 1 for kind, size in axes)
    return not unknown and not any(sharding.spec)
