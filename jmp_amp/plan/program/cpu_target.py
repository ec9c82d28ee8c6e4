"""Targets: the kind of device that a plan is made for.

A GPU or a TPU gains from half precision wherever an array is read or written. A CPU has
at most instructions for products of bf16 that add up in f32; every other operation on
bf16 costs it more than on f32, since it converts both ways. So a plan for a CPU is that
of f32, but for the operands of products.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.policies.dtypes import BF16, F16, F32
from jmp_amp.policies.policy import Policy

# What a caller may write. None is an accelerator too.
TARGETS = ("gpu", "tpu", "cpu", "auto")
# The instructions that multiply bf16, as Linux calls them on x86 and on Arm.
_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
_CPU_INFO = Path("/proc/cpuinfo")


class Cpu(NamedTuple):
    """A CPU that a plan is made for.

    Attributes:
      native: whether it has instructions for products of bf16.
    """

    native: bool

    def __str__(self) -> str:
        if self.native:
            return "bf16 products with f32 results, f32 between them"
        return "no instructions for bf16 products, so all is f32"

    def in_words(
        self, asked: Collection[np.dtype], gains: bool, own: bool = False
    ) -> str:
        """Returns what it runs of a program.

        Args:
          asked: the compute dtypes of the policies.
          gains: whether the plan has any product in bf16.
          own: whether the program itself asks for anything in half precision.
        """
        if own:
            told = str(self) if gains else "f32"
            return f"{told}, and half precision where the program asks for it"
        if gains or not self.native:
            return str(self)
        if F16 in asked and BF16 not in asked:
            return "XLA computes products of f16 in f32, so all is f32"
        return "no product in bf16, so all is f32"

    def runs(self, asked: Policy) -> Policy:
        """Returns the policy of all operations but products.

        What the backward pass keeps is what `asked` says. If it does not say it, that
        is "all": a CPU would rather read than compute again.
        """
        return _in_f32(asked)


def checked_target(text: object, call: str) -> str | None:
    """Returns a target as it was written.

    Args:
      text: one of `TARGETS`, or None.
      call: the caller's call as written, with `{}` for the target, for errors.

    Raises:
      TypeError: if it is neither text nor None.
      ValueError: if it is none of `TARGETS`.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(
            f"{call.format(repr(text))}: a target is text, found "
            f"{type(text).__name__}. Use {_listed()}."
        )
    if text not in TARGETS:
        raise ValueError(f"{call.format(repr(text))}: unknown target. Use {_listed()}.")
    return text


def cpu_of(target: str | None) -> Cpu | None:
    """Returns the CPU that a plan is made for; None for a GPU or a TPU.

    "cpu" is the CPU of this machine, "auto" JAX's default backend now.
    """
    kind = jax.default_backend() if target == "auto" else target
    return this_cpu() if kind == "cpu" else None


def _listed() -> str:
    *first, last = (f'"{each}"' for each in TARGETS)
    return f"{', '.join(first)} or {last}; None plans for a GPU or a TPU"


@functools.cache
def this_cpu() -> Cpu:
    """Returns the CPU of this machine, as its XLA compiles for it."""
    return Cpu(_has_instructions() and _keeps_bf16())


def _has_instructions() -> bool:
    try:
        told = _CPU_INFO.read_text()
    except OSError:
        return False
    flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", told, re.MULTILINE)
    return any(not _INSTRUCTIONS.isdisjoint(line.split()) for line in flags)


def _keeps_bf16() -> bool:
    """Whether the compiler multiplies bf16, and not the same cast to f32."""

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        # Asked once, whatever the default precision is around here.
        default = jax.lax.Precision.DEFAULT
        return jnp.matmul(x, y, precision=default, preferred_element_type=F32)

    x = jax.ShapeDtypeStruct((256, 256), BF16)
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return False  # JAX was told to leave the CPU alone
    with jax.default_device(device):
        compiled = jax.jit(product).lower(x, x).compile()
    return "convert(" not in str(compiled.as_text())


@functools.lru_cache(maxsize=256)
def _in_f32(asked: Policy) -> Policy:
    return dataclasses.replace(asked, compute_dtype=F32, output_dtype=F32, matmul=None)
