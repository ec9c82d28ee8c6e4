"""Recursions that estimate and decide: filters, control, statistics, finance."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, normals, row, uniform, weights
from tests.loops.samplers import positive, spread, stochastic, turning

EYE = jnp.eye


def predicted(move, mean, cov):
    """The prediction of a Kalman filter."""
    return move @ mean, move @ cov @ move.T + 0.02 * EYE(4, dtype=cov.dtype)


def corrected(see, mean, cov, y):
    """The correction of a Kalman filter by one observation."""
    spread_of_y = see @ cov @ see.T + 0.1 * EYE(2, dtype=cov.dtype)
    gain = jnp.linalg.solve(spread_of_y, see @ cov).T
    return mean + gain @ (y - see @ mean), cov - gain @ see @ cov


MODEL = both(turning(0.99, move=(4, 4)), weights(see=(2, 4)))


@row(MODEL, normals(y=(50, 2)))
def kalman_filter_in_a_dictionary(p, inputs):
    def turn(c, y):
        mean, cov = predicted(p["move"], c["mean"], c["cov"])
        mean, cov = corrected(p["see"], mean, cov, y)
        return {"mean": mean, "cov": cov}, jnp.sqrt(jnp.diagonal(cov))

    start = {"mean": jnp.zeros(4), "cov": EYE(4)}
    return jax.lax.scan(turn, start, inputs["y"])


@row(MODEL, normals(y=(40, 2)))
def rauch_tung_striebel_smoother(p, inputs):
    """A filter forward and a smoother backward over what it stacked."""

    def forward(carry, y):
        ahead = predicted(p["move"], *carry)
        carry = corrected(p["see"], *ahead, y)
        return carry, (carry, ahead)

    end, (now, ahead) = jax.lax.scan(forward, (jnp.zeros(4), EYE(4)), inputs["y"])

    def backward(later, both):
        (mean, cov), (mean_ahead, cov_ahead) = both
        gain = jnp.linalg.solve(cov_ahead, p["move"] @ cov).T
        mean = mean + gain @ (later[0] - mean_ahead)
        cov = cov + gain @ (later[1] - cov_ahead) @ gain.T
        return (mean, cov), mean

    before = jax.tree.map(lambda x: x[:-1], now)
    after = jax.tree.map(lambda x: x[1:], ahead)
    return jax.lax.scan(backward, end, (before, after), reverse=True)[1]


@row(constants(length=1.0), normals(scale=0.3, y=(60,)))
def extended_kalman_filter_of_a_pendulum(p, inputs):
    """The derivative of the model is taken in every turn."""

    def model(x):
        down = -9.8 / p["length"] * jnp.sin(x[0])
        return x + 0.05 * jnp.stack([x[1], down - 0.1 * x[1]])

    def turn(carry, y):
        mean, cov = carry
        slope = jax.jacfwd(model)(mean)
        mean, cov = model(mean), slope @ cov @ slope.T + 0.01 * EYE(2)
        gain = cov[:, 0] / (cov[0, 0] + 0.1)
        mean = mean + gain * (y - jnp.sin(mean[0]))
        return (mean, cov - gain[:, None] * cov[0][None]), mean

    return jax.lax.scan(turn, (jnp.zeros(2), EYE(2)), inputs["y"])[1]


@row(turning(0.98, move=(6, 6)), normals(x=(20, 6), y=(30, 6)))
def ensemble_kalman_filter(p, inputs):
    """Evensen 1994: the covariance is that of twenty members."""

    def turn(members, y):
        members = members @ p["move"].T
        off = members - members.mean(0, keepdims=True)
        cov = jnp.einsum("ni,nj->ij", off, off) / 19.0
        gain = jnp.linalg.solve(cov + 0.5 * EYE(6), cov)
        members = members + (y[None] - members) @ gain
        return members + 0.1 * off[::-1], members.mean(0)

    return jax.lax.scan(turn, inputs["x"], inputs["y"])[1]


@row(normals(truth=(6,)), normals(x=(150, 6)))
def recursive_least_squares(p, inputs):
    """With a forgetting factor, as adaptive filters have it."""

    def turn(carry, x):
        w, cov = carry
        cx = cov @ x
        gain = cx / (0.98 + x @ cx)
        y = jnp.sum(x * p["truth"])
        w = w + gain * (y - w @ x)
        return (w, (cov - jnp.outer(gain, cx)) / 0.98), y - w @ x

    start = (jnp.zeros(6), 10.0 * EYE(6))
    (w, cov), wrong = jax.lax.scan(turn, start, inputs["x"])
    return w, cov, wrong[:20]


@row(normals(truth=(8,)), normals(x=(200,)))
def least_mean_squares_filter(p, inputs):
    """Widrow and Hoff 1960: an echo is cancelled, tap by tap."""

    def turn(carry, x):
        w, window = carry
        window = jnp.roll(window, 1).at[0].set(x)
        wrong = jnp.sum(window * p["truth"]) - w @ window
        return (w + 0.03 * wrong * window, window), wrong

    start = (jnp.zeros(8), jnp.zeros(8))
    (w, _), wrong = jax.lax.scan(turn, start, inputs["x"])
    return w, wrong


@row(both(stochastic(a=(5, 5)), stochastic(e=(40, 5))), normals(x=(2,)))
def forward_and_backward_probabilities(p, inputs):
    """Rabiner 1989: two scans, the posterior of each state from both."""

    def forward(alpha, e):
        alpha = (alpha @ p["a"]) * e
        return alpha / alpha.sum(), alpha / alpha.sum()

    def backward(beta, e):
        new = p["a"] @ (beta * e)
        return new / new.sum(), beta

    _, alphas = jax.lax.scan(forward, jnp.full(5, 0.2), p["e"])
    _, betas = jax.lax.scan(backward, jnp.ones(5), p["e"], reverse=True)
    both_ways = alphas * betas
    return both_ways / both_ways.sum(1, keepdims=True)


@row(normals(w=(3, 2)), normals(x=(60, 2)))
def mixture_of_gaussians_by_expectation_maximisation(p, inputs):
    x = inputs["x"] + 2.5 * jnp.repeat(p["w"], 20, axis=0)

    def turn(_, carry):
        means, scales, shares = carry
        far = (x**2).sum(1)[:, None] - 2 * x @ means.T + (means**2).sum(1)[None]
        logs = jnp.log(shares)[None] - jnp.log(scales)[None] - far / scales[None] / 2
        r = jax.nn.softmax(logs, axis=1)
        total = r.sum(0)
        means = (r.T @ x) / total[:, None]
        spread_of_x = (r * ((x[:, None] - means[None]) ** 2).sum(-1)).sum(0)
        return means, spread_of_x / total / 2 + 1e-3, total / 60.0

    start = (x[::20], jnp.ones(3), jnp.full(3, 1 / 3))
    return jax.lax.fori_loop(0, 20, turn, start)


@row(normals(scale=2.0, c=(4, 6)), normals(x=(64, 6)), grad=())
def clusters_by_means(p, inputs):
    """Lloyd 1982, until the means rest; distances by a product."""
    x = inputs["x"] + jnp.repeat(p["c"], 16, axis=0)

    def turn(carry):
        i, c, _ = carry
        far = (c**2).sum(1)[None] - 2 * jnp.einsum("nd,kd->nk", x, c)
        belongs = jax.nn.one_hot(far.argmin(1), 4)
        new = (belongs.T @ x) / jnp.maximum(belongs.sum(0), 1.0)[:, None]
        return i + 1, new, jnp.abs(new - c).max()

    def goes_on(carry):
        return (carry[0] < 30) & (carry[2] > 1e-5)

    return jax.lax.while_loop(goes_on, turn, (0, x[::16], jnp.array(jnp.inf)))[1]


@row(normals(w=(6,)), normals(x=(48, 6), u=(48,)))
def logistic_regression_by_reweighting(p, inputs):
    """Newton's method of statistics: it has a sigmoid, yet it is no layer."""
    x = inputs["x"]
    y = jax.nn.sigmoid((x * p["w"][None]).sum(1) + 0.5 * inputs["u"])

    def turn(w, _):
        mu = jax.nn.sigmoid(x @ w)
        hessian = x.T @ (x * (mu * (1 - mu))[:, None]) + 0.01 * EYE(6)
        gradient = x.T @ (y - mu) - 0.01 * w
        return w + jnp.linalg.solve(hessian, gradient), None

    return jax.lax.scan(turn, jnp.zeros(6), None, length=10)[0]


@row(both(stochastic(p=(3, 12, 12)), normals(r=(3, 12))), normals(x=(2,)))
def value_iteration(p, inputs):
    """Bellman 1957: the best of three actions in each of twelve states."""

    def turn(v, _):
        q = p["r"] + 0.95 * jnp.einsum("aij,j->ai", p["p"], v)
        return q.max(0), None

    v, _ = jax.lax.scan(turn, jnp.zeros(12), None, length=150)
    return v, v - v.mean()


@row(both(stochastic(p=(24, 24)), normals(f=(24, 6))), uniform(0.0, 1.0, r=(24,)))
def temporal_differences_with_traces(p, inputs):
    """Sutton 1988: linear values of a chain, TD(lambda) over 150 turns."""

    def turn(carry, k):
        w, trace = carry
        now, later = p["f"][k * 7 % 24], p["f"][(k * 7 + 7) % 24]
        off = inputs["r"][k * 7 % 24] + 0.9 * (w @ later) - w @ now
        trace = 0.7 * 0.9 * trace + now
        return (w + 0.01 * off * trace, trace), off

    start = (jnp.zeros(6), jnp.zeros(6))
    return jax.lax.scan(turn, start, jnp.arange(150))


PLANT = both(turning(1.02, a=(6, 6)), weights(b=(6, 2)))


@row(PLANT, normals(x=(6,)))
def linear_quadratic_regulator(p, inputs):
    """Gains backward in time by Riccati's equation, then the plant forward."""
    a, b = p["a"], p["b"]

    def backward(cost, _):
        gain = jnp.linalg.solve(EYE(2) + b.T @ cost @ b, b.T @ cost @ a)
        return EYE(6) + a.T @ cost @ (a - b @ gain), gain

    _, gains = jax.lax.scan(backward, EYE(6), None, length=40)

    def forward(x, gain):
        u = -gain @ x
        return a @ x + b @ u, (x, u)

    return jax.lax.scan(forward, inputs["x"], gains[::-1])[1]


@row(both(turning(0.97, phi=(4, 4)), normals(scale=0.1, d=(4,))), normals(x=(4,)))
def affine_bond_prices(p, inputs):
    """Ang and Piazzesi 2003: log prices of bonds, maturity after maturity."""

    def turn(carry, _):
        a, b = carry
        a = a + 0.5 * (b @ b) * 0.01 - 0.004
        b = p["phi"].T @ b - p["d"]
        return (a, b), (a, b)

    start = (jnp.zeros(()), jnp.zeros(4))
    _, (a, b) = jax.lax.scan(turn, start, None, length=120)
    return a, b


@row(stochastic(p=(24, 24)), constants(price=np.linspace(0.5, 1.7, 24)))
def american_option_on_a_chain(p, inputs):
    """Backward induction: to hold is a product, to exercise a relu."""
    exercise = jax.nn.relu(1.0 - inputs["price"])
    move = 0.9 * EYE(24) + 0.1 * p["p"]

    def turn(value, _):
        held = 0.998 * (move @ value)
        return jnp.maximum(held, exercise), None

    return jax.lax.scan(turn, exercise, None, length=60)[0]


@row(
    both(turning(0.5, a=(3, 3)), turning(0.8, b=(3, 3))),
    both(normals(e=(100, 3)), positive(0.05, 0.3, c=(3, 3))),
)
def multivariate_garch_likelihood(p, inputs):
    """Engle and Kroner 1995 (BEKK): the covariance of returns follows itself."""

    def turn(carry, e):
        h, total = carry
        pull = p["a"] @ e
        h = inputs["c"] + pull[:, None] * pull[None] + p["b"] @ h @ p["b"].T
        total = total + jnp.linalg.slogdet(h)[1] + e @ jnp.linalg.solve(h, e)
        return (h, total), jnp.diagonal(h)

    return jax.lax.scan(turn, (inputs["c"], jnp.zeros(())), inputs["e"])


@row(turning(0.7, one=(4, 4), two=(4, 4)), normals(y=(2, 4), e=(60, 4)))
def vector_autoregression(p, inputs):
    """A forecast of two lags, with shocks."""

    def turn(lags, e):
        y = 0.9 * (p["one"] @ lags[0]) + 0.35 * (p["two"] @ lags[1]) + 0.1 * e
        return jnp.stack([y, lags[0]]), y

    return jax.lax.scan(turn, inputs["y"], inputs["e"])[1]


@row(positive(0.5, 4.0, a=(6, 6)), normals(q=(6,), m=(12, 6), u=(12,)), grad=())
def hamiltonian_monte_carlo(p, inputs):
    """Leapfrog steps in an inner loop, accepted by the energy."""

    def energy(q, m):
        return 0.5 * (q @ p["a"] @ q) + 0.5 * (m @ m)

    def leap(_, both):
        q, m = both
        m = m - 0.05 * (p["a"] @ q)
        q = q + 0.1 * m
        return q, m - 0.05 * (p["a"] @ q)

    def turn(q, drawn):
        m, u = drawn
        new, end = jax.lax.fori_loop(0, 15, leap, (q, m))
        lost = energy(new, end) - energy(q, m)
        return jnp.where(jnp.exp(-lost) > jax.nn.sigmoid(u) - 0.4, new, q), lost

    return jax.lax.scan(turn, inputs["q"], (inputs["m"], inputs["u"]))


@row(normals(scale=0.5, r=(12,)), normals(x=(12,)))
def levinson_durbin_recursion(p, inputs):
    """A prediction filter from autocorrelations, one order after the other."""
    power = jnp.exp(-0.3 * jnp.arange(13.0)) * jnp.cos(0.9 * jnp.arange(13.0))
    r = power.at[1:].add(0.05 * jnp.tanh(p["r"])).at[0].add(0.1)

    def turn(k, carry):
        a, left = carry
        reversed_a = jnp.roll(a[::-1], k + 1)
        reflection = -(jnp.roll(r[::-1], k + 2) @ a) / left
        kept = jnp.where(jnp.arange(13) <= k + 1, jnp.roll(reversed_a, 1), 0.0)
        return a + reflection * kept, left * (1 - reflection**2)

    start = (jnp.zeros(13).at[0].set(1.0), r[0])
    return jax.lax.fori_loop(0, 12, turn, start)


@row(spread(0.2, 1.5, a=(8, 5)), normals(y=(40, 8)))
def factor_analysis_by_expectation_maximisation(p, inputs):
    """Rubin and Thayer 1982: loadings from expected factors, in a scan."""
    y = inputs["y"]

    def turn(carry, _):
        load, noise = carry
        scaled = load / noise[:, None]
        cov = jnp.linalg.inv(EYE(5) + load.T @ scaled)
        mean = y @ scaled @ cov
        second = 40.0 * cov + mean.T @ mean
        load = jnp.linalg.solve(second, mean.T @ y).T
        noise = jnp.mean(y**2 - y * (mean @ load.T), axis=0)
        return (load, jnp.maximum(noise, 0.2)), None

    start = (p["a"], jnp.ones(8))
    return jax.lax.scan(turn, start, None, length=15)[0]


@row(turning(0.99, move=(3, 3)), normals(x=(32, 3), y=(30, 3)), grad=())
def particle_filter(p, inputs):
    """Systematic resampling by the weights of the particles."""

    def turn(x, y):
        x = x @ p["move"].T + 0.2 * x[::-1]
        logs = -2.0 * ((x - y[None]) ** 2).sum(1)
        w = jax.nn.softmax(logs)
        mean = w @ x
        chosen = jnp.searchsorted(jnp.cumsum(w), (jnp.arange(32.0) + 0.5) / 32.0)
        return 0.9 * x[jnp.minimum(chosen, 31)] + 0.1 * y[None], mean

    return jax.lax.scan(turn, inputs["x"], inputs["y"])[1]
