"""A network that learns digits, its moments in each of the ways to store them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_amp as amp
from tests.training.wrappers import F32, WAYS

Weights = Any


def first_weights() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "w0": jnp.asarray(rng.standard_normal((64, 128)) / 8, F32),
        "b0": jnp.zeros((1, 128)),
        "w1": jnp.asarray(rng.standard_normal((128, 10)) / 11, F32),
        "b1": jnp.zeros((1, 10)),
    }


def trained(tx: Any) -> tuple[Weights, jax.Array]:
    """The last weights of 1000 steps, and the loss on digits that were held out."""
    images, digits = load_digits(return_X_y=True)
    images, digits = jnp.asarray(images / 16, F32), jnp.asarray(digits, jnp.int32)

    def loss_fn(p: Any, at: Any) -> jax.Array:
        scores = jnp.tanh(images[at] @ p["w0"] + p["b0"]) @ p["w1"] + p["b1"]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, digits[at])
        return losses.mean()

    def step(carry: Any, key: Any) -> Any:
        p, state = carry
        grads = jax.grad(loss_fn)(p, jax.random.randint(key, (64,), 0, 1400))
        updates, state = tx.update(grads, state, p)
        return (optax.apply_updates(p, updates), state), None

    @jax.jit
    def run(params: Any, state: Any) -> Any:
        keys = jax.random.split(jax.random.key(1), 1000)
        last = jax.lax.scan(step, (params, state), keys)[0][0]
        return last, loss_fn(last, jnp.arange(1400, 1797))

    params = first_weights()
    return run(params, tx.init(params))


def train() -> dict[str, tuple[Weights, jax.Array]]:
    """What `trained` returns in f32, and in each of the ways."""
    inner = optax.adamw(1e-3)
    ways = {name: amp.with_low_precision_state(inner, **w) for name, w in WAYS.items()}
    return {name: trained(tx) for name, tx in ({"f32": inner} | ways).items()}


def figures(results: dict[str, tuple[Weights, jax.Array]]) -> dict[str, Any]:
    """How far each ends from f32, in lengths of its way; and its held-out loss."""
    first, exact = first_weights()["w0"], results["f32"][0]["w0"]
    way = np.linalg.norm(exact - first)
    return {
        name: {
            "off": float(np.linalg.norm(last["w0"] - exact) / way),
            "loss": float(loss),
        }
        for name, (last, loss) in results.items()
    }
