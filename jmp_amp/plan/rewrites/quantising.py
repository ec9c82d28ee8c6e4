"""Quantising: an array as 8-bit floats and a scale.

`q * scale` stands for the array. The scale is made of the largest magnitude, which
becomes the largest number of the format; see `Fp8`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jmp_amp.policies.dtypes import F32


class Quantised(NamedTuple):
    """An array as 8-bit floats.

    Attributes:
      q: 8-bit floats of the shape of the array.
      scale: f32, a scalar.
      kept: the same as `q`, for a derivative to save, see `Quantised.to_keep`.
    """

    q: jax.Array
    scale: jax.Array
    kept: jax.Array

    def to_keep(self, name: str) -> Quantised:
        """Returns the same, with a name for the policies of `jax.checkpoint`.

        What such a policy saves of floats that the program itself reads too,
        `jax.checkpoint` rounds by `lax.reduce_precision`, for which e4m3 ends at 240:
        of larger numbers, up to 448, it makes NaN (jax/_src/ad_checkpoint.py,
        `_insert_reduce_precision`). So the program reads `q`, and `kept` is saved.
        """
        kept, scale = (checkpoint_name(x, name) for x in (self.q, self.scale))
        return Quantised(self.q, scale, kept)

    def read_again(self) -> Quantised:
        """Returns the same, of which nothing is kept."""
        return self._replace(kept=self.q)

    def for_derivative(self, scale: jax.Array) -> Quantised:
        """Returns what is kept, with a scale."""
        return Quantised(self.kept, scale, self.kept)

    def restored(self, dtype: np.dtype) -> jax.Array:
        """Returns the array in `dtype`: exact in bf16, as the scale is a power of two.

        XLA finds the 8-bit product in this form: a cast, times a scale in the same
        dtype, then the product.
        """
        return self.q.astype(dtype) * self.scale.astype(dtype)


def quantise(x: jax.Array, dtype: np.dtype) -> Quantised:
    """Returns a floating array in 8 bits, rounded to nearest even in f32.

    An infinity becomes the largest number; NaN stays NaN.
    """
    # Magnitudes are exact in the dtype of the array.
    scale = scale_of(jnp.max(jnp.abs(x)).astype(F32), dtype)
    limit = float(jnp.finfo(dtype).max)
    # Most 8-bit formats have no infinity: a plain cast makes NaN of large numbers.
    q = jnp.clip(x.astype(F32) / scale, -limit, limit).astype(dtype)
    return Quantised(q, scale, q)


def scale_of(largest: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the scale that brings a magnitude to the largest number of a format.

    It is rounded up to a power of two, by the bits: `exp2` is not exact.

    Args:
      largest: f32, magnitudes; where it is 0 or not finite the scale is 1.
      dtype: the format.

    Returns:
      f32 of the shape of `largest`, at least the smallest normal number.
    """
    finfo = jnp.finfo(F32)
    scale = largest / jnp.float32(jnp.finfo(dtype).max)
    scale = jnp.maximum(scale, finfo.smallest_normal)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    mantissa = np.uint32((1 << finfo.nmant) - 1)
    bits = (bits + mantissa) & ~mantissa
    scale = jax.lax.bitcast_convert_type(bits, F32)
    usable = jnp.isfinite(largest) & (largest > 0)
    return jnp.where(usable, scale, jnp.ones_like(scale))
