"""Lines whose results nobody reads: they must change neither value nor gradient.

Each program computes with a small part of a value near 1, of which half precision keeps
nothing, and has a line that would read that value in half.
"""

import jax
import jax.numpy as jnp

from tests.idioms.row import normals, row, weights

MODEL = weights(w=(8, 4))
SQUARE = weights(w=(8, 4), k=(4, 4))
X = normals(x=(32, 8))


def near_one(p, inputs):
    return 1 + 0.001 * jax.nn.sigmoid(inputs["x"] @ p["w"])


def rest(v):
    return (v - 1) * 1000


@row(MODEL, X)
def dead_multiplication(p, inputs):
    v = near_one(p, inputs)
    _ = jnp.tanh(v) * v
    return rest(v)


@row(SQUARE, X)
def dead_product(p, inputs):
    v = near_one(p, inputs)
    _ = jnp.tanh(v @ p["k"]) + v
    return rest(v)


@row(SQUARE, X)
def primal_of_a_gradient_taken_inside(p, inputs):
    """The value of `value_and_grad` is dropped, and so is what led to it alone."""

    def energy(h):
        v = 1 + 0.001 * jax.nn.sigmoid(h)
        return jnp.sum(rest(v) ** 2) + jnp.sum(v @ p["k"])

    _, force = jax.value_and_grad(energy)(inputs["x"] @ p["w"])
    return force


@row(SQUARE, normals(x=(32, 8), y=(32, 4)))
def metrics_that_are_dropped(p, inputs):
    def loss(p, inputs):
        v = near_one(p, inputs)
        e = rest(v) - inputs["y"]
        metrics = {
            "norm": jnp.linalg.norm(v @ p["k"]),
            "mean": jnp.tanh(v * v).mean(),
            "hits": jnp.mean((v @ p["k"] > 0.5).astype(jnp.float32)),
        }
        return jnp.mean(e**2), metrics

    value, _ = loss(p, inputs)
    return value


@row(SQUARE, X)
def jitted_helper_with_an_output_that_is_dropped(p, inputs):
    @jax.jit
    def both(v):
        return rest(v), jnp.tanh(v @ p["k"]) * v

    kept, _ = both(near_one(p, inputs))
    return kept


@row(SQUARE, X)
def checkpoint_with_an_output_that_is_dropped(p, inputs):
    @jax.checkpoint
    def both(x, w, k):
        v = 1 + 0.001 * jax.nn.sigmoid(x @ w)
        return rest(v), jnp.tanh(v) * v, v @ k

    return both(inputs["x"], p["w"], p["k"])[0]


@row(MODEL, X)
def helper_in_a_helper_with_a_dropped_output(p, inputs):
    @jax.jit
    def inner(v):
        return v - 1, v * v

    @jax.jit
    def outer(v):
        little, square = inner(v)
        return little * 1000, square * v

    return outer(near_one(p, inputs))[0]


@row(SQUARE, normals(x=(4, 32, 8)))
def stack_that_nobody_reads(p, inputs):
    def turn(total, x):
        v = 1 + 0.001 * jax.nn.sigmoid(x @ p["w"])
        return total + rest(v), jnp.tanh(v @ p["k"]) * v

    total, _ = jax.lax.scan(turn, jnp.zeros((32, 4)), inputs["x"])
    return total


@row(SQUARE, normals(x=(4, 32, 8)))
def carry_that_nobody_reads(p, inputs):
    """The turns read it themselves, and nothing else does."""

    def turn(carry, x):
        total, unread = carry
        v = 1 + 0.001 * jax.nn.sigmoid(x @ p["w"])
        return (total + rest(v), unread + jnp.tanh(v @ p["k"])), None

    start = (jnp.zeros((32, 4)), jnp.zeros((32, 4)))
    (total, _), _ = jax.lax.scan(turn, start, inputs["x"])
    return total


@row(SQUARE, X)
def carry_of_a_fori_loop_that_nobody_reads(p, inputs):
    v = near_one(p, inputs)

    def turn(_, carry):
        y, unread = carry
        return y + 0.1 * rest(v), unread + jnp.tanh(v @ p["k"])

    start = (jnp.zeros((32, 4)), jnp.zeros((32, 4)))
    return jax.lax.fori_loop(0, 5, turn, start)[0]


@row(SQUARE, X, grad=())
def carry_of_a_while_loop_that_nobody_reads(p, inputs):
    v = near_one(p, inputs)

    def turn(carry):
        i, y, unread = carry
        return i + 1, y + rest(v), unread + jnp.tanh(v @ p["k"])

    start = (0, jnp.zeros((32, 4)), jnp.zeros((32, 4)))
    return jax.lax.while_loop(lambda c: c[0] < 4, turn, start)[1]


@row(SQUARE, X)
def branch_with_an_output_that_nobody_reads(p, inputs):
    v = near_one(p, inputs)
    kept, _ = jax.lax.cond(
        inputs["x"][0, 0] > 0,
        lambda v: (rest(v), jnp.tanh(v @ p["k"]) * v),
        lambda v: (-rest(v), v * v),
        v,
    )
    return kept


@row(SQUARE, X)
def dead_norm_of_a_projection(p, inputs):
    v = near_one(p, inputs)
    h = v @ p["k"]
    unit = h / jnp.linalg.norm(h, axis=1, keepdims=True)
    _ = jnp.maximum(unit * v, 0.5), jnp.log(v)
    return rest(v)


@row(MODEL, X)
def dead_line_under_vmap(p, inputs):
    def of_one(x):
        v = 1 + 0.001 * jax.nn.sigmoid(x @ p["w"])
        _ = jnp.tanh(v) * v, jnp.outer(v, v)
        return rest(v)

    return jax.vmap(of_one)(inputs["x"])


@row(MODEL, normals(x=(8, 8), spot=(8, 4)))
def sensitivity_of_options(p, inputs):
    """Of `value_and_grad` the derivative is kept, and the price is dropped."""

    def price(spot, rate):
        return spot * jax.nn.sigmoid(rest(rate) - 0.5) + spot * rate

    rate, spot = near_one(p, inputs), jnp.exp(0.1 * inputs["spot"])
    each = jax.vmap(jax.vmap(jax.value_and_grad(price, argnums=1)))
    return each(spot, rate)[1] / 1000


@row(SQUARE, X)
def result_that_a_product_and_a_return_read(p, inputs):
    """A near miss: the product is read, and keeps half precision."""
    v = near_one(p, inputs)
    return jnp.tanh(v @ p["k"]), jnp.tanh(v * 0.5)


@row(weights(w=(8, 8), v=(8, 4)), X)
def layers_with_a_dead_norm(p, inputs):
    """A near miss: a dead line in f32 does not take the products of layers along."""
    h = jnp.tanh(inputs["x"] @ p["w"])
    _ = jnp.linalg.norm(h), jnp.log(h * h + 1).mean()
    return h @ p["v"]
