"""An MLP, a CNN and a transformer, and the same written by hand in half precision.

The twin is what a careful person writes by hand today: Flax's own `dtype=` on every
layer, norms as Flax computes them, softmax and loss in f32. It is the bar for autocast,
which gets the f32 model unchanged.

Here alone a case tells its forward pass from its loss: a user wraps the one or both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.case import Case, Forward, Fp8Twin, Loss
from tests.zoo.language import fp8_twin

Dtype = Any
# (params, batch) -> (f32[], state of the model)
LossAndState = Callable[[Any, Any], tuple[jax.Array, Any]]


class MLP(nn.Module):
    hidden: int
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    dtype: Dtype = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        precision = {"dtype": self.dtype, "dot_general_cls": self.dot_general_cls}
        for _ in range(3):
            x = self.activation(nn.Dense(self.hidden, **precision)(x))
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
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        cls = self.dot_general_cls
        dense = functools.partial(nn.Dense, dtype=self.dtype, dot_general_cls=cls)
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        position = self.param(
            "position", nn.initializers.normal(0.02), (1, *x.shape[1:])
        )
        x = x + position.astype(x.dtype)
        mask = nn.make_causal_mask(tokens, dtype=jnp.bool_)
        for _ in range(2):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                self.heads,
                dtype=self.dtype,
                attention_fn=self.attention_fn,
                qkv_dot_general_cls=cls,
                out_dot_general_cls=cls,
            )(y, mask=mask)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(dense(4 * self.width)(y))
            x = x + dense(self.width)(y)
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


def mean_cross_entropy(forward: Forward) -> LossAndState:
    """Returns the loss of logits, computed in f32."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        logits, state = forward(params, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), state

    return loss


def loss_alone(forward: Forward) -> Loss:
    loss = mean_cross_entropy(forward)
    return lambda params, batch: loss(params, batch)[0]


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A model with data of some size; `inputs` makes them from a key."""

    model: nn.Module
    inputs: Callable[[jax.Array], tuple[jax.Array, jax.Array]]

    def sample(self, key: jax.Array) -> tuple[Any, Any]:
        """Returns random (params, batch); trace it for their shapes alone."""
        for_params, for_inputs, for_dropout = jax.random.split(key, 3)
        x, label = self.inputs(for_inputs)
        with jax.numpy_dtype_promotion("standard"):
            variables = dict(self.model.init(for_params, x, train=False))
        params = variables.pop("params")
        batch = {"x": x, "label": label, "key": for_dropout, "state": variables}
        return params, batch

    def forward(self, params: Any, batch: Any) -> tuple[jax.Array, Any]:
        """Returns the logits in the model's dtype, and the model's new state."""
        # Norms and pools of Flax mix dtypes, which strict JAX refuses.
        with jax.numpy_dtype_promotion("standard"):
            return self.model.apply(
                {"params": params, **batch["state"]},
                batch["x"],
                train=True,
                rngs={"dropout": batch["key"]},
                mutable=["batch_stats"],
            )

    def half_fields(self, dtype: Dtype) -> dict[str, Any]:
        """Returns the fields that the twin of the model has otherwise."""
        fields: dict[str, Any] = {"dtype": jnp.dtype(dtype)}
        if isinstance(self.model, Transformer):
            fields["attention_fn"] = attention_with_float32_softmax
        return fields

    def half_forward(self, dtype: Dtype) -> Forward:
        """Returns `forward` of the twin, its logits in f32."""
        in_half = self.model.clone(**self.half_fields(dtype))
        twin = dataclasses.replace(self, model=in_half)

        def half_forward(params: Any, batch: Any) -> tuple[jax.Array, Any]:
            logits, state = twin.forward(params, batch)
            return logits.astype(jnp.float32), state

        return half_forward

    def fp8_twin(self) -> Fp8Twin | None:
        """Returns the bf16 twin with Flax's fp8 layers, for a model without state."""
        if not hasattr(self.model, "dot_general_cls"):
            return None

        def loss_of(logits: jax.Array, batch: Any) -> jax.Array:
            logits = logits.astype(jnp.float32)
            return mean_cross_entropy(lambda *_: (logits, ()))(None, batch)[0]

        return fp8_twin(
            self.model.clone(**self.half_fields("bfloat16")),
            loss_of,
            lambda batch: (batch["x"], True),
        )

    def case(self) -> Case:
        return Case(
            self.sample,
            loss_alone(self.forward),
            lambda dtype: loss_alone(self.half_forward(dtype)),
            lambda wrap: loss_alone(wrap(self.forward)),
            self.fp8_twin(),
        )


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


CLASSIFIERS = {
    ("mlp", "small"): Classifier(MLP(128, nn.gelu), random_images(64, 64)),
    ("mlp", "large"): Classifier(MLP(2048), random_images(8192, 784)),
    ("cnn", "small"): Classifier(
        CNN((16, 32), nn.silu, nn.avg_pool), random_images(32, 8, 8, 1)
    ),
    ("cnn", "large"): Classifier(CNN((64, 128)), random_images(256, 32, 32, 3)),
    ("transformer", "small"): Classifier(
        Transformer(64, 64, 4), random_tokens(64, 8, 16)
    ),
    ("transformer", "large"): Classifier(
        Transformer(4096, 512, 8), random_tokens(4096, 8, 512)
    ),
}
CASES: dict[tuple[str, str], Case] = {
    name: classifier.case() for name, classifier in CLASSIFIERS.items()
}
# A rounding that flips one ReLU or one maximum moves a gradient by 10 % and more: not
# in the zoo, whose small models are smooth.
BRANCHING = {
    "mlp": Classifier(MLP(128), random_images(64, 64)).case(),
    "cnn": Classifier(CNN((16, 32)), random_images(32, 8, 8, 1)).case(),
}
