"""A lookup of one element in each row, whose derivative is not a scatter.

So a cross-entropy takes the logits of the labels: `jnp.take_along_axis` with one index
for each row. JAX differentiates it to a scatter into an array of zeros, which XLA keeps
in f32 and fuses with nothing: an array as large as the logits. A comparison with the
indices is fused with its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.program import binding
from jmp_amp.plan.program.jaxprs import Eqn, Value, aval_of
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.policies.dtypes import is_half


def picks_from_rows(eqn: Eqn) -> bool:
    """Whether `eqn` takes one element of each row, along the last dimension."""
    if eqn.primitive.name != "gather":
        return False
    operand, indices = map(aval_of, eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    rows = numbers.operand_batching_dims
    return (
        operand.ndim > 1
        and all(size == 1 for size in eqn.params["slice_sizes"])
        and not numbers.offset_dims
        and rows == tuple(range(operand.ndim - 1))
        and numbers.start_indices_batching_dims == rows
        and numbers.start_index_map == (operand.ndim - 1,)
        and indices.shape[:-2] == operand.shape[:-1]
        and indices.shape[-2:] == (1, 1)
    )


def pick(eqn: Eqn, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """Runs the `gather` equation `eqn`, which picks one element of each row.

    Args:
      eqn: the equation.
      operand: f16, bf16 or f32 of shape (..., n).
      indices: integers of shape (..., 1, 1).

    Returns:
      An array of the dtype of `operand` and of shape (..., 1).
    """

    def picked(tangent: jax.Array, indices: jax.Array) -> jax.Array:
        axis = tangent.ndim - 1
        index = indices[..., 0]
        if index.dtype.itemsize < 4:
            # Labels may be of a dtype that cannot count to the end of a row.
            index = index.astype(jnp.int32)
        if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, tangent.shape[axis] - 1)
        here = jax.lax.broadcasted_iota(index.dtype, tangent.shape, axis) == index
        rows = jnp.where(here, tangent, jnp.zeros((), tangent.dtype))
        return jnp.sum(rows, axis=axis, keepdims=True)

    return looked_up(eqn, operand, indices, picked)


def looked_up(
    eqn: Eqn,
    operand: jax.Array,
    indices: jax.Array,
    tangent_of: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Runs the `gather` equation `eqn` with another derivative than JAX's.

    Args:
      eqn: the equation.
      operand, indices: its operands.
      tangent_of: returns the tangent of the result; it is given that of `operand`, and
        `indices`, and is linear in the former.
    """

    @jax.custom_jvp
    def lookup(operand: jax.Array, indices: jax.Array) -> jax.Array:
        (result,) = binding.bind(eqn, (operand, indices))
        return result

    @lookup.defjvp
    def derivative(
        primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, object]
    ) -> tuple[jax.Array, jax.Array]:
        return lookup(*primals), tangent_of(tangents[0], primals[1])

    return lookup(operand, indices)


def _bind(
    eqn: Eqn, dtype: np.dtype | None, operands: Sequence[Value]
) -> Sequence[jax.Array]:
    return [pick(eqn, *operands)]


_PICK = Rewrite(_bind, derivative_only=True)


def pick_from_rows(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a lookup of one element in each row."""
    return _PICK if picks_from_rows(at.eqn) and is_half(at.half) else None
