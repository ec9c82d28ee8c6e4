"""Optimisation by hand, fixed points, and loops that run until a float is small."""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, normals, row, weights

CONTRACTION = both(weights(scale=0.5, w=(8, 8)), normals(b=(8,)))
START = normals(z=(8,))
TOLERANCE = 1e-5
MOST = 500


def positive(p):
    """A symmetric matrix with a condition number of 30 or so."""
    return p["a"] @ p["a"].T + 0.1 * jnp.eye(8)


SYSTEM = weights(a=(8, 8))
RIGHT_SIDE = normals(b=(8,))


@row(CONTRACTION, START, grad=(), f32=True)
def fixed_point_until_a_residual(p, inputs):
    def goes_on(carry):
        i, z, before = carry
        return (jnp.max(jnp.abs(z - before)) > TOLERANCE) & (i < MOST)

    def turn(carry):
        i, z, _ = carry
        return i + 1, jnp.tanh(z @ p["w"] + p["b"]), z

    i, z, _ = jax.lax.while_loop(goes_on, turn, (0, inputs["z"], inputs["z"] + 1.0))
    return z, i


@row(CONTRACTION, START, grad=(), f32=True)
def fixed_point_with_its_residual_carried(p, inputs):
    def turn(carry):
        i, z, _ = carry
        new = jnp.tanh(z @ p["w"] + p["b"])
        return i + 1, new, jnp.linalg.norm(new - z)

    def goes_on(carry):
        return (carry[2] > TOLERANCE) & (carry[0] < MOST)

    start = (0, inputs["z"], jnp.float32(jnp.inf))
    i, z, _ = jax.lax.while_loop(goes_on, turn, start)
    return z, i


@row(CONTRACTION, START, grad=(), f32=True)
def fixed_point_with_a_boolean_carried(p, inputs):
    """As optimistix has it: the comparison is in the body."""

    def turn(carry):
        i, z, _ = carry
        new = jnp.tanh(z @ p["w"] + p["b"])
        done = jnp.all(jnp.abs(new - z) < TOLERANCE * (1 + jnp.abs(z)))
        return i + 1, new, done | (i >= MOST)

    start = (0, inputs["z"], jnp.array(False))
    i, z, _ = jax.lax.while_loop(lambda c: ~c[2], turn, start)
    return z, i


@row(CONTRACTION, START, grad=(), f32=True)
def fixed_point_of_a_batch(p, inputs):
    def turn(carry):
        i, z, done = carry
        new = jnp.tanh(z @ p["w"] + p["b"][None])
        near = jnp.abs(new - z).max(axis=1) < TOLERANCE
        return i + 1, jnp.where(done[:, None], z, new), done | near

    def goes_on(carry):
        return ~carry[2].all() & (carry[0] < MOST)

    z = jnp.stack([inputs["z"], 2 * inputs["z"]])
    i, z, _ = jax.lax.while_loop(goes_on, turn, (0, z, jnp.zeros(2, bool)))
    return z, i


@row(CONTRACTION, normals(x=(4, 8)), grad=(), f32=True)
def equilibrium_layer(p, inputs):
    """Bai et al. 2019, arXiv:1909.01377: the input is added in every turn."""

    def turn(carry):
        i, z, _ = carry
        new = jnp.tanh(z @ p["w"] + inputs["x"])
        return i + 1, new, jnp.sum((new - z) ** 2)

    def goes_on(carry):
        return (carry[2] > TOLERANCE**2) & (carry[0] < MOST)

    start = (0, jnp.zeros((4, 8)), jnp.float32(1.0))
    i, z, _ = jax.lax.while_loop(goes_on, turn, start)
    return z, i


@row(SYSTEM, RIGHT_SIDE, grad=(), f32=True)
def conjugate_gradients_until_a_residual(p, inputs):
    a = p["a"]

    def turn(carry):
        i, x, r, d, size = carry
        moved = (d @ a) @ a.T + 0.1 * d
        alpha = size / (d @ moved)
        x, r = x + alpha * d, r - alpha * moved
        new = r @ r
        return i + 1, x, r, r + new / size * d, new

    def goes_on(carry):
        return (carry[4] > 1e-8) & (carry[0] < 200)

    b = inputs["b"]
    start = (0, jnp.zeros(8), b, b, b @ b)
    i, x, *_ = jax.lax.while_loop(goes_on, turn, start)
    return x, i


@row(SYSTEM, normals(b=(8,)))
def conjugate_gradients_of_fixed_length(p, inputs):
    def turn(carry, _):
        x, r, d = carry
        moved = (d @ p["a"]) @ p["a"].T + 0.5 * d
        size = jnp.sum(r * r)
        alpha = size / jnp.sum(d * moved)
        x, r = x + alpha * d, r - alpha * moved
        return (x, r, r + jnp.sum(r * r) / size * d), None

    b = inputs["b"]
    (x, _, _), _ = jax.lax.scan(turn, (jnp.zeros(8), b, b), None, length=6)
    return x


@row(SYSTEM, normals(b=(8,)))
def conjugate_gradients_of_jax(p, inputs):
    def moved(d):
        return (d @ p["a"]) @ p["a"].T + 0.5 * d

    return jax.scipy.sparse.linalg.cg(moved, inputs["b"], maxiter=20)[0]


def hidden(p, x):
    return jnp.tanh(x @ p["w"])


@row(weights(w=(8, 8)), normals(x=(16, 8), y=(16, 4), v=(8, 4)))
def inner_gradient_descent(p, inputs):
    """Finn et al. 2017, arXiv:1703.03400: a head is fitted inside of the loss."""
    h = hidden(p, inputs["x"])

    def loss(v):
        return jnp.mean((h @ v - inputs["y"]) ** 2)

    def turn(v, _):
        return v - 2e-3 * jax.grad(loss)(v), None

    v, _ = jax.lax.scan(turn, inputs["v"], None, length=300)
    return v - inputs["v"], loss(v)


@row(weights(w=(8, 8)), normals(x=(16, 8), y=(16, 4), v=(8, 4)))
def inner_gradient_descent_in_a_python_loop(p, inputs):
    h = hidden(p, inputs["x"])

    def loss(v):
        return jnp.mean((h @ v - inputs["y"]) ** 2)

    v = inputs["v"]
    for _ in range(6):
        v = v - 2e-3 * jax.grad(loss)(v)
    return v - inputs["v"]


@row(weights(w=(8, 8), v=(8, 4)), normals(x=(16, 8), y=(16, 4)))
def one_step_of_an_optimizer_inside(p, inputs):
    def loss(p):
        return jnp.mean((hidden(p, inputs["x"]) @ p["v"] - inputs["y"]) ** 2)

    grads = jax.grad(loss)(p)
    return jax.tree.map(lambda leaf, g: leaf - 1e-3 * g, p, grads)


@row(weights(w=(8, 8)), normals(x=(16, 8), y=(16, 4), v=(8, 4)))
def inner_momentum(p, inputs):
    h = hidden(p, inputs["x"])

    def turn(carry, _):
        v, m = carry
        m = 0.99 * m + h.T @ (h @ v - inputs["y"]) / 16
        return (v - 1e-4 * m, m), None

    start = (inputs["v"], jnp.zeros((8, 4)))
    (v, m), _ = jax.lax.scan(turn, start, None, length=200)
    return v - inputs["v"], m


@row(weights(w=(8, 8)), normals(x=(16, 8), y=(16, 4), v=(8, 4)), grad=())
def inner_adam(p, inputs):
    h = hidden(p, inputs["x"])

    def turn(carry, t):
        v, m, n = carry
        g = h.T @ (h @ v - inputs["y"]) / 16
        m, n = 0.9 * m + 0.1 * g, 0.999 * n + 0.001 * g**2
        step = (m / (1 - 0.9**t)) / (jnp.sqrt(n / (1 - 0.999**t)) + 1e-3)
        return (v - 1e-3 * step, m, n), None

    start = (inputs["v"], jnp.zeros((8, 4)), jnp.zeros((8, 4)))
    (v, _, n), _ = jax.lax.scan(turn, start, jnp.arange(1.0, 201.0))
    return v - inputs["v"], n


@row(weights(w=(8, 8)), normals(x=(8,)))
def newton_by_the_hessian(p, inputs):
    def energy(x):
        return jnp.sum(jnp.cosh(0.3 * (x @ p["w"]))) + 0.5 * jnp.sum((x - 1.0) ** 2)

    x = inputs["x"]
    for _ in range(3):
        x = x - jnp.linalg.solve(jax.hessian(energy)(x), jax.grad(energy)(x))
    return x


@row(weights(w=(8, 1)), normals(x=(8, 8)), grad=(), f32=True)
def newton_root_until_a_residual(p, inputs):
    """A root for each row: a product predicts nothing here, it is the function."""

    def value(t):
        return t**3 + t - jnp.tanh((t * inputs["x"]) @ p["w"]) - 1.0

    def turn(carry):
        i, t, _ = carry
        slope = (value(t + 1e-2) - value(t - 1e-2)) / 2e-2
        new = t - value(t) / slope
        return i + 1, new, jnp.max(jnp.abs(new - t))

    def goes_on(carry):
        return (carry[2] > TOLERANCE) & (carry[0] < MOST)

    start = (0, jnp.ones((8, 1)), jnp.float32(1.0))
    i, t, _ = jax.lax.while_loop(goes_on, turn, start)
    return t, i


@row(weights(w=(8, 8)), normals(x=(8,)), grad=(), f32=True)
def bfgs_until_a_gradient_is_small(p, inputs):
    def energy(x):
        return jnp.sum(jnp.log(jnp.cosh(x @ p["w"]))) + 0.5 * jnp.sum((x - 1.0) ** 2)

    def turn(carry):
        i, x, g, inverse = carry
        step = -0.5 * (inverse @ g)
        new = jax.grad(energy)(x + step)
        y = new - g
        rho = 1.0 / (y @ step)
        left = jnp.eye(8) - rho * step[:, None] * y[None, :]
        inverse = left @ inverse @ left.T + rho * step[:, None] * step[None, :]
        return i + 1, x + step, new, inverse

    def goes_on(carry):
        return (jnp.linalg.norm(carry[2]) > 1e-4) & (carry[0] < 200)

    x = inputs["x"]
    start = (0, x, jax.grad(energy)(x), jnp.eye(8))
    i, x, *_ = jax.lax.while_loop(goes_on, turn, start)
    return x, i


@row(weights(w=(8, 8)), normals(x=(16, 8), y=(16, 8)), grad=())
def line_search(p, inputs):
    """Armijo's rule: the loop waits for a loss that its body computes."""

    def loss(w):
        return jnp.mean((jnp.tanh(inputs["x"] @ w) - inputs["y"]) ** 2)

    before, g = loss(p["w"]), jax.grad(loss)(p["w"])
    slope = jnp.sum(g * g)

    def too_long(carry):
        step, now = carry
        return (now > before - 0.3 * step * slope) & (step > 1e-4)

    def turn(carry):
        step = carry[0] * 0.8
        return step, loss(p["w"] - step * g)

    step, now = jax.lax.while_loop(
        too_long, turn, (jnp.float32(64.0), jnp.inf + before)
    )
    return step, now, p["w"] - step * g


@row(SYSTEM, normals(v=(8,)), grad=(), f32=True)
def power_iteration_until_it_stands(p, inputs):
    m = jnp.abs(p["a"]) + 0.1

    def turn(carry):
        i, v, _ = carry
        new = m @ v
        new = new / jnp.linalg.norm(new)
        return i + 1, new, jnp.linalg.norm(new - v)

    def goes_on(carry):
        return (carry[2] > TOLERANCE) & (carry[0] < MOST)

    v = jnp.abs(inputs["v"])
    i, v, _ = jax.lax.while_loop(goes_on, turn, (0, v, jnp.float32(1.0)))
    return v, i


@row(SYSTEM, normals(v=(8,)))
def power_iteration_of_fixed_length(p, inputs):
    def turn(_, v):
        v = jnp.abs(p["a"]) @ v + 0.1 * v.sum()
        return v / jnp.linalg.norm(v)

    v = jax.lax.fori_loop(0, 30, turn, jnp.abs(inputs["v"]))
    return v, v @ (p["a"] @ v)


@row(SYSTEM, normals(b=(8,)))
def jacobi_iteration(p, inputs):
    a = 0.1 * p["a"] + jnp.eye(8)
    middle = jnp.diagonal(a)

    def turn(x, _):
        return x + (inputs["b"] - a @ x) / middle, None

    return jax.lax.scan(turn, jnp.zeros(8), None, length=100)[0]


@row(weights(a=(16, 8)), normals(b=(16,)))
def lasso_by_proximal_steps(p, inputs):
    """Beck and Teboulle 2009, without momentum."""

    def turn(x, _):
        x = x - 0.1 * (p["a"].T @ (p["a"] @ x - inputs["b"]))
        return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.02, 0.0), None

    return jax.lax.scan(turn, jnp.zeros(8), None, length=300)[0]


@row(weights(a=(8, 8)), normals(b=(8, 2)))
def implicit_gradient_of_a_solve(p, inputs):
    a = p["a"] + 3 * jnp.eye(8)

    def solve(move, b):
        return jnp.linalg.solve(a, b)

    return jax.lax.custom_linear_solve(
        lambda x: a @ x,
        inputs["b"],
        solve,
        transpose_solve=lambda move, b: jnp.linalg.solve(a.T, b),
    )


@row(weights(w=(8, 8)), normals(x=(16, 8)), grad=(), f32=True)
def clusters_until_nothing_moves(p, inputs):
    """k-means: the condition compares centers, which are floats of the body."""
    x = jnp.concatenate([inputs["x"] + 3.0, inputs["x"] - 3.0])

    def turn(carry):
        i, centers, _ = carry
        scores = (centers**2).sum(1)[None] - 2 * x @ centers.T
        one = jax.nn.one_hot(scores.argmin(axis=1), 2)
        new = (one.T @ x) / (one.sum(0)[:, None] + 1e-6)
        return i + 1, new, jnp.abs(new - centers).max()

    start = (0, x[jnp.array([0, 20])], jnp.float32(1.0))
    i, centers, _ = jax.lax.while_loop(
        lambda c: (c[2] > TOLERANCE) & (c[0] < 50), turn, start
    )
    return centers, i
