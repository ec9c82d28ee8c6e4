"""Reading fp8 products from a program, and running small ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jmp_amp as amp
from tests.fp8.reference import relative_error
from tests.measures import EXACTLY_AS_WRITTEN
from tests.programs import dtypes_of

E4M3 = "e4m3 x e4m3 -> bf16"
# The error of a product with e5m2 is .058 whatever the data, and of e4m3 .037.
E5M2_ERROR = 0.08
compiled = functools.partial(jax.jit, compiler_options=EXACTLY_AS_WRITTEN)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Random f32 numbers of bf16's precision: casts to bf16 round nothing."""
    x = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(x.astype(ml_dtypes.bfloat16).astype(np.float32))


def formats(fn: Callable[..., Any], *args: Any, policy: Any = "fp8") -> list[str]:
    """The dtype of each matrix product, as `explain` tells."""
    report = amp.explain(fn, policy)(*args)
    return [e.dtype for e in report.equations if e.matmuls]


def reasons(fn: Callable[..., Any], *args: Any, policy: Any = "fp8") -> list[str]:
    """Why, likewise."""
    report = amp.explain(fn, policy)(*args)
    return [e.reason for e in report.equations if e.matmuls]


def quantisations(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The formats of the 8-bit arrays that a program makes, as traced."""
    rows = dtypes_of(fn, *args, primitive="convert_element_type")
    return [row[-1] for row in rows if row and row[-1].startswith("float8")]


def assert_close(found, expected, error=E5M2_ERROR):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        assert relative_error(a, np.asarray(b, np.float64)) < error
