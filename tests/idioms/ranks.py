"""Choices by rank: `top_k`, `sort`, `argsort`, `approx_max_k`.

Operands and results of the products are exact in half precision. What is added to a
result is less than half precision tells apart, and decides. Indices are returned as
floats: another choice is an error.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, drawn, row

# Weights of 1/2 and inputs of 1, -1: every score is a multiple of 1/2.
signs = drawn(lambda rng, shape: np.float32(rng.choice((-1, 1), shape)))
W = drawn(lambda rng, shape: np.float32(rng.choice((-0.5, 0.5), shape)))
# What decides: an order of multiples of 0.0001.
small = drawn(lambda rng, shape: np.float32(1e-4 * (1 + rng.permutation(shape[-1]))))


def steps(rng):
    """Noise for 16 rows: each row has an order of its own."""
    return {"noise": np.float32(1e-4 * np.argsort(rng.random((16, 8)), axis=1))}


EXPERTS = both(W(w=(4, 1)), small(b=(8,)))
X = signs(x=(16, 4))
NOISY = both(X, steps)


def scores(p, x):
    """The same score for each of 8 experts, between 4 and 8."""
    return (x @ jnp.tile(p["w"], (1, 8))) + 6.0


def biased(p, x):
    return scores(p, x) + p["b"][None]


def floats(index):
    return index.astype(jnp.float32)


@row(constants(w=np.full((4, 8), 0.5), b=0.0003 * np.arange(8.0)), X, grad=())
def top_k_of_biased_experts(p, inputs):
    return floats(jax.lax.top_k(jnp.ones((1, 4)) @ p["w"] + p["b"][None], 2)[1])


@row(EXPERTS, X, grad=())
def choice_of_experts_with_a_bias(p, inputs):
    return floats(jax.lax.top_k(biased(p, inputs["x"]), 2)[1])


@row(EXPERTS, NOISY, grad=())
def noisy_top_k(p, inputs):
    """Shazeer et al. 2017, arXiv:1701.06538, section 2.1."""
    noisy = scores(p, inputs["x"]) + inputs["noise"]
    values, index = jax.lax.top_k(noisy, 3)
    return floats(index), jax.nn.softmax(values)


@row(EXPERTS, NOISY, grad=())
def argsort_of_noisy_scores(p, inputs):
    return floats(jnp.argsort(scores(p, inputs["x"]) + inputs["noise"], axis=1))


@row(EXPERTS, NOISY, grad=())
def argsort_from_the_best(p, inputs):
    noisy = scores(p, inputs["x"]) - inputs["noise"]
    order = jnp.argsort(noisy, axis=1, descending=True)
    return floats(order), floats(jnp.argsort(order, axis=1))


@row(EXPERTS, X, grad=())
def approximate_best(p, inputs):
    return floats(jax.lax.approx_max_k(biased(p, inputs["x"]), 2)[1])


@row(EXPERTS, NOISY, grad=())
def keys_sorted_with_their_places(p, inputs):
    keys = scores(p, inputs["x"]) * (1 + inputs["noise"])
    places = jnp.broadcast_to(jnp.arange(8), keys.shape)
    return floats(jax.lax.sort_key_val(keys, places)[1])


@row(EXPERTS, X, grad=())
def sigmoid_scores_with_a_bias(p, inputs):
    """DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2: the bias only chooses."""
    s = jax.nn.sigmoid(scores(p, inputs["x"]))
    index = jax.lax.top_k(s + p["b"][None], 2)[1]
    weight = jnp.take_along_axis(s, index, axis=1)
    return floats(index), weight / weight.sum(1, keepdims=True)


@row(EXPERTS, X, grad=())
def top_k_of_one_token_under_vmap(p, inputs):
    def of_one(x):
        return jax.lax.top_k(x @ jnp.tile(p["w"], (1, 8)) + 6.0 + p["b"], 2)[1]

    return floats(jax.vmap(of_one)(inputs["x"]))


@row(EXPERTS, NOISY, grad=())
def beam_in_a_scan(p, inputs):
    """The best of eight by turns: each turn adds to the scores of the one before."""

    def turn(total, noise):
        total = total + noise
        return total, floats(jax.lax.top_k(total, 2)[1])

    start = scores(p, inputs["x"])
    return jax.lax.scan(turn, start, jnp.stack([inputs["noise"]] * 3) / 3)[1]


@row(EXPERTS, NOISY, grad=())
def order_in_a_jitted_helper(p, inputs):
    @jax.jit
    def order(s, noise):
        gumbel = jnp.log1p(noise)
        return jnp.argsort(s + gumbel, axis=-1, stable=True)

    return floats(order(scores(p, inputs["x"]), inputs["noise"]))


@row(EXPERTS, NOISY, grad=())
def sorted_twice_by_two_keys(p, inputs):
    keys = scores(p, inputs["x"]) + inputs["noise"]
    places = jnp.broadcast_to(jnp.arange(8), keys.shape)
    ties = jnp.zeros((16, 8), jnp.int32)
    return floats(jax.lax.sort((ties, keys, places), dimension=1, num_keys=2)[2])


@row(both(EXPERTS, W(v=(8, 4))), NOISY)
def mixture_of_the_chosen_experts(p, inputs):
    """With a gradient: another choice would send it to other experts."""
    h = biased(p, inputs["x"])
    values, index = jax.lax.top_k(h, 2)
    gates = jax.nn.one_hot(index, 8) * jax.nn.sigmoid(values)[..., None]
    return gates.sum(1) @ p["v"]


@row(EXPERTS, X)
def best_values_for_a_product(p, inputs):
    """A near miss: nothing is added to the scores, and a product reads the best."""
    h = jnp.tanh(inputs["x"] @ jnp.tile(p["w"], (1, 8)))
    return jax.lax.top_k(h, 4)[0] @ p["w"]


@row(EXPERTS, X)
def pool_of_the_largest(p, inputs):
    """A near miss: a maximum for a product chooses no index."""
    h = jnp.tanh(inputs["x"] @ jnp.tile(p["w"], (1, 8)))
    return jnp.max(h.reshape(16, 4, 2), axis=2) @ p["w"]
