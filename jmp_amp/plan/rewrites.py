"""Operations whose derivative JAX writes badly for mixed precision, with a better one.

Each is a `custom_jvp` around the equation as it is: a `custom_vjp` would lose forward
mode, and derivatives of derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan import jaxprs


def half_operands_f32_result(eqn: Any, dtype: np.dtype) -> Callable[..., Any]:
    """Returns the product `eqn` with a derivative whose products are half too.

    JAX differentiates a dot of half operands with an f32 result to dots of f32 and half
    operands, which are f32 gemms, and refuses the convolution.
    """

    @jax.custom_jvp
    def product(*operands: Any) -> Any:
        (result,) = jaxprs.bind(eqn, operands)
        return result

    @product.defjvp
    def derivative(operands: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        def in_half(*operands: Any) -> Any:
            (result,) = jaxprs.bind(eqn, operands, **jaxprs.retyped(eqn, dtype))
            return result

        _, tangent = jax.jvp(in_half, operands, tangents)
        return product(*operands), tangent.astype(jnp.float32)

    return product


def picks_from_rows(eqn: Any) -> bool:
    """Whether `eqn` takes one element of each row, along the last dimension.

    So a cross-entropy takes the logits of the labels: `jnp.take_along_axis` with one
    index for each row.
    """
    if eqn.primitive.name != "gather":
        return False
    operand, indices = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    rows = numbers.operand_batching_dims
    return (
        operand.aval.ndim > 1
        and all(size == 1 for size in eqn.params["slice_sizes"])
        and not numbers.offset_dims
        and rows == tuple(range(operand.aval.ndim - 1))
        and numbers.start_indices_batching_dims == rows
        and numbers.start_index_map == (operand.aval.ndim - 1,)
        and indices.aval.shape[:-2] == operand.aval.shape[:-1]
        and indices.aval.shape[-2:] == (1, 1)
    )


def pick(eqn: Any, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """Runs the `gather` equation `eqn`, which picks one element of each row.

    JAX differentiates it to a scatter into an array of zeros, which XLA keeps in f32
    and fuses with nothing: for a cross-entropy that is an array as large as the logits.
    A comparison with the indices is fused with what reads it.
    """

    @jax.custom_jvp
    def picked(operand: jax.Array, indices: jax.Array) -> jax.Array:
        (result,) = jaxprs.bind(eqn, (operand, indices))
        return result

    @picked.defjvp
    def derivative(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
        (operand, indices), (tangent, _) = primals, tangents
        axis = operand.ndim - 1
        index = indices[..., 0]
        if index.dtype.itemsize < 4:
            # Labels may be of a dtype that cannot count to the end of a row.
            index = index.astype(jnp.int32)
        if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, operand.shape[axis] - 1)
        here = jax.lax.broadcasted_iota(index.dtype, operand.shape, axis) == index
        rows = jnp.where(here, tangent, jnp.zeros((), tangent.dtype))
        return picked(operand, indices), jnp.sum(rows, axis=axis, keepdims=True)

    return picked(operand, indices)
