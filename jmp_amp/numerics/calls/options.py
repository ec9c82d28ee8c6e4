"""How programs that are measured are compiled: every rounding is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax

# XLA may drop a cast to half and its inverse, and its CPU compiler does.
_EXACT: dict[str, Any] = {"xla_allow_excess_precision": False}
# LLVM's own optimisations take most of the time to compile for a CPU.
# Kernels that are split among several modules take longer, in all.
_FAST: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if version("jax").startswith("0.10."):  # JAX < 0.11: later ones have no other kind.
    _FAST["xla_cpu_use_fusion_emitters"] = False


def compiler_options(fast: bool = False) -> dict[str, Any]:
    """Returns the options for `jax.stages.Lowered.compile`.

    Args:
      fast: whether to compile fast, for a program that runs seldom or is small: on a
        CPU it runs about four times as long then.
    """
    return _EXACT | _FAST if fast and jax.default_backend() == "cpu" else _EXACT


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Programs run here to their end, and compiled, whatever JAX was told to debug.

    With `jax_debug_nans` JAX stops at the value that is looked for.
    """
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
        yield
