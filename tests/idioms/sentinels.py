"""Masks by a large negative number, and what reads it."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, normals, row, weights


def masks(rng):
    return {"c": np.arange(16) < rng.integers(6, 12, (8, 1))}


SCORES = weights(w=(8, 16))
INPUTS = both(normals(x=(8, 8)), masks)
HIDDEN = -1e9


def masked(p, inputs):
    return jnp.where(inputs["c"], inputs["x"] @ p["w"], HIDDEN)


@row(SCORES, INPUTS)
def scores_returned(p, inputs):
    return masked(p, inputs)


@row(SCORES, INPUTS)
def scores_returned_and_multiplied(p, inputs):
    s = masked(p, inputs)
    return s, jax.nn.softmax(s) @ p["w"].T


@row(SCORES, INPUTS)
def scores_summed(p, inputs):
    return masked(p, inputs).sum()


@row(SCORES, INPUTS)
def scores_divided(p, inputs):
    return masked(p, inputs) / 1e6


@row(SCORES, INPUTS)
def scores_compared_with_the_sentinel(p, inputs):
    s = masked(p, inputs)
    return jnp.where(s == HIDDEN, 0.0, s), (s > HIDDEN / 2).sum()


@row(SCORES, INPUTS)
def scores_compared_and_multiplied(p, inputs):
    s = masked(p, inputs)
    return (s > HIDDEN / 2).sum(1), jnp.maximum(s, -50.0) @ p["w"].T


@row(SCORES, INPUTS)
def scores_of_top_k(p, inputs):
    return jax.lax.top_k(masked(p, inputs), 14)[0]


@row(SCORES, INPUTS)
def scores_of_log_softmax(p, inputs):
    return jax.nn.log_softmax(masked(p, inputs))


@row(SCORES, INPUTS)
def scores_at_their_minimum(p, inputs):
    s = masked(p, inputs)
    return s.min(axis=1), s.max(axis=1)


@row(SCORES, INPUTS)
def scores_sorted(p, inputs):
    return jnp.sort(masked(p, inputs), axis=1)


@row(SCORES, INPUTS)
def scores_gathered(p, inputs):
    return jnp.take_along_axis(masked(p, inputs), jnp.full((8, 1), 15), axis=1)


@row(SCORES, INPUTS)
def scores_in_a_scan(p, inputs):
    def turn(carry, x):
        return carry, jnp.where(inputs["c"][0], x @ p["w"], HIDDEN)

    return jax.lax.scan(turn, 0, inputs["x"])[1]


@row(SCORES, INPUTS)
def scores_of_a_bias_that_is_added(p, inputs):
    bias = jnp.where(inputs["c"], 0.0, HIDDEN)
    s = inputs["x"] @ p["w"] + bias
    return jax.nn.softmax(s), s


@row(weights(q=(8, 8), k=(8, 8), v=(8, 8)), normals(x=(4, 12, 8)))
def causal_attention(p, inputs):
    q, k, v = (inputs["x"] @ p[name] for name in "qkv")
    s = (q @ k.swapaxes(1, 2)) / 8**0.5
    s = jnp.where(jnp.tril(jnp.ones((12, 12), bool))[None], s, HIDDEN)
    return jax.nn.softmax(s) @ v


@row(weights(q=(8, 8), k=(8, 8), v=(8, 8)), normals(x=(4, 12, 8)))
def attention_with_the_least_float(p, inputs):
    q, k, v = (inputs["x"] @ p[name] for name in "qkv")
    s = (q @ k.swapaxes(1, 2)) / 8**0.5
    least = jnp.finfo(s.dtype).min
    s = jnp.where(jnp.tril(jnp.ones((12, 12), bool))[None], s, least)
    return jax.nn.softmax(s) @ v, jax.nn.logsumexp(s, axis=-1)


@row(weights(q=(8, 8), k=(8, 8), v=(8, 8)), normals(x=(2, 32, 8)))
def attention_in_blocks(p, inputs):
    """Dao et al. 2022, arXiv:2205.14135, algorithm 1: a running maximum and sum."""
    q, k, v = (inputs["x"] @ p[name] for name in "qkv")

    def turn(carry, block):
        best, total, out = carry
        k, v = block
        s = q @ k.swapaxes(1, 2)
        now = jnp.maximum(best, s.max(-1))
        weight = jnp.exp(s - now[..., None])
        fade = jnp.exp(best - now)
        out = out * fade[..., None] + weight @ v
        return (now, total * fade + weight.sum(-1), out), None

    blocks = [jnp.moveaxis(t.reshape(2, 8, 4, 8), 1, 0) for t in (k, v)]
    start = (jnp.full((2, 32), HIDDEN), jnp.zeros((2, 32)), jnp.zeros((2, 32, 8)))
    (_, total, out), _ = jax.lax.scan(turn, start, blocks)
    return out / total[..., None]


@row(SCORES, INPUTS)
def masked_mean_by_where(p, inputs):
    h = inputs["x"] @ p["w"]
    kept = jnp.where(inputs["c"], h, 0.0)
    return kept.sum(1) / inputs["c"].sum(1).astype(jnp.float32)


@row(SCORES, INPUTS)
def best_action_that_is_allowed(p, inputs):
    s = jnp.where(inputs["c"], inputs["x"] @ p["w"], -jnp.inf)
    return s.max(axis=1), jax.nn.softmax(s)
