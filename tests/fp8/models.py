"""Two models as plain functions of shapes: what is compiled for an H100."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmp_amp as amp

ACTIVATIONS = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}


def aval(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def training_step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of SGD."""

    def step(params: Any, *batch: Any) -> Any:
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


@dataclasses.dataclass(frozen=True)
class Mlp:
    """Layers of one width with an activation between them, and a mean square.

    Attributes:
      width: of each layer, and the number of examples.
      activation: a name of `ACTIVATIONS`.
      bias: whether layers have one.
    """

    width: int = 4096
    layers: int = 3
    activation: str = "relu"
    bias: bool = True

    def shapes(self) -> tuple[Any, ...]:
        layer = {"w": aval(self.width, self.width)}
        layer |= {"b": aval(self.width)} if self.bias else {}
        batch = aval(self.width, self.width)
        return [layer] * self.layers, batch, batch

    def loss(self, params: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        for i, layer in enumerate(params):
            x = x @ layer["w"]
            x = x + layer["b"][None] if self.bias else x
            x = ACTIVATIONS[self.activation](x) if i + 1 < len(params) else x
        return jnp.mean((x - target) ** 2)


@amp.with_policy("p=f32,c=bf16,o=bf16")
def head(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


@dataclasses.dataclass(frozen=True)
class Gpt:
    """A GPT with separate q, k and v, and its head in bf16.

    Attributes:
      loop: "unrolled"; "scan" over layers; "remat", the same, each turn a checkpoint
        that saves its products.
    """

    layers: int = 4
    width: int = 2048
    tokens: int = 1024
    batch: int = 8
    vocabulary: int = 32768
    heads: int = 16
    loop: str = "unrolled"

    def shapes(self) -> tuple[Any, ...]:
        d = self.width
        block = {name: (d, d) for name in "qkvo"}
        block |= {"up": (d, 4 * d), "down": (4 * d, d), "g1": (d,), "g2": (d,)}
        stack = () if self.loop == "unrolled" else (self.layers,)
        blocks = {name: aval(*stack, *shape) for name, shape in block.items()}
        params = {
            "embedding": aval(self.vocabulary, d),
            "position": aval(self.tokens, d),
            "norm": aval(d),
            "head": aval(d, self.vocabulary),
            "blocks": blocks if stack else [blocks] * self.layers,
        }
        return params, aval(self.batch, self.tokens, dtype="int32")

    def block(self, x: jax.Array, p: Any) -> jax.Array:
        batch, tokens, width = x.shape
        split = batch, tokens, self.heads, width // self.heads
        h = norm(x, p["g1"])
        q, k, v = ((h @ p[name]).reshape(split) for name in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(split[-1])
        causal = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        x = x + mixed @ p["o"]
        return x + jax.nn.gelu(norm(x, p["g2"]) @ p["up"]) @ p["down"]

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens] + params["position"][None]
        if self.loop == "unrolled":
            for p in params["blocks"]:
                x = self.block(x, p)
        else:
            x, _ = jax.lax.scan(self.turn(), x, params["blocks"])
        logits = head(norm(x, params["norm"]), params["head"])
        likely = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(likely, tokens[..., None], -1))

    def turn(self) -> Callable[..., Any]:
        def turn(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return self.block(x, p), None

        if self.loop == "scan":
            return turn
        saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(turn, policy=saved, prevent_cse=False)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale[None, None]
