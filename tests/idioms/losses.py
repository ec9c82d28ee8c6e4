"""Losses by hand, with large targets and with metrics beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.idioms.row import both, integers, normals, row, weights

MODEL = weights(w=(8, 4))


def large_targets(rng):
    return {"y": np.float32(rng.uniform(1e5, 2e5, (32, 4)))}


LARGE = both(normals(x=(32, 8)), large_targets)
SMALL = normals(x=(32, 8), y=(32, 4))


def wrong(p, inputs):
    return inputs["x"] @ p["w"] - inputs["y"]


@row(MODEL, LARGE)
def mean_square(p, inputs):
    return jnp.mean(wrong(p, inputs) ** 2)


@row(MODEL, LARGE)
def mean_square_with_accuracy_beside(p, inputs):
    e = wrong(p, inputs)
    return jnp.mean(e**2), jnp.mean(jnp.abs(e) < 5)


@row(MODEL, LARGE)
def mean_square_of_scaled_errors(p, inputs):
    return jnp.mean((wrong(p, inputs) / 1e4) ** 2)


@row(MODEL, LARGE)
def mean_square_with_a_metric_beside(p, inputs):
    e = wrong(p, inputs)
    return jnp.mean((e / 1e4) ** 2), jnp.mean(jnp.abs(e) < 1.5e5)


@row(MODEL, SMALL)
def mean_square_with_a_metric_of_small_errors(p, inputs):
    e = wrong(p, inputs)
    return jnp.mean(e**2), jnp.mean((jnp.abs(e) < 1.0).astype(jnp.float32))


@row(MODEL, LARGE)
def huber_by_hand(p, inputs):
    e = wrong(p, inputs) / 1e4
    return jnp.mean(jnp.where(jnp.abs(e) < 1.0, 0.5 * e**2, jnp.abs(e) - 0.5))


@row(MODEL, LARGE)
def huber_of_errors_that_are_not_scaled(p, inputs):
    e = wrong(p, inputs)
    a = jnp.abs(e)
    return jnp.mean(jnp.where(a < 1e5, 0.5e-5 * e**2, a - 0.5e5)) * 1e-4


@row(MODEL, LARGE)
def huber_by_minimum(p, inputs):
    a = jnp.abs(wrong(p, inputs))
    part = jnp.minimum(a, 1e5)
    return jnp.mean(0.5 * (part / 1e5) * part + (a - part)) * 1e-4


@row(MODEL, LARGE)
def quantile_loss(p, inputs):
    e = -wrong(p, inputs)
    return jnp.mean(jnp.maximum(0.9 * e, -0.1 * e)) * 1e-4


@row(MODEL, LARGE)
def loss_of_chosen_rows(p, inputs):
    e = wrong(p, inputs)[jnp.array([3, 1, 17])]
    return jnp.mean((e / 1e4) ** 2)


@row(MODEL, both(LARGE, integers(4, at=(32, 1))))
def loss_of_chosen_actions(p, inputs):
    e = jnp.take_along_axis(wrong(p, inputs), inputs["at"], axis=1)
    return jnp.mean((e / 1e4) ** 2)


@row(MODEL, LARGE)
def median_of_errors(p, inputs):
    return jnp.median(jnp.abs(wrong(p, inputs))) * 1e-4


@row(MODEL, LARGE)
def trimmed_mean_of_sorted_errors(p, inputs):
    e = jnp.sort(wrong(p, inputs).ravel())
    return jnp.mean(e[16:-16]) * 1e-4


@row(MODEL, LARGE)
def quantile_of_errors(p, inputs):
    return jnp.quantile(wrong(p, inputs), jnp.array([0.1, 0.9]), axis=0) * 1e-4


@row(MODEL, LARGE)
def largest_errors(p, inputs):
    return jax.lax.top_k(jnp.abs(wrong(p, inputs)).ravel(), 5)[0] * 1e-4


@row(MODEL, LARGE)
def errors_returned(p, inputs):
    return wrong(p, inputs)


@row(MODEL, LARGE)
def residual_and_its_norm(p, inputs):
    e = wrong(p, inputs)
    return jnp.sqrt(jnp.sum((e / 1e5) ** 2)), jnp.max(jnp.abs(e))


@row(MODEL, LARGE)
def log_cosh_by_hand(p, inputs):
    e = wrong(p, inputs) / 1e5
    return jnp.mean(e + jax.nn.softplus(-2.0 * e) - jnp.log(2.0))


@row(MODEL, both(SMALL, integers(4, label=(32,))))
def cross_entropy_by_hand(p, inputs):
    logits = inputs["x"] @ p["w"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - jnp.log(jnp.exp(shifted).sum(axis=1, keepdims=True))
    chosen = jnp.take_along_axis(logs, inputs["label"][:, None], axis=1)
    return -chosen.mean(), jnp.mean(logits.argmax(axis=1) == inputs["label"])


@row(weights(scale=20.0, w=(8, 64)), both(normals(x=(32, 8)), integers(64, y=(32,))))
def cross_entropy_of_large_logits(p, inputs):
    logits = inputs["x"] @ p["w"]
    total = jnp.log(jnp.exp(logits - logits.max(1, keepdims=True)).sum(1))
    chosen = jnp.sum(logits * jax.nn.one_hot(inputs["y"], 64), axis=1)
    return (total + logits.max(1) - chosen).mean()


@row(weights(w=(8, 16)), both(normals(x=(32, 8)), integers(16, y=(32,))))
def perplexity_with_padding(p, inputs):
    logits = inputs["x"] @ p["w"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["y"])
    mask = (inputs["y"] > 2).astype(jnp.float32)
    return jnp.exp((losses * mask).sum() / mask.sum())


@row(weights(w=(8, 16)), both(normals(x=(32, 8)), integers(16, y=(32,))))
def label_smoothing_and_z_loss(p, inputs):
    logits = inputs["x"] @ p["w"]
    z = jax.nn.logsumexp(logits, axis=1)
    target = 0.9 * jax.nn.one_hot(inputs["y"], 16) + 0.1 / 16
    return (z - (target * logits).sum(1)).mean() + 1e-4 * (z**2).mean()


@row(weights(w=(8, 4), v=(8, 4)), normals(x=(32, 8), y=(32, 4)))
def gaussian_likelihood(p, inputs):
    mean, log_scale = inputs["x"] @ p["w"], inputs["x"] @ p["v"]
    z = (inputs["y"] - mean) * jnp.exp(-log_scale)
    return jnp.mean(0.5 * z**2 + log_scale + 0.5 * jnp.log(2 * jnp.pi))


@row(weights(w=(8, 16), v=(8, 16)), normals(x=(32, 8), y=(32, 8)))
def contrastive_loss(p, inputs):
    """Radford et al. 2021, arXiv:2103.00020, figure 3."""
    a, b = inputs["x"] @ p["w"], inputs["y"] @ p["v"]
    a = a / jnp.linalg.norm(a, axis=1, keepdims=True)
    b = b / jnp.linalg.norm(b, axis=1, keepdims=True)
    logits = (a @ b.T) / 0.07
    right = jnp.arange(32)
    losses = (
        optax.softmax_cross_entropy_with_integer_labels(each, right)
        for each in (logits, logits.T)
    )
    return sum(loss.mean() for loss in losses) / 2


@row(weights(w=(8, 16)), normals(x=(32, 8), y=(32, 8), z=(32, 8)))
def triplet_loss(p, inputs):
    a, b, c = (inputs[name] @ p["w"] for name in "xyz")
    near, far = ((a - b) ** 2).sum(1), ((a - c) ** 2).sum(1)
    return jnp.maximum(near - far + 1.0, 0.0).mean(), (near < far).mean()


@row(weights(w=(8, 16), v=(16, 8)), normals(x=(32, 8), noise=(32, 8)))
def variational_bound(p, inputs):
    mean, log_var = jnp.split(inputs["x"] @ p["w"], 2, axis=1)
    z = mean + jnp.exp(0.5 * log_var) * inputs["noise"]
    back = z @ p["v"][:8]
    kl = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var)
    return jnp.mean((back - inputs["x"]) ** 2), kl.sum(1).mean()


@row(weights(w=(8, 8)), normals(x=(8, 8), y=(8, 8)))
def sinkhorn_distance(p, inputs):
    """Cuturi 2013, in logarithms."""
    a, b = inputs["x"] @ p["w"], inputs["y"] @ p["w"]
    cost = ((a[:, None] - b[None]) ** 2).sum(-1)
    scores = -cost / 0.5

    def turn(carry, _):
        f, g = carry
        f = -jax.nn.logsumexp(scores + g[None], axis=1)
        g = -jax.nn.logsumexp(scores + f[:, None], axis=0)
        return (f, g), None

    start = (jnp.zeros(8), jnp.zeros(8))
    (f, g), _ = jax.lax.scan(turn, start, None, length=50)
    return jnp.sum(jnp.exp(scores + f[:, None] + g[None]) * cost)
