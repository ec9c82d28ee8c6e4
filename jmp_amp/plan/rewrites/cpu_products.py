"""Products as a CPU multiplies them: bf16 operands, f32 results, forward and backward.

XLA for CPUs keeps bf16 in a product whose result is f32 and whose operands lie in
memory as the product reads them, with the contracted dimensions last (or second to last
for the right one). It casts any other product of bf16 to f32. Operands with a pinned
layout are always multiplied as bf16.

Of some products it makes programs that fail when they run (`DotThunk::Execute: BF16 x
BF16 = F32`): those that it found to be of bf16 and then changed, by moving a transpose
of an operand or of the result into the product. `(x @ w).T` becomes a product of the
transposes. So a barrier stands before each product and behind it.

JAX differentiates a product with an f32 result to products of f32 and bf16, so the
derivative is written here: the cotangent is rounded to bf16, and all three products of
a training step are of bf16.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.values import Trait, unfit
from jmp_amp.plan.program.dimensions import Dimensions, Sides, as_number, sides_of
from jmp_amp.plan.program.jaxprs import Eqn, Value, aval_of
from jmp_amp.plan.program.meshes import before_transpose
from jmp_amp.plan.rewrites.linear import linear_function
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.policies.dtypes import BF16, F32, short_name

# Smaller products are faster in f32, measured on Xeons with AVX512-BF16 and with AMX:
# `examples/benchmarks/train_on_cpu.py --products`.
_SMALLEST_SIDE, _SMALLEST_FACE, _FEWEST_TERMS = 32, 2**12, 2**19


def cpu_product(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a product, where the plan is for a CPU that gains."""
    cpu, asked = at.region.cpu, at.region.asked.compute_dtype
    if cpu is None or asked == F32 or at.rule.op_class is not OpClass.LOW:
        return None
    if why_f32(at) is not None:
        return None
    moving = [i for i, v in enumerate(at.views) if Trait.TANGENT in v.traits]
    # Both are tangents where a rule calls another one: which of them JAX transposes is
    # not known.
    linear_in = moving[0] if len(moving) == 1 else None
    return (_DOT if at.name == "dot_general" else _POINTWISE)[linear_in]


def why_f32(at: Standing) -> str | None:
    """Returns why a low operation runs in f32 on the CPU of the plan, in words.

    None if it does not, and if the policy says it.
    """
    cpu, asked = at.region.cpu, at.region.asked.compute_dtype
    if cpu is None or asked == F32:
        return None
    if asked != BF16:
        return f"on this CPU: XLA computes products of {short_name(asked)} in f32"
    if not cpu.native:
        return f"on this CPU: {cpu}"
    is_convolution = at.name == "conv_general_dilated"
    if is_convolution and not _is_pointwise(at.eqn):
        return "on this CPU: convolutions are faster in f32"
    if not is_convolution and at.name != "dot_general":
        return "on this CPU: no instructions for it in bf16"
    if any(aval_of(v).dtype != F32 for v in (*at.eqn.invars, *at.eqn.outvars)):
        return "on this CPU: an operand has its dtype from the program"
    misfit = unfit(at.operands, BF16, "overflows")
    if misfit is not None:
        return misfit
    if any(Trait.OVERSIZED in v.traits for v in at.operands):
        return "a constant overflows in bfloat16"
    return _too_small(at.eqn)


def _too_small(eqn: Eqn) -> str | None:
    sides = sides_of(eqn) if eqn.primitive.name == "dot_general" else _pointwise(eqn)
    sides = [*map(as_number, sides)]
    if min(sides) < _SMALLEST_SIDE:
        return f"on this CPU: a side of {min(sides)} is too small to gain from bf16"
    if not gains(sides):
        shape = " x ".join(map(str, sides))
        return f"on this CPU: {shape} is too small to gain from bf16"
    return None


def gains(sides: Sequence[int]) -> bool:
    """Whether a product of these rows, columns and terms is faster in bf16."""
    smallest, second, largest = sorted(sides)
    face = smallest * second
    return (
        smallest >= _SMALLEST_SIDE
        and face >= _SMALLEST_FACE
        and face * largest >= _FEWEST_TERMS
    )


def _multiplied(
    dimensions: Dimensions,
    lhs: jax.Array,
    rhs: jax.Array,
    sharding: NamedSharding | None,
) -> jax.Array:
    """Returns the product of two bf16 arrays in f32, of operands with pinned layouts.

    The free dimensions of `dimensions` may be in any order: it is that of the result.
    On a mesh with explicit axes, `sharding` is that of the result; None if the operands
    tell it.
    """
    terms, batch, free = dimensions
    lhs = _pinned(lhs, (*batch[0], *free[0], *terms[0]))
    order = (*batch[1], *free[1], *terms[1])
    # Both orders of the right operand will do: the one that moves nothing.
    terms_last = order == tuple(range(rhs.ndim))
    if not terms_last:
        order = (*batch[1], *terms[1], *free[1])
    rhs = _pinned(rhs, order)
    shared, summed = len(batch[0]), len(terms[0])
    begin = rhs.ndim - summed if terms_last else shared
    both = tuple(range(shared))
    contracted = (
        tuple(range(lhs.ndim - summed, lhs.ndim)),
        tuple(range(begin, begin + summed)),
    )
    made = jax.lax.dot_general(
        lhs,
        rhs,
        (contracted, (both, both)),
        # Whatever is the default around here: a program that asks for digits is f32.
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=F32,
        out_sharding=sharding,
    )
    return jax.lax.optimization_barrier(made)


def _pinned(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Returns an array with its dimensions in another order, in memory too."""
    x = jax.lax.transpose(x, tuple(order))
    x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(x)


@functools.lru_cache(maxsize=1024)
def half_product(
    dimensions: Dimensions,
    sharding: NamedSharding | None = None,
    linear_in: int | None = None,
) -> Callable[..., jax.Array]:
    """Returns the product of two bf16 arrays, whose derivative is of bf16 too.

    A third argument of it is the operands whose gradient is f32, as they are held, by
    their positions.

    Args:
      dimensions: those of the product.
      sharding: of the result, as `jax.lax.dot_general` takes it.
      linear_in: the operand that is a tangent of a derivative rule, if one is. Where
        JAX makes a gradient of the rule it asks for no derivative: it transposes what
        the product computes.
    """

    @jax.custom_jvp
    def product(
        lhs: jax.Array, rhs: jax.Array, held: dict[int, jax.Array] | None = None
    ) -> jax.Array:
        if linear_in is None:
            return _multiplied(dimensions, lhs, rhs, sharding)
        moving, other = (lhs, rhs) if linear_in == 0 else (rhs, lhs)
        return _linear(dimensions, sharding, linear_in, moving, other)

    @functools.partial(product.defjvp, symbolic_zeros=True)
    def derivative(
        operands: tuple[jax.Array, jax.Array, dict[int, jax.Array] | None],
        tangents: tuple[Any, Any, dict[int, Any] | None],
    ) -> tuple[jax.Array, jax.Array]:
        *halves, in_f32 = tangents
        moving = [(in_f32 or {}).get(i, t) for i, t in enumerate(halves)]
        terms = [
            _linear(dimensions, sharding, i, t, operands[1 - i])
            for i, t in enumerate(moving)
            if not isinstance(t, SymbolicZero)
        ]
        return product(*operands), functools.reduce(jnp.add, terms)

    return product


# Jitted, to be traced once for all products of the same shapes.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _linear(
    dimensions: Dimensions,
    sharding: NamedSharding | None,
    i: int,
    moving: jax.Array,
    other: jax.Array,
) -> jax.Array:
    """Returns the product of a tangent of operand `i` and the other operand.

    Its transpose is one of bf16: JAX's would multiply the f32 cotangent. The gradient
    has the dtype of the tangent.
    """
    back, order = dimensions.transposed(i)

    def product(moving: jax.Array) -> jax.Array:
        moving = moving.astype(BF16)
        lhs, rhs = (moving, other) if i == 0 else (other, moving)
        return _multiplied(dimensions, lhs, rhs, sharding)

    def transposed(cotangent: jax.Array) -> jax.Array:
        rounded = cotangent.astype(BF16)
        lhs, rhs = (rounded, other) if i == 0 else (other, rounded)
        made = _multiplied(back, lhs, rhs, before_transpose(moving, order))
        return jax.lax.transpose(made, order).astype(moving.dtype)

    (result,) = linear_function(
        lambda xs: [product(*xs)], lambda xs: [transposed(*xs)], [moving], [other]
    )
    return result


def _bind_dot(
    linear_in: int | None,
    eqn: Eqn,
    dtype: np.dtype | None,
    operands: Sequence[Value],
    held: Mapping[int, Value] = MappingProxyType({}),
) -> Sequence[jax.Array]:
    product = half_product(Dimensions.of(eqn), eqn.params["out_sharding"], linear_in)
    return [product(*operands, dict(held))]


def _is_pointwise(eqn: Eqn) -> bool:
    """Whether a convolution is a product over channels: its window is one pixel."""
    params = eqn.params
    kernel = aval_of(eqn.invars[1]).shape
    spatial = params["dimension_numbers"].rhs_spec[2:]
    return (
        all(kernel[d] == 1 for d in spatial)
        and all(low == high == 0 for low, high in params["padding"])
        and all(each == 1 for each in params["lhs_dilation"])
        and params["feature_group_count"] == params["batch_group_count"] == 1
    )


def _pointwise(eqn: Eqn) -> Sides:
    """Returns the sides of the product that a convolution of one pixel is."""
    of_kernel, of_result = eqn.params["dimension_numbers"][1:]
    kernel, result = aval_of(eqn.invars[1]).shape, aval_of(eqn.outvars[0]).shape
    pixels = math.prod(n for d, n in enumerate(result) if d != of_result[1])
    outputs, inputs = (kernel[d] for d in of_kernel[:2])
    return Sides(pixels, outputs, inputs)


def _bind_pointwise(
    linear_in: int | None,
    eqn: Eqn,
    dtype: np.dtype | None,
    operands: Sequence[Value],
    held: Mapping[int, Value] = MappingProxyType({}),
) -> Sequence[jax.Array]:
    """Runs a convolution of one pixel as a product over channels."""
    image = aval_of(eqn.invars[0])
    of_image, of_kernel, of_result = eqn.params["dimension_numbers"]
    strides = [1] * image.ndim
    for d, stride in zip(of_image[2:], eqn.params["window_strides"], strict=True):
        strides[d] = stride

    def prepared(i: int, x: jax.Array) -> jax.Array:
        if i == 1:
            return jax.lax.squeeze(x, of_kernel[2:])
        if max(strides) == 1:
            return x
        return jax.lax.slice(x, (0,) * x.ndim, x.shape, strides)

    operands = list(itertools.starmap(prepared, enumerate(operands)))
    held = {i: prepared(i, x) for i, x in held.items()}
    outputs, inputs = of_kernel[:2]
    terms = ((of_image[1],), (int(inputs > outputs),))
    dimensions = Dimensions.among(terms, ((), ()), (image.ndim, 2))
    made = half_product(dimensions, linear_in=linear_in)(*operands, held)
    # The result has the dimensions of the image without channels, then the channels.
    place = {d: i for i, d in enumerate(dimensions.free[0])}
    order = [0] * image.ndim
    for to, d in zip(of_result, of_image, strict=True):
        order[to] = place.get(d, image.ndim - 1)
    return [jax.lax.transpose(made, order)]


def _rewrites(
    bind: Callable[..., Sequence[jax.Array]], reason: str
) -> dict[int | None, Rewrite]:
    """Returns the rewrites of a product, by the operand that is a tangent."""
    return {
        linear_in: Rewrite(
            functools.partial(bind, linear_in),
            reason=reason,
            dtype=BF16,
            result=F32,
            one_product=True,
            bind_f32=functools.partial(bind, linear_in),
        )
        for linear_in in (None, 0, 1)
    }


_DOT = _rewrites(_bind_dot, "on this CPU: bf16 x bf16 -> f32")
_POINTWISE = _rewrites(
    _bind_pointwise, "on this CPU: a product over channels, bf16 x bf16 -> f32"
)


def is_cpu_product(rewrite: Rewrite | None) -> bool:
    """Whether a product runs as a CPU multiplies bf16."""
    return rewrite in (*_DOT.values(), *_POINTWISE.values())
