"""Floating dtypes: their names, and which of them the library moves values between.

A dtype has one short name (`f32`), which is the one that policies and reports print,
and several that are understood (`float32`, `fp32`, `full`). `half` is a name for
the dtype that the machine at hand multiplies fast, see `half_dtype`.
"""

import re
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

PyTree = Any  # A pytree of arrays; jax has no type for it.
AnyFn = Callable[..., Any]  # A user's function.

F16 = jnp.dtype(jnp.float16)
BF16 = jnp.dtype(jnp.bfloat16)
F32 = jnp.dtype(jnp.float32)
F64 = jnp.dtype(jnp.float64)

_HALF = frozenset((F16, BF16))
_CASTABLE = frozenset((F16, BF16, F32))

# Floats of 8 bits and fewer. Their values mean nothing without a scale, which lives
# elsewhere, so nothing is ever cast out of them.
_NARROW = tuple(
    jnp.dtype(name)
    for name in (
        "float8_e4m3fn float8_e5m2 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
        "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn"
    ).split()
)

# `float8_e4m3` and `f8_e4m3` differ: the first is numpy's name of the IEEE-like
# format, the second everybody's short name for the OCP one, `float8_e4m3fn`.
_SHORT_NAMES = {
    F16: "f16",
    BF16: "bf16",
    F32: "f32",
    F64: "f64",
    jnp.dtype(jnp.float8_e4m3fn): "f8_e4m3",
    jnp.dtype(jnp.float8_e5m2): "f8_e5m2",
}

_DTYPES: dict[str, np.dtype] = (
    {dtype.name: dtype for dtype in (F16, BF16, F32, F64, *_NARROW)}
    | {name: dtype for dtype, name in _SHORT_NAMES.items()}
    | {"fp16": F16, "fp32": F32, "full": F32, "fp64": F64}
    | {"fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn), "e4m3": jnp.dtype(jnp.float8_e4m3fn)}
    | {"fp8_e5m2": jnp.dtype(jnp.float8_e5m2), "e5m2": jnp.dtype(jnp.float8_e5m2)}
    | {
        dtype.name.replace("float", prefix): dtype
        for dtype in _NARROW
        if dtype.name not in ("float8_e4m3", "float8_e5m2")
        for prefix in ("f", "fp")
    }
)


def is_half(dtype: object) -> bool:
    """Returns whether `dtype` is f16 or bf16."""
    if isinstance(dtype, np.dtype):  # asked for each value of a program
        return dtype in _HALF
    return any(known == dtype for known in _HALF)


def is_castable(dtype: object) -> bool:
    """Returns whether values may be cast out of and into `dtype` unasked.

    True for f16, bf16 and f32. A program asks for f64 because it needs it, and fp8
    values have a scale that a cast would lose.
    """
    if isinstance(dtype, np.dtype):
        return dtype in _CASTABLE
    return any(known == dtype for known in _CASTABLE)


def is_fp8(dtype: object) -> bool:
    """Returns whether `dtype` is a float of 8 bits or fewer."""
    return any(known == dtype for known in _NARROW)


def short_name(dtype: DTypeLike) -> str:
    """Returns the short name of a dtype: `f32`, `bf16`, `f8_e4m3`.

    Dtypes without one (other fp8 formats, integers, keys) keep their own name.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return str(getattr(dtype, "name", dtype))
    known = jnp.dtype(dtype)
    return _SHORT_NAMES.get(known, known.name)


def known_names() -> list[str]:
    """Returns every name of a dtype that a policy may be written with."""
    return [*_DTYPES, "half"]


def advice() -> str:
    """Returns the end of an error message: which dtypes there are."""
    names = ", ".join(_SHORT_NAMES.values())
    return f"Use one of {names}, or half (here {half_dtype().name})."


def parse_dtype(text: str) -> np.dtype | None:
    """Returns the floating dtype that `text` names, or None if it names none.

    Case and surrounding spaces do not matter; `half` is `half_dtype()`.
    """
    name = text.strip().lower()
    return half_dtype() if name == "half" else _DTYPES.get(name)


def floating_dtype(dtype: DTypeLike, call: str, remedy: str = "") -> np.dtype:
    """Returns `dtype` as a numpy dtype.

    Args:
      dtype: a name that `parse_dtype` knows, or anything `jnp.dtype` accepts. Python's
        `float` is f32, or f64 with `jax_enable_x64`.
      call: the call as the user wrote it, with `{}` for the dtype, for the error.
      remedy: the end of the error, if there is another than `advice`.

    Raises:
      TypeError: if it is no dtype, or not one of floats.
      ValueError: if it is text that names no dtype.
    """
    if dtype is float:
        return jnp.result_type(float)
    given = _numpy_dtype(dtype)
    if isinstance(dtype, str):
        found = parse_dtype(dtype)
    else:
        # By name, not by identity: a big-endian float32 is a float32 to JAX.
        found = None if given is None else _DTYPES.get(given.name)
    if found is not None:
        return found
    remedy = remedy or advice()
    is_type = isinstance(dtype, type | np.dtype)
    call = call.format(given.name if given is not None and is_type else repr(dtype))
    if given is not None and not jnp.issubdtype(given, jnp.floating):
        raise TypeError(f"{call}: {given.name} is not a floating dtype. {remedy}")
    if isinstance(dtype, str):
        hint = ""
        if re.fullmatch(r"mixed_b?float16|fp8|.*=.*", dtype.strip().lower()):
            hint = f" It is the text of a policy: amp.get_policy({dtype!r})."
        raise ValueError(f"{call}: unknown dtype {dtype!r}.{hint} {remedy}")
    fact = "that is not a dtype" if given is None else f"JAX has no {given.name}"
    raise TypeError(f"{call}: {fact}. {remedy}")


def reduce_dtype_of(given: DTypeLike | None, call: str) -> np.dtype | None:
    """Returns the `reduce_dtype` of a policy.

    Args:
      given: the argument of the caller.
      call: the caller's call, with `{}` for the argument, for errors.

    Raises:
      TypeError, ValueError: if it is neither float32 nor None.
    """
    if given is None:
        return None
    fact = "gradients are made and summed in float32, or in the dtype of the operation"
    remedy = 'that makes them. Use "float32", or None for the latter.'
    dtype = floating_dtype(given, call, f"{fact[0].upper()}{fact[1:]} {remedy}")
    if dtype != F32:
        raise ValueError(f"{call.format(repr(given))}: {fact} {remedy}")
    return dtype


def _numpy_dtype(dtype: Any) -> np.dtype | None:
    try:
        # numpy takes None for float64.
        return None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError):
        return None


def given_as_dtype(value: object) -> np.dtype | None:
    """Returns the floating dtype that an argument is, such as `jnp.bfloat16`.

    None if it is anything else; text is not taken for a dtype.
    """
    if value is float:
        return jnp.result_type(float)
    given = _numpy_dtype(value) if isinstance(value, type | np.dtype) else None
    return None if given is None else _DTYPES.get(given.name)


def cast_leaf(leaf: PyTree, dtype: np.dtype) -> PyTree:
    """Returns one leaf of a tree cast to `dtype`; see `cast_floating` for which."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return leaf
    if leaf.dtype == dtype or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    if is_fp8(leaf.dtype):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    if is_fp8(dtype):
        # Most fp8 formats have no inf: a plain cast turns too large values into NaN.
        ranges = [float(jnp.finfo(each).max) for each in (dtype, leaf.dtype)]
        bound = np.asarray(min(ranges), leaf.dtype)
        clip = jnp.clip if isinstance(leaf, jax.Array) else np.clip
        leaf = clip(cast(PyTree, leaf), -bound, bound)
    return leaf.astype(dtype)


def half_dtype(backend: str | None = None) -> np.dtype:
    """Returns the half-precision dtype that a backend's matrix units work in.

    bf16 on TPUs, on CPUs, on AMD GPUs and on NVIDIA GPUs of compute capability 8.0
    (Ampere) and newer; f16 on older NVIDIA GPUs (Volta, Turing), whose matrix units
    multiply no other half dtype. If the local GPUs differ, the oldest decides.

    Args:
      backend: "cpu", "gpu", "cuda", "rocm" or "tpu"; by default the one that JAX uses.
        For a backend that this machine does not have, the answer is that of the
        current hardware generation.

    Raises:
      TypeError: if `backend` is neither text nor None.
      ValueError: if JAX knows no backend of that name.

    Example:
      >>> import jmp_amp as amp
      >>> amp.half_dtype("tpu")
      dtype(bfloat16)
    """
    known = ("cpu", "gpu", "cuda", "rocm", "tpu")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(
            f"half_dtype({backend!r}): the name of a backend is text. "
            f"Use one of {', '.join(known)}, or None for the one in use."
        )
    try:
        devices = jax.local_devices(backend=backend)
    except RuntimeError as error:
        if backend is None:
            raise
        if backend in known:
            return BF16
        raise ValueError(
            f"half_dtype({backend!r}): JAX has no such backend here. "
            f"Use one of {', '.join(known)}, or None for the one in use."
        ) from error
    return BF16 if all(multiplies_bf16(device) for device in devices) else F16


def multiplies_bf16(device: object) -> bool:
    """Returns whether a device has bf16 matrix units, or emulates them."""
    capability = str(getattr(device, "compute_capability", ""))
    # "7.5" on NVIDIA, "gfx942" on AMD, absent on CPUs and TPUs.
    version = re.fullmatch(r"(\d+)\.\d+", capability)
    return version is None or int(version[1]) >= 8
