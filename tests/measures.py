"""What a mixed precision program costs and how wrong its gradients are.

Nothing here knows `jmp_amp`: every figure is read from a jaxpr or computed against
float64, for hand-written and automatic mixed precision alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.extend.core import Literal

HALF = ("bfloat16", "float16")

# Loss and gradient of one `(params, batch) -> (loss, state)` function.
Loss = Callable[[Any, Any], tuple[jax.Array, Any]]

# Without it XLA may keep f32 where the program says half, and every half precision
# program looks more accurate than it is.
EXACTLY_AS_WRITTEN = {"xla_allow_excess_precision": False}

# f16 is measured as it is trained, with a loss scale: without one the cotangents of a
# mean over some hundred tokens are subnormal. A power of two, so it rounds nothing.
LOSS_SCALE = {"float32": 1.0, "bfloat16": 1.0, "float16": 2.0**10}


class Matmul(NamedTuple):
    """A `dot_general` or `conv_general_dilated` of a jaxpr."""

    primitive: str
    operands: tuple[str, str]
    result: str


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of an open or closed jaxpr and of all that it calls."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield from equations(value)


def matmuls(fn: Callable[..., Any], *args: Any) -> list[Matmul]:
    """Returns the matrix products and convolutions of `fn(*args)`, as traced.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.ones((2, 2), jnp.bfloat16)
      >>> [m.operands for m in matmuls(jax.grad(lambda x: (x @ x).sum()), x)]
      [('bfloat16', 'bfloat16'), ('bfloat16', 'bfloat16'), ('bfloat16', 'bfloat16')]
    """
    return [
        Matmul(
            eqn.primitive.name,
            (eqn.invars[0].aval.dtype.name, eqn.invars[1].aval.dtype.name),
            eqn.outvars[0].aval.dtype.name,
        )
        for eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]


def saved_for_backward(loss: Loss, params: Any, batch: Any) -> tuple[list, list]:
    """Returns the avals that the backward pass keeps: (activations, arguments).

    What autodiff saves, before XLA recomputes any of it; nothing is executed.
    """

    def residuals(params: Any, batch: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, batch)[0], params)[1])

    closed = jax.make_jaxpr(residuals)(params, batch)
    jaxpr = getattr(closed, "jaxpr", closed)
    kept = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, Literal))
    arguments = set(jaxpr.invars)
    return (
        [v.aval for v in kept if v not in arguments],
        [v.aval for v in kept if v in arguments],
    )


def saved_bytes(loss: Loss, params: Any, batch: Any) -> int:
    """Returns the bytes of activations that the backward pass keeps.

    Arguments that it keeps are not counted: parameters and the batch live anyway.
    """
    activations, _ = saved_for_backward(loss, params, batch)
    return sum(aval.size * aval.dtype.itemsize for aval in activations)


def gradient(loss: Loss, dtype: str) -> Callable[[Any, Any], Any]:
    """Returns the compiled gradient of `loss`, rounding wherever the program does."""
    scale = LOSS_SCALE[dtype]

    def scaled(params: Any, batch: Any) -> jax.Array:
        return loss(params, batch)[0] * scale

    def unscaled(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda g: g / scale, jax.grad(scaled)(params, batch))

    return jax.jit(unscaled, compiler_options=EXACTLY_AS_WRITTEN)


def _dropout_of_float32(
    next_fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    """Drops what the f32 model drops: in x64 mode JAX would draw other numbers."""
    dropout = context.module
    if not isinstance(dropout, nn.Dropout) or context.method_name != "__call__":
        return next_fun(*args, **kwargs)
    (x,) = args
    keep = 1.0 - dropout.rate
    mask = jax.random.bernoulli(dropout.make_rng("dropout"), jnp.float32(keep), x.shape)
    return jnp.where(mask, x / keep, 0.0)


def float64_gradients(loss: Loss, samples: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns the gradients of the f32 model, computed in f64, as numpy trees."""

    def widen(leaf: Any) -> Any:
        return leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf

    def reference(params: Any, batch: Any) -> jax.Array:
        with nn.intercept_methods(_dropout_of_float32):
            return loss(params, batch)[0]

    with jax.enable_x64(True):
        compiled = jax.jit(jax.grad(reference))
        gradients = [compiled(*jax.tree.map(widen, sample)) for sample in samples]
        return jax.tree.map(np.asarray, gradients)


def relative_error(gradient: Any, reference: Any) -> float:
    """Returns |gradient - reference| / |reference| over all leaves, in f64."""
    wide = jax.tree.map(lambda g: np.asarray(g, np.float64), gradient)
    error = jax.tree.map(lambda g, r: float(np.sum((g - r) ** 2)), wide, reference)
    size = jax.tree.map(lambda r: float(np.sum(r**2)), reference)
    return math.sqrt(sum(jax.tree.leaves(error)) / sum(jax.tree.leaves(size)))


class Comparison(NamedTuple):
    """Paired errors of two programs over the same seeds.

    `ratio` is the median of our error over theirs: below 1, ours is better.
    `p_worse` is the chance that so many seeds or more are worse if both programs are
    equally good: the one-sided sign test, without the seeds where errors are equal.
    """

    ratio: float
    worse: int
    better: int
    p_worse: float


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """Returns how the errors `ours` compare with `theirs`, seed by seed.

    Example:
      >>> compare([1.0, 1.1, 1.2, 1.3], [1.0, 1.0, 1.0, 1.0])
      Comparison(ratio=1.15, worse=3, better=0, p_worse=0.125)
    """
    worse = sum(a > b for a, b in zip(ours, theirs, strict=True))
    better = sum(a < b for a, b in zip(ours, theirs, strict=True))
    decided = worse + better
    at_least = sum(math.comb(decided, k) for k in range(worse, decided + 1))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Comparison(float(np.median(ratios)), worse, better, at_least / 2**decided)
