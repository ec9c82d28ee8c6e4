"""Statistics, flows, quantities that are sorted or counted, and quantization."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import stats

from tests.idioms.row import both, constants, integers, normals, row, weights

MODEL = weights(w=(8, 16))
X = normals(x=(64, 8))


def far_from_zero(p, inputs):
    """Activations with a mean that is large beside their spread."""
    return 30.0 + inputs["x"] @ p["w"]


@row(MODEL, X)
def variance_and_standard_deviation(p, inputs):
    h = far_from_zero(p, inputs)
    return h.var(0), h.std(0), h.mean(0)


@row(MODEL, X)
def variance_by_two_means(p, inputs):
    h = 1.0 + inputs["x"] @ p["w"]
    return (h**2).mean(0) - h.mean(0) ** 2


@row(MODEL, X)
def covariance_and_correlation(p, inputs):
    h = inputs["x"] @ p["w"] + 1.0
    return jnp.cov(h.T), jnp.corrcoef(h[:, :4].T)


@row(MODEL, X)
def covariance_by_a_product(p, inputs):
    h = inputs["x"] @ p["w"] + 1.0
    h = h - h.mean(0, keepdims=True)
    return h.T @ h / 63


@row(MODEL, both(X, normals(y=(64,))))
def correlation_with_targets(p, inputs):
    a = (inputs["x"] @ p["w"]).sum(1)
    b = 1e4 + inputs["y"]
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / jnp.sqrt((a * a).sum() * (b * b).sum())


@row(MODEL, both(X, normals(y=(64, 16))))
def determination(p, inputs):
    y = 100.0 + inputs["y"]
    e = y - (100.0 + inputs["x"] @ p["w"])
    return 1 - (e**2).sum() / ((y - y.mean()) ** 2).sum()


@row(MODEL, X)
def median_and_quantiles(p, inputs):
    h = inputs["x"] @ p["w"]
    return jnp.median(h, axis=0), jnp.quantile(h, 0.9, axis=0)


@row(MODEL, X)
def sorted_and_ranked(p, inputs):
    h = inputs["x"] @ p["w"]
    return jnp.sort(h, axis=0), jnp.sort(h, axis=0)[::-1][:5].mean(0)


@row(MODEL, X)
def top_k_and_a_threshold(p, inputs):
    h = inputs["x"] @ p["w"]
    top, _ = jax.lax.top_k(h, 4)
    return top, jnp.where(h >= top[:, -1:], h, 0.0).sum(1)


@row(MODEL, X, grad=())
def histogram(p, inputs):
    h = jnp.tanh(inputs["x"] @ p["w"])
    counts, _ = jnp.histogram(h, bins=8, range=(-1.0, 1.0))
    return jnp.cumsum(counts)


@row(MODEL, X)
def soft_histogram(p, inputs):
    h = jnp.tanh(inputs["x"] @ p["w"]).ravel()
    near = jnp.exp(-50.0 * (h[:, None] - jnp.linspace(-1.0, 1.0, 16)[None]) ** 2)
    near = near / near.sum(1, keepdims=True)
    counts = near.sum(0) / near.sum()
    return counts, -(counts * jnp.log(counts)).sum()


@row(MODEL, X)
def empirical_distribution_distance(p, inputs):
    h = jnp.sort(inputs["x"] @ p["w"], axis=0)
    even = stats.norm.ppf((jnp.arange(64.0) + 0.5) / 64)
    return jnp.abs(h - even[:, None]).mean()


@row(weights(w=(8, 8)), normals(x=(32, 8), y=(32, 8)))
def mean_discrepancy_of_kernels(p, inputs):
    def kernel(a, b):
        far = ((a[:, None] - b[None]) ** 2).sum(-1)
        return jnp.exp(-far / 8).mean()

    a, b = inputs["x"] @ p["w"], 1.0 + inputs["y"]
    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


@row(weights(w=(8, 8)), normals(x=(64, 8)))
def normal_log_density(p, inputs):
    h = inputs["x"] @ p["w"]
    return stats.norm.logpdf(h).sum(1), stats.norm.cdf(h), stats.norm.logcdf(h - 3.0)


@row(weights(w=(8, 8)), normals(x=(64, 8)))
def mixture_log_density(p, inputs):
    mean = 3.0 * (inputs["x"] @ p["w"])
    parts = stats.norm.logpdf(inputs["x"][:, :1], mean, 0.3) - jnp.log(8.0)
    return jax.nn.logsumexp(parts, axis=1)


@row(weights(w=(8, 10)), normals(x=(16, 8)))
def multivariate_normal_density(p, inputs):
    terms = inputs["x"] @ p["w"]

    def density(t):
        rows, columns = jnp.tril_indices(4)
        low = jnp.zeros((4, 4)).at[rows, columns].set(0.3 * t)
        low = low + jnp.eye(4)
        z = jax.scipy.linalg.solve_triangular(low, jnp.ones(4), lower=True)
        return -0.5 * (z * z).sum() - jnp.log(jnp.abs(jnp.diagonal(low))).sum()

    return jax.vmap(density)(terms)


# Normalizing flows.
@row(weights(a=(4, 16), b=(16, 8), c=(4, 16), d=(16, 8)), normals(x=(32, 8)))
def coupling_flow(p, inputs):
    """Dinh et al. 2016, arXiv:1605.08803: what comes in goes out, and is invertible."""
    x, logs = inputs["x"], jnp.zeros(32)
    for first, second in ("ab", "cd") * 3:
        a, b = jnp.split(x, 2, axis=1)
        s, t = jnp.split(jnp.tanh(a @ p[first]) @ p[second], 2, axis=1)
        s = 0.3 * jnp.tanh(s)
        x = jnp.concatenate([b * jnp.exp(s) + t, a], axis=1)
        logs = logs + s.sum(1)
    return x, logs - 0.5 * (x**2).sum(1)


# Its gradient is zero.
@row(weights(a=(4, 16), b=(16, 8)), normals(x=(32, 8)), grad=())
def coupling_flow_and_its_inverse(p, inputs):
    def terms(a):
        s, t = jnp.split(jnp.tanh(a @ p["a"]) @ p["b"], 2, axis=1)
        return 0.3 * jnp.tanh(s), t

    a, b = jnp.split(inputs["x"], 2, axis=1)
    s, t = terms(a)
    there = jnp.exp(s) * b + t
    s, t = terms(a)
    return (there - t) * jnp.exp(-s) - b + 1.0


@row(weights(u=(8, 8), w=(8, 8)), normals(x=(32, 8)))
def planar_flow(p, inputs):
    x, logs = inputs["x"], jnp.zeros(32)
    for k in range(4):
        inside = jnp.tanh(x @ p["w"][:, k])
        x = x + 0.3 * p["u"][k][None] * inside[:, None]
        slope = (1 - inside**2) * (0.3 * (p["w"][:, k] * p["u"][k]).sum())
        logs = logs + jnp.log(jnp.abs(1 + slope))
    return x, logs


@row(weights(w=(8, 16)), normals(x=(64, 8), y=(64,)))
def spline_flow(p, inputs):
    """Durkan et al. 2019, arXiv:1906.04032, with linear pieces."""
    widths = jax.nn.softmax(inputs["x"] @ p["w"])
    knots = jnp.concatenate([jnp.zeros((64, 1)), jnp.cumsum(widths, axis=1)], axis=1)
    at = jax.nn.sigmoid(inputs["y"])
    bin_ = (knots[:, 1:] < at[:, None]).sum(1)
    low = jnp.take_along_axis(knots, bin_[:, None], axis=1)[:, 0]
    width = jnp.take_along_axis(widths, bin_[:, None], axis=1)[:, 0]
    return (bin_.astype(jnp.float32) + (at - low) / width) / 16, -jnp.log(width)


@row(weights(w=(8, 8)), normals(x=(16, 8), noise=(16, 8)))
def trace_by_hutchinson(p, inputs):
    def field(x):
        return jnp.tanh(x @ p["w"])

    _, moved = jax.jvp(field, (inputs["x"],), (inputs["noise"],))
    return (moved * inputs["noise"]).sum(1)


# Quantization.
def through(hard, soft):
    return soft + jax.lax.stop_gradient(hard - soft)


@row(weights(w=(8, 16)), normals(x=(32, 8)))
def rounding_straight_through(p, inputs):
    h = jnp.tanh(inputs["x"] @ p["w"])
    hard = jnp.round(h * 7.0) / 7.0
    return through(hard, h) @ p["w"].T


@row(weights(w=(8, 16)), normals(x=(32, 8)))
def weights_rounded_to_8_bits(p, inputs):
    step = jnp.abs(p["w"]).max() / 127
    w = through(jnp.round(p["w"] / step) * step, p["w"])
    return inputs["x"] @ w


@row(weights(w=(8, 16)), normals(x=(32, 8)), grad=())
def activations_rounded_to_8_bits(p, inputs):
    h = inputs["x"] @ p["w"]
    step = jnp.abs(h).max(1, keepdims=True) / 127
    codes = jnp.clip(jnp.round(h / step), -127, 127).astype(jnp.int8)
    return codes.astype(jnp.float32) * step


def codebook(rng):
    return {"w": np.float32(np.eye(8)), "book": np.float32(4 * np.eye(8))}


def near_codes(rng):
    codes = 4 * np.eye(8)[rng.integers(8, size=32)]
    return {"x": np.float32(codes + rng.normal(scale=0.3, size=(32, 8)))}


@row(codebook, near_codes)
def vector_quantization(p, inputs):
    """van den Oord et al. 2017, arXiv:1711.00937, equation 3."""
    z = inputs["x"] @ p["w"]
    far = (z**2).sum(1)[:, None] - 2 * z @ p["book"].T + (p["book"] ** 2).sum(1)[None]
    chosen = p["book"][far.argmin(1)]
    still = jax.lax.stop_gradient
    moves_book, moves_z = (still(z) - chosen) ** 2, (z - still(chosen)) ** 2
    return through(chosen, z), jnp.mean(moves_book) + 0.25 * jnp.mean(moves_z)


@row(weights(w=(8, 6)), normals(x=(32, 8)))
def finite_scalar_quantization(p, inputs):
    """Mentzer et al. 2023, arXiv:2309.15505."""
    z = 3.5 * jnp.tanh(inputs["x"] @ p["w"])
    return through(jnp.round(z), z) / 3.5


@row(weights(w=(8, 8)), both(normals(x=(32, 8)), integers(8, at=(32,))))
def mean_of_each_class(p, inputs):
    h = 5.0 + inputs["x"] @ p["w"]
    total = jax.ops.segment_sum(h, inputs["at"], 8)
    count = jax.ops.segment_sum(jnp.ones(32), inputs["at"], 8)
    return total / jnp.maximum(count, 1.0)[:, None], jax.ops.segment_max(
        jnp.concatenate([h, h]), jnp.tile(jnp.arange(8), 8), 8
    )


@row(weights(w=(8, 8)), both(normals(x=(64, 8)), constants(big=3000.0)))
def probabilities_counted_and_compared(p, inputs):
    chances = jax.nn.sigmoid(inputs["x"] @ p["w"])
    count = inputs["big"] * chances.mean(0)
    return count, (count - 1500.0) / jnp.sqrt(count)
