"""Rounding float32 numbers to a half-precision grid, to nearest and at random.

What rounding takes away can be kept as a remainder in 16 bits.

The results are float32 numbers that a half-precision dtype holds. A pair of casts
would do the same, but XLA drops such pairs: by default it may keep more precision than
a program asks for, and what a rounding took away, which is all that masters and
compensations are about, would be zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_amp.policies.dtypes import F32

_F16 = np.dtype("float16")
_UNITS = 2.0**16


def round_to(numbers: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns float32 `numbers` rounded to the nearest that `dtype` holds.

    Ties go to even, what is too large becomes inf, as `numbers.astype(dtype)`.

    Args:
      numbers: float32 of any shape.
      dtype: bfloat16 or float16.

    Example:
      >>> from jmp_amp.training.rounding import round_to
      >>> round_to(jnp.float32([1.001, 1.005]), jnp.dtype("bfloat16"))
      Array([1.       , 1.0078125], dtype=float32)
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(numbers, info.nexp, info.nmant)
    if dtype != _F16:
        return rounded
    # reduce_precision has no subnormal results. Those of f16 are weights like others.
    steps = jax.lax.round(
        numbers / float(info.smallest_subnormal),
        jax.lax.RoundingMethod.TO_NEAREST_EVEN,
    )
    is_subnormal = jnp.abs(numbers) < float(info.smallest_normal)
    return jnp.where(is_subnormal, steps * float(info.smallest_subnormal), rounded)


def land_on(numbers: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns `round_to` of them, with finite numbers that are too large at the end.

    A weight that leaves the range of `dtype` waits there instead of becoming inf.

    Example:
      >>> from jmp_amp.training.rounding import land_on
      >>> land_on(jnp.float32([1e5, jnp.inf]), jnp.dtype("float16"))
      Array([65504.,    inf], dtype=float32)
    """
    largest = float(jnp.finfo(dtype).max)
    rounded = jnp.clip(round_to(numbers, dtype), -largest, largest)
    return jnp.where(jnp.isfinite(numbers), rounded, numbers)


def round_at_random(numbers: jax.Array, dtype: np.dtype, key: ArrayLike) -> jax.Array:
    """Returns float32 `numbers`, each as one of its two neighbours in `dtype`.

    The nearer one is the likelier one, so that the mean is the number itself (up to
    2**-16 of their distance). A number that `dtype` holds stays; one that is too large
    becomes the largest there is.

    Args:
      numbers: float32 of any shape.
      dtype: bfloat16 or float16.
      key: a PRNG key. Equal keys make equal choices, however the array is sharded.

    Example:
      >>> from jmp_amp.training.rounding import round_at_random
      >>> third, key = jnp.full(9999, 1 + 1 / 384, F32), jax.random.key(0)
      >>> rounded = round_at_random(third, jnp.dtype("bfloat16"), key)
      >>> jnp.unique(rounded), jnp.mean(rounded == 1.0078125)
      (Array([1.       , 1.0078125], dtype=float32), Array(0.33..., dtype=float32))
    """
    info = jnp.finfo(dtype)
    chance = jax.random.bits(key, numbers.shape, jnp.uint16).astype(jnp.uint32)
    # What f32 has beyond the mantissa of `dtype`: adding as many random bits carries
    # into the mantissa as often as these bits say.
    dropped = jnp.uint32((1 << (23 - info.nmant)) - 1)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    carried = jax.lax.bitcast_convert_type(
        (bits + (chance & dropped)) & ~dropped, jnp.float32
    )
    nearest = land_on(numbers, dtype)
    if dtype == _F16:
        # Its subnormal numbers are equally far apart, so the carry is one of numbers.
        steps = numbers / float(info.smallest_subnormal)
        down = jnp.floor(steps)
        up = chance.astype(F32) * 2.0**-16 < steps - down
        subnormal = (down + up.astype(F32)) * float(info.smallest_subnormal)
        is_subnormal = jnp.abs(numbers) < float(info.smallest_normal)
        carried = jnp.where(is_subnormal, subnormal, carried)
    fits = jnp.isfinite(numbers) & (jnp.abs(carried) <= float(info.max))
    return jnp.where(fits, carried, nearest)


def remainder_of(numbers: jax.Array, rounded: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns what rounding took from `numbers`, in 2**-16 of the last place: int16.

    A bfloat16 number and its remainder are the 32 bits of a float32, and say as much
    (Kalamkar et al. 2020, arXiv:2005.04680, "Split-SGD-BF16", keeps a float32 in two
    halves): only of a tie that was rounded down one bit is lost. Float16 has digits
    enough for all above its subnormal numbers.

    Args:
      numbers: float32 of any shape.
      rounded: the same rounded to `dtype`, as float32.
      dtype: bfloat16 or float16.

    Example:
      >>> from jmp_amp.training.rounding import remainder_of, round_to, with_remainder
      >>> number, dtype = jnp.float32(1.001), jnp.dtype("bfloat16")
      >>> rounded = round_to(number, dtype)
      >>> remainder = remainder_of(number, rounded, dtype)
      >>> rounded, remainder, with_remainder(rounded, remainder, dtype)
      (Array(1., dtype=float32), Array(8389, dtype=int16), Array(1.001, dtype=float32))
    """
    left = numbers - rounded
    units = left / _last_place(rounded, left < 0, dtype) * _UNITS
    units = jnp.where(jnp.isfinite(units), units, 0.0)
    return jnp.clip(jnp.round(units), -(2.0**15), 2.0**15 - 1).astype(jnp.int16)


def with_remainder(
    rounded: jax.Array, remainder: jax.Array, dtype: np.dtype
) -> jax.Array:
    """Returns the float32 numbers that `rounded` and its `remainder_of` make.

    Example:
      >>> from jmp_amp.training.rounding import with_remainder
      >>> with_remainder(jnp.float32(3.0), jnp.int16(-(2**15)), jnp.dtype("float16"))
      Array(2.9990234, dtype=float32)
    """
    units = remainder.astype(F32) / _UNITS
    return rounded + units * _last_place(rounded, remainder < 0, dtype)


def _last_place(numbers: jax.Array, below: jax.Array, dtype: np.dtype) -> jax.Array:
    """How far float32 numbers on the grid of `dtype` are from the next one.

    Args:
      below: whether the next one is the smaller one.
    """
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    power = jax.lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
    info = jnp.finfo(dtype)
    # Where bf16 has subnormal numbers, f32 has them too, and XLA takes them for zero.
    smallest = max(float(info.smallest_normal), 2.0**-100)
    # Toward zero from a power of two the grid is twice as fine.
    is_edge = (jnp.abs(numbers) == power) & (below != (numbers < 0))
    finer = jnp.where(is_edge & (power > smallest), 0.5, 1.0)
    return jnp.maximum(power, smallest) * float(info.eps) * finer
