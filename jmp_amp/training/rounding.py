"""Rounding float32 numbers to a half-precision grid, to nearest and at random.

The results are float32 numbers that a half-precision dtype holds. A pair of casts
would do the same, but XLA drops such pairs: by default it may keep more precision than
a program asks for. The error of rounding, which masters and compensations keep as a
remainder in 16 bits, would then be zero.

Everywhere `numbers` and `rounded` are float32 of any shape, the latter on the grid of
`dtype`, which is bfloat16 or float16.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_amp.policies.dtypes import F32, PyTree, cast_leaf, is_castable, is_half

# A function of an array that is traced once for a shape, not once for each leaf. Its
# operations stand in the program as if it was called.
once_a_shape = functools.partial(jax.jit, inline=True)

_F16 = np.dtype("float16")
# Two random words, uint32[] each, see `random_seeds`.
Seeds = tuple[jax.Array, jax.Array]
# 2**32 over the golden ratio.
_ODD = np.uint32(0x9E3779B9)


def land_on(numbers: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns float32 `numbers` rounded to the nearest finite number of `dtype`.

    Ties go to even, inf and (quiet) NaN stay. A weight that leaves the range waits at
    its end instead of becoming inf.

    On bits: a minimum of them, or a mask, is what XLA neither drops nor sees through.
    So float16 may be cast there and back, which a CPU does in an instruction each and
    `reduce_precision`, with subnormal numbers beside it, in thirty.
    """
    if dtype == _F16:
        half = jax.lax.bitcast_convert_type(numbers.astype(dtype), jnp.uint16)
        sign, size = half & jnp.uint16(0x8000), half & jnp.uint16(0x7FFF)
        bits = jnp.minimum(size, jnp.uint16(0x7BFF)) | sign
        landed = jax.lax.bitcast_convert_type(bits, dtype).astype(F32)
        return jnp.where(jnp.isfinite(numbers), landed, numbers)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    nearest = bits + jnp.uint32(0x7FFF) + ((bits >> 16) & jnp.uint32(1))
    # Between the largest number and the one that would follow it. Beyond, digits are
    # dropped: that is the largest, or inf.
    last_tie = (2.0 - 2.0**-8) * 2.0**127
    carried = jnp.where(jnp.abs(numbers) < last_tie, nearest, bits)
    return jax.lax.bitcast_convert_type(carried & jnp.uint32(0xFFFF0000), F32)


def stored(leaf: PyTree, dtype: np.dtype) -> PyTree:
    """Returns a leaf cast to the dtype that it is stored in.

    Finite numbers beyond the range of a half `dtype` become its largest; inf and NaN
    stay. Leaves other than f16, bf16 and f32 come back as the same objects.
    """
    if not is_castable(getattr(leaf, "dtype", None)):
        return leaf
    if is_half(dtype) and leaf.dtype != dtype:
        if isinstance(leaf, jax.Array):
            return _in_range_once_a_shape(leaf, dtype, jnp)
        if isinstance(leaf, np.ndarray | np.generic):
            return _in_range(leaf, dtype, np)
    return cast_leaf(leaf, dtype)


def _in_range(array: Any, dtype: np.dtype, library: Any) -> Any:
    wide = array.astype(F32)  # bf16 does not have the largest f16 number.
    largest = float(jnp.finfo(dtype).max)
    is_beyond = library.isfinite(wide) & (abs(wide) > largest)
    # Not the clipped numbers alone: a CPU flushes subnormal ones.
    return library.where(is_beyond, wide.clip(-largest, largest), wide).astype(dtype)


_in_range_once_a_shape = once_a_shape(_in_range, static_argnums=(1, 2))


def next_on_grid(numbers: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns float32 `numbers` that `dtype` holds, or their successors away from zero.

    The latter where `dtype` holds those; any other number is dropped to one it holds.
    """
    dropped = jnp.uint32((1 << (23 - jnp.finfo(dtype).nmant)) - 1)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    rounded = (bits + jnp.uint32(1)) & ~dropped
    # No successor of a NaN, which may be zero.
    kept = jnp.where(numbers == numbers, rounded, bits)
    return jax.lax.bitcast_convert_type(kept, F32)


def round_at_random(numbers: jax.Array, dtype: np.dtype, seeds: Seeds) -> jax.Array:
    """Returns float32 `numbers`, each as one of its two neighbours in `dtype`.

    The nearer one is more likely, so that the mean is the number itself (up to 2**-16
    of their distance). A number that `dtype` holds stays; a larger one becomes its
    largest.

    Equal `seeds` make equal choices, however the array is sharded.
    """
    info = jnp.finfo(dtype)
    chance = _random_words(seeds, numbers.shape) >> 16
    # The bits of f32 below the mantissa of `dtype`. Adding random bits to them carries
    # into the mantissa with the probability that they spell.
    dropped = jnp.uint32((1 << (23 - info.nmant)) - 1)
    end = jnp.uint32(np.float32(info.max).view(np.uint32)) | dropped
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    size = jnp.minimum((bits & jnp.uint32(0x7FFFFFFF)) + (chance & dropped), end)
    carried = jax.lax.bitcast_convert_type(
        (bits & jnp.uint32(0x80000000)) | (size & ~dropped), F32
    )
    if dtype == _F16:
        # Subnormal numbers are equally spaced: round the number of steps instead.
        steps = numbers / float(info.smallest_subnormal)
        down = jnp.floor(steps)
        up = chance.astype(F32) * 2.0**-16 < steps - down
        subnormal = (down + up.astype(F32)) * float(info.smallest_subnormal)
        is_subnormal = jnp.abs(numbers) < float(info.smallest_normal)
        carried = jnp.where(is_subnormal, subnormal, carried)
    return jnp.where(jnp.isfinite(numbers), carried, numbers)


def key_parts(key: Any, call: str) -> tuple[jax.Array, Any]:
    """Returns the uint32 of a key, and the implementation that makes it a key again.

    Args:
      key: a PRNG key, new or old style.
      call: the call as the user wrote it, with `{}` for the key, for the error.

    Raises:
      TypeError: if it is not one key.
    """
    try:
        data, implementation = jax.random.key_data(key), jax.random.key_impl(key)
        if jax.random.wrap_key_data(data, impl=implementation).shape == ():
            return data, implementation
    except (TypeError, ValueError, AttributeError):
        pass
    given = call.format(repr(key))
    raise TypeError(f"{given}: not one PRNG key. Use jax.random.key(0).")


def random_seeds(key: ArrayLike, step: ArrayLike, count: int) -> list[Seeds]:
    """Returns the seeds of `count` arrays in a step.

    `jax.random` draws two words for the step: on a GPU it is several kernels each time.
    For each array their bits are flipped, and a number is added, in another way.

    Args:
      key: a PRNG key.
      step: int32[], the number of the step.
      count: an int.
    """
    words = jax.random.bits(jax.random.fold_in(key, step), (2,), jnp.uint32)
    # As numbers, known before the arrays: kernels of several arrays that read one small
    # array would be merged into one that reads everything twice.
    first, second = jax.lax.optimization_barrier(tuple(words))
    ways = _hashed(np.arange(2 * count, dtype=np.uint32)).reshape(count, 2)
    return [(first ^ flipped, second + added) for flipped, added in ways]


def _random_words(seeds: Seeds, shape: Sequence[int]) -> jax.Array:
    """Returns random words that are computed where they are used: uint32[shape].

    Each element's word is a hash of the two `seeds` and of its place, a dozen
    operations that XLA fuses with what reads it. (threefry is a hundred operations for
    each element, through memory on a CPU; rounding needs bits that are independent, not
    secret.)

    Args:
      seeds: of `random_seeds`.
      shape: of the result.
    """
    first, second = seeds
    place = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        index = jax.lax.broadcasted_iota(jnp.uint32, tuple(shape), axis)
        if stride < 2**32:
            place = place + index * jnp.uint32(stride)
        else:
            # Places are counted modulo 2**32: beyond, the words are others.
            second = second + index * _ODD
        stride *= shape[axis]
    return _hashed((place ^ first) * _ODD + second)


def _hashed(words: Any) -> Any:
    """Returns a permutation of uint32 in which each bit changes half of the others.

    The function lowbias32 of https://nullprogram.com/blog/2018/07/31.
    """
    words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * np.uint32(0x846CA68B)
    return words ^ (words >> 16)


def remainder_of(numbers: jax.Array, rounded: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the error of rounding `numbers`, in 2**-16 of the last place: int16.

    A bfloat16 number and its remainder hold all digits of a float32 in its 32 bits
    (as the two halves of Kalamkar et al. 2020, arXiv:2005.04680, "Split-SGD-BF16"),
    except that a tie that was rounded down loses one bit. A float16 number and its
    remainder do so above the subnormal range.
    """
    left = numbers - rounded
    place = _last_place(rounded, left < 0, dtype)
    # One over a power of two, times 2**16: the exponent's other side.
    bits = jax.lax.bitcast_convert_type(place, jnp.uint32)
    inverse = jnp.uint32((2 * 127 + 16) << 23) - bits
    units = left * jax.lax.bitcast_convert_type(inverse, F32)
    units = jnp.where(jnp.isfinite(units), units, 0.0).clip(-(2.0**15), 2.0**15 - 1)
    # The sum has no digits below 1, so its last 16 bits are the rounded integer.
    bits = jax.lax.bitcast_convert_type(units + 1.5 * 2.0**23, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16)


def with_remainder(
    rounded: jax.Array, remainder: jax.Array, dtype: np.dtype
) -> jax.Array:
    """Returns the float32 numbers that `rounded` and its `remainder_of` make."""
    units = remainder.astype(F32) / 2.0**16
    return rounded + units * _last_place(rounded, remainder < 0, dtype)


def _last_place(rounded: jax.Array, below: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns how far `rounded` is from the next number on its grid: float32[...].

    below: bool[...], whether the next number is the smaller one.
    """
    bits = jax.lax.bitcast_convert_type(rounded, jnp.uint32)
    power = jax.lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), F32)
    info = jnp.finfo(dtype)
    # Where bf16 has subnormal numbers, f32 has them too, and XLA takes them for zero.
    smallest = max(float(info.smallest_normal), 2.0**-100)
    power = jnp.minimum(power, 2.0**127)  # 0 units of an infinite place are NaN.
    # Toward zero from a power of two the grid is twice as fine.
    is_edge = (jnp.abs(rounded) == power) & (below != (rounded < 0))
    finer = jnp.where(is_edge & (power > smallest), 0.5, 1.0)
    return jnp.maximum(power, smallest) * float(info.eps) * finer
