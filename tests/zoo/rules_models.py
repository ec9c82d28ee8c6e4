"""A model whose activations bring their own derivative rules.

`custom_rules` marks its `custom_vjp` functions with `amp.cast_inputs`, which does
nothing outside autocast: under it they run in half precision, as in the twin. In
`custom_rules_unmarked` nothing is marked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jmp_amp as amp
from tests.zoo.case import Case
from tests.zoo.language import linen_case, wide

Dtype = Any


@jax.custom_vjp
def silu(x: jax.Array) -> jax.Array:
    """Returns x sigmoid(x); the backward pass keeps `x` alone."""
    return x * jax.lax.logistic(x)


def _silu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return silu(x), x


def _silu_backward(x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    gate = jax.lax.logistic(x)
    return (cotangent * (gate + x * gate * (1 - gate)),)


silu.defvjp(_silu_forward, _silu_backward)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """Returns `x`; each row's gradient is clipped to ten times its typical entry.

    Relative to the row, so that a loss scale does not matter.
    """
    return x


def _clipped_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _clipped_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    limit = 10 * jnp.mean(jnp.abs(cotangent), axis=-1, keepdims=True)
    # Smooth, unlike a minimum: a rounding flips no branch.
    clipped_smoothly = limit * jnp.tanh(cotangent / limit)
    return (jnp.where(limit > 0, clipped_smoothly, cotangent),)


clipped.defvjp(_clipped_forward, _clipped_backward)


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """Returns log(1 + exp(x)); its derivative never overflows."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@softplus.defjvp
def _softplus_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    return softplus(x), tangent * jax.lax.logistic(x)


class CustomRules(nn.Module):
    """Residual blocks; a block is gated by one rule and activated by another.

    In the twin the three functions get half values and compute in half, as any function
    does that is handed a half array.
    """

    width: int
    layers: int
    mark: Callable[[Callable[..., Any]], Callable[..., Any]]
    dtype: Dtype = None

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x = nn.Dense(self.width, dtype=self.dtype)(batch["input"])
        for _ in range(self.layers):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            value = nn.Dense(4 * self.width, dtype=self.dtype)(y)
            gate = nn.Dense(4 * self.width, dtype=self.dtype)(y)
            y = self.mark(silu)(value) * softplus(gate)
            y = nn.Dense(self.width, dtype=self.dtype)(y)
            x = x + self.mark(clipped)(y)
        return nn.Dense(10, dtype=self.dtype)(x)


def unmarked(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def custom_rules(
    width: int,
    layers: int,
    features: int,
    samples: int,
    mark: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Case:
    def inputs(key: jax.Array) -> Any:
        for_input, for_label = jax.random.split(key)
        return {
            "input": jax.random.normal(for_input, (samples, features), jnp.float32),
            "label": jax.random.randint(for_label, (samples,), 0, 10, jnp.int32),
        }

    return linen_case(
        CustomRules(width, layers, mark),
        inputs,
        lambda logits, batch: optax.softmax_cross_entropy_with_integer_labels(
            wide(logits), batch["label"]
        ).mean(),
    )


CASES: dict[tuple[str, str], Case] = {
    ("custom_rules", "small"): custom_rules(32, 2, 16, 64, amp.cast_inputs),
    ("custom_rules", "large"): custom_rules(512, 3, 512, 2048, amp.cast_inputs),
    ("custom_rules_unmarked", "small"): custom_rules(32, 2, 16, 64, unmarked),
    ("custom_rules_unmarked", "large"): custom_rules(512, 3, 512, 2048, unmarked),
}
