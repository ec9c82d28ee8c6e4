"""What a mixed precision program costs and how wrong its gradients are.

Nothing here knows `jmp_amp`: every figure is read from a jaxpr or computed against
float64, for hand-written and automatic mixed precision alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.extend.core import Literal

from tests.programs import equations

HALF = ("bfloat16", "float16")

# Loss and gradient of one `(params, batch) -> (loss, state)` function.
Loss = Callable[[Any, Any], tuple[jax.Array, Any]]

# Without it XLA may keep f32 where the program says half, and every half precision
# program looks more accurate than it is.
EXACTLY_AS_WRITTEN = {"xla_allow_excess_precision": False}

# As a user compiles: `tests/conftest.py` compiles without optimising. Optimised code
# contracts a product and a sum to one operation, which rounds once.
OPTIMISED = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11):
    OPTIMISED["xla_cpu_use_fusion_emitters"] = True  # JAX < 0.11

# f16 is measured as it is trained, with a loss scale: without one the cotangents of a
# mean over some hundred tokens are subnormal. A power of two, so it rounds nothing.
LOSS_SCALE = {"float32": 1.0, "bfloat16": 1.0, "float16": 2.0**10}


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` as one program; its operations, each compiled alone, take longer."""
    return jax.jit(fn, compiler_options=EXACTLY_AS_WRITTEN)


class Matmul(NamedTuple):
    """A `dot_general` or `conv_general_dilated` of a jaxpr."""

    primitive: str
    operands: tuple[str, str]
    result: str


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


class Traced(NamedTuple):
    """A loss and its gradient, traced once; nothing is executed.

    Attributes:
      jaxpr: closed, of both passes.
      value: the shape of the loss.
      gradient: the shapes of the gradient.
      saved_bytes: of the activations that the backward pass keeps: what autodiff saves,
        before XLA recomputes any of it. Arguments that it keeps are not counted:
        parameters and the batch live anyway.
    """

    jaxpr: Any
    value: jax.ShapeDtypeStruct
    gradient: Any
    saved_bytes: int


def traced(loss: Loss, params: Any, batch: Any) -> Traced:
    """Returns the traced value and gradient of `loss`."""

    def both_passes(params: Any, batch: Any) -> Any:
        value, backward = jax.vjp(lambda p: loss(p, batch)[0], params)
        (gradient,) = backward(jnp.ones_like(value))
        return jax.tree.leaves(backward), value, gradient

    closed, shapes = jax.make_jaxpr(both_passes, return_shape=True)(params, batch)
    kept, value, gradient = shapes
    jaxpr = closed.jaxpr
    activations = dict.fromkeys(
        v
        for v in jaxpr.outvars[: len(kept)]
        if not isinstance(v, Literal) and v not in jaxpr.invars
    )
    saved = sum(v.aval.size * v.aval.dtype.itemsize for v in activations)
    return Traced(closed, value, gradient, saved)


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
    found, expected = (
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
        for tree in (gradient, reference)
    )
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, expected)
    error = jax.tree.map(lambda f, e: float(np.sum((f - e) ** 2)), found, expected)
    size = jax.tree.map(lambda e: float(np.sum(e**2)), expected)
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
