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
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding

from jmp_amp.plan.dataflow.standing import Standing
from jmp_amp.plan.dataflow.values import Trait, unfit
from jmp_amp.plan.program.dimensions import Dimensions, as_number, sides_of
from jmp_amp.plan.program.jaxprs import Eqn, Value, aval_of
from jmp_amp.plan.program.meshes import before_transpose
from jmp_amp.plan.rewrites.linear import linear_function, nonzero
from jmp_amp.plan.rewrites.rewriting import Rewrite
from jmp_amp.plan.tables.operations import OpClass
from jmp_amp.policies.dtypes import BF16, F32, short_name

# The smallest side, face and volume that gain. Smaller products are faster in f32,
# measured on Xeons with AVX512-BF16 and with AMX:
# `examples/benchmarks/train_on_cpu.py --products`.
_SMALLEST = 32, 2**12, 2**19


def cpu_product(at: Standing) -> Rewrite | None:
    """Returns the rewrite of a product, where the plan is for a CPU that gains."""
    if at.rule.op_class is not OpClass.LOW or why_f32(at) is not None:
        return None
    moving = [i for i, v in enumerate(at.views) if Trait.TANGENT in v.traits]
    # Both are tangents where a rule calls another one: which of them JAX transposes is
    # not known.
    linear_in = moving[0] if len(moving) == 1 else None
    over = "" if at.name == "dot_general" else "a product over channels, "
    return Rewrite(
        functools.partial(_bind, linear_in),
        reason=f"on this CPU: {over}bf16 x bf16 -> f32",
        dtype=BF16,
        result=F32,
        one_product=True,
        takes_held=True,
    )


def why_f32(at: Standing) -> str | None:
    """Returns why a low operation runs in f32 on the CPU of the plan, in words.

    None if it runs in bf16, and no words if the policy or another target decides.
    """
    cpu, asked = at.region.cpu, at.region.asked.compute_dtype
    if cpu is None or asked == F32:
        return ""
    sides = _sides(at.eqn)
    if asked != BF16:
        why = f"XLA computes products of {short_name(asked)} in f32"
    elif not cpu.native:
        why = str(cpu)
    elif sides is None and at.name == "conv_general_dilated":
        why = "convolutions are faster in f32"
    elif sides is None:
        why = "no instructions for it in bf16"
    elif any(aval_of(v).dtype != F32 for v in (*at.eqn.invars, *at.eqn.outvars)):
        why = "an operand has its dtype from the program"
    elif (misfit := unfit(at.operands, BF16, "overflows")) is not None:
        return misfit
    elif any(Trait.OVERSIZED in v.traits for v in at.operands):
        return "a constant overflows in bfloat16"
    elif gains(sides):
        return None
    else:
        is_thin = min(sides) < _SMALLEST[0]
        size = f"a side of {min(sides)}" if is_thin else " x ".join(map(str, sides))
        why = f"{size} is too small to gain from bf16"
    return f"on this CPU: {why}"


def gains(sides: Sequence[int]) -> bool:
    """Whether a product of these rows, columns and terms is faster in bf16."""
    side, second, largest = sorted(sides)
    face = side * second
    return all(map(operator.ge, (side, face, face * largest), _SMALLEST))


def _sides(eqn: Eqn) -> list[int] | None:
    """Returns the rows, columns and terms; None if `eqn` is no product of matrices.

    A convolution is one, over channels, if its window is one pixel.
    """
    if eqn.primitive.name == "dot_general":
        return [*map(as_number, sides_of(eqn))]
    if eqn.primitive.name != "conv_general_dilated":
        return None
    params = eqn.params
    _, of_kernel, of_result = params["dimension_numbers"]
    outputs, inputs, *window = (aval_of(eqn.invars[1]).shape[d] for d in of_kernel)
    groups = params["feature_group_count"], params["batch_group_count"]
    padding = {*itertools.chain(*params["padding"])}
    if {*window, *params["lhs_dilation"], *groups} != {1} or padding - {0}:
        return None
    result = aval_of(eqn.outvars[0]).shape
    pixels = math.prod(n for d, n in enumerate(result) if d != of_result[1])
    return [*map(as_number, (pixels, outputs, inputs))]


class CpuProduct(NamedTuple):
    """How two arrays are multiplied.

    Attributes:
      dimensions: those of the operands. The free ones of each may be in any order: it
        is that of the result.
      sharding: that of the result, on a mesh with explicit axes; None if the operands
        tell it.
    """

    dimensions: Dimensions
    sharding: NamedSharding | None = None

    def multiplied(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Returns the product in f32, of operands in bf16 with pinned layouts."""
        terms, batch, free = self.dimensions
        shared, summed = len(batch[0]), len(terms[0])
        lhs = _pinned(lhs, (*batch[0], *free[0], *terms[0]))
        order, begin = (*batch[1], *free[1], *terms[1]), rhs.ndim - summed
        # Both orders of the right operand will do: the one that moves nothing.
        if order != tuple(range(rhs.ndim)):
            order, begin = (*batch[1], *terms[1], *free[1]), shared
        rhs = _pinned(rhs, order)
        ends = range(lhs.ndim - summed, lhs.ndim), range(begin, begin + summed)
        both = range(shared), range(shared)
        # Whatever is the default around here: a program that asks for digits is f32.
        how = jax.lax.Precision.DEFAULT, F32
        made = jax.lax.dot_general(
            lhs, rhs, (ends, both), *how, out_sharding=self.sharding
        )
        return jax.lax.optimization_barrier(made)


def _pinned(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Returns an array in bf16, its dimensions in another order, in memory too."""
    x = jax.lax.transpose(x.astype(BF16), order)
    x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 3))
def half_product(
    by: CpuProduct, lhs: jax.Array, rhs: jax.Array, linear_in: int | None = None
) -> jax.Array:
    """Returns the product of two arrays in bf16, whose derivative is of bf16 too.

    Args:
      by: how they are multiplied.
      lhs, rhs: the arrays, in f32 or bf16: their gradients have the same dtypes.
      linear_in: the operand that is a tangent of a derivative rule, if one is. Where
        JAX makes a gradient of the rule it asks for no derivative: it transposes what
        the product computes.

    Returns:
      f32.
    """
    if linear_in is None:
        return by.multiplied(lhs, rhs)
    moving, other = (lhs, rhs) if linear_in == 0 else (rhs, lhs)
    return _linear(by, linear_in, moving, other.astype(BF16))


@functools.partial(half_product.defjvp, symbolic_zeros=True)
def _(by: CpuProduct, linear_in: int | None, operands: Any, tangents: Any) -> Any:
    terms = [
        _linear(by, i, tangent, operands[1 - i].astype(BF16))
        for i, tangent in nonzero(enumerate(tangents)).items()
    ]
    return half_product(by, *operands, linear_in), functools.reduce(jnp.add, terms)


# Jitted, to be traced once for all products of the same shapes.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _linear(by: CpuProduct, i: int, moving: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the product of a tangent of operand `i` and the other operand.

    Its transpose is one of bf16: JAX's would multiply the f32 cotangent. The gradient
    has the dtype of the tangent.
    """
    dimensions, order = by.dimensions.transposed(i)
    back = CpuProduct(dimensions, before_transpose(moving, order))

    def multiplied(by: CpuProduct, x: jax.Array) -> jax.Array:
        return by.multiplied(*((x, other) if i == 0 else (other, x)))

    def transposed(cotangents: list[jax.Array]) -> list[jax.Array]:
        made = jax.lax.transpose(multiplied(back, *cotangents), order)
        return [made.astype(moving.dtype)]

    product = functools.partial(multiplied, by)
    return linear_function(lambda xs: [product(*xs)], transposed, [moving], [other])[0]


def _bind(
    linear_in: int | None, eqn: Eqn, _: object, operands: Sequence[Value]
) -> list[jax.Array]:
    """Runs a product, or a convolution of one pixel as a product over channels."""
    lhs, rhs = operands
    if eqn.primitive.name == "dot_general":
        by = CpuProduct(Dimensions.of(eqn), eqn.params["out_sharding"])
        return [half_product(by, lhs, rhs, linear_in)]
    of_image, of_kernel, of_result = eqn.params["dimension_numbers"]
    strides = dict(zip(of_image[2:], eqn.params["window_strides"], strict=True))
    if max(strides.values(), default=1) > 1:
        steps = [strides.get(d, 1) for d in range(lhs.ndim)]
        lhs = jax.lax.slice(lhs, [0] * lhs.ndim, lhs.shape, steps)
    rhs = jax.lax.squeeze(rhs, of_kernel[2:])
    inputs = int(of_kernel[0] < of_kernel[1])
    in_order = (d for _, d in sorted(zip(of_result, of_image, strict=True)))
    pixels = tuple(d for d in in_order if d != of_image[1])
    terms, free = ((of_image[1],), (inputs,)), (pixels, (1 - inputs,))
    by = CpuProduct(Dimensions(terms, ((), ()), free))
    return [jnp.moveaxis(half_product(by, lhs, rhs, linear_in), -1, of_result[1])]
