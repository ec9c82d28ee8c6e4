"""What operations cost, read from their shapes; nothing is executed.

Multiplications and additions of matrix products, and what differentiation keeps for
the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan import jaxprs
from jmp_amp.plan.jaxprs import Body


def matmul_flops(eqn: Any) -> int | None:
    """Returns the operations of a matrix product or convolution, else None.

    A multiplication and an addition are two. A convolution is counted as XLA counts it:
    what it multiplies with padding, or with the zeros of a dilated input, is not work.
    """
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return _products(eqn, contracted)
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        products = _products(eqn, contracted)
        if set(numbers.lhs_ragged_dimensions) & set(contracted):
            # The groups divide what is summed over among themselves.
            products //= max(eqn.invars[2].aval.shape[-1], 1)
        return products
    if eqn.primitive.name == "conv_general_dilated":
        return _convolution(eqn)
    return None


def _products(eqn: Any, contracted: Sequence[int]) -> int:
    terms = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    return 2 * eqn.outvars[0].aval.size * terms


def _convolution(eqn: Any) -> int:
    numbers = eqn.params["dimension_numbers"]
    image, kernel = (v.aval.shape for v in eqn.invars)
    result = eqn.outvars[0].aval.shape
    batch, features, *spatial = (result[d] for d in numbers.out_spec)
    _, inputs, *window = (kernel[d] for d in numbers.rhs_spec)
    sizes = [image[d] for d in numbers.lhs_spec[2:]]
    if eqn.params["batch_group_count"] > 1:
        # The groups lie along the batch of the image, which the result has not.
        assert eqn.params["feature_group_count"] == 1
    pairs = math.prod(
        _pairs(*of_one_dimension)
        for of_one_dimension in zip(
            sizes,
            window,
            spatial,
            eqn.params["window_strides"],
            (low for low, _ in eqn.params["padding"]),
            eqn.params["lhs_dilation"],
            eqn.params["rhs_dilation"],
            strict=True,
        )
    )
    return 2 * batch * features * inputs * pairs


def _pairs(
    size: int,
    window: int,
    results: int,
    stride: int,
    padding: int,
    image_dilation: int,
    window_dilation: int,
) -> int:
    """How many pairs of a result and a window element meet an element of the image."""
    pairs = 0
    for element in range(window):
        place = np.arange(results) * stride + element * window_dilation - padding
        inside = (place >= 0) & (place <= (size - 1) * image_dilation)
        pairs += int(np.count_nonzero(inside & (place % image_dilation == 0)))
    return pairs


class Matmuls(NamedTuple):
    """Matrix products and their operations, in all and in half precision."""

    total: int = 0
    in_half: int = 0
    flops: int = 0
    flops_in_half: int = 0

    def plus(self, other: Matmuls) -> Matmuls:
        return Matmuls(*map(sum, zip(self, other, strict=True)))


def matmuls_as_traced(body: Body, times: int) -> Matmuls:
    """Returns the matrix products of a body that runs `times` times as traced."""
    found = Matmuls()
    for eqn in body.jaxpr.eqns:
        dtypes = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        found = found.plus(matmul_of(eqn, dtypes, times))
        if eqn.primitive.name == "pallas_call":
            continue  # written for one block of a grid
        for inner in jaxprs.owned_bodies(eqn):
            again = times * jaxprs.repetitions(eqn)
            found = found.plus(matmuls_as_traced(inner, again))
    return found


def matmul_of(eqn: Any, dtypes: Sequence[Any], times: int) -> Matmuls:
    """Returns what `eqn` multiplies, its operands read in `dtypes`; integers do not."""
    flops = matmul_flops(eqn)
    if flops is None or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return Matmuls()
    half = all(dtype.itemsize <= 2 for dtype in dtypes[:2])
    return Matmuls(1, int(half), flops * times, flops * times * half)


class Residual(NamedTuple):
    """A value that is kept for the backward pass.

    Attributes:
      makers: the equation that made it, preceded by the calls that it is inside of.
      size: in bytes.
    """

    makers: tuple[Any, ...]
    size: int


def saved_for_backward(
    fn: Callable[..., Any], args: Sequence[Any], differentiated: Sequence[int]
) -> list[Residual]:
    """Returns what `jax.vjp` of `fn` keeps, arguments and constants apart.

    It is what differentiation saves, before XLA computes any of it a second time.

    Args:
      fn: a function of arrays.
      args: arrays or avals.
      differentiated: the positions of the arguments to differentiate.
    """

    def residuals(*args: Any) -> list[Any]:
        def of_moving(*moving: Any) -> Any:
            given = dict(zip(differentiated, moving, strict=True))
            return fn(*(given.get(i, x) for i, x in enumerate(args)))

        results, backward = jax.vjp(of_moving, *(args[i] for i in differentiated))
        # Only the backward pass of a `while_loop` says that there is none.
        backward(jax.tree.map(_zero_cotangent, results))
        return jax.tree.leaves(backward)

    jaxpr = jaxprs.body_of(jaxprs.trace(residuals, args)).jaxpr
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    kept = dict.fromkeys(
        v for v in jaxpr.outvars if not isinstance(v, jaxprs.Literal) and v in made
    )
    return [
        Residual(_makers(made, var), var.aval.size * var.aval.dtype.itemsize)
        for var in kept
    ]


def _zero_cotangent(result: Any) -> Any:
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return jnp.zeros_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)


def _makers(made: dict[Any, Any], var: Any) -> tuple[Any, ...]:
    eqn = made[var]
    if jaxprs.is_conversion(eqn):
        (source,) = eqn.invars
        if not isinstance(source, jaxprs.Literal) and source in made:
            return _makers(made, source)  # a value is whose it is in any dtype
    bodies = jaxprs.inner_bodies(eqn)
    if not bodies:
        return (eqn,)
    jaxpr = bodies[-1].body.jaxpr
    inside = {v: inner for inner in jaxpr.eqns for v in inner.outvars}
    returned = jaxpr.outvars[eqn.outvars.index(var)]
    if isinstance(returned, jaxprs.Literal) or returned not in inside:
        return (eqn,)
    return (eqn, *_makers(inside, returned))
