"""Arrays of an optimizer's state, stored in 16 or 8 bits a number.

A code is a node of the state where the optimizer has a float32 array. Its `codes` have
the shape of that array, and so of a parameter, and its sharding. (Of 8 bits, along the
last axis, if that is a multiple of 256 and the part of a device one of 32; else XLA
gathers the numbers.) Functions of one array are traced once for a shape.

8 bits are floats with a scale for each block of numbers (Dettmers et al. 2021,
arXiv:2110.02861, section 2.1, "8-bit Optimizers via Block-wise Quantization"). There
codes are looked up in a table of 256 numbers. Here they are fp8: XLA fuses a cast with
what reads it, and a lookup it does not.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.policies.dtypes import F32, PyTree
from jmp_amp.training.rounding import (
    Seeds,
    land_on,
    once_a_shape,
    random_words,
    round_at_random,
)

BLOCK = 256
# Blocks are worked on in parts of this length, and a device may have some of them: its
# shard of 96 columns is 3 parts and no whole number of blocks.
_PART = 32

_BF16 = np.dtype(jnp.bfloat16)
# Bits of float32: a minus sign, infinity, the smallest normal number.
_SIGN, _INFINITE = np.uint32(0x80000000), np.uint32(0x7F800000)
_SMALLEST = np.uint32(0x00800000)
_NORMAL = np.float32(2.0**-126)
_ONE = np.uint32(0x3F800000)
# Of the mantissa: a quarter, less its last bit.
_QUARTER = np.uint32(0x1FFFFF)
# Above all sums of two exponents.
_BEYOND = np.uint32(1024)


class Bfloat16Code(NamedTuple):
    """Float32 numbers that are stored as bfloat16.

    Attributes:
      codes: bfloat16[...].
    """

    codes: jax.Array

    @classmethod
    @functools.partial(once_a_shape, static_argnums=0)
    def encoded(cls, numbers: jax.Array, seeds: Seeds | None = None) -> Self:
        """Returns the code of float32 `numbers`, rounded at random if there are seeds.

        On bits: XLA may drop a pair of casts, and keep what it should round.

        Args:
          numbers: float32[...].
          seeds: of `random_seeds`, or None.
        """
        if seeds is None:
            return cls(land_on(numbers, _BF16).astype(_BF16))
        return cls(round_at_random(numbers, _BF16, seeds).astype(_BF16))

    def decoded(self) -> jax.Array:
        """Returns the numbers: float32[...]."""
        return self.codes.astype(F32)


class Scales(NamedTuple):
    """What the blocks of a `Float8Code` are scaled by; all are of shape [..., blocks].

    Attributes:
      stored: float32, powers of two, as `Float8Code.scales` has them.
      inverses: float32, one over their sizes; 0 where all codes are zero.
      is_signed: bool, whether a block is of float8_e4m3fn.
    """

    stored: jax.Array
    inverses: jax.Array
    is_signed: jax.Array


class Float8Code(NamedTuple):
    """Float32 numbers that are stored in 8 bits, with a scale for each 256 of them.

    A block is 256 numbers in a row of the flattened array; the last may be shorter. It
    is of float8_e5m2 if no number in it has a minus sign, as in second moments, which
    span 8 powers of ten. Any other is of float8_e4m3fn.

    Attributes:
      codes: uint8[...], bit patterns of fp8, in the shape of the numbers.
      scales: float32[..., blocks], powers of two: what a block is multiplied by. Minus
        that if it is of float8_e4m3fn; 1 if it is all zeros, and NaN if not all of it
        is finite. Leading axes of `codes` remain if blocks do not cross them.
    """

    codes: jax.Array
    scales: jax.Array

    @classmethod
    @functools.partial(once_a_shape, static_argnums=0)
    def encoded(
        cls,
        numbers: jax.Array,
        seeds: Seeds | None = None,
        scales: Scales | None = None,
    ) -> Self:
        """Returns the code of float32 `numbers`, rounded at random if there are seeds.

        What `decoded` returns has the same code again, bit for bit.

        Args:
          numbers: float32[...].
          seeds: of `random_seeds`, or None.
          scales: those of `scales_of`, if they are known.
        """
        found = scales or Float8Code.scales_of(numbers, seeds)
        parts = _in_parts(numbers)
        words = None if seeds is None else random_words(seeds, parts.shape)
        codes = _codes(
            parts, _of_parts(found.inverses), _of_parts(found.is_signed), words
        )
        return cls(_out_of_blocks(codes, numbers.shape), found.stored)

    @staticmethod
    @once_a_shape
    def scales_of(numbers: jax.Array, seeds: Seeds | None = None) -> Scales:
        """Returns the scales that `encoded` finds.

        Args:
          numbers: float32[...].
          seeds: of `random_seeds`, or None.
        """
        bits = jax.lax.bitcast_convert_type(_in_parts(numbers), jnp.uint32)
        words = None if seeds is None else random_words(seeds, bits.shape)
        powers = jnp.max(_powers(bits & ~_SIGN, words), axis=-1)
        # Those of parts go through memory, in few bytes.
        largest = jnp.max(_by_block(powers.astype(jnp.uint16)), axis=-1)
        is_signed = jnp.any(_by_block(jnp.max(bits, axis=-1) >= _SIGN), axis=-1)
        largest = largest.astype(jnp.uint32)
        is_number, is_zero = largest < _BEYOND, largest == 0
        minus, plus = (largest + 1) >> 1, largest >> 1
        minus, plus = _E4M3.scales(minus), _E5M2.scales(plus)
        is_signed = is_signed & ~is_zero
        powers = jnp.where(is_zero, _ONE, jnp.where(is_signed, minus, plus))
        sign = jnp.where(is_signed, _SIGN, jnp.uint32(0))
        stored = jax.lax.bitcast_convert_type(powers | sign, F32)
        # One over a power of two is the exponent's other side.
        inverses = jax.lax.bitcast_convert_type(jnp.uint32(254 << 23) - powers, F32)
        return Scales(
            jnp.where(is_number, stored, jnp.nan),
            jnp.where(is_number & ~is_zero, inverses, 0.0),
            is_signed,
        )

    @once_a_shape
    def decoded(self) -> jax.Array:
        """Returns the numbers: float32[...]."""
        codes, scales = _in_parts(self.codes), _of_parts(self.scales)
        signed, unsigned = _E4M3.numbers(codes), _E5M2.numbers(codes)
        numbers = jnp.where(scales < 0, signed, unsigned) * jnp.abs(scales)
        return _out_of_blocks(numbers, self.codes.shape)


Code = Bfloat16Code | Float8Code
CODES = (Bfloat16Code, Float8Code)


def is_code(node: object) -> bool:
    return isinstance(node, CODES)


def decoded(tree: PyTree) -> PyTree:
    """Returns `tree` with float32 arrays in place of codes.

    If an nnx Variable holds the codes, one like it holds the array.
    """

    def plain(node: PyTree) -> PyTree:
        if not is_code(node):
            return node
        numbers = type(node)(*jax.tree.leaves(node)).decoded()
        return jax.tree.map(lambda _: numbers, node.codes)

    return jax.tree.map(plain, tree, is_leaf=is_code)


def encoded_like(
    code: PyTree,
    numbers: jax.Array,
    seeds: Seeds | None = None,
    scales: Scales | None = None,
) -> PyTree:
    """Returns the code of float32 `numbers`, in Variables where `code` is in some.

    Args:
      code: a code of the same kind.
      numbers: float32[...].
      seeds: of `random_seeds`, or None.
      scales: those of `Float8Code.scales_of`, if they are known.
    """
    if isinstance(code, Float8Code):
        found = Float8Code.encoded(numbers, seeds, scales)
    else:
        found = Bfloat16Code.encoded(numbers, seeds)
    return jax.tree.structure(code).unflatten(jax.tree.leaves(found))


class _Format(NamedTuple):
    """A dtype of 8 bits whose largest number is 1.75 * 2**power_of_largest.

    Attributes:
      dtype: the dtype.
      power_of_largest: an int.
    """

    dtype: np.dtype
    power_of_largest: int

    def power(self, sizes: jax.Array, words: jax.Array | None = None) -> jax.Array:
        """Returns the exponents of rounded numbers, one more beyond 1.75 times it.

        The rounded number decides on the scale: encoded again, it has the same. A scale
        is a power of two, so that the digits are rounded without it.

        Args:
          sizes: uint32[...], the bits of absolute values of float32 numbers.
          words: random words to round with, uint32[...]; None: to nearest.

        Returns:
          uint32[...].
        """
        last = (sizes >> (23 - self.info.nmant)) & jnp.uint32(1)
        added = (self.dropped >> 1) + last if words is None else words & self.dropped
        return (((sizes + added) & ~self.dropped) + _QUARTER) >> 23

    def scales(self, power: jax.Array) -> jax.Array:
        """Returns the least powers of two that scale blocks into the range.

        Args:
          power: uint32[...], the largest `power` in each block.

        Returns:
          uint32[...], the bits of float32 numbers.
        """
        # Of numbers beyond a scaled code would be infinite.
        exponents = jnp.minimum(power, 254).astype(jnp.int32) - self.power_of_largest
        # The smallest number of the dtype, scaled, is the smallest normal float32.
        tiny = int(np.log2(float(self.info.smallest_subnormal)))
        exponents = jnp.maximum(exponents, 1 - tiny)
        return jax.lax.bitcast_convert_type(exponents << 23, jnp.uint32)

    def codes(self, numbers: jax.Array) -> jax.Array:
        """Returns what float32 numbers are in this dtype, to nearest: uint8."""
        return jax.lax.bitcast_convert_type(numbers.astype(self.dtype), jnp.uint8)

    def numbers(self, codes: jax.Array) -> jax.Array:
        """Returns the numbers that uint8 codes stand for, without a scale: float32."""
        return jax.lax.bitcast_convert_type(codes, self.dtype).astype(F32)

    @property
    def info(self) -> Any:
        return jnp.finfo(self.dtype)

    @property
    def dropped(self) -> np.uint32:
        """The bits of a float32 below the mantissa of the dtype."""
        return np.uint32((1 << (23 - self.info.nmant)) - 1)


_E4M3 = _Format(np.dtype(jnp.float8_e4m3fn), 8)
_E5M2 = _Format(np.dtype(jnp.float8_e5m2), 15)


def _codes(
    parts: jax.Array,
    inverses: jax.Array,
    is_signed: jax.Array,
    words: jax.Array | None,
) -> jax.Array:
    """Returns the codes of parts of blocks: uint8[..., n].

    With as few operations on single numbers as can be: of more, XLA makes several
    kernels for a GPU, with float32 in memory between them.

    Args:
      parts: float32[..., n].
      inverses: float32[..., 1], as in `Scales`.
      is_signed: bool[..., 1], as in `Scales`.
      words: random words to round with, uint32[..., n]; None: to nearest.
    """

    def of_format(of: Callable[[_Format], Any]) -> jax.Array:
        return jnp.where(is_signed, of(_E4M3), of(_E5M2))

    # Zero times infinity would be no number.
    parts = jnp.where(inverses == 0, 0.0, parts)
    scaled = parts * inverses
    if words is not None:
        smallest = of_format(lambda each: np.float32(each.info.smallest_normal))
        dropped = of_format(lambda each: each.dropped)
        scaled = _rounded_at_random(scaled, smallest, dropped, words)
    # Of a second moment that is zero Adam divides by the square root. (A CPU takes
    # subnormal numbers for zero.) A cast of what is beyond the largest number, such as
    # 460 to 448, is not that of all devices.
    tiny = np.float32(_E5M2.info.smallest_subnormal)
    end = of_format(lambda each: np.float32(each.info.max))
    least = jnp.where(is_signed, -end, jnp.where(parts >= _NORMAL, tiny, 0.0))
    scaled = jax.lax.clamp(*jnp.broadcast_arrays(least, scaled, end))
    return of_format(lambda each: each.codes(scaled))


def _rounded_at_random(
    numbers: jax.Array, smallest: jax.Array, dropped: jax.Array, words: jax.Array
) -> jax.Array:
    """Returns a neighbour of 8 bits of each number, up or down: float32[..., n].

    Args:
      numbers: float32[..., n].
      smallest: float32[..., 1], the smallest normal number of the dtype.
      dropped: uint32[..., 1], the bits of a float32 below its mantissa.
      words: uint32[..., n], random.
    """
    sizes = jnp.abs(numbers)
    # Subnormal numbers are equally spaced, as those are that begin with `smallest`.
    added = jnp.where(sizes < smallest, smallest, 0.0)
    # As in `round_at_random`: random bits carry into the mantissa.
    bits = jax.lax.bitcast_convert_type(sizes + added, jnp.uint32)
    carried = (bits + (words & dropped)) & ~dropped
    rounded = jax.lax.bitcast_convert_type(carried, F32) - added
    # Zero keeps its sign.
    return jnp.copysign(rounded, numbers)


def _in_parts(array: jax.Array) -> jax.Array:
    """Returns `array` as [..., parts of blocks, 32], filled up with zeros.

    Blocks are those of the flattened array. Axes that none of them crosses remain, so
    that a sharding of these does.
    """
    size = 1
    for axis in reversed(range(array.ndim)):
        size *= array.shape[axis]
        if size % BLOCK == 0:
            return array.reshape(*array.shape[:axis], size // _PART, _PART)
    filled = jnp.pad(array.reshape(-1), (0, -array.size % BLOCK))
    return filled.reshape(-1, _PART)


def _by_block(of_parts: jax.Array) -> jax.Array:
    """Returns what is known of parts as [..., blocks, parts of a block]."""
    *axes, count = of_parts.shape
    return of_parts.reshape(*axes, count * _PART // BLOCK, BLOCK // _PART)


def _of_parts(of_blocks: jax.Array) -> jax.Array:
    """Returns what is known of blocks for each of their parts: [..., parts, 1]."""
    return jnp.repeat(of_blocks, BLOCK // _PART, axis=-1)[..., None]


def _powers(sizes: jax.Array, words: jax.Array | None = None) -> jax.Array:
    """Returns the sum of a number's `power` in both dtypes: uint32.

    0 for zero, and `_BEYOND` for what is not finite. The power in float8_e4m3fn is that
    in float8_e5m2, or one more: of the largest sum in a block both are the largest. For
    another maximum XLA would write the numbers to memory.

    Args:
      sizes: uint32[...], the bits of absolute values of float32 numbers.
      words: random words to round with, uint32[...]; None: to nearest.
    """
    sums = _E4M3.power(sizes, words) + _E5M2.power(sizes, words)
    # A CPU takes subnormal numbers for zero.
    sums = jnp.where(sizes < _SMALLEST, 0, sums)
    return jnp.where(sizes < _INFINITE, sums, _BEYOND)


def _out_of_blocks(blocks: jax.Array, shape: Sequence[int]) -> jax.Array:
    size = int(np.prod(shape))
    if blocks.size == size:
        return blocks.reshape(shape)
    return blocks.reshape(-1)[:size].reshape(shape)
