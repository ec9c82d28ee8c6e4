"""fp8 as its contract says it, in numpy: nothing here knows `jmp_amp` or JAX.

Casts to 8 bits are those of ml_dtypes, which `oracle/fp8/casts.json` compares with
torch's. Products are added up in f64.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BF16, F32, F64 = np.dtype(ml_dtypes.bfloat16), np.dtype("float32"), np.dtype("float64")
# How far a result of bf16 is from the exact one.
HALF_EPS = float(ml_dtypes.finfo(BF16).eps) / 2


class Quantised(NamedTuple):
    """`q * scale` stands for an array; q in 8 bits, scale in f32."""

    q: np.ndarray
    scale: np.ndarray

    def exact(self) -> np.ndarray:
        return self.q.astype(F64) * self.scale.astype(F64)


def scale_of(x: Any, dtype: np.dtype) -> np.ndarray:
    """The scale as f32: of the largest magnitude, 1 where that is 0 or not finite.

    It is rounded up to a power of two.
    """
    largest = np.max(np.abs(np.asarray(x, F32)))
    limit = F32.type(ml_dtypes.finfo(dtype).max)
    scale = np.maximum(largest / limit, np.finfo(F32).tiny)
    fraction, exponent = np.frexp(scale)  # 0.5 <= fraction < 1
    scale = np.ldexp(F32.type(1), exponent - (fraction == 0.5))
    usable = np.isfinite(largest) & (largest > 0)
    return np.where(usable, scale, 1).astype(F32)


def quantised(x: Any, dtype: np.dtype = E4M3) -> Quantised:
    """x in 8 bits: divided in f32, clipped, rounded to nearest even."""
    x = np.asarray(x, F32)
    scale = scale_of(x, dtype)
    limit = F32.type(ml_dtypes.finfo(dtype).max)
    return Quantised(np.clip(x / scale, -limit, limit).astype(dtype), scale)


def half(x: Any) -> np.ndarray:
    """x rounded to bf16, in f64."""
    return np.asarray(x, F32).astype(BF16).astype(F64)


class Linear(NamedTuple):
    """What a linear layer computes in fp8, in f64: `y = x @ w` and its gradients."""

    y: np.ndarray
    dx: np.ndarray
    dw: np.ndarray


def linear(x: Any, w: Any, g: Any, backward: np.dtype = E5M2) -> Linear:
    """A product of x[m, k] and w[k, n] with the cotangent g[m, n], all as bf16."""
    x, w, g = half(x), half(w), half(g)
    left, right = quantised(x).exact(), quantised(w).exact()
    cotangent = quantised(g, backward).exact()
    return Linear(left @ right, cotangent @ right.T, left.T @ cotangent)


def relative_error(found: Any, expected: np.ndarray) -> float:
    """|found - expected| / |expected|, in f64."""
    found = np.asarray(found).astype(F64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
