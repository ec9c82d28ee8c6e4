"""Recursions of numerical linear algebra: solvers, eigenvalues, matrix functions."""

import jax
import jax.numpy as jnp

from tests.idioms.row import both, constants, normals, row, weights
from tests.loops.samplers import laplacian, positive, spread, turning

SYSTEM = positive(0.3, 3.0, a=(16, 16))
RIGHT = normals(b=(16,))


@row(SYSTEM, RIGHT)
def conjugate_gradients(p, inputs):
    """Hestenes and Stiefel 1952, a fixed number of turns, carries in a tuple."""
    a, b = p["a"], inputs["b"]

    def turn(_, carry):
        x, r, d, size = carry
        ad = a @ d
        step = size / (d @ ad)
        x, r = x + step * d, r - step * ad
        new = r @ r
        return x, r, r + (new / size) * d, new

    return jax.lax.fori_loop(0, 9, turn, (jnp.zeros(16), b, b, b @ b))[0]


@row(SYSTEM, RIGHT, grad=())
def conjugate_gradients_until_a_residual(p, inputs):
    """A preconditioned solver in a while loop, carries in a dictionary."""
    scale = 1 / jnp.diagonal(p["a"])

    def turn(c):
        ad = jnp.dot(p["a"], c["d"])
        step = jnp.dot(c["r"], c["z"]) / jnp.dot(c["d"], ad)
        r = c["r"] - step * ad
        z = scale * r
        beta = jnp.dot(r, z) / jnp.dot(c["r"], c["z"])
        x, d = c["x"] + step * c["d"], z + beta * c["d"]
        return {"x": x, "r": r, "z": z, "d": d, "turns": c["turns"] + 1}

    def goes_on(c):
        return (jnp.linalg.norm(c["r"]) > 1e-4) & (c["turns"] < 40)

    b = inputs["b"]
    z = scale * b
    start = {"x": jnp.zeros(16), "r": b, "z": z, "d": z, "turns": 0}
    return jax.lax.while_loop(goes_on, turn, start)["x"]


@row(SYSTEM, normals(b=(5, 16)))
def conjugate_residuals_under_vmap(p, inputs):
    """The loop is written for one right-hand side and mapped over five."""

    def solve(b):
        def turn(carry, _):
            x, r, d, ar, ad = carry
            step = (r @ ar) / (ad @ ad)
            x, new = x + step * d, r - step * ad
            a_new = p["a"] @ new
            beta = (new @ a_new) / (r @ ar)
            return (x, new, new + beta * d, a_new, a_new + beta * ad), new @ new

        ab = p["a"] @ b
        (x, *_), sizes = jax.lax.scan(
            turn, (jnp.zeros(16), b, b, ab, ab), None, length=8
        )
        return x, sizes

    return jax.vmap(solve)(inputs["b"])


@row(both(SYSTEM, turning(0.3, skew=(16, 16))), RIGHT)
def stabilised_biconjugate_gradients(p, inputs):
    """Van der Vorst 1992, for a matrix that is not symmetric."""
    a, b = p["a"] + jnp.eye(16) + p["skew"], inputs["b"]

    def turn(_, c):
        x, r, d, rho = c
        ad = a @ d
        alpha = rho / (b @ ad)
        s = r - alpha * ad
        t = a @ s
        omega = (t @ s) / (t @ t)
        x, r = x + alpha * d + omega * s, s - omega * t
        new = b @ r
        return x, r, r + (new / rho) * (alpha / omega) * (d - omega * ad), new

    return jax.lax.fori_loop(0, 6, turn, (jnp.zeros(16), b, b, b @ b))[0]


@row(SYSTEM, RIGHT)
def lanczos_tridiagonal(p, inputs):
    """The coefficients of Lanczos, stacked: eigenvalues are read from them."""

    def turn(carry, _):
        before, q, beta = carry
        w = p["a"] @ q - beta * before
        alpha = w @ q
        w = w - alpha * q
        size = jnp.sqrt(w @ w)
        return (q, w / size, size), (alpha, size)

    q = inputs["b"] / jnp.linalg.norm(inputs["b"])
    start = (jnp.zeros(16), q, jnp.zeros(()))
    return jax.lax.scan(turn, start, None, length=6)[1]


@row(weights(a=(16, 16)), RIGHT)
def arnoldi_with_two_projections(p, inputs):
    """A basis in an array that the loop fills, orthogonalised twice."""

    def turn(k, carry):
        basis, h = carry
        w = p["a"] @ basis[k]
        first = basis @ w
        w = w - first @ basis
        second = basis @ w
        w = w - second @ basis
        size = jnp.linalg.norm(w)
        h = h.at[k].set(first + second).at[k, k + 1].set(size)
        return basis.at[k + 1].set(w / size), h

    basis = jnp.zeros((9, 16)).at[0].set(inputs["b"] / jnp.linalg.norm(inputs["b"]))
    return jax.lax.fori_loop(0, 8, turn, (basis, jnp.zeros((8, 9))))[1]


@row(positive(0.5, 4.0, a=(12, 12)), normals(v=(12,)))
def power_iteration(p, inputs):
    def turn(v, _):
        v = p["a"] @ v
        return v / jnp.linalg.norm(v), None

    v, _ = jax.lax.scan(turn, inputs["v"], None, length=80)
    return jnp.sum(v * v[::-1]), jnp.abs(v)


@row(positive(0.1, 8.0, a=(8, 8)), normals(b=(2,)))
def eigenvalues_by_the_qr_algorithm(p, inputs):
    """Francis 1961, without shifts: a product of the two factors in each turn."""

    def turn(_, a):
        q, r = jnp.linalg.qr(a)
        return r @ q

    return jnp.diagonal(jax.lax.fori_loop(0, 40, turn, p["a"]))


@row(positive(0.1, 8.0, a=(12, 12)), normals(v=(12, 3)))
def orthogonal_iteration(p, inputs):
    def turn(v, _):
        q, r = jnp.linalg.qr(p["a"] @ v)
        return q, jnp.abs(jnp.diagonal(r))

    return jax.lax.scan(turn, inputs["v"], None, length=30)[1][-1]


@row(SYSTEM, RIGHT)
def inverse_by_newton_schulz(p, inputs):
    a = p["a"]

    def turn(_, x):
        return x @ (2 * jnp.eye(16) - a @ x)

    return jax.lax.fori_loop(0, 14, turn, a.T / jnp.sum(a * a))


@row(positive(0.05, 1.0, a=(12, 12)), RIGHT)
def square_root_by_coupled_newton(p, inputs):
    """Higham 2008, section 6.4: the root and its inverse come together."""

    def turn(carry, _):
        y, z = carry
        t = 1.5 * jnp.eye(12) - 0.5 * (z @ y)
        return (y @ t, t @ z), None

    return jax.lax.scan(turn, (p["a"], jnp.eye(12)), None, length=12)[0]


@row(spread(0.05, 1.0, a=(10, 10)), RIGHT)
def polar_factor_by_cubic_steps(p, inputs):
    def turn(x, _):
        return 1.5 * x - 0.5 * (x @ x.T @ x), None

    return jax.lax.scan(turn, p["a"], None, length=14)[0]


@row(weights(scale=3.0, a=(10, 10)), RIGHT)
def exponential_by_scaling_and_squaring(p, inputs):
    """A Taylor polynomial in one loop and its squares in another."""
    small = p["a"] / 64.0

    def horner(k, total):
        return jnp.eye(10) + (small @ total) / (8 - k).astype(small.dtype)

    start = jax.lax.fori_loop(0, 8, horner, jnp.eye(10))
    return jax.lax.fori_loop(0, 6, lambda _, x: x @ x, start)


@row(positive(0.01, 1.0, a=(16, 16)), normals(b=(16,), c=(24,)))
def chebyshev_series_of_a_matrix(p, inputs):
    """Clenshaw's recurrence over the coefficients, the last first."""
    a = 2 * p["a"] - jnp.eye(16)

    def turn(carry, c):
        one, two = carry
        return (c * inputs["b"] + 2 * (a @ one) - two, one), None

    start = (jnp.zeros(16), jnp.zeros(16))
    one, two = jax.lax.scan(turn, start, inputs["c"], reverse=True)[0]
    return one - a @ two


@row(SYSTEM, RIGHT)
def gauss_seidel_sweeps(p, inputs):
    """Nested loops: each row of a sweep reads what the rows before it wrote."""
    a, b = p["a"], inputs["b"]

    def of_row(i, x):
        return x.at[i].add((b[i] - a[i] @ x) / a[i, i])

    def sweep(x, _):
        x = jax.lax.fori_loop(0, 16, of_row, x)
        return x, None

    return jax.lax.scan(sweep, jnp.zeros(16), None, length=12)[0]


@row(SYSTEM, RIGHT)
def jacobi_iteration_with_a_jitted_residual(p, inputs):
    @jax.jit
    def residual(x):
        return inputs["b"] - p["a"] @ x

    def turn(_, x):
        return x + 0.5 * residual(x) / jnp.diagonal(p["a"])

    return jax.lax.fori_loop(0, 60, turn, jnp.zeros(16))


@row(positive(0.02, 1.0, a=(12, 12)), RIGHT)
def cholesky_by_columns(p, inputs):
    """The left-looking factorisation: each column is less what stands left of it."""

    def turn(low, j):
        column = p["a"][:, j] - low @ low[j]
        column = jnp.where(jnp.arange(12) >= j, column, 0.0)
        return low.at[:, j].set(column / jnp.sqrt(column[j])), None

    return jax.lax.scan(turn, jnp.zeros((12, 12)), jnp.arange(12))[0]


@row(positive(0.1, 2.0, a=(12, 12)), normals(b=(12, 3)))
def elimination_by_outer_products(p, inputs):
    """Gauss and Jordan: a row of the pivot is taken from all others."""

    def turn(i, m):
        pivot = m[i] / m[i, i]
        factors = m[:, i].at[i].set(0.0)
        return (m - jnp.einsum("i,j->ij", factors, pivot)).at[i].set(pivot)

    both_sides = jnp.concatenate([p["a"], inputs["b"]], axis=1)
    return jax.lax.fori_loop(0, 12, turn, both_sides)[:, 12:]


@row(spread(0.1, 2.0, a=(12, 6)), RIGHT)
def householder_triangle(p, inputs):
    def turn(k, a):
        column = jnp.where(jnp.arange(12) >= k, a[:, k], 0.0)
        v = column.at[k].add(jnp.sign(column[k]) * jnp.linalg.norm(column))
        v = v / jnp.linalg.norm(v)
        return a - 2 * v[:, None] * (v @ a)[None]

    return jax.lax.fori_loop(0, 6, turn, p["a"])[:6]


@row(spread(0.02, 1.0, a=(8, 16)), RIGHT)
def gram_schmidt_of_rows(p, inputs):
    def turn(basis, both):
        k, v = both
        v = v - (basis @ v) @ basis
        q = v / jnp.linalg.norm(v)
        return basis.at[k].set(q), q

    start = jnp.zeros((8, 16))
    return jax.lax.scan(turn, start, (jnp.arange(8), p["a"]))[1]


@row(SYSTEM, constants(l=laplacian(15)))
def two_grid_cycles(p, inputs):
    """Poisson's equation of 15 points: smooth, correct on 7 points, smooth again."""
    matrix, b = -64.0 * inputs["l"], p["a"][0, :15]
    centres = 2 * jnp.arange(7) + 1
    far = jnp.abs(jnp.arange(15)[:, None] - centres[None]).astype(b.dtype)
    up = jnp.maximum(1 - 0.5 * far, 0.0)
    coarse = up.T @ matrix @ up

    def smooth(x):
        return x + (0.66 / 128.0) * (b - matrix @ x)

    def cycle(x, _):
        x = smooth(smooth(x))
        x = x + up @ jnp.linalg.solve(coarse, up.T @ (b - matrix @ x))
        return smooth(x), None

    return jax.lax.scan(cycle, jnp.zeros(15), None, length=8)[0]


@row(weights(a=(24, 8)), normals(x=(8,)))
def kaczmarz_rows(p, inputs):
    """Projections on one equation after the other, five times over all."""
    a = p["a"]
    b = jnp.sum(a * inputs["x"][None], axis=1)

    def turn(x, k):
        one = a[k % 24]
        return x + one * ((b[k % 24] - one @ x) / (one @ one)), None

    return jax.lax.scan(turn, jnp.zeros(8), jnp.arange(120))[0]


@row(turning(0.97, a=(8, 8)), positive(0.2, 1.0, q=(8, 8)))
def lyapunov_equation_by_doubling(p, inputs):
    """Smith 1968: the turns of x = a x a' + q, twice as many in each step."""

    def turn(carry, _):
        a, x = carry
        return (a @ a, x + a @ x @ a.T), None

    return jax.lax.scan(turn, (p["a"], inputs["q"]), None, length=8)[0][1]


@row(positive(0.3, 0.9, a=(10, 10)), normals(b=(10,)))
def neumann_series(p, inputs):
    """A sum of powers: the inverse of one less the matrix, term by term."""

    def turn(carry, _):
        term, total = carry
        term = p["a"] @ term
        return (term, total + term), None

    start = (inputs["b"], inputs["b"])
    return jax.lax.scan(turn, start, None, length=100)[0][1]
