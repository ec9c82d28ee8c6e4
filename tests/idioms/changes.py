"""Changes of a stream: what is left of two sums that have a term in common."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.idioms.row import both, normals, row, weights

X = normals(x=(16, 8))
MODEL = weights(w=(8, 8), v=(8, 8), u=(8, 8))


def layer(h, v):
    return h + 0.02 * jnp.tanh(h @ v)


@row(MODEL, X)
def penalty_of_a_change(p, inputs):
    h = inputs["x"] @ p["w"]
    return jnp.mean((layer(h, p["v"]) - h) ** 2)


@row(MODEL, X)
def consistency_of_two_branches(p, inputs):
    h = inputs["x"] @ p["w"]
    other = h + 0.02 * jax.nn.relu(h @ p["u"])
    return jnp.mean(jnp.abs(layer(h, p["v"]) - other))


@row(MODEL, X)
def guidance_of_a_conditioned_stream(p, inputs):
    """Ho and Salimans 2022, arXiv:2207.12598, equation 6."""
    free = inputs["x"] @ p["w"]
    conditioned = free + 0.01 * jnp.tanh(inputs["x"] @ p["v"])
    return free + 30.0 * (conditioned - free)


@row(MODEL, X)
def divergence_from_logits_without_an_adapter(p, inputs):
    """Hu et al. 2021, arXiv:2106.09685: the adapter is a small product of two."""
    before = inputs["x"] @ p["w"]
    after = before + 0.02 * jnp.tanh(inputs["x"] @ p["v"]) @ p["u"]
    told, base = map(jax.nn.log_softmax, (after, before))
    return jnp.sum(jnp.exp(told) * (told - base), -1)


@row(both(MODEL, weights(stack=(3, 8, 8))), X)
def change_of_each_layer_of_a_stack(p, inputs):
    def turn(h, v):
        after = layer(h, v)
        return after, jnp.sum((after - h) ** 2, -1)

    return lax.scan(turn, inputs["x"] @ p["w"], p["stack"])[1]


@row(both(MODEL, weights(stack=(3, 8, 8))), X)
def change_over_a_stack_in_a_jitted_helper(p, inputs):
    @jax.jit
    def velocity(after, before):
        return (after - before) / 0.06

    h = inputs["x"] @ p["w"]
    after = lax.scan(lambda h, v: (layer(h, v), None), h, p["stack"])[0]
    return jnp.tanh(velocity(after, h) @ p["v"])


@row(MODEL, X)
def consistency_of_two_predictions(p, inputs):
    """Laine and Aila 2016, arXiv:1610.02242: of two noises, beside each other."""
    h = inputs["x"] @ p["w"]
    told, other = map(jax.nn.softmax, (layer(h, p["v"]), layer(h, p["u"])))
    return jnp.sum((told - other) ** 2, -1)


@row(MODEL, X)
def drift_of_a_normalized_feature(p, inputs):
    h = inputs["x"] @ p["w"]
    before, after = (
        each / jnp.linalg.norm(each, axis=-1, keepdims=True)
        for each in (h, layer(h, p["v"]))
    )
    return jnp.sum((after - before) ** 2, -1)


@row(MODEL, X)
def length_of_a_stacked_path(p, inputs):
    path = [inputs["x"] @ p["w"]]
    for v in (p["v"], p["u"], p["v"]):
        path.append(layer(path[-1], v))
    return jnp.linalg.norm(jnp.diff(jnp.stack(path), axis=0), axis=-1).sum(0)


@row(both(MODEL, weights(stack=(3, 8, 8))), X)
def steps_of_a_scanned_path(p, inputs):
    def turn(h, v):
        after = layer(h, v)
        return after, after

    path = lax.scan(turn, inputs["x"] @ p["w"], p["stack"])[1]
    steps = jnp.diff(path, axis=0)
    return jnp.sum(steps**2, (0, -1)), jnp.tanh(path @ p["v"]).sum((0, -1))
