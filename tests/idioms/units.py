"""Arguments outside of float16's range, or near its end, that scale an activation.

Units, scales of layers, statistics of targets: a chain of elementwise operations
between two products.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, drawn, normals, row, weights

MODEL = weights(w=(8, 4), v=(4, 4))
X = normals(x=(32, 8))
# A different size for each feature: 1e5 or 1e-8, times 1 to 2.
large = drawn(lambda rng, shape: np.float32(1e5 * rng.uniform(1, 2, shape)))
tiny = drawn(lambda rng, shape: np.float32(1e-8 * rng.uniform(1, 2, shape)))


def hidden(p, inputs):
    return inputs["x"] @ p["w"]


@row(MODEL, both(X, large(std=(1, 4))))
def large_unit_and_back(p, inputs):
    return ((hidden(p, inputs) * inputs["std"]) / inputs["std"]) @ p["v"]


@row(MODEL, both(X, tiny(std=(1, 4))))
def tiny_unit_and_back(p, inputs):
    return ((hidden(p, inputs) * inputs["std"]) / inputs["std"]) @ p["v"]


@row(MODEL, both(X, large(mean=(1, 4), std=(1, 4))))
def normalized_anew_for_the_next_task(p, inputs):
    """van Hasselt et al. 2016, arXiv:1602.07714, as for the head of a value."""
    value = hidden(p, inputs) * inputs["std"] + inputs["mean"]
    return ((value - inputs["mean"]) / inputs["std"]) @ p["v"]


@row(both(MODEL, constants(scale=np.full((1, 4), 1e-7))), normals(x=(32, 8), y=(32, 4)))
def scale_of_a_layer(p, inputs):
    """Touvron et al. 2021, arXiv:2103.17239, section 3, begun smaller."""
    h = inputs["y"] + jax.nn.gelu(hidden(p, inputs)) * p["scale"]
    return jnp.tanh(h @ p["v"])


@row(both(MODEL, constants(scale=np.full((1, 4), 2e-8))), normals(x=(32, 8), y=(32, 4)))
def gradient_of_a_tiny_scale(p, inputs):
    h = inputs["y"] + hidden(p, inputs) * p["scale"]
    return h @ p["v"]


@row(MODEL, both(X, constants(count=np.full((1, 1), 2e5))))
def total_and_mean_of_many(p, inputs):
    total = hidden(p, inputs) * inputs["count"]
    return jnp.tanh(total / inputs["count"]) @ p["v"]


@row(MODEL, both(X, large(unit=())))
def scalar_unit_in_a_jitted_helper(p, inputs):
    @jax.jit
    def to_volts(h, unit):
        return h * unit

    volts = to_volts(hidden(p, inputs), inputs["unit"])
    return (volts / inputs["unit"]) @ p["v"]


@row(MODEL, both(normals(x=(4, 8, 8)), large(std=(4, 1, 4))))
def units_in_a_scan(p, inputs):
    def turn(total, each):
        h = (each["x"] @ p["w"]) * each["std"]
        return total + (h / each["std"]) @ p["v"], None

    return jax.lax.scan(turn, jnp.zeros((8, 4)), inputs)[0]


@row(MODEL, both(X, tiny(std=(32, 4))))
def tiny_units_under_vmap(p, inputs):
    def of_one(x, std):
        return ((x @ p["w"]) * std / std) @ p["v"]

    return jax.vmap(of_one)(inputs["x"], inputs["std"])


@row(MODEL, both(X, large(std=(1, 4))))
def units_in_a_checkpoint(p, inputs):
    @jax.checkpoint
    def rescaled(h, std):
        return jax.nn.relu(h * std + std) / std

    return rescaled(hidden(p, inputs), inputs["std"]) @ p["v"]


@row(MODEL, both(X, large(std=(1, 4))))
def difference_in_units(p, inputs):
    """The shift is as large as the unit."""
    h = hidden(p, inputs) * inputs["std"]
    return ((h - 2 * inputs["std"]) * (1 / inputs["std"])) @ p["v"]


@row(MODEL, both(X, constants(step=np.full((1, 4), 1e-6))))
def integer_steps(p, inputs):
    """A grid of steps, as of a converter: h / step counts to a million."""
    steps = hidden(p, inputs) / inputs["step"]
    return (steps * inputs["step"]) @ p["v"]


@row(both(MODEL, normals(b=(1, 4))), X)
def bias_and_gain_between_products(p, inputs):
    """A near miss: a bias and a gain fit into half precision."""
    h = hidden(p, inputs) + p["b"]
    return (h * (1 + p["b"])) @ p["v"]


@row(MODEL, both(X, normals(mask=(32, 4))))
def mask_between_products(p, inputs):
    """A near miss: a dropout mask with its scale."""
    keep = jnp.where(inputs["mask"] > -1.0, 1.25, 0.0)
    return (jax.nn.relu(hidden(p, inputs)) * keep) @ p["v"]


@row(MODEL, X)
def kelvin_and_back(p, inputs):
    kelvin = 0.1 * hidden(p, inputs) + 300.0
    return jnp.tanh(((kelvin - 300.0) / 0.1) @ p["v"])
