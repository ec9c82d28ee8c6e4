"""Flax models and their hand-written half precision twins, with shared parameters.

The twin is what a careful person writes by hand today: Flax's own `dtype=` on every
layer, norms as Flax computes them, softmax and loss in f32. It is the bar for autocast,
which gets the f32 model unchanged.

`examples/benchmarks/compare_precision.py` prints how they compare.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

# Before JAX is imported: see `tests/h100.py`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jmp_amp as amp
from tests import h100, measures

Dtype = Any


class MLP(nn.Module):
    hidden: int
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(3):
            x = self.activation(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


class CNN(nn.Module):
    widths: tuple[int, ...]
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    pool: Callable[..., jax.Array] = nn.max_pool
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def conv_norm(x: jax.Array, width: int) -> jax.Array:
            x = nn.Conv(width, (3, 3), use_bias=False, dtype=self.dtype)(x)
            return nn.BatchNorm(not train, dtype=self.dtype)(x)

        for width in self.widths:
            x = self.activation(conv_norm(x, width))
            y = self.activation(conv_norm(x, width))
            x = self.activation(x + conv_norm(y, width))
            x = self.pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        x = self.activation(nn.Dense(128, dtype=self.dtype)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(10, dtype=self.dtype)(x)


class Transformer(nn.Module):
    vocabulary: int
    width: int
    heads: int
    dtype: Dtype = None
    attention_fn: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        position = self.param(
            "position", nn.initializers.normal(0.02), (1, *x.shape[1:])
        )
        x = x + position.astype(x.dtype)
        mask = nn.make_causal_mask(tokens, dtype=jnp.bool_)
        for _ in range(2):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                self.heads, dtype=self.dtype, attention_fn=self.attention_fn
            )(y, mask=mask)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(y))
            x = x + nn.Dense(self.width, dtype=self.dtype)(y)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


def attention_with_float32_softmax(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> jax.Array:
    """Attention in half precision but for its softmax.

    Flax's own `force_fp32_for_softmax` leaves the weights in f32, and with them the
    product with `value`.
    """
    weights = nn.dot_product_attention_weights(
        query, key, mask=mask, force_fp32_for_softmax=True
    )
    return jnp.einsum("...hqk,...khd->...qhd", weights.astype(value.dtype), value)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with data of some size; `inputs` makes them from a key."""

    model: nn.Module
    inputs: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    optimizer: optax.GradientTransformation

    def sample(self, key: jax.Array) -> tuple[Any, Any]:
        """Returns random (params, batch); trace it for their shapes alone."""
        for_params, for_inputs, for_dropout = jax.random.split(key, 3)
        x, label = self.inputs(for_inputs)
        with jax.numpy_dtype_promotion("standard"):
            variables = dict(self.model.init(for_params, x, train=False))
        params = variables.pop("params")
        batch = {"x": x, "label": label, "key": for_dropout, "state": variables}
        return params, batch

    def abstract(self) -> tuple[Any, Any]:
        """Returns the shapes of (params, batch): nothing is allocated."""
        return jax.eval_shape(self.sample, jax.random.key(0))

    def forward(self, model: nn.Module) -> Callable[[Any, Any], Any]:
        def forward(params: Any, batch: Any) -> tuple[jax.Array, Any]:
            # Norms and pools of Flax mix dtypes, which strict JAX refuses.
            with jax.numpy_dtype_promotion("standard"):
                return model.apply(
                    {"params": params, **batch["state"]},
                    batch["x"],
                    train=True,
                    rngs={"dropout": batch["key"]},
                    mutable=["batch_stats"],
                )

        return forward

    def loss(self) -> measures.Loss:
        """The loss of the f32 model."""
        return mean_cross_entropy(self.forward(self.model))

    def twin_loss(self, dtype: str, careful: bool = True) -> measures.Loss:
        """The loss of the hand-written half precision model, computed in f32.

        With `careful=False` the model is Flax's `dtype=` and nothing else: the softmax
        of its attention is in half precision too.
        """
        options: dict[str, Any] = {"dtype": jnp.dtype(dtype)}
        if careful and isinstance(self.model, Transformer):
            options["attention_fn"] = attention_with_float32_softmax
        forward = self.forward(self.model.clone(**options))

        def half_forward(params: Any, batch: Any) -> tuple[jax.Array, Any]:
            logits, state = forward(params, batch)
            return logits.astype(jnp.float32), state

        return mean_cross_entropy(half_forward)

    def autocast_loss(self, dtype: str, wrap: str = "loss") -> measures.Loss:
        """The loss of the f32 model under autocast, of the whole or of the forward."""
        policy = f"mixed_{dtype}"
        if wrap == "forward":
            return mean_cross_entropy(amp.autocast(self.forward(self.model), policy))
        return amp.autocast(self.loss(), policy)

    def step(self, loss: measures.Loss) -> Callable[..., Any]:
        """Returns the training step of `loss`; donate its first two arguments."""

        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            gradient = jax.value_and_grad(loss, has_aux=True)
            (value, state), grads = gradient(params, batch)
            # Adam of optax raises a float to its integer step count.
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, state, value

        return step


def mean_cross_entropy(forward: Callable[[Any, Any], Any]) -> measures.Loss:
    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        logits, state = forward(params, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), state

    return loss


def random_images(*shape: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    return lambda key: (
        jax.random.normal(key, shape),
        jax.random.randint(key, shape[:1], 0, 10),
    )


def random_tokens(vocabulary: int, *shape: int) -> Callable[..., Any]:
    def inputs(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = jax.random.randint(key, shape, 0, vocabulary)
        return tokens, jnp.roll(tokens, -1, axis=1)

    return inputs


_MOMENTUM = optax.sgd(0.1, momentum=0.9)
_ADAMW = optax.adamw(1e-3)

# "small" ones are run, "large" ones are only compiled: their temporary memory is far
# above the workspace of cublasLt. A rounding that flips one ReLU or one maximum moves a
# gradient by 10 % and more; the "smooth" models have none, and errors that differ by
# 3 % can be told apart.
CASES: dict[tuple[str, str], Case] = {
    ("mlp", "small"): Case(MLP(128), random_images(64, 64), _ADAMW),
    ("mlp", "smooth"): Case(MLP(128, nn.gelu), random_images(64, 64), _ADAMW),
    ("mlp", "large"): Case(MLP(2048), random_images(8192, 784), _ADAMW),
    ("cnn", "small"): Case(CNN((16, 32)), random_images(32, 8, 8, 1), _MOMENTUM),
    ("cnn", "smooth"): Case(
        CNN((16, 32), nn.silu, nn.avg_pool), random_images(32, 8, 8, 1), _MOMENTUM
    ),
    ("cnn", "large"): Case(CNN((64, 128)), random_images(256, 32, 32, 3), _MOMENTUM),
    ("transformer", "smooth"): Case(
        Transformer(64, 64, 4), random_tokens(64, 8, 16), _ADAMW
    ),
    ("transformer", "large"): Case(
        Transformer(4096, 512, 8), random_tokens(4096, 8, 512), _ADAMW
    ),
}
MODELS = ("mlp", "cnn", "transformer")
RUN = tuple(case for case in CASES if case[1] != "large")


@functools.cache
def references(model: str, size: str, seeds: int) -> tuple[list[Any], list[Any]]:
    """Returns [(params, batch), ...] and their gradients in f64, one for each seed."""
    case = CASES[model, size]
    sample = jax.jit(case.sample)
    samples = [sample(jax.random.key(seed)) for seed in range(seeds)]
    return samples, measures.float64_gradients(case.loss(), samples)


def gradient_errors(
    loss: measures.Loss, dtype: str, model: str, size: str, seeds: int
) -> list[float]:
    """Returns the relative gradient error of each seed against f64."""
    gradient = measures.gradient(loss, dtype)
    return [
        measures.relative_error(gradient(*sample), reference)
        for sample, reference in zip(*references(model, size, seeds), strict=True)
    ]


def traced(case: Case, loss: measures.Loss) -> tuple[list[measures.Matmul], int]:
    """Returns the matmuls, forward and backward, and the bytes saved between them."""
    sample = case.abstract()
    gradient = jax.value_and_grad(loss, has_aux=True)
    return measures.matmuls(gradient, *sample), measures.saved_bytes(loss, *sample)


class Compiled(NamedTuple):
    """What an H100 would run in one training step."""

    gemms: list[h100.Gemm]
    convolutions: list[h100.Convolution]
    pure_casts: list[h100.PureCast]
    temp_bytes: int


def compiled(case: Case, loss: measures.Loss) -> Compiled:
    """Returns the training step of `loss`, its parameters and state donated."""
    params, batch = case.abstract()
    opt_state = jax.eval_shape(case.optimizer.init, params)
    program = h100.compile_for_gpu(
        case.step(loss), params, opt_state, batch, donate_argnums=(0, 1)
    )
    return Compiled(
        h100.gemms(program),
        h100.convolutions(program),
        h100.pure_casts(program),
        h100.temp_bytes(program),
    )


AUTOCAST = ("loss", "forward")
PROGRAMS = ("f32", "twin", "flax", *AUTOCAST)


def program_loss(case: Case, dtype: str, program: str) -> measures.Loss:
    """Returns the loss of a row of the table.

    `flax` is the twin with its softmax in half precision; `loss` and `forward` are
    autocast around the whole loss and around the model alone.
    """
    if program == "f32":
        return case.loss()
    if program in ("twin", "flax"):
        return case.twin_loss(dtype, careful=program == "twin")
    return case.autocast_loss(dtype, program)
