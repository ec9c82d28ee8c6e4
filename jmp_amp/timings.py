"""How fast products and a training step are on this machine, beside f32."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.plan.program.dimensions import Dimensions
from jmp_amp.plan.rewrites.cpu import CpuProduct, half_product
from jmp_amp.policies.dtypes import BF16, F16, F32, short_name
from jmp_amp.transform.autocasting import autocast

ROUNDS = 30
_DTYPES = (F32, BF16, F16)


class Product(NamedTuple):
    """The limits of a dtype, and its speed on this machine.

    Attributes:
      dtype: its short name.
      largest: the largest finite number.
      smallest: the smallest positive number, denormals included.
      last_place: the distance from 1 to the next number.
      speed: of a matrix product, as a multiple of float32's.
      speed_on_cpu: of the product that a plan for this CPU runs instead; None where
        that is in f32, and on other devices.
    """

    dtype: str
    largest: float
    smallest: float
    last_place: float
    speed: float
    speed_on_cpu: float | None = None


class Speeds(NamedTuple):
    """How fast a training step is on this CPU, as a multiple of float32's.

    Attributes:
      autocast: under `autocast(fn)`.
      on_cpu: under `autocast(fn, target="cpu")`.
    """

    autocast: float
    on_cpu: float


def of_steps() -> Speeds:
    """Returns how fast a training step of a small network is, in three programs."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x * x)

    weights = [jnp.full((512, 512), 2.0**-8, F32)] * 3
    x = jnp.ones((512, 512), F32)
    steps = [
        jax.jit(jax.grad(fn))
        for fn in (loss, autocast(loss), autocast(loss, target="cpu"))
    ]
    plain, *others = medians([functools.partial(step, weights, x) for step in steps])
    return Speeds(*(plain / each for each in others))


def of_products(kind: str, multiplies_bf16: bool) -> tuple[Product, ...]:
    """Returns the speed of a matrix product in f32, bf16 and f16.

    Args:
      kind: the `platform` of the device.
      multiplies_bf16: whether it is a CPU that does.
    """
    size = 512 if kind == "cpu" else 4096
    runs = [_product(jnp.matmul, dtype, size) for dtype in _DTYPES]
    if multiplies_bf16:
        matrices = CpuProduct(Dimensions.among(((1,), (0,)), ((), ()), (2, 2)))
        product = functools.partial(half_product, matrices)
        runs.append(_product(product, BF16, size))
    times = medians(runs)
    on_cpu = {BF16: times[0] / times[-1]} if multiplies_bf16 else {}
    return tuple(
        Product(
            short_name(dtype),
            float(jnp.finfo(dtype).max),
            float(jnp.finfo(dtype).smallest_subnormal),
            float(jnp.finfo(dtype).eps),
            times[0] / seconds,
            on_cpu.get(dtype),
        )
        for dtype, seconds in zip(_DTYPES, times[:3], strict=True)
    )


def _product(
    product: Callable[..., jax.Array], dtype: np.dtype, size: int
) -> Callable[[], object]:
    matrix = jnp.full((size, size), 2.0**-10, dtype)
    return functools.partial(jax.jit(product), matrix, matrix)


def medians(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the median seconds of each of some compiled programs.

    They take turns: a machine that slows down does so for all of them.
    """
    for run in runs:
        jax.block_until_ready(run())  # compiles
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, seconds in zip(runs, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in times]
