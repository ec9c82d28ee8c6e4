"""Floating dtypes: their names, and which of them the library moves values between.

A dtype has one short name (`f32`), which is the one that policies and reports print,
and several that are understood (`float32`, `fp32`, `full`). `half` is a name for
the dtype that the machine at hand multiplies fast, see `half_dtype`.

`cast_floating` is explicit: its caller has named the dtype, so f64 leaves follow too.
The library itself casts fewer dtypes, see `is_castable`.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

PyTree = Any  # A pytree of arrays; jax has no type for it.
AnyFn = Callable[..., Any]  # A user's function.
Tree = TypeVar("Tree")

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
E4M3, E5M2 = _NARROW[:2]

_SHORT_NAMES = {
    **{F16: "f16", BF16: "bf16", F32: "f32", F64: "f64"},
    **{E4M3: "f8_e4m3", E5M2: "f8_e5m2"},
}
_DTYPES: dict[str, np.dtype] = {
    **{
        dtype.name.replace("float", prefix): dtype
        for dtype in (F16, F32, F64, *_NARROW)
        for prefix in ("float", "f", "fp")
    },
    **{name: dtype for dtype, name in _SHORT_NAMES.items()},
    **{"bfloat16": BF16, "full": F32, "fp8_e4m3": E4M3, "e4m3": E4M3, "e5m2": E5M2},
}


# Every name that a policy may be written with.
NAMES = (*_DTYPES, "half")


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
      remedy: the end of the error, if it is not the list of dtypes.

    Raises:
      TypeError: if it is no dtype, or not one of floats.
      ValueError: if it is text that names no dtype.
    """
    given = _numpy_dtype(dtype)
    # By name, not by identity: a big-endian float32 is a float32 to JAX.
    by_name = _DTYPES.get(getattr(given, "name", ""))
    found = parse_dtype(dtype) if isinstance(dtype, str) else by_name
    if found is not None:
        return found
    shown = given.name if given and isinstance(dtype, type | np.dtype) else repr(dtype)
    call = call.replace("{}", shown)
    remedy = remedy or advice()
    if given is not None and not jnp.issubdtype(given, jnp.floating):
        raise TypeError(f"{call}: {given.name} is not a floating dtype. {remedy}")
    if isinstance(dtype, str):
        if re.fullmatch(r"mixed_b?float16|fp8|.*=.*", dtype.strip().lower()):
            remedy = f"It is the text of a policy: amp.get_policy({dtype!r}). {remedy}"
        raise ValueError(f"{call}: unknown dtype {dtype!r}. {remedy}")
    fact = "that is not a dtype" if given is None else f"JAX has no {given.name}"
    raise TypeError(f"{call}: {fact}. {remedy}")


def given_as_dtype(value: object) -> np.dtype | None:
    """Returns the floating dtype that an argument is, such as `jnp.bfloat16`.

    None if it is anything else; text is not taken for a dtype.
    """
    given = _numpy_dtype(value) if isinstance(value, type | np.dtype) else None
    return _DTYPES.get(getattr(given, "name", ""))


def _numpy_dtype(dtype: Any) -> np.dtype | None:
    if dtype is float:
        return jnp.result_type(float)
    try:
        # numpy takes None for float64.
        return None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError):
        return None


def cast_leaf(leaf: PyTree, dtype: np.dtype) -> PyTree:
    """Returns one leaf of a tree cast to `dtype`; see `cast_floating` for which."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return leaf
    is_cast = jnp.issubdtype(leaf.dtype, jnp.floating) and not is_fp8(leaf.dtype)
    if leaf.dtype == dtype or not is_cast:
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


def cast_floating(tree: Tree, dtype: DTypeLike) -> Tree:
    """Returns `tree` with its floating-point leaves cast to `dtype`.

    Leaves of f16, bf16, f32 and f64 are cast: JAX arrays (they keep their sharding) and
    tracers, numpy arrays and numpy scalars (they stay numpy, on the host), and
    `jax.ShapeDtypeStruct`.

    Integer, boolean, complex, PRNG-key and non-array leaves come back as the same
    objects, and so does a floating leaf that already has `dtype`. Non-array leaves
    are, for example, strings, functions and Python's own `float`, which takes the dtype
    of the array it meets anyway. fp8 leaves come back as they are, because their values
    mean nothing without a scale that this function does not see.

    Values beyond the range of `dtype` become inf; in an fp8 `dtype`, of which most have
    no inf, they become its largest value.

    Args:
      tree: any pytree; array leaves of any shape.
      dtype: a floating dtype, or anything `jnp.dtype` accepts, or one of the names
        that `get_policy` knows ("bf16", "half", "f8_e4m3").

    Returns:
      A pytree of the same structure; every leaf keeps its shape.

    Raises:
      TypeError: if `dtype` is not a floating dtype.
      ValueError: if it is text that names no dtype.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> batch = {"x": jnp.ones((2, 3)), "label": jnp.arange(2)}
      >>> batch = amp.cast_floating(batch, "bfloat16")
      >>> jax.tree.map(lambda leaf: leaf.dtype.name, batch)
      {'label': 'int32', 'x': 'bfloat16'}
    """
    wanted = floating_dtype(dtype, "cast_floating(tree, {})")
    return jax.tree.map(lambda leaf: cast_leaf(leaf, wanted), tree)


def cast_to_half(tree: Tree) -> Tree:
    """Returns `tree` with its floating-point leaves in `half_dtype()`.

    See `cast_floating` for which leaves are cast.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> amp.cast_to_half(jnp.ones(2)).dtype == amp.half_dtype()
      True
    """
    return cast_floating(tree, half_dtype())


def cast_to_full(tree: Tree) -> Tree:
    """Returns `tree` with its floating-point leaves in f32.

    See `cast_floating` for which leaves are cast. f64 leaves become f32 as well.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> amp.cast_to_full({"w": jnp.ones(2, jnp.float16), "step": 3})
      {'step': 3, 'w': Array([1., 1.], dtype=float32)}
    """
    return cast_floating(tree, F32)


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
    remedy = f"Use one of {', '.join(known)}, or None for the one in use."
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"half_dtype({backend!r}): no name of a backend. {remedy}")
    try:
        devices = jax.local_devices(backend=backend)
    except RuntimeError as error:
        if backend is None:
            raise
        if backend in known:
            return BF16
        fact = "JAX has no such backend here."
        raise ValueError(f"half_dtype({backend!r}): {fact} {remedy}") from error
    return BF16 if all(multiplies_bf16(device) for device in devices) else F16


def multiplies_bf16(device: object) -> bool:
    """Returns whether a device has bf16 matrix units, or emulates them."""
    capability = str(getattr(device, "compute_capability", ""))
    # "7.5" on NVIDIA, "gfx942" on AMD, absent on CPUs and TPUs.
    version = re.fullmatch(r"(\d+)\.\d+", capability)
    return version is None or int(version[1]) >= 8
