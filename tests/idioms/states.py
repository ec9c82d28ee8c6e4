"""States that a product or a lookup begins, or an array that is closed over.

The weights are the same in every turn: these are steps, and no layers.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, integers, normals, row, weights

DT = 0.01
FIELD = weights(e=(8, 8), w=(8, 8))
X = normals(x=(4, 8))
START = np.float32(np.random.default_rng(3).normal(size=(4, 8)))


def moved(y, start):
    return {"end": y, "moved": y - start}


@row(FIELD, X)
def latent_differential_equation(p, inputs):
    def turn(y, _):
        return y + DT * jnp.tanh(y @ p["w"]), None

    return jax.lax.scan(turn, inputs["x"] @ p["e"], None, length=100)[0]


@row(FIELD, X)
def latent_equation_in_a_fori_loop(p, inputs):
    def turn(_, y):
        return y + DT * jnp.tanh(y @ p["w"])

    return jax.lax.fori_loop(0, 100, turn, jnp.tanh(inputs["x"] @ p["e"]))


@row(FIELD, X, grad=())
def latent_equation_in_a_while_loop(p, inputs):
    def turn(carry):
        t, y = carry
        return t + DT, y + DT * jnp.tanh(y @ p["w"])

    start = (0.0, inputs["x"] @ p["e"])
    return jax.lax.while_loop(lambda c: c[0] < 1, turn, start)[1]


@row(FIELD, X)
def latent_path_of_each_example_under_vmap(p, inputs):
    def path(x):
        def turn(y, _):
            y = y - DT * (y - jnp.sin(y @ p["w"]))
            return y, y[:2]

        return jax.lax.scan(turn, x @ p["e"], None, length=100)

    return jax.vmap(path)(inputs["x"])


@row(both(normals(table=(16, 8)), weights(w=(8, 8))), integers(16, ids=(4,)))
def flow_of_embeddings(p, inputs):
    start = p["table"][inputs["ids"]]
    y = jax.lax.fori_loop(0, 200, lambda _, y: y + 0.002 * jnp.tanh(y @ p["w"]), start)
    return moved(y, start)


@row(both(normals(table=(16, 8)), weights(w=(8, 8))), integers(16, ids=(4,)))
def flow_of_embeddings_in_checkpoints(p, inputs):
    @jax.checkpoint
    def turn(y, _):
        return y - 0.002 * (jnp.tanh(y @ p["w"]) @ p["w"].T), None

    start = jnp.take(p["table"], inputs["ids"], axis=0)
    return moved(jax.lax.scan(turn, start, None, length=200)[0], start)


@row(weights(e=(8, 16), w=(8, 32)), normals(x=(4, 8), xs=(64, 4, 32)))
def decoder_that_an_encoder_begins(p, inputs):
    """An LSTM; what its inputs add to the gates was made before the loop."""
    h, c = jnp.split(inputs["x"] @ p["e"], 2, axis=1)

    def turn(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(h @ p["w"] + 0.1 * x, 4, axis=1)
        c = jax.nn.sigmoid(f + 4) * c + 0.1 * jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    return jax.lax.scan(turn, (jnp.tanh(h), c), inputs["xs"])[0]


@row(weights(e=(8, 16), w=(8, 16), u=(8, 8)), X)
def gated_unit_that_an_encoder_begins(p, inputs):
    def turn(_, h):
        z, r = jnp.split(jax.nn.sigmoid(h @ p["w"]), 2, axis=1)
        new = jnp.tanh((r * h) @ p["u"])
        return h + 0.02 * z * (new - h)

    h = jnp.split(inputs["x"] @ p["e"], 2, axis=1)[0]
    return jax.lax.fori_loop(0, 100, turn, h)


@row(weights(e=(8, 16), w=(8, 8)), X)
def leapfrog_that_a_product_begins(p, inputs):
    def turn(carry, _):
        q, v = carry
        v = v - DT * (q @ p["w"])
        return (q + DT * v, v), None

    start = jnp.split(inputs["x"] @ p["e"], 2, axis=1)
    return jax.lax.scan(turn, tuple(start), None, length=100)[0]


@row(FIELD, normals(x=(4, 8), force=(100, 4, 8)))
def forced_state_that_a_product_begins(p, inputs):
    def turn(y, force):
        return y + DT * (jnp.tanh(y @ p["w"]) + force), None

    @jax.jit
    def solved(start):
        return jax.lax.scan(turn, start, inputs["force"])[0]

    return solved(inputs["x"] @ p["e"])


@row(weights(e=(8, 8), w=(8, 8), out=(8, 4)), X)
def latent_equation_between_two_products(p, inputs):
    def turn(y, _):
        slope = jnp.tanh(y @ p["w"])
        half = jnp.tanh((y + DT / 2 * slope) @ p["w"])
        return y + DT * half, None

    y, _ = jax.lax.scan(turn, inputs["x"] @ p["e"], None, length=100)
    return y @ p["out"]


@row(weights(w=(8, 8)), X)
def unrolled_from_a_closed_over_array(p, inputs):
    y = jnp.asarray(START)
    for _ in range(12):
        y = y + DT * jnp.tanh((y + inputs["x"]) @ p["w"])
    return moved(y, START)


@row(weights(w=(8, 8)), X)
def unrolled_in_a_jitted_helper(p, inputs):
    @jax.jit
    def solved(w):
        y = jnp.asarray(START)
        for _ in range(8):
            y = y - DT * (y @ w)
        return y

    return moved(solved(p["w"]), START), inputs["x"] @ p["w"]


@row(weights(w=(8, 8)), X)
def unrolled_checkpointed_steps(p, inputs):
    @jax.checkpoint
    def step(y):
        return y + DT * jnp.sin(y @ p["w"])

    y = jnp.asarray(START)
    for _ in range(8):
        y = step(y)
    return moved(y, START), inputs["x"] @ p["w"]


@row(weights(w=(8, 8)), X)
def unrolled_under_vmap(p, inputs):
    def path(x):
        y = jnp.asarray(START[0])
        for _ in range(8):
            y = y + DT * jnp.tanh(y @ p["w"] + x)
        return moved(y, START[0])

    return jax.vmap(path)(inputs["x"])


@row(weights(w=(8, 8)), X)
def unrolled_leapfrog_from_a_closed_over_array(p, inputs):
    q, v = jnp.asarray(START), jnp.zeros((4, 8))
    for _ in range(8):
        v = v - DT * (q @ p["w"])
        q = q + DT * (v + 0.1 * inputs["x"])
    return moved(q, START)


@row(weights(w=(8, 8)), X)
def unrolled_heavy_ball(p, inputs):
    """Descent with momentum to the solution of a least squares problem."""
    y, speed = jnp.asarray(START), jnp.zeros((4, 8))
    for _ in range(8):
        slope = (y @ p["w"] - inputs["x"]) @ p["w"].T
        speed = 0.5 * speed - 0.002 * slope
        y = y + speed
    return moved(y, START)


@row(weights(w=(8, 8)), X)
def unrolled_from_rows_of_a_closed_over_array(p, inputs):
    y = jnp.asarray(START)[jnp.array([3, 1, 0, 2])]
    start = y
    for _ in range(8):
        y = y + DT * jnp.tanh((y - inputs["x"]) @ p["w"])
    return moved(y, start)


@row(weights(e=(8, 8), w=(4, 8, 8)), X)
def layers_of_stacked_weights(p, inputs):
    """A near miss: each turn reads its own weights, so they are layers."""

    def layer(h, w):
        return h + jnp.tanh(h @ w), None

    return jax.lax.scan(layer, inputs["x"] @ p["e"], p["w"])[0]


@row(both(normals(table=(16, 8)), weights(w=(4, 8, 8))), integers(16, ids=(4,)))
def layers_of_weights_by_index(p, inputs):
    """A near miss: the slices are read by index."""

    def layer(i, h):
        return h + jnp.tanh(h @ p["w"][i])

    h = jax.lax.fori_loop(0, 4, layer, p["table"][inputs["ids"]])
    return h @ p["w"][0]


@row(weights(a=(8, 8), b=(8, 8), c=(8, 8)), X)
def layers_from_a_product_in_a_row(p, inputs):
    """A near miss: unrolled layers with weights of their own."""
    h = inputs["x"] @ p["a"]
    for name in "bc":
        h = h + jnp.tanh(h @ p[name])
    return h @ p["a"]
