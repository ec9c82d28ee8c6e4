"""Second moments less what the means explain: two products nearly cancel."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, normals, row, weights

N = 64


def about_a_hundred(rng):
    return {"y": np.float32(100 + 5 * rng.normal(size=(N, 8)))}


def shares(rng):
    """Columns of weights that sum to 1."""
    logits = rng.normal(size=(N, 4))
    return {"r": np.float32(np.exp(logits) / np.exp(logits).sum(0))}


MODEL = weights(v=(8, 8))
DATA = both(normals(x=(N, 8)), shares)
ARGUMENT = both(DATA, about_a_hundred)


def samples(p, inputs):
    """Samples around 100 that a layer predicts."""
    return 100 + 5 * jnp.tanh(inputs["x"] @ p["v"])


def layer(p, inputs):
    return jnp.tanh(inputs["x"] @ p["v"])


@row(MODEL, ARGUMENT, grad=(0, 1))
def variance_of_an_argument(p, inputs):
    y, r = inputs["y"], inputs["r"]
    return r.T @ (y * y) - (r.T @ y) ** 2, layer(p, inputs)


@row(MODEL, ARGUMENT, grad=(0, 1))
def covariance_of_an_argument(p, inputs):
    y = inputs["y"]
    m = jnp.mean(y, axis=0)
    return y.T @ y / N - jnp.outer(m, m), layer(p, inputs)


@row(MODEL, DATA)
def variance_of_a_weighted_mixture(p, inputs):
    y, r = samples(p, inputs), inputs["r"]
    return r.T @ (y * y) - (r.T @ y) ** 2


@row(MODEL, DATA)
def covariance_less_an_outer_product(p, inputs):
    y = samples(p, inputs)
    m = jnp.mean(y, axis=0)
    return y.T @ y / N - jnp.outer(m, m)


@row(MODEL, DATA)
def variance_under_vmap(p, inputs):
    y = samples(p, inputs)

    def of_component(r):
        return r @ (y * y) - (r @ y) ** 2

    return jax.vmap(of_component, in_axes=1)(inputs["r"])


@row(MODEL, DATA)
def covariance_by_einsum(p, inputs):
    y = samples(p, inputs)
    m = y.mean(0)
    second = jnp.einsum("ni,nj->ij", y, y) / N
    return second - jnp.einsum("i,j->ij", m, m)


@row(MODEL, DATA)
def covariance_in_a_jitted_helper(p, inputs):
    @jax.jit
    def covariance(y):
        m = jnp.sum(y, axis=0, keepdims=True)
        return (y.T @ y - m.T * m / N) / N

    return covariance(samples(p, inputs))


@row(MODEL, DATA)
def weighted_covariance_in_a_checkpoint(p, inputs):
    @jax.checkpoint
    def covariance(y, r):
        m = r @ y
        return (y * r[:, None]).T @ y - m[:, None] * m[None]

    return covariance(samples(p, inputs), inputs["r"][:, 0])


@row(MODEL, DATA)
def moments_added_up_in_a_scan(p, inputs):
    """Both sums are made in parts; the difference is taken in the end."""

    def turn(carry, y):
        first, second = carry
        return (first + y.sum(0), second + y.T @ y), None

    y = samples(p, inputs).reshape(4, N // 4, 8)
    start = (jnp.zeros(8), jnp.zeros((8, 8)))
    (first, second), _ = jax.lax.scan(turn, start, y)
    m = first / N
    return second / N - jnp.outer(m, m)


@row(MODEL, DATA)
def variance_by_a_row_of_ones(p, inputs):
    y, ones = samples(p, inputs), jnp.ones((1, N))
    mean, square = ones @ y / N, ones @ jnp.square(y) / N
    return square - mean * mean


@row(MODEL, both(DATA, normals(z=(N, 8))))
def cross_covariance(p, inputs):
    a = samples(p, inputs)
    b = 100 + a - jnp.roll(a, 1, axis=1) + 5 * inputs["z"]
    return a.T @ b / N - jnp.mean(a, 0)[:, None] * jnp.mean(b, 0)[None]


@row(MODEL, DATA)
def second_moment_of_centred_samples(p, inputs):
    """A near miss: the mean is subtracted first, and the product keeps half."""
    y = samples(p, inputs)
    y = y - y.mean(0, keepdims=True)
    return y.T @ y / N


@row(weights(w=(8, 4), v=(8, 4)), normals(x=(32, 8)))
def product_less_the_square_of_another(p, inputs):
    """A near miss: a square of other activations, that does not cancel."""
    a, b = inputs["x"] @ p["w"], inputs["x"] @ p["v"]
    return (jnp.tanh(a) - 0.1 * jnp.tanh(b) ** 2) @ p["w"].T
