"""Recurrent models and graphs: an LSTM, a state-space model, a graph convolution.

The linen models have Flax's own field `dtype`: `None` is the f32 model, a half dtype
the twin. Where a line says `astype` or `wide`, it does nothing in the f32 model.

The last layers have no bias: it would have most of an untrained model's gradient, a sum
over the batch which the twin adds up in half precision. The errors of everything else
would not show.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.case import Case
from tests.zoo.language import linen_case, wide

Dtype = Any


class LSTM(nn.Module):
    """Layers that scan over time, and a regression at each time.

    The carry is Flax's own: zeros in the dtype of the parameters. In the twin it is f32
    and so is what a layer hands on (an f32 cell state times a half gate), while the
    gates and both products of a step are half.
    """

    hidden: int
    layers: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x: Any = batch["input"]
        param_dtype = x.dtype
        for _ in range(self.layers):
            x = nn.RNN(
                nn.OptimizedLSTMCell(
                    self.hidden, dtype=self.dtype, param_dtype=param_dtype
                )
            )(x)
        features = batch["target"].shape[-1]
        return nn.Dense(features, use_bias=False, dtype=self.dtype)(x)


def lstm(hidden: int, layers: int, features: int, *shape: int) -> Case:
    """The target is the input added to that four steps before: so there is memory."""

    def inputs(key: jax.Array) -> Any:
        x = jax.random.normal(key, (*shape, features), jnp.float32)
        earlier = jnp.pad(x, ((0, 0), (4, 0), (0, 0)))[:, :-4]
        return {"input": x, "target": (x + earlier)[..., :8]}

    return linen_case(
        LSTM(hidden, layers),
        inputs,
        lambda found, batch: jnp.mean((wide(found) - batch["target"]) ** 2),
    )


def recurrence(decay: jax.Array, update: jax.Array) -> jax.Array:
    """Returns h[t] = decay[t] h[t-1] + update[t] along axis 1, from zeros."""

    def after(
        first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return first[0] * second[0], first[1] * second[0] + second[1]

    return jax.lax.associative_scan(after, (decay, update), axis=1)[1]


class MambaBlock(nn.Module):
    """A selective state space (arXiv:2312.00752), its recurrence by associative scan.

    In the twin the products and the convolution are half. Step sizes, decays, states
    and the sum over the states are f32, and the result is cast back, as in
    `selective_scan_ref` of github.com/state-spaces/mamba, which casts all it is given.
    """

    states: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = 2 * x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y, gate = jnp.split(nn.Dense(2 * width, dtype=self.dtype)(y), 2, axis=-1)
        y = nn.silu(
            nn.Conv(
                width,
                (4,),
                padding="CAUSAL",
                feature_group_count=width,
                dtype=self.dtype,
            )(y)
        )
        rank = max(width // 16, 4)
        chosen = nn.Dense(rank + 2 * self.states, use_bias=False, dtype=self.dtype)(y)
        step, write, read = jnp.split(chosen, [rank, rank + self.states], axis=-1)
        step = nn.Dense(width, use_bias=False, dtype=self.dtype)(step)

        # 1, 2, ... states, and step sizes around 0.05, as Mamba starts.
        rate = self.param(
            "log_rate",
            lambda key: jnp.tile(
                jnp.log(jnp.arange(1, self.states + 1, dtype=jnp.float32)), (width, 1)
            ),
        )
        step_bias = self.param("step_bias", nn.initializers.constant(-3.0), (width,))
        skip = self.param("skip", nn.initializers.ones, (width,))

        step = nn.softplus(wide(step) + step_bias[None, None])
        decay = jnp.exp(-step[..., None] * jnp.exp(rate)[None, None])
        update = (step * wide(y))[..., None] * wide(write)[..., None, :]
        state = recurrence(decay, update)
        mixed = jnp.sum(state * wide(read)[..., None, :], axis=-1)
        mixed = (mixed + skip[None, None] * wide(y)).astype(y.dtype) * nn.silu(gate)
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(mixed)


class Mamba(nn.Module):
    vocabulary: int
    width: int
    states: int
    layers: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = MambaBlock(self.states, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


def mamba(vocabulary: int, width: int, states: int, layers: int, *shape: int) -> Case:
    return linen_case(
        Mamba(vocabulary, width, states, layers),
        lambda key: jax.random.randint(key, shape, 0, vocabulary, jnp.int32),
        lambda logits, tokens: optax.softmax_cross_entropy_with_integer_labels(
            wide(logits), jnp.roll(tokens, -1, axis=1)
        ).mean(),
    )


class GCN(nn.Module):
    """Graph convolutions with symmetric normalisation (arXiv:1609.02907).

    `residual` adds what a node sends to what it receives and normalises the sum.

    In the twin, products and messages are half. A node sums its messages in f32: a node
    with many neighbours loses the small ones otherwise, and GPUs add f32 faster, for
    which cugraph does so too (github.com/rapidsai/cugraph/pull/4260).
    """

    hidden: int
    layers: int
    residual: bool = False
    dtype: Dtype = None

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x, senders, receivers = batch["node"], batch["sender"], batch["receiver"]
        nodes = x.shape[0]
        ones = jnp.ones(senders.shape, x.dtype)
        outgoing = jax.ops.segment_sum(ones, senders, nodes)
        incoming = jax.ops.segment_sum(ones, receivers, nodes)
        weight = jax.lax.rsqrt(outgoing[senders] * incoming[receivers])[:, None]
        for _ in range(self.layers):
            x = nn.Dense(self.hidden, dtype=self.dtype)(x)
            messages = x[senders] * weight.astype(x.dtype)
            summed = jax.ops.segment_sum(wide(messages), receivers, nodes)
            if self.residual:
                x = nn.LayerNorm(dtype=self.dtype)(summed.astype(x.dtype) + x)
                x = nn.silu(x)
            else:
                x = nn.silu(summed.astype(x.dtype))
        return nn.Dense(10, use_bias=False, dtype=self.dtype)(x)


def gcn(
    hidden: int,
    layers: int,
    features: int,
    nodes: int,
    edges: int,
    residual: bool = False,
) -> Case:
    """Every node has a loop to itself; the other edges favour the first nodes."""

    def inputs(key: jax.Array) -> Any:
        for_node, for_label, for_edge = jax.random.split(key, 3)
        ends = jax.random.uniform(for_edge, (2, edges), jnp.float32)
        senders, receivers = (nodes * ends**2).astype(jnp.int32)
        loops = jnp.arange(nodes, dtype=jnp.int32)
        return {
            "node": jax.random.normal(for_node, (nodes, features), jnp.float32),
            "label": jax.random.randint(for_label, (nodes,), 0, 10, jnp.int32),
            "sender": jnp.concatenate([senders, loops]),
            "receiver": jnp.concatenate([receivers, loops]),
        }

    return linen_case(
        GCN(hidden, layers, residual),
        inputs,
        lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(
            wide(logits), batch["label"]
        ).mean(),
    )


CASES: dict[tuple[str, str], Case] = {
    ("lstm", "small"): lstm(32, 2, 16, 8, 16),
    ("lstm", "large"): lstm(512, 2, 256, 128, 64),
    ("mamba", "small"): mamba(64, 16, 4, 2, 4, 32),
    ("mamba", "large"): mamba(1024, 128, 4, 2, 8, 512),
    ("gcn", "small"): gcn(32, 3, 16, 64, 512),
    ("gcn", "large"): gcn(256, 3, 128, 16384, 131072),
}
