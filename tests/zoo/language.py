"""Language models: GPT unrolled and in a loop, LLaMA.

The linen models have Flax's own field `dtype`: `None` is the f32 model, a half dtype
the twin. Some have its field `dot_general_cls` too, for the twin with its fp8 layers.
Where a line says `astype`, it does nothing in the f32 model: it is how the twin's
author spells the dtype of that value, which follows the dtype of the parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.case import Case, Fp8Twin, Loss

Dtype = Any


def wide_dtype(x: jax.Array) -> Dtype:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def wide(x: jax.Array) -> jax.Array:
    """Returns `x` in f32, or in f64 where it is f64."""
    return x.astype(wide_dtype(x))


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns softmax(query key^T) value, its softmax in f32.

    As GPT-NeoX, LLaMA and T5 of Hugging Face do: scores in the compute dtype, the
    softmax in f32, its result back in the compute dtype for the second product.

    Args:
      query: [batch, length, heads, features].
      key: [batch, source, heads, features].
      value: [batch, source, heads, features].
      mask: booleans, True where attention is allowed; broadcast to the scores
        [batch, heads, length, source].
      bias: added to the scores.
      scale: of the scores; 1/sqrt(features) where it is None.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(wide(scores)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((1, 1, length, length), jnp.bool_))


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of the next token; computed in f32."""
    return optax.softmax_cross_entropy_with_integer_labels(
        wide(logits), jnp.roll(tokens, -1, axis=1)
    ).mean()


def random_tokens(key: jax.Array, vocabulary: int, *shape: int) -> jax.Array:
    return jax.random.randint(key, shape, 0, vocabulary, jnp.int32)


def linen_case(
    model: nn.Module,
    inputs: Callable[[jax.Array], Any],
    loss_of: Callable[[Any, Any], jax.Array],
) -> Case:
    """Returns the case of a linen model that has a field `dtype`.

    Args:
      model: takes the batch. With a field `dot_general_cls` it has an fp8 twin too.
      inputs: key -> batch.
      loss_of: (output of the model, batch) -> f32[].
    """

    def loss(model: nn.Module) -> Loss:
        def loss(params: Any, batch: Any) -> jax.Array:
            # Layers of Flax mix dtypes, which strict JAX refuses.
            with jax.numpy_dtype_promotion("standard"):
                return loss_of(model.apply({"params": params}, batch), batch)

        return loss

    def sample(key: jax.Array) -> tuple[Any, Any]:
        for_params, for_batch = jax.random.split(key)
        batch = inputs(for_batch)
        with jax.numpy_dtype_promotion("standard"):
            return model.init(for_params, batch)["params"], batch

    return Case(
        sample,
        loss(model),
        lambda dtype: loss(model.clone(dtype=dtype)),
        fp8=fp8_twin(model, loss_of) if hasattr(model, "dot_general_cls") else None,
    )


def fp8_twin(
    model: nn.Module,
    loss_of: Callable[[Any, Any], jax.Array],
    arguments: Callable[[Any], tuple[Any, ...]] = lambda batch: (batch,),
) -> Fp8Twin:
    """Returns the bf16 twin of a linen model with the fp8 layers of Flax.

    Args:
      model: has the fields `dtype` and `dot_general_cls`.
      loss_of: (output of the model, batch) -> f32[].
      arguments: batch -> what the model is called with.
    """
    name = "_overwrite_with_gradient"
    cls = nn.fp8_ops.Fp8DirectDotGeneralOp
    twin = model.clone(dtype=jnp.dtype("bfloat16"), dot_general_cls=cls)

    def scales(batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return twin.init(jax.random.key(0), *arguments(batch))[name]

    def loss(params: Any, scales: Any, batch: Any) -> jax.Array:
        variables = {"params": params, name: scales}
        with jax.numpy_dtype_promotion("standard"):
            return loss_of(twin.apply(variables, *arguments(batch)), batch)

    return Fp8Twin(scales, loss)


# GPT-2: fused q, k and v, pre-norm, tied embeddings.


class Attention(nn.Module):
    heads: int
    causal: bool = True
    dtype: Dtype = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(
            nn.Dense, dtype=self.dtype, dot_general_cls=self.dot_general_cls
        )
        batch, length, width = x.shape
        joint = dense(3 * width)(x)
        joint = joint.reshape(batch, length, 3 * self.heads, -1)
        query, key, value = jnp.split(joint, 3, axis=2)
        mask = causal(length) if self.causal else None
        mixed = attend(query, key, value, mask).reshape(x.shape)
        return dense(width)(mixed)


class Block(nn.Module):
    heads: int
    causal: bool = True
    dtype: Dtype = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        precision = {"dtype": self.dtype, "dot_general_cls": self.dot_general_cls}
        dense = functools.partial(nn.Dense, **precision)
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + Attention(self.heads, self.causal, **precision)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(dense(4 * width)(y))
        return x + dense(width)(y)


class ScannedBlock(nn.Module):
    heads: int
    dtype: Dtype = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        precision = {"dtype": self.dtype, "dot_general_cls": self.dot_general_cls}
        return Block(self.heads, **precision)(x), None


class GPT(nn.Module):
    """The layers one by one or, `scanned`, in one loop that recomputes each of them."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    scanned: bool = False
    dtype: Dtype = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        precision = {"dtype": self.dtype, "dot_general_cls": self.dot_general_cls}
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x = embedding(tokens)
        position = self.param(
            "position", nn.initializers.normal(0.02), (1, *x.shape[1:])
        )
        x = x + position.astype(x.dtype)
        if self.scanned:
            layers = nn.scan(
                nn.remat(ScannedBlock, prevent_cse=False),
                variable_axes={"params": 0, "_overwrite_with_gradient": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = layers(self.heads, **precision)(x, None)
        else:
            for _ in range(self.layers):
                x = Block(self.heads, **precision)(x)
        return embedding.attend(nn.LayerNorm(dtype=self.dtype)(x))


def gpt(
    vocabulary: int, width: int, heads: int, layers: int, *shape: int, scanned: bool
) -> Case:
    return linen_case(
        GPT(vocabulary, width, heads, layers, scanned),
        lambda key: random_tokens(key, vocabulary, *shape),
        next_token_loss,
    )


# LLaMA: rotary positions, grouped queries, SwiGLU, RMSNorm; plain functions. `dtype` is
# what the weights are cast to where they are used, `None` for the f32 program.


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x` over its root mean square, computed in f32, in the dtype of `x`.

    As LlamaRMSNorm of Hugging Face: `weight * normalised.to(input_dtype)`.
    """
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1)).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns `x` [batch, length, heads, features] turned by its `positions` [length].

    As Hugging Face's LLaMA: sines and cosines in f32, cast to the dtype of `x`.
    """
    half = x.shape[-1] // 2
    float_dtype = wide_dtype(x)
    frequencies = 10000.0 ** -(jnp.arange(half).astype(float_dtype) / half)
    angles = jnp.outer(positions.astype(float_dtype), frequencies)[None, :, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [left * cos - right * sin, right * cos + left * sin], axis=-1
    )


def grouped_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> jax.Array:
    """Returns attention in which several heads of `query` share one of `key`.

    Args:
      query: [batch, length, heads, features].
      key: [batch, source, key heads, features].
      value: [batch, source, key heads, features].
      mask: booleans [length, source], True where attention is allowed.
    """
    batch, length, heads, features = query.shape
    query = query.reshape(batch, length, key.shape[2], -1, features)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key) / math.sqrt(features)
    mask = jnp.expand_dims(mask, (0, 1, 2))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(wide(scores)).astype(value.dtype)
    mixed = jnp.einsum("bhgqk,bkhd->bqhgd", weights, value)
    return mixed.reshape(batch, length, heads * features)


def _llama_layer(
    weights: Any,
    x: jax.Array,
    positions: jax.Array,
    attention: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    features: int,
    dtype: Dtype,
) -> jax.Array:
    """Returns the next residual stream; `attention` takes the new q, k and v."""

    def project(x: jax.Array, name: str) -> jax.Array:
        return x @ weights[name].astype(dtype or weights[name].dtype)

    def split_heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, features)

    y = rms_norm(x, weights["attention_norm"])
    query = rotate(split_heads(project(y, "query")), positions)
    key = rotate(split_heads(project(y, "key")), positions)
    value = split_heads(project(y, "value"))
    x = x + project(attention(query, key, value), "out")
    y = rms_norm(x, weights["feed_forward_norm"])
    return x + project(jax.nn.silu(project(y, "gate")) * project(y, "up"), "down")


def _llama_ends(params: Any, dtype: Dtype) -> tuple[Callable[..., Any], ...]:
    """Returns the embedding of tokens and the logits of the residual stream."""

    def embed(tokens: jax.Array) -> jax.Array:
        table = params["embedding"]
        return table.astype(dtype or table.dtype)[tokens]

    def logits(x: jax.Array) -> jax.Array:
        head = params["head"]
        y = rms_norm(x, params["norm"]) @ head.astype(dtype or head.dtype)
        return wide(y)

    return embed, logits


def llama_params(
    key: jax.Array, vocabulary: int, width: int, heads: int, key_heads: int, layers: int
) -> Any:
    """Returns random f32 parameters."""
    features = width // heads
    hidden = 2 * width
    shapes = {
        "query": (width, width),
        "key": (width, key_heads * features),
        "value": (width, key_heads * features),
        "out": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        weights = {
            name: jax.random.normal(k, shape) / math.sqrt(shape[0])
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        norms = ("attention_norm", "feed_forward_norm")
        return weights | {name: jnp.ones(width) for name in norms}

    for_embedding, for_head, *for_layers = jax.random.split(key, 2 + layers)
    return {
        "embedding": jax.random.normal(for_embedding, (vocabulary, width)),
        "layers": [layer(k) for k in for_layers],
        "norm": jnp.ones(width),
        "head": jax.random.normal(for_head, (width, vocabulary)) / math.sqrt(width),
    }


def llama(
    vocabulary: int, width: int, heads: int, key_heads: int, layers: int, *shape: int
) -> Case:
    features = width // heads

    def loss_in(dtype: Dtype) -> Loss:
        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            embed, logits = _llama_ends(params, dtype)
            positions = jnp.arange(tokens.shape[1])
            mask = positions[:, None] >= positions[None, :]
            x = embed(tokens)
            for weights in params["layers"]:
                x = _llama_layer(
                    weights,
                    x,
                    positions,
                    lambda q, k, v: grouped_attention(q, k, v, mask),
                    features,
                    dtype,
                )
            return next_token_loss(logits(x), tokens)

        return loss

    def sample(key: jax.Array) -> tuple[Any, jax.Array]:
        for_params, for_tokens = jax.random.split(key)
        params = llama_params(for_params, vocabulary, width, heads, key_heads, layers)
        return params, random_tokens(for_tokens, vocabulary, *shape)

    return Case(sample, loss_in(None), loss_in)


# One layer's keys and values of all positions, [batch, positions, key heads, features].
Cache = list[dict[str, jax.Array]]


def _decode_in(dtype: Dtype) -> Callable[..., tuple[jax.Array, Cache]]:
    def decode(
        params: Any, cache: Cache, token: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, Cache]:
        embed, logits = _llama_ends(params, dtype)
        features = cache[0]["key"].shape[-1]
        x = embed(token[:, None])
        new_cache = []
        for weights, old in zip(params["layers"], cache, strict=True):

            def attention(
                query: jax.Array, key: jax.Array, value: jax.Array, old: Any = old
            ) -> jax.Array:
                new = {
                    name: jax.lax.dynamic_update_slice(
                        old[name], part.astype(old[name].dtype), (0, position, 0, 0)
                    )
                    for name, part in (("key", key), ("value", value))
                }
                new_cache.append(new)
                mask = jnp.arange(new["key"].shape[1])[None, :] <= position
                # A cache may be stored in fewer bits than the program computes in.
                read = {name: part.astype(query.dtype) for name, part in new.items()}
                return grouped_attention(query, read["key"], read["value"], mask)

            x = _llama_layer(weights, x, position[None], attention, features, dtype)
        return logits(x)[:, 0], new_cache

    return decode


decode = _decode_in(None)
"""(params, cache, token: int32[batch], position: int32[]) -> (logits, new cache)."""


def decode_twin(dtype: Dtype) -> Callable[..., tuple[jax.Array, Cache]]:
    """Returns `decode` in half precision; a cache of `dtype` is used as it is."""
    return _decode_in(dtype)


def decode_sample(
    key: jax.Array, dtype: Dtype = jnp.float32, positions: int = 16
) -> tuple[Any, Cache, jax.Array, jax.Array]:
    """Returns the arguments of `decode`: f32 parameters, a half-full cache of `dtype`.

    Positions that are not yet written hold zeros, as they do in practice.
    """
    for_params, for_cache, for_token = jax.random.split(key, 3)
    params = llama_params(for_params, 64, 32, 4, 2, 2)
    position = positions // 2
    written = jnp.arange(positions).reshape(1, -1, 1, 1) < position
    values = jax.random.normal(for_cache, (2, 2, 4, positions, 2, 8))
    values = jnp.where(written[None, None], values, 0.0).astype(dtype)
    cache = [{"key": keys, "value": values} for keys, values in values]
    token = jax.random.randint(for_token, (4,), 0, 64, jnp.int32)
    return params, cache, token, jnp.int32(position)


CASES: dict[tuple[str, str], Case] = {
    ("gpt", "small"): gpt(64, 32, 4, 2, 8, 16, scanned=False),
    ("gpt", "large"): gpt(4096, 512, 8, 3, 4, 512, scanned=False),
    ("gpt_scan", "small"): gpt(64, 32, 4, 2, 8, 16, scanned=True),
    ("gpt_scan", "large"): gpt(4096, 512, 8, 4, 8, 512, scanned=True),
    ("llama", "small"): llama(64, 32, 4, 2, 2, 8, 16),
    ("llama", "large"): llama(4096, 512, 8, 2, 3, 4, 512),
}
