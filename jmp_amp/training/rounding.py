"""Rounding float32 numbers to a half-precision grid, to nearest and at random.

The results are float32 numbers that a half-precision dtype holds. A pair of casts
would do the same, but XLA drops such pairs: by default it may keep more precision than
a program asks for. The error of rounding, which masters and compensations keep as a
remainder in 16 bits, would then be zero.

Everywhere `numbers` and `rounded` are float32 of any shape, the latter on the grid of
`dtype`, which is bfloat16 or float16.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_amp.policies.dtypes import F32

_F16 = np.dtype("float16")
_UNITS = 2.0**16


def round_to(numbers: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns float32 `numbers` rounded to the nearest that `dtype` holds.

    Ties go to even, numbers beyond its range become inf, as in `numbers.astype(dtype)`.
    """
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(numbers, info.nexp, info.nmant)
    if dtype != _F16:
        return rounded
    # reduce_precision has no subnormal results, but f16 weights may be subnormal.
    steps = jnp.round(numbers / float(info.smallest_subnormal))
    is_subnormal = jnp.abs(numbers) < float(info.smallest_normal)
    return jnp.where(is_subnormal, steps * float(info.smallest_subnormal), rounded)


def land_on(numbers: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns `round_to` of float32 numbers, clipped to the range of `dtype` if finite.

    A weight that leaves the range waits at its end instead of becoming inf.
    """
    largest = float(jnp.finfo(dtype).max)
    rounded = jnp.clip(round_to(numbers, dtype), -largest, largest)
    return jnp.where(jnp.isfinite(numbers), rounded, numbers)


def round_at_random(numbers: jax.Array, dtype: np.dtype, key: ArrayLike) -> jax.Array:
    """Returns float32 `numbers`, each as one of its two neighbours in `dtype`.

    The nearer one is more likely, so that the mean is the number itself (up to 2**-16
    of their distance). A number that `dtype` holds stays; a larger one becomes its
    largest.

    Equal PRNG keys make equal choices, however the array is sharded.
    """
    info = jnp.finfo(dtype)
    chance = jax.random.bits(key, numbers.shape, jnp.uint16).astype(jnp.uint32)
    # The bits of f32 below the mantissa of `dtype`. Adding random bits to them carries
    # into the mantissa with the probability that they spell.
    dropped = jnp.uint32((1 << (23 - info.nmant)) - 1)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    carried = jax.lax.bitcast_convert_type(
        (bits + (chance & dropped)) & ~dropped, jnp.float32
    )
    nearest = land_on(numbers, dtype)
    if dtype == _F16:
        # Subnormal numbers are equally spaced: round the number of steps instead.
        steps = numbers / float(info.smallest_subnormal)
        down = jnp.floor(steps)
        up = chance.astype(F32) * 2.0**-16 < steps - down
        subnormal = (down + up.astype(F32)) * float(info.smallest_subnormal)
        is_subnormal = jnp.abs(numbers) < float(info.smallest_normal)
        carried = jnp.where(is_subnormal, subnormal, carried)
    fits = jnp.isfinite(numbers) & (jnp.abs(carried) <= float(info.max))
    return jnp.where(fits, carried, nearest)


def remainder_of(numbers: jax.Array, rounded: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the error of rounding `numbers`, in 2**-16 of the last place: int16.

    A bfloat16 number and its remainder hold all digits of a float32 in its 32 bits
    (as the two halves of Kalamkar et al. 2020, arXiv:2005.04680, "Split-SGD-BF16"),
    except that a tie that was rounded down loses one bit. A float16 number and its
    remainder do so above the subnormal range.
    """
    left = numbers - rounded
    units = left / _last_place(rounded, left < 0, dtype) * _UNITS
    units = jnp.where(jnp.isfinite(units), units, 0.0)
    return jnp.clip(jnp.round(units), -(2.0**15), 2.0**15 - 1).astype(jnp.int16)


def with_remainder(
    rounded: jax.Array, remainder: jax.Array, dtype: np.dtype
) -> jax.Array:
    """Returns the float32 numbers that `rounded` and its `remainder_of` make."""
    units = remainder.astype(F32) / _UNITS
    return rounded + units * _last_place(rounded, remainder < 0, dtype)


def _last_place(rounded: jax.Array, below: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns how far `rounded` is from the next number on its grid: float32[...].

    below: bool[...], whether the next number is the smaller one.
    """
    bits = jax.lax.bitcast_convert_type(rounded, jnp.uint32)
    power = jax.lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
    info = jnp.finfo(dtype)
    # Where bf16 has subnormal numbers, f32 has them too, and XLA takes them for zero.
    smallest = max(float(info.smallest_normal), 2.0**-100)
    # Toward zero from a power of two the grid is twice as fine.
    is_edge = (jnp.abs(rounded) == power) & (below != (rounded < 0))
    finer = jnp.where(is_edge & (power > smallest), 0.5, 1.0)
    return jnp.maximum(power, smallest) * float(info.eps) * finer
