"""More transformers: an encoder-decoder, a mixture of experts, two contrastive towers.

As in `language.py`, `dtype=None` is the f32 model and a half dtype the twin.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.case import Case
from tests.zoo.language import (
    Attention,
    Block,
    Dtype,
    attend,
    causal,
    linen_case,
    next_token_loss,
    random_tokens,
    rms_norm,
    wide,
)

# T5: RMSNorm, relative positions, cross attention, no biases, gated GELU.


class RMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(
            x, self.param("scale", nn.initializers.ones_init(), x.shape[-1:])
        )


class RelativePositions(nn.Module):
    """A bias for each head and distance, T5's buckets: exact ones, then wider ones."""

    heads: int
    buckets: int = 32
    bidirectional: bool = True

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        positions = jnp.arange(length)
        distance = positions[None, :] - positions[:, None]
        buckets = self.buckets
        if self.bidirectional:
            buckets //= 2
            offset = jnp.where(distance > 0, buckets, 0)
            distance = jnp.abs(distance)
        else:
            offset = 0
            distance = jnp.maximum(-distance, 0)
        exact = buckets // 2
        ratio = jnp.maximum(distance, 1).astype(jnp.float32) / exact
        wider = exact + (jnp.log(ratio) / math.log(128 / exact) * (buckets - exact))
        wider = jnp.minimum(wider.astype(distance.dtype), buckets - 1)
        bucket = offset + jnp.where(distance < exact, distance, wider)
        table = self.param(
            "bias", nn.initializers.normal(0.5), (self.buckets, self.heads)
        )
        return table[bucket].transpose(2, 0, 1)[None]


class CrossAttention(nn.Module):
    """Attention of `x` to `source`, which is `x` itself for self attention."""

    heads: int
    dtype: Dtype = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array,
        mask: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        width = x.shape[-1]

        def project(x: jax.Array, name: str, variance: float = 1.0) -> jax.Array:
            init = nn.initializers.variance_scaling(variance, "fan_in", "normal")
            y = nn.Dense(width, False, self.dtype, kernel_init=init, name=name)(x)
            return y.reshape(*y.shape[:2], self.heads, -1)

        # T5 does not divide the scores: its initial query weights are smaller instead.
        query = project(x, "query", self.heads / width)
        key, value = project(source, "key"), project(source, "value")
        mixed = attend(query, key, value, mask, bias, scale=1.0)
        return nn.Dense(width, use_bias=False, dtype=self.dtype, name="out")(
            mixed.reshape(x.shape)
        )


class GatedFeedForward(nn.Module):
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(width: int) -> nn.Dense:
            return nn.Dense(width, use_bias=False, dtype=self.dtype)

        width = x.shape[-1]
        return dense(width)(nn.gelu(dense(2 * width)(x)) * dense(2 * width)(x))


class EncoderDecoder(nn.Module):
    vocabulary: int
    width: int
    heads: int
    layers: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        def attention(*args: Any, **kwargs: Any) -> jax.Array:
            return CrossAttention(self.heads, self.dtype)(*args, **kwargs)

        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        source, target = batch["source"], batch["target"]
        x = embedding(source)
        bias = RelativePositions(self.heads)(source.shape[1])
        padding = batch["mask"][:, None, None, :]
        for _ in range(self.layers):
            y = RMSNorm()(x)
            x = x + attention(y, y, padding, bias)
            x = x + GatedFeedForward(self.dtype)(RMSNorm()(x))
        memory = RMSNorm()(x)
        x = embedding(target)
        bias = RelativePositions(self.heads, bidirectional=False)(target.shape[1])
        for _ in range(self.layers):
            y = RMSNorm()(x)
            x = x + attention(y, y, causal(target.shape[1]), bias)
            x = x + attention(RMSNorm()(x), memory, padding)
            x = x + GatedFeedForward(self.dtype)(RMSNorm()(x))
        y = RMSNorm()(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(y)


def encoder_decoder(
    vocabulary: int, width: int, heads: int, layers: int, batch: int, length: int
) -> Case:
    def inputs(key: jax.Array) -> dict[str, jax.Array]:
        for_source, for_target, for_mask = jax.random.split(key, 3)
        lengths = jax.random.randint(for_mask, (batch, 1), length // 2, length + 1)
        return {
            "source": random_tokens(for_source, vocabulary, batch, length),
            "target": random_tokens(for_target, vocabulary, batch, length),
            "mask": jnp.arange(length)[None, :] < lengths,
        }

    return linen_case(
        EncoderDecoder(vocabulary, width, heads, layers),
        inputs,
        lambda logits, batch: next_token_loss(logits, batch["target"]),
    )


# Experts: two of many for each token, as GShard and Mixtral choose them.


class Experts(nn.Module):
    """Feed-forward layers of which each token takes its best two.

    Returns the result and the load balancing loss of Switch. Dispatch and combination
    are products with one-hot tensors [group, tokens, experts, capacity], as in GShard,
    Switch and Flaxformer, whose f32 router and half combination weights the twin has.
    """

    experts: int
    capacity: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        width = x.shape[-1]
        hidden = 2 * width
        router = self.param(
            "router", nn.initializers.lecun_normal(), (width, self.experts)
        )
        shape = (self.experts, width, hidden)
        up = self.param("up", nn.initializers.lecun_normal(batch_axis=0), shape)
        shape = (self.experts, hidden, width)
        down = self.param("down", nn.initializers.lecun_normal(batch_axis=0), shape)

        probabilities = jax.nn.softmax(wide(x) @ wide(router))
        gates, chosen = jax.lax.top_k(probabilities, 2)
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        # [group, token, choice, expert]
        one_hot = jax.nn.one_hot(chosen, self.experts, dtype=gates.dtype)
        # The first choices of all tokens take their places before the second ones.
        queue = jnp.moveaxis(one_hot, 2, 1).reshape(x.shape[0], -1, self.experts)
        place = jnp.cumsum(queue, axis=1) * queue - 1
        place = jnp.moveaxis(
            place.reshape(x.shape[0], 2, x.shape[1], self.experts), 1, 2
        )
        # one_hot is zero where the place is negative or beyond the capacity.
        places = jax.nn.one_hot(
            place.astype(jnp.int32), self.capacity, dtype=gates.dtype
        )
        combine = jnp.sum(gates[..., None, None] * places, axis=2)
        dispatch = (combine > 0).astype(x.dtype)

        received = jnp.einsum("gtec,gtd->gecd", dispatch, x)
        y = nn.gelu(jnp.einsum("gecd,edh->gech", received, up.astype(x.dtype)))
        y = jnp.einsum("gech,ehd->gecd", y, down.astype(x.dtype))
        mixed = jnp.einsum("gtec,gecd->gtd", combine.astype(x.dtype), y)

        share = jnp.mean(one_hot[:, :, 0], axis=(0, 1))
        balance = self.experts * jnp.sum(share * jnp.mean(probabilities, axis=(0, 1)))
        return mixed, balance


class MoE(nn.Module):
    vocabulary: int
    width: int
    heads: int
    layers: int
    experts: int
    capacity: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        balances = []
        for _ in range(self.layers):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + Attention(self.heads, dtype=self.dtype)(y)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y, balance = Experts(self.experts, self.capacity, self.dtype)(y)
            x = x + y
            balances.append(balance)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x), balances


def experts(
    vocabulary: int, width: int, heads: int, layers: int, number: int, *shape: int
) -> Case:
    # Room for twice the average load.
    capacity = 4 * shape[1] // number

    def loss_of(output: tuple[jax.Array, list[jax.Array]], tokens: Any) -> jax.Array:
        logits, balances = output
        return next_token_loss(logits, tokens) + 0.01 * sum(balances)

    return linen_case(
        MoE(vocabulary, width, heads, layers, number, capacity),
        lambda key: random_tokens(key, vocabulary, *shape),
        loss_of,
    )


# CLIP: an image and a text tower, and the contrastive loss of all pairs.


class Towers(nn.Module):
    vocabulary: int
    patch: int
    width: int
    heads: int
    layers: int
    dtype: Dtype = None

    @nn.compact
    def __call__(
        self, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def tower(x: jax.Array, name: str, causal: bool) -> jax.Array:
            position = self.param(
                f"{name}_position", nn.initializers.normal(0.02), (1, *x.shape[1:])
            )
            x = x + position.astype(x.dtype)
            for _ in range(self.layers):
                x = Block(self.heads, causal, self.dtype)(x)
            x = nn.LayerNorm(dtype=self.dtype)(x)
            x = x[:, -1] if causal else jnp.mean(x, axis=1)
            x = nn.Dense(self.width, use_bias=False, dtype=self.dtype)(x)
            # The norm in f32, the features in half: as OpenCLIP under torch.autocast.
            y = wide(x)
            norm = jnp.sqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + 1e-12)
            return (y / norm).astype(x.dtype)

        patches = nn.Conv(
            self.width,
            (self.patch, self.patch),
            (self.patch, self.patch),
            dtype=self.dtype,
        )(batch["image"])
        patches = patches.reshape(patches.shape[0], -1, self.width)
        tokens = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(batch["text"])
        temperature = self.param(
            "temperature", nn.initializers.constant(math.log(1 / 0.07)), ()
        )
        return (
            tower(patches, "image", False),
            tower(tokens, "text", True),
            temperature,
        )


def contrastive_loss(
    output: tuple[jax.Array, jax.Array, jax.Array], _: Any
) -> jax.Array:
    """Returns InfoNCE, both ways; the logits are f32 from the temperature on."""
    image, text, temperature = output
    logits = wide(image @ text.T) * jnp.exp(temperature)
    labels = jnp.arange(logits.shape[0])
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    both = cross_entropy(logits, labels), cross_entropy(logits.T, labels)
    return (both[0].mean() + both[1].mean()) / 2


def towers(
    vocabulary: int,
    patch: int,
    width: int,
    heads: int,
    layers: int,
    batch: int,
    image: int,
    text: int,
) -> Case:
    def inputs(key: jax.Array) -> dict[str, jax.Array]:
        for_image, for_text = jax.random.split(key)
        return {
            "image": jax.random.normal(for_image, (batch, image, image, 3)),
            "text": random_tokens(for_text, vocabulary, batch, text),
        }

    model = Towers(vocabulary, patch, width, heads, layers)
    return linen_case(model, inputs, contrastive_loss)


CASES: dict[tuple[str, str], Case] = {
    ("encoder_decoder", "small"): encoder_decoder(64, 32, 4, 2, 8, 16),
    ("encoder_decoder", "large"): encoder_decoder(4096, 512, 8, 2, 4, 512),
    ("moe", "small"): experts(64, 32, 4, 2, 4, 8, 16),
    ("moe", "large"): experts(4096, 512, 8, 2, 8, 4, 512),
    ("clip", "small"): towers(64, 4, 32, 4, 2, 8, 16, 8),
    ("clip", "large"): towers(4096, 16, 512, 8, 2, 16, 224, 64),
}
