"""Layers that are written to compute in float32: `nn.Dense(10, dtype=jnp.float32)`.

In float32 code the argument changes no equation. So the attribute of the module is
read. A dtype that the whole model has says nothing about one layer: all of them got it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import numpy as np
from flax import linen as nn
from flax import nnx

from jmp_amp.policies.dtypes import F32

_PLAIN = (nn.Module, nnx.Module, nnx.Variable, type)


def asks_for_f32(module: object, around: Sequence[object]) -> bool:
    """Whether a module was given `dtype=float32`, and the modules around it were not.

    A model that has the dtype itself, or a configuration with it, hands it on.

    Args:
      module: a module of linen or nnx.
      around: the modules that it is a part of.
    """
    cls = type(module)
    if not _is_f32(getattr(module, "dtype", None)) or _is_f32(_default(cls)):
        return False
    if isinstance(module, nnx.Embed):
        return False  # It has the dtype of its table if nobody gave it one.
    is_model = not around and not cls.__module__.startswith("flax.")
    return not is_model and not any(map(_is_f32, _dtypes(around)))


def linen_modules_around(module: nn.Module) -> list[nn.Module]:
    """Returns the linen modules around a bound module, the innermost first."""
    found, parent = [], module.parent
    while isinstance(parent, nn.Module):
        found.append(parent)
        parent = parent.parent
    return found


def _default(cls: type) -> object:
    """Returns what the dtype of a module is if nobody gives one."""
    if issubclass(cls, nn.Module):
        return getattr(cls, "dtype", None)
    parameter = inspect.signature(cls.__init__).parameters.get("dtype")
    return None if parameter is None else parameter.default


def _dtypes(modules: Sequence[object]) -> Iterator[object]:
    """Yields the dtypes of modules, and those of their configurations."""
    for module in modules:
        yield getattr(module, "dtype", None)
        for value in vars(module).values():
            # A parameter has a dtype too, and so has `jnp.float32`.
            if not isinstance(value, _PLAIN) and not hasattr(value, "shape"):
                yield getattr(value, "dtype", None)


def _is_f32(dtype: object) -> bool:
    try:
        return dtype is not None and np.dtype(dtype) == F32  # pyright: ignore
    except TypeError:
        return False
