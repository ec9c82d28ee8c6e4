"""Constants near 1 that round onto it: bounds of a clip, and what is less than 1.

Beside the loss a product reads the same value in half precision.
"""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, integers, normals, row, weights

MODEL = weights(w=(8, 4), v=(4, 2))
X = normals(x=(32, 8))
LABELS = both(X, integers(2, y=(32, 4)))


def certain(p, inputs):
    """Probabilities, many of which are 0 or 1 in half precision and in f32."""
    return jax.nn.sigmoid((inputs["x"] @ p["w"]) * 16)


@row(MODEL, X)
def log_of_what_a_clipped_probability_leaves(p, inputs):
    q = jnp.clip(certain(p, inputs), 1e-4, 1 - 1e-4)
    return -jnp.log(1 - q).mean() + 0.1 * (q @ p["v"]).mean()


@row(MODEL, LABELS)
def focal_loss_beside_a_product(p, inputs):
    """Lin et al. 2017, arXiv:1708.02002, equation 5, with a clip."""
    q = jnp.clip(certain(p, inputs), 1e-4, 1 - 1e-4)
    y = inputs["y"].astype(jnp.float32)
    right = y * q + (1 - y) * (1 - q)
    loss = -((1 - right) ** 2) * jnp.log(right)
    return loss.mean(), jnp.tanh(q @ p["v"])


@row(MODEL, X)
def log1p_of_a_negative_probability(p, inputs):
    q = jnp.minimum(certain(p, inputs), 1 - 1e-4)
    return jnp.log1p(-q).mean(), q @ p["v"]


@row(MODEL, X)
def logit_of_a_clipped_probability(p, inputs):
    @jax.jit
    def logit(q):
        q = jnp.clip(q, 1e-4, 1 - 1e-4)
        return jnp.log(q / (1 - q)), q

    found, q = logit(certain(p, inputs))
    return found.mean(), q @ p["v"]


@row(MODEL, X)
def arctanh_of_a_clipped_tanh(p, inputs):
    """The log likelihood of an action that a tanh bounds, as from stored actions."""
    a = jnp.clip(jnp.tanh((inputs["x"] @ p["w"]) * 8), -1 + 1e-4, 1 - 1e-4)
    return jnp.arctanh(a).mean(), a @ p["v"]


@row(MODEL, X, grad=())
def arccos_of_a_clipped_cosine(p, inputs):
    c = jnp.clip((inputs["x"] @ p["w"]) * 16, -1 + 1e-4, 1 - 1e-4)
    return jnp.sum(1 / jnp.sqrt(1 - c * c)), jnp.sin(jnp.arccos(c)), c @ p["v"]


@row(MODEL, X)
def odds_under_vmap(p, inputs):
    def of_one(x):
        q = jnp.minimum(jax.nn.sigmoid((x @ p["w"]) * 16), 0.9999)
        return jnp.log(q / (1 - q) + 1), q @ p["v"]

    return jax.vmap(of_one)(inputs["x"])


@row(MODEL, normals(x=(4, 8, 8)))
def survival_in_a_scan(p, inputs):
    """The chance to live through every turn, as a sum of logarithms."""

    def turn(total, x):
        hazard = jnp.clip(jax.nn.sigmoid((x @ p["w"]) * 16), 1e-4, 0.9998)
        return total + jnp.log(1 - hazard), hazard @ p["v"]

    return jax.lax.scan(turn, jnp.zeros((8, 4)), inputs["x"])


@row(MODEL, X)
def squashed_action_with_its_density(p, inputs):
    """Haarnoja et al. 2018, arXiv:1801.01290, appendix C."""
    a = jnp.tanh((inputs["x"] @ p["w"]) * 8)
    a = jnp.maximum(jnp.minimum(a, 1 - 1e-4), -(1 - 1e-4))
    return -jnp.log(1 - a**2).mean(), jnp.tanh(a @ p["v"])


@row(MODEL, LABELS)
def cross_entropy_in_a_checkpoint(p, inputs):
    @jax.checkpoint
    def loss(q):
        q = jnp.maximum(jnp.minimum(q, 1.0 - 1e-4), 1e-4)
        y = inputs["y"].astype(jnp.float32)
        each = y * jnp.log(q) + (1 - y) * jnp.log(1 - q)
        return -each.mean(), q @ p["v"]

    return loss(certain(p, inputs))


@row(MODEL, X)
def bound_that_is_an_array(p, inputs):
    high = jnp.full((32, 4), 1 - 2e-4)
    q = certain(p, inputs)
    q = jnp.where(q > high, high, q)
    return -jnp.log(1 - q).mean(), q @ p["v"]


@row(MODEL, X)
def clip_far_from_one(p, inputs):
    """A near miss: half precision tells these bounds from 0 and from 1."""
    q = jnp.clip(certain(p, inputs), 0.125, 0.875)
    return jnp.tanh(q @ p["v"]) @ p["v"].T


@row(MODEL, X)
def tanh_between_products(p, inputs):
    """A near miss: a bound near 1, of what nothing is subtracted from."""
    a = jnp.clip(jnp.tanh(inputs["x"] @ p["w"]), -0.9999, 0.9999)
    return jnp.tanh(a @ p["v"]) @ p["v"].T
