"""Arrays of an optimizer's state, stored in 16 or 8 bits a number.

A code is a node of the state where the optimizer has a float32 array. Its `codes` have
the shape of that array, and so of a parameter: they shard as it does.

8 bits are floats with a scale for each block of numbers (Dettmers et al. 2021,
arXiv:2110.02861, section 2.1, "8-bit Optimizers via Block-wise Quantization"). There
codes are looked up in a table of 256 numbers. Here they are fp8: XLA fuses a cast with
what reads it, and a lookup it does not.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_amp.policies.dtypes import F32, PyTree
from jmp_amp.training.rounding import land_on, random_words, round_at_random

BLOCK = 256

_BF16 = np.dtype(jnp.bfloat16)
# Bits of float32: a minus sign, infinity, the smallest normal number.
_SIGN, _INFINITE = np.uint32(0x80000000), np.uint32(0x7F800000)
_SMALLEST = np.uint32(0x00800000)
_LARGEST = 1.75 * 2.0**127


class Bfloat16Code(NamedTuple):
    """Float32 numbers that are stored as bfloat16.

    Attributes:
      codes: bfloat16[...].
    """

    codes: jax.Array

    @classmethod
    def encoded(cls, numbers: jax.Array, key: ArrayLike | None = None) -> Self:
        """Returns the code of float32 `numbers`, rounded at random if there is a key.

        On bits: XLA may drop a pair of casts, and keep what it should round.
        """
        if key is None:
            return cls(land_on(numbers, _BF16).astype(_BF16))
        return cls(round_at_random(numbers, _BF16, key).astype(_BF16))

    def decoded(self) -> jax.Array:
        """Returns the numbers: float32[...]."""
        return self.codes.astype(F32)


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
    def encoded(cls, numbers: jax.Array, key: ArrayLike | None = None) -> Self:
        """Returns the code of float32 `numbers`, rounded at random if there is a key.

        What `decoded` returns has the same code again, bit for bit.
        """
        # Beyond, a scaled code would be infinite; inf stays, for the scale to see.
        finite = jnp.clip(numbers, -_LARGEST, _LARGEST)
        blocks = _in_blocks(jnp.where(jnp.isinf(numbers), numbers, finite))
        words = None if key is None else random_words(key, blocks.shape)
        # Sizes are in the order of their bits, and a minus sign is before all of them.
        bits = jax.lax.bitcast_convert_type(blocks, jnp.uint32)
        sizes = bits & ~_SIGN
        largest = jnp.max(sizes, axis=-1, keepdims=True)
        is_signed = jnp.max(bits, axis=-1, keepdims=True) >= _SIGN
        is_number = largest < _INFINITE
        # A CPU takes subnormal numbers for zero.
        is_zero = largest < _SMALLEST
        signed, minus = _E4M3.encoded(blocks, sizes, largest, words)
        unsigned, plus = _E5M2.encoded(blocks, sizes, largest, words)
        codes = jnp.where(is_signed, signed, unsigned)
        codes = jnp.where(is_number & ~is_zero, codes, jnp.uint8(0))
        scales = jnp.where(is_zero, 1.0, jnp.where(is_signed, -minus, plus))
        scales = jnp.where(is_number, scales, jnp.nan)
        return cls(_out_of_blocks(codes, numbers.shape), scales[..., 0])

    def decoded(self) -> jax.Array:
        """Returns the numbers: float32[...]."""
        codes, scales = _in_blocks(self.codes), self.scales[..., None]
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
    code: PyTree, numbers: jax.Array, key: ArrayLike | None = None
) -> PyTree:
    """Returns the code of float32 `numbers`, in Variables where `code` is in some."""
    parts = jax.tree.leaves(type(code).encoded(numbers, key))
    return jax.tree.structure(code).unflatten(parts)


class _Format(NamedTuple):
    """A dtype of 8 bits whose largest number is 1.75 * 2**power.

    Attributes:
      dtype: the dtype.
      power: an int.
      above_zero: whether a number greater than zero is never rounded to it. Of a second
        moment that is zero Adam divides by the square root.
    """

    dtype: np.dtype
    power: int
    above_zero: bool

    def encoded(
        self,
        blocks: jax.Array,
        sizes: jax.Array,
        largest: jax.Array,
        words: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the codes, uint8[..., n], and scales, float32[..., 1], of blocks.

        Args:
          blocks: float32[..., n].
          sizes: uint32[..., n], the bits of their absolute values.
          largest: uint32[..., 1], the largest of these.
          words: random words to round with, uint32[..., n]; None: to nearest.
        """
        info, dropped = jnp.finfo(self.dtype), self._dropped
        # The rounded number decides on the scale: encoded again, it has the same. A
        # scale is a power of two, so that the digits are rounded without it.
        if words is None:
            last = (largest >> (23 - info.nmant)) & jnp.uint32(1)
            landed = (largest + (dropped >> 1) + last) & ~dropped
        else:
            landed = (sizes + (words & dropped)) & ~dropped
            landed = jnp.max(landed, axis=-1, keepdims=True)
        scales = self._scales(landed)
        scaled = blocks * _inverse(scales)
        if words is not None:
            scaled = self._at_random(scaled, words)
        if self.above_zero:
            tiny = float(info.smallest_subnormal)
            scaled = jnp.where(blocks > 0, jnp.maximum(scaled, tiny), scaled)
        # A cast of what is beyond, such as 460 to 448, is not that of all devices.
        end = float(info.max)
        codes = jnp.clip(scaled, -end, end).astype(self.dtype)
        return jax.lax.bitcast_convert_type(codes, jnp.uint8), scales

    def numbers(self, codes: jax.Array) -> jax.Array:
        """Returns the numbers that uint8 codes stand for, without a scale: float32."""
        return jax.lax.bitcast_convert_type(codes, self.dtype).astype(F32)

    @property
    def _dropped(self) -> np.uint32:
        """The bits of a float32 below the mantissa of the dtype."""
        return np.uint32((1 << (23 - jnp.finfo(self.dtype).nmant)) - 1)

    def _scales(self, landed: jax.Array) -> jax.Array:
        """Returns the least power of two that scales `landed` into the range.

        landed: uint32[..., 1], the bits of the largest number of a block, rounded.
        """
        exponents = (landed >> 23).astype(jnp.int32) - self.power
        is_above = (landed & jnp.uint32(0x7FFFFF)) > jnp.uint32(0x600000)
        # The smallest number of the dtype, scaled, is the smallest normal float32.
        tiny = int(np.log2(float(jnp.finfo(self.dtype).smallest_subnormal)))
        exponents = jnp.maximum(exponents + is_above.astype(jnp.int32), 1 - tiny)
        return jax.lax.bitcast_convert_type(exponents << 23, F32)

    def _at_random(self, scaled: jax.Array, words: jax.Array) -> jax.Array:
        """Returns each number as one of its two neighbours in the dtype: float32."""
        info = jnp.finfo(self.dtype)
        bits = jax.lax.bitcast_convert_type(scaled, jnp.uint32)
        # As in `round_at_random`: random bits carry into the mantissa.
        carried = (bits + (words & self._dropped)) & ~self._dropped
        normal = jax.lax.bitcast_convert_type(carried, F32)
        # Subnormal numbers are equally spaced: round the number of steps.
        tiny = float(info.smallest_subnormal)
        steps = scaled / tiny
        down = jnp.floor(steps)
        up = words.astype(F32) * 2.0**-32 < steps - down
        subnormal = (down + up.astype(F32)) * tiny
        # Zero keeps its sign.
        subnormal = jnp.copysign(subnormal, scaled)
        is_small = jnp.abs(scaled) < float(info.smallest_normal)
        return jnp.where(is_small, subnormal, normal)


_E4M3 = _Format(np.dtype(jnp.float8_e4m3fn), 8, above_zero=False)
_E5M2 = _Format(np.dtype(jnp.float8_e5m2), 15, above_zero=True)


def _inverse(powers: jax.Array) -> jax.Array:
    """Returns 1 / powers of two, by the exponent's other side: float32[...]."""
    bits = jax.lax.bitcast_convert_type(powers, jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.uint32(2 * 127 << 23) - bits, F32)


def _in_blocks(array: jax.Array) -> jax.Array:
    """Returns `array` as [..., blocks, 256], filled up with zeros.

    Blocks are those of the flattened array. Axes that none of them crosses remain, so
    that a sharding of these does.
    """
    size = 1
    for axis in reversed(range(array.ndim)):
        size *= array.shape[axis]
        if size % BLOCK == 0:
            return array.reshape(*array.shape[:axis], size // BLOCK, BLOCK)
    filled = jnp.pad(array.reshape(-1), (0, -array.size % BLOCK))
    return filled.reshape(-1, BLOCK)


def _out_of_blocks(blocks: jax.Array, shape: Sequence[int]) -> jax.Array:
    size = int(np.prod(shape))
    if blocks.size == size:
        return blocks.reshape(shape)
    return blocks.reshape(-1)[:size].reshape(shape)
