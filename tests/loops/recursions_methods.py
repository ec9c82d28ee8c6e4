"""Recursions that search: methods of optimisation, games, graphs, inverse problems."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.idioms.row import both, constants, normals, row, uniform, weights
from tests.loops.samplers import graph, positive, spread, stochastic

LEAST_SQUARES = spread(0.3, 1.5, a=(24, 12))
MEASURED = normals(b=(24,))


def soft(x, limit):
    """What is left of values that are drawn to zero by `limit`."""
    return jnp.sign(x) * jax.nn.relu(jnp.abs(x) - limit)


@row(LEAST_SQUARES, MEASURED)
def lasso_by_accelerated_shrinkage(p, inputs):
    """FISTA, Beck and Teboulle 2009: a product, a relu, and momentum."""

    def turn(carry, _):
        x, y, t = carry
        new = soft(y - 0.4 * (p["a"].T @ (p["a"] @ y - inputs["b"])), 0.02)
        t_new = 0.5 + 0.5 * jnp.sqrt(1 + 4 * t**2)
        return (new, new + ((t - 1) / t_new) * (new - x), t_new), None

    start = (jnp.zeros(12), jnp.zeros(12), jnp.ones(()))
    return jax.lax.scan(turn, start, None, length=60)[0][0]


@row(LEAST_SQUARES, MEASURED)
def nonnegative_least_squares(p, inputs):
    """Projected gradients: each turn looks like a layer with a relu."""

    def turn(_, x):
        return jax.nn.relu(x - 0.4 * (p["a"].T @ (p["a"] @ x - inputs["b"])))

    return jax.lax.fori_loop(0, 120, turn, jnp.zeros(12))


@row(LEAST_SQUARES, MEASURED)
def lasso_by_splitting(p, inputs):
    """ADMM, Boyd et al. 2011, with the inverse of the quadratic at hand."""
    inverse = jnp.linalg.inv(jnp.einsum("ki,kj->ij", p["a"], p["a"]) + jnp.eye(12))

    def turn(carry, _):
        z, u = carry
        x = inverse @ (inputs["b"] @ p["a"] + z - u)
        z = soft(x + u, 0.05)
        return (z, u + x - z), None

    return jax.lax.scan(turn, (jnp.zeros(12), jnp.zeros(12)), None, length=60)[0]


@row(positive(0.02, 1.0, a=(12, 12)), normals(b=(12,)))
def heavy_ball_on_a_quadratic(p, inputs):
    """Polyak 1964: the end is a solution of a linear system."""

    def turn(_, carry):
        x, before = carry
        return x - 1.2 * (p["a"] @ x - inputs["b"]) + 0.7 * (x - before), x

    zero = jnp.zeros(12)
    return jax.lax.fori_loop(0, 150, turn, (zero, zero))[0]


@row(positive(0.1, 2.0, a=(8, 8)), normals(x=(8,)))
def quasi_newton_steps(p, inputs):
    """BFGS with the inverse Hessian in the carry, steps of a fixed length."""

    def slope(x):
        return p["a"] @ x + 0.1 * x**3 - 1.0

    def turn(carry, _):
        x, h, g = carry
        s = -0.5 * (h @ g)
        new = slope(x + s)
        y = new - g
        rho = 1 / (y @ s)
        left = jnp.eye(8) - rho * jnp.outer(s, y)
        h = left @ h @ left.T + rho * jnp.outer(s, s)
        return (x + s, h, new), new @ new

    start = (inputs["x"], 0.5 * jnp.eye(8), slope(inputs["x"]))
    (x, _, _), sizes = jax.lax.scan(turn, start, None, length=12)
    return x, sizes


@row(constants(w=[1.0, 0.5, 2.0, 0.3]), normals(scale=0.1, noise=(30,)))
def curve_fit_by_levenberg_marquardt(p, inputs):
    """A sum of two exponentials is fitted; the Jacobian is taken in every turn."""
    t = jnp.linspace(0.0, 3.0, 30)

    def curve(w):
        return w[0] * jnp.exp(-w[1] * t) + w[2] * jnp.exp(-w[3] * t)

    y = curve(p["w"]) + 0.1 * inputs["noise"]

    def turn(_, w):
        off, j = curve(w) - y, jax.jacfwd(curve)(w)
        return w - jnp.linalg.solve(j.T @ j + 0.05 * jnp.eye(4), j.T @ off)

    return jax.lax.fori_loop(0, 15, turn, 0.8 * p["w"])


@row(normals(scale=1.0, a=(10, 10)), normals(x=(2,)))
def zero_sum_game_by_multiplicative_weights(p, inputs):
    """Two players with a softmax each: it looks like attention."""

    def turn(carry, _):
        mine, theirs, total = carry
        x, y = jax.nn.softmax(mine), jax.nn.softmax(-theirs)
        gain, loss = p["a"] @ y, x @ p["a"]
        return (mine + 0.2 * gain, theirs + 0.2 * loss, total + x), None

    zero = jnp.zeros(10)
    return jax.lax.scan(turn, (zero, zero, zero), None, length=150)[0][2] / 150.0


@row(normals(x=(24,)), constants(d=np.eye(23, 24, k=1) - np.eye(23, 24)))
def total_variation_by_primal_and_dual(p, inputs):
    """Chambolle and Pock 2011: the dual variable is clipped."""
    d = inputs["d"]

    def turn(carry, _):
        x, over, dual = carry
        dual = jnp.clip(dual + 0.4 * (d @ over), -0.5, 0.5)
        new = (x - 0.4 * (d.T @ dual) + 0.4 * p["x"]) / 1.4
        return (new, 2 * new - x, dual), None

    start = (p["x"], p["x"], jnp.zeros(23))
    return jax.lax.scan(turn, start, None, length=80)[0][0]


@row(normals(c=(12,)), uniform(0.2, 1.0, a=(4, 12)))
def linear_program_by_interior_points(p, inputs):
    """Short steps of a primal barrier method, each a weighted system."""
    a = inputs["a"]

    def turn(carry, _):
        x, mu = carry
        weighted = a * (x**2)[None]
        slope = p["c"] - mu / x
        y = jnp.linalg.solve(weighted @ a.T, weighted @ slope)
        step = -(x**2) * (slope - a.T @ y) / mu
        size = jnp.minimum(1.0, 0.8 / jnp.max(jnp.abs(step / x)))
        return (x + size * step, 0.8 * mu), y

    start = (jnp.ones(12), jnp.ones(()))
    (x, _), y = jax.lax.scan(turn, start, None, length=12)
    return x, y[-1]


@row(uniform(0.1, 1.0, v=(12, 10)), uniform(0.1, 1.0, w=(12, 3), h=(3, 10)))
def nonnegative_factors(p, inputs):
    """Lee and Seung 2001: multiplicative updates of both factors."""

    def turn(_, c):
        w, h = c["w"], c["h"]
        h = h * (w.T @ p["v"]) / (w.T @ w @ h)
        w = w * (p["v"] @ h.T) / (w @ (h @ h.T))
        return {"w": w, "h": h}

    return jax.lax.fori_loop(0, 60, turn, dict(inputs))


@row(normals(x=(12, 2), y=(10, 2)), stochastic(a=(12,), b=(10,)))
def optimal_transport_by_sinkhorn(p, inputs):
    far = ((p["x"][:, None] - p["y"][None]) ** 2).sum(-1)
    kernel = jnp.exp(-far)

    def turn(_, both):
        v = inputs["b"] / (both[0] @ kernel)
        return inputs["a"] / (kernel @ v), v

    u, v = jax.lax.fori_loop(0, 60, turn, (jnp.ones(12), jnp.ones(10)))
    return (u[:, None] * kernel * v[None] * far).sum(), u[:, None] * kernel * v[None]


@row(uniform(0.5, 1.5, w=(16, 16)), graph(g=(16, 16)))
def ranks_of_pages(p, inputs):
    links = p["w"] * inputs["g"]
    links = links / links.sum(0, keepdims=True)

    def turn(rank, _):
        return 0.15 / 16.0 + 0.85 * (links @ rank), None

    return jax.lax.scan(turn, jnp.full(16, 1 / 16), None, length=80)[0]


@row(uniform(0.5, 1.5, w=(16, 16)), graph(g=(16, 16)))
def similarity_of_neighbours(p, inputs):
    """SimRank, Jeh and Widom 2002: two are alike if their neighbours are."""
    links = p["w"] * inputs["g"]
    links = links / links.sum(0, keepdims=True)

    def turn(s, _):
        s = 0.8 * (links.T @ s @ links)
        return jnp.fill_diagonal(s, 1.0, inplace=False), None

    return jax.lax.scan(turn, jnp.eye(16), None, length=20)[0]


@row(uniform(0.5, 1.5, w=(16, 16)), both(graph(g=(16, 16)), normals(y=(16, 3))))
def labels_that_spread_in_a_graph(p, inputs):
    """Zhou et al. 2004: as a graph network without weights, and it converges."""
    links = (p["w"] + p["w"].T) * inputs["g"]
    size = jnp.sqrt(links.sum(0))
    links = links / size[:, None] / size[None]

    def turn(f, _):
        return 0.95 * (links @ f) + 0.05 * inputs["y"], None

    return jax.lax.scan(turn, inputs["y"], None, length=100)[0]


@row(normals(scale=0.5, j=(12, 12)), both(graph(g=(12, 12)), normals(b=(12,))))
def mean_field_of_spins(p, inputs):
    """An Ising model: tanh of a product, damped, near its transition."""
    pull = 0.35 * (1 + 0.2 * jnp.tanh(p["j"] + p["j"].T)) * inputs["g"]

    def turn(_, m):
        return 0.5 * m + 0.5 * jnp.tanh(pull @ m + 0.02 * inputs["b"])

    return jax.lax.fori_loop(0, 150, turn, 0.1 * inputs["b"])


@row(normals(scale=0.4, angle=(7,)), normals(goal=(2,)))
def inverse_kinematics_by_damped_steps(p, inputs):
    """An arm of seven joints reaches for a goal."""

    def hand(angles):
        total = jnp.cumsum(angles)
        return jnp.stack([jnp.cos(total).sum(), jnp.sin(total).sum()])

    goal = 2.0 * inputs["goal"] / jnp.linalg.norm(inputs["goal"]) + 1.0

    def turn(angles, _):
        j = jax.jacfwd(hand)(angles)
        off = goal - hand(angles)
        step = j.T @ jnp.linalg.solve(j @ j.T + 0.3 * jnp.eye(2), off)
        return angles + 0.5 * step, off

    return jax.lax.scan(turn, p["angle"], None, length=40)[0]


@row(spread(0.3, 1.2, a=(16, 16)), normals(x=(16,)))
def richardson_lucy_deblurring(p, inputs):
    """Photons are counted: each turn multiplies by a ratio of products."""
    blur = jnp.abs(p["a"]) + 0.5 * jnp.eye(16)
    blur = blur / blur.sum(0, keepdims=True)
    seen = (blur * jnp.exp(0.5 * inputs["x"])[None]).sum(1)

    def turn(x, _):
        return x * (blur.T @ (seen / (blur @ x))), None

    return jax.lax.scan(turn, jnp.ones(16), None, length=100)[0]


@row(both(weights(scale=0.5, u=(12, 3)), normals(v=(3, 10))), normals(x=(12, 10)))
def alternating_least_squares(p, inputs):
    """Two factors of a table, solved in turn (recommendation)."""
    table = (p["u"][:, :, None] * p["v"][None]).sum(1) + 0.3 * inputs["x"]

    def solved(left, right):
        return jnp.linalg.solve(left.T @ left + 0.1 * jnp.eye(3), left.T @ right)

    def turn(u, _):
        v = solved(u, table)
        return solved(v.T, table.T).T, v

    u, v = jax.lax.scan(turn, p["u"] + inputs["x"][:, :3], None, length=30)
    return (u[:, :, None] * v[-1][None]).sum(1)
