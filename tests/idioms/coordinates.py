"""Coordinates: an argument plus a prediction, that a distance and a product read."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, drawn, integers, normals, row, weights

MODEL = weights(w=(8, 3), k=(3, 4))
far = drawn(lambda rng, shape: np.float32(1000 + 10 * rng.normal(size=shape)))
SYSTEM = both(normals(f=(20, 8)), far(x=(20, 3)))


def atoms(p, inputs):
    return inputs["x"] + 0.1 * jnp.tanh(inputs["f"] @ p["w"])


def read_by_a_product(p, x):
    return jnp.tanh((x / 1000) @ p["k"])


@row(MODEL, SYSTEM)
def distances_beside_a_product(p, inputs):
    x = atoms(p, inputs)
    d = x[:, None] - x[None]
    return jnp.sqrt(jnp.sum(d * d, -1) + 1e-3), read_by_a_product(p, x)


@row(MODEL, SYSTEM)
def bonds_of_a_chain(p, inputs):
    x = atoms(p, inputs)
    return jnp.linalg.norm(x[1:] - x[:-1], axis=-1), read_by_a_product(p, x)


@row(MODEL, both(SYSTEM, integers(20, a=(40,), b=(40,))))
def edges_of_a_graph(p, inputs):
    x = atoms(p, inputs)
    d = x[inputs["a"]] - x[inputs["b"]]
    return jnp.sum(d * d, -1), read_by_a_product(p, x)


@row(MODEL, SYSTEM)
def distances_under_vmap(p, inputs):
    x = atoms(p, inputs)

    def to_all(one):
        return jnp.sum((one[None] - x) ** 2, -1)

    return jnp.sqrt(jax.vmap(to_all)(x) + 1e-3), read_by_a_product(p, x)


@row(MODEL, SYSTEM)
def energy_in_a_jitted_helper(p, inputs):
    @jax.jit
    def energy(x):
        d = jnp.expand_dims(x, 1) - jnp.expand_dims(x, 0)
        return jnp.sum(1 / (1 + 0.01 * jnp.sum(d**2, axis=2)))

    x = atoms(p, inputs)
    return energy(x), read_by_a_product(p, x)


@row(MODEL, SYSTEM)
def distances_of_moved_atoms_in_a_checkpoint(p, inputs):
    @jax.checkpoint
    def both_of(x):
        d = x[:, None] - x[None]
        return jnp.exp(-0.01 * jnp.sum(d * d, -1)), jnp.tanh((x / 1000) @ p["k"])

    return both_of(inputs["x"] + 0.1 * (inputs["f"] @ p["w"]))


@row(MODEL, both(normals(f=(6, 8, 8)), far(x=(6, 8, 3))))
def distances_in_a_scan(p, inputs):
    def turn(total, each):
        x = each["x"] + 0.1 * jnp.tanh(each["f"] @ p["w"])
        d = x[:, None] - x[None]
        near = jnp.sqrt(jnp.sum(d * d, -1) + 1e-3)
        return total + near, read_by_a_product(p, x)

    return jax.lax.scan(turn, jnp.zeros((8, 8)), inputs)


@row(MODEL, SYSTEM)
def around_their_centre(p, inputs):
    """A centre is a mean of moves: what is left is small."""
    x = atoms(p, inputs)
    return x - jnp.mean(x, axis=0, keepdims=True), read_by_a_product(p, x)


@row(MODEL, SYSTEM)
def steps_along_a_path(p, inputs):
    x = atoms(p, inputs)
    return jnp.diff(x, axis=0), x - jnp.roll(x, 1, axis=0), read_by_a_product(p, x)


@row(MODEL, both(normals(f=(20, 8)), far(lo=(20, 3))))
def sides_of_predicted_boxes(p, inputs):
    """Two corners: an argument, and the same argument with a prediction."""
    size = jnp.exp(0.1 * (inputs["f"] @ p["w"]))
    high = inputs["lo"] + size
    sides = jnp.maximum(high - inputs["lo"], 0.0)
    area = sides[:, 0] * sides[:, 1] * sides[:, 2]
    return area, read_by_a_product(p, high)


@row(MODEL, SYSTEM)
def angles_between_bonds(p, inputs):
    x = atoms(p, inputs)
    a, b = x[2:] - x[1:-1], x[:-2] - x[1:-1]
    lengths = jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1)
    return jnp.sum(a * b, axis=1) / (lengths + 1.0), read_by_a_product(p, x)


@row(MODEL, SYSTEM)
def relative_positions_for_a_product(p, inputs):
    x = atoms(p, inputs)
    return jnp.tanh((x[:, None] - x[None]) @ p["k"])


@row(MODEL, both(SYSTEM, integers(20, a=(40,), b=(40,))))
def edges_for_a_product(p, inputs):
    x = atoms(p, inputs)
    return jnp.tanh((x[inputs["a"]] - x[inputs["b"]]) @ p["k"])


@row(MODEL, SYSTEM)
def positions_from_a_given_point(p, inputs):
    return jnp.tanh((atoms(p, inputs) - inputs["x"][:1]) @ p["k"])


@row(MODEL, SYSTEM)
def positions_and_the_negative_of_their_middle(p, inputs):
    middle = jnp.mean(inputs["x"], axis=0, keepdims=True)
    return jnp.tanh((atoms(p, inputs) + -middle) @ p["k"])


@row(MODEL, SYSTEM)
def the_nearer_of_two_positions(p, inputs):
    x = jnp.clip(atoms(p, inputs), 0, 2000)
    x = jnp.where(inputs["x"] > 1000, x, inputs["x"])
    return jnp.tanh((x[1:] - x[:-1]) @ p["k"])


@row(MODEL, SYSTEM)
def in_a_periodic_box(p, inputs):
    return jnp.tanh((atoms(p, inputs) % 3.0) @ p["k"])


@row(weights(w=(8, 3), k=(48, 4)), normals(f=(20, 8), x=(20, 3)))
def waves_of_warped_positions(p, inputs):
    """Park et al. 2021, arXiv:2011.12948: a point is moved, then encoded."""
    x = inputs["x"] + 0.1 * jnp.tanh(inputs["f"] @ p["w"])
    angles = (x[:, :, None] * 2.0 ** jnp.arange(8.0)[None, None]).reshape(20, 24)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    return jnp.tanh(waves @ p["k"])


@row(weights(w=(8, 8), k=(8, 8)), normals(f=(20, 8), x=(20, 8)))
def residual_of_an_argument_for_a_product(p, inputs):
    """A near miss: nothing is subtracted from a move of itself."""
    h = inputs["x"] + jnp.tanh(inputs["f"] @ p["w"])
    return jnp.tanh(h @ p["k"]) @ p["k"].T


@row(weights(w=(8, 8), k=(8, 8)), normals(f=(20, 8), x=(20, 8)))
def rotary_halves_of_a_product(p, inputs):
    """A near miss: halves of one activation are subtracted, for a product."""
    a, b = jnp.split(inputs["x"] @ p["w"], 2, axis=1)
    turned = jnp.concatenate([0.8 * a - 0.6 * b, 0.6 * a + 0.8 * b], axis=1)
    return turned @ p["k"]
