"""Reinforcement learning: returns, advantages, targets and losses of policies."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, integers, normals, row, uniform, weights

CRITIC = weights(w=(8, 1))
ACTOR = weights(w=(8, 6))


def episode(rng):
    return {
        "x": np.float32(rng.normal(size=(300, 8))),
        "reward": np.float32(rng.uniform(0.5, 1.5, 300)),
        "goes_on": np.float32(rng.uniform(size=300) > 0.005),
    }


def values(p, x):
    return 20.0 + (x @ p["w"])[..., 0]


@row(CRITIC, episode)
def returns_with_a_bootstrap(p, inputs):
    v = values(p, inputs["x"])

    def turn(g, both):
        reward, goes_on = both
        g = reward + 0.99 * goes_on * g
        return g, g

    pairs = (inputs["reward"], inputs["goes_on"])
    return jax.lax.scan(turn, v[-1], pairs, reverse=True)[1]


@row(CRITIC, episode)
def generalized_advantages(p, inputs):
    """Schulman et al. 2015, arXiv:1506.02438, equation 16."""
    v = values(p, inputs["x"])
    after = jnp.concatenate([v[1:], v[-1:]])
    delta = inputs["reward"] + 0.99 * inputs["goes_on"] * after - v

    def turn(a, both):
        d, goes_on = both
        a = d + 0.99 * 0.95 * goes_on * a
        return a, a

    pairs = (delta, inputs["goes_on"])
    return jax.lax.scan(turn, jnp.zeros_like(v[0]), pairs, reverse=True)[1]


@row(CRITIC, episode)
def advantages_from_the_last_difference(p, inputs):
    v = values(p, inputs["x"])
    delta = inputs["reward"][:-1] + 0.99 * v[1:] - v[:-1]

    def turn(a, d):
        a = d + 0.99 * 0.95 * a
        return a, a

    return jax.lax.scan(turn, delta[-1], delta[:-1], reverse=True)[1]


@row(CRITIC, episode)
def temporal_difference_target(p, inputs):
    v = values(p, inputs["x"])
    target = jax.lax.stop_gradient(inputs["reward"][:-1] + 0.99 * v[1:])
    return jnp.mean((v[:-1] - target) ** 2)


@row(CRITIC, episode)
def returns_of_n_steps(p, inputs):
    v = values(p, inputs["x"])
    total = v[10:]
    for k in reversed(range(10)):
        total = inputs["reward"][k : k + 290] + 0.99 * total
    return jnp.mean((v[:290] - jax.lax.stop_gradient(total)) ** 2)


@row(both(weights(w=(8, 1)), weights(a=(8, 6))), both(episode, integers(6, act=(300,))))
def v_trace(p, inputs):
    """Espeholt et al. 2018, arXiv:1802.01561, equation 1."""
    v = values(p, inputs["x"])
    logs = jax.nn.log_softmax(inputs["x"] @ p["a"])
    chosen = jnp.take_along_axis(logs, inputs["act"][:, None], axis=1)[:, 0]
    rho = jnp.minimum(jnp.exp(chosen - jnp.log(1 / 6)), 1.0)
    after = jnp.concatenate([v[1:], v[-1:]])
    delta = rho * (inputs["reward"] + 0.99 * after - v)

    def turn(a, both):
        d, c = both
        a = d + 0.99 * c * a
        return a, a

    _, a = jax.lax.scan(turn, jnp.float32(0.0), (delta, rho), reverse=True)
    return v + a


@row(ACTOR, both(normals(x=(64, 8), a=(64,), old=(64,)), integers(6, act=(64,))))
def clipped_ratio(p, inputs):
    """Schulman et al. 2017, arXiv:1707.06347, equation 7."""
    logs = jax.nn.log_softmax(inputs["x"] @ p["w"])
    chosen = jnp.take_along_axis(logs, inputs["act"][:, None], axis=1)[:, 0]
    ratio = jnp.exp(chosen + 1.5 + 0.1 * inputs["old"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    loss = -jnp.minimum(ratio * inputs["a"], clipped * inputs["a"]).mean()
    return loss, jnp.mean(jnp.abs(ratio - 1) > 0.2), (ratio - 1 - jnp.log(ratio)).mean()


@row(ACTOR, both(normals(x=(64, 8)), integers(6, act=(64,))))
def policy_gradient_with_entropy(p, inputs):
    scores = inputs["x"] @ p["w"]
    logs = jax.nn.log_softmax(scores)
    entropy = -(jnp.exp(logs) * logs).sum(1)
    chosen = jnp.take_along_axis(logs, inputs["act"][:, None], axis=1)
    return -chosen.mean() - 0.01 * entropy.mean(), (scores.argmax(1) == 2).mean()


@row(
    weights(w=(8, 6)),
    both(normals(x=(64, 8), y=(64, 8)), weights(t=(8, 6)), integers(6, act=(64,))),
)
def double_q_learning(p, inputs):
    """van Hasselt et al. 2015, arXiv:1509.06461."""
    q = jnp.take_along_axis(inputs["x"] @ p["w"], inputs["act"][:, None], axis=1)[:, 0]
    best = (inputs["y"] @ p["w"]).argmax(1)
    after = jnp.take_along_axis(inputs["y"] @ inputs["t"], best[:, None], axis=1)[:, 0]
    e = q - jax.lax.stop_gradient(1e4 + 0.99 * after)
    return jnp.mean(jnp.where(jnp.abs(e) < 1.0, 0.5 * e**2, jnp.abs(e) - 0.5))


@row(weights(w=(8, 32)), normals(x=(16, 8), target=(16, 32)))
def quantile_regression(p, inputs):
    """Dabney et al. 2017, arXiv:1710.10044, equation 10."""
    q = inputs["x"] @ p["w"]
    tau = (jnp.arange(32.0) + 0.5) / 32
    u = inputs["target"][:, None, :] - q[:, :, None]
    huber = jnp.where(jnp.abs(u) < 1.0, 0.5 * u**2, jnp.abs(u) - 0.5)
    weight = jnp.abs(tau[None, :, None] - (u < 0).astype(jnp.float32))
    return (weight * huber).sum(1).mean()


@row(weights(w=(8, 51)), both(normals(x=(16, 8)), uniform(-9.0, 9.0, r=(16,))))
def categorical_projection(p, inputs):
    """Bellemare et al. 2017, arXiv:1707.06887, algorithm 1."""
    chances = jax.nn.softmax(inputs["x"] @ p["w"])
    atoms = jnp.linspace(-10.0, 10.0, 51)
    moved = jnp.clip(inputs["r"][:, None] + 0.9 * atoms[None], -10.0, 10.0)
    at = (moved + 10.0) / 0.4
    low = jnp.floor(at)
    i, part = low.astype(jnp.int32), at - low
    rows = jnp.arange(16)[:, None]
    out = jnp.zeros((16, 52)).at[rows, i].add(chances * (1 - part))
    return out.at[rows, i + 1].add(chances * part)


@row(weights(w=(8, 1)), both(normals(x=(64, 8)), uniform(1.0, 2.0, big=(64,))))
def normalized_advantages(p, inputs):
    a = 1000.0 * inputs["big"] - (inputs["x"] @ p["w"])[:, 0]
    return (a - a.mean()) / (a.std() + 1e-8)


@row(weights(w=(8, 6)), both(normals(x=(64, 8)), integers(6, act=(64,))))
def value_iteration(p, inputs):
    """64 states, 6 actions; the rewards are predicted."""
    reward = 1.0 + 0.1 * (inputs["x"] @ p["w"])
    to = (jnp.arange(64)[:, None] * 5 + jnp.arange(6)[None] * 11) % 64

    def turn(v, _):
        return (reward + 0.99 * v[to]).max(axis=1), None

    return jax.lax.scan(turn, jnp.zeros(64), None, length=300)[0]


@row(ACTOR, both(normals(x=(200, 8)), integers(6, act=(200,))))
def importance_weights_in_a_product(p, inputs):
    logs = jax.nn.log_softmax(0.2 * (inputs["x"] @ p["w"]))
    chosen = jnp.take_along_axis(logs, inputs["act"][:, None], axis=1)[:, 0]
    ratios = jnp.cumprod(jnp.exp(chosen + jnp.log(6.0)))
    return ratios / (1.0 + ratios), jnp.cumsum(chosen)[-1]
