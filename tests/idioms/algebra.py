"""Linear algebra: of arguments, and of matrices that a product predicted."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import linalg as sla

from tests.idioms.row import both, constants, integers, normals, row, uniform, weights

MATRIX = weights(a=(8, 8))
ARGUMENT = normals(b=(8,))
PREDICTED = both(weights(w=(8, 64)), normals(b=(8,)))
X = normals(x=(8,))


def predicted(p, inputs):
    """A matrix that a network predicts, well conditioned."""
    return 0.1 * (inputs["x"] @ p["w"]).reshape(8, 8) + jnp.eye(8)


def positive(p, inputs):
    m = predicted(p, inputs)
    return m @ m.T + 0.1 * jnp.eye(8)


@row(MATRIX, ARGUMENT, f32=True)
def expm(p, inputs):
    return sla.expm(p["a"])


@row(weights(scale=12.0, a=(8, 8)), ARGUMENT, f32=True)
def expm_of_a_large_matrix(p, inputs):
    return sla.expm(p["a"] - 30.0 * jnp.eye(8))


@row(PREDICTED, X)
def expm_of_a_predicted_matrix(p, inputs):
    return sla.expm(predicted(p, inputs))


@row(PREDICTED, X)
def expm_in_a_layer(p, inputs):
    m = sla.expm(0.1 * predicted(p, inputs))
    return jnp.tanh(m @ inputs["x"]) @ m


@row(weights(a=(12, 8)), ARGUMENT, f32=True)
def pinv(p, inputs):
    return jnp.linalg.pinv(p["a"])


@row(weights(a=(12, 8)), normals(b=(12,)), f32=True)
def lstsq(p, inputs):
    return jnp.linalg.lstsq(p["a"], inputs["b"])[0]


@row(normals(y=(20,)), constants(x=np.linspace(-2, 2, 20)), f32=True)
def polyfit(p, inputs):
    return jnp.polyfit(inputs["x"], p["y"], 4)


@row(MATRIX, ARGUMENT, f32=True)
def matrix_power(p, inputs):
    return jnp.linalg.matrix_power(p["a"], 5)


@row(MATRIX, ARGUMENT, f32=True)
def matrix_inverse_and_determinant(p, inputs):
    a = p["a"] + 2 * jnp.eye(8)
    return jnp.linalg.inv(a), jnp.linalg.slogdet(a)[1], jnp.linalg.det(a)


@row(weights(a=(8, 8)), ARGUMENT, f32=True)
def condition_number_and_norms(p, inputs):
    return jnp.linalg.cond(p["a"]), jnp.linalg.norm(p["a"]), jnp.linalg.norm(p["a"], 2)


@row(MATRIX, ARGUMENT, f32=True)
def singular_values_and_vectors(p, inputs):
    u, s, v = jnp.linalg.svd(p["a"])
    return s, jnp.abs(u).sum(), jnp.abs(v).sum()


@row(MATRIX, ARGUMENT, f32=True)
def tensor_solve(p, inputs):
    a = (p["a"] + 2 * jnp.eye(8)).reshape(2, 4, 8)
    return jnp.linalg.tensorsolve(a, inputs["b"].reshape(2, 4))


@row(PREDICTED, X)
def solve_of_a_predicted_matrix(p, inputs):
    return jnp.linalg.solve(predicted(p, inputs), p["b"])


@row(PREDICTED, X)
def solve_by_cholesky(p, inputs):
    return sla.cho_solve(sla.cho_factor(positive(p, inputs)), p["b"])


@row(PREDICTED, X)
def whitening_by_eigenvectors(p, inputs):
    values, vectors = jnp.linalg.eigh(positive(p, inputs))
    return (vectors / jnp.sqrt(values)[None]) @ vectors.T @ p["b"]


@row(PREDICTED, X)
def log_determinant(p, inputs):
    low = jnp.linalg.cholesky(positive(p, inputs))
    return 2 * jnp.log(jnp.diagonal(low)).sum()


@row(PREDICTED, X)
def pinv_of_a_predicted_matrix(p, inputs):
    return jnp.linalg.pinv(predicted(p, inputs)) @ p["b"]


@row(PREDICTED, X)
def orthogonal_matrix_by_cayley(p, inputs):
    m = predicted(p, inputs)
    skew = m - m.T
    return jnp.linalg.solve(jnp.eye(8) + skew, jnp.eye(8) - skew)


@row(PREDICTED, X)
def orthogonal_matrix_by_newton_schulz(p, inputs):
    m = predicted(p, inputs)
    m = m / jnp.linalg.norm(m)
    for _ in range(12):
        m = 1.5 * m - 0.5 * (m @ m.T @ m)
    return m


@row(weights(w=(8, 8)), normals(x=(20, 8), y=(20, 3)))
def ridge_regression(p, inputs):
    h = jnp.tanh(inputs["x"] @ p["w"])
    return jnp.linalg.solve(h.T @ h + 0.1 * jnp.eye(8), h.T @ inputs["y"])


@row(weights(w=(8, 8), k=(8, 3)), normals(x=(20, 8), y=(20, 3)))
def normal_equations_beside_a_layer(p, inputs):
    h = jnp.tanh(inputs["x"] @ p["w"])
    a = h.T @ h + 0.1 * jnp.eye(8)
    logdet = 2 * jnp.log(jnp.diagonal(jnp.linalg.cholesky(a))).sum()
    return jnp.linalg.solve(a, h.T @ inputs["y"]), logdet, jnp.tanh(a @ p["k"])


@row(weights(w=(8, 4)), normals(x=(24, 8), y=(24,)))
def gaussian_process(p, inputs):
    """Rasmussen and Williams 2006, algorithm 2.1, with a learned projection."""
    z = inputs["x"] @ p["w"]
    far = ((z[:, None] - z[None]) ** 2).sum(-1)
    low = jnp.linalg.cholesky(jnp.exp(-0.5 * far) + 0.1 * jnp.eye(24))
    alpha = sla.cho_solve((low, True), inputs["y"])
    logs = jnp.log(jnp.diagonal(low)).sum()
    return 0.5 * (inputs["y"] * alpha).sum() + logs


@row(weights(w=(8, 4)), normals(x=(24, 8), y=(24,)))
def gaussian_process_by_products(p, inputs):
    z = inputs["x"] @ p["w"]
    size = (z**2).sum(1)
    far = size[:, None] + size[None] - 2 * z @ z.T
    kernel = jnp.exp(-0.5 * jnp.maximum(far, 0.0)) + 0.5 * jnp.eye(24)
    return inputs["y"] @ jnp.linalg.solve(kernel, inputs["y"])


# Sums by a product without a free dimension.
LONG = normals(scale=40.0, w=(64,), v=(64,))


@row(LONG, ARGUMENT, f32=True)
def vdot(p, inputs):
    return jnp.vdot(p["w"], p["w"])


@row(LONG, ARGUMENT, f32=True)
def dot_of_vectors(p, inputs):
    return p["w"] @ p["v"], jnp.dot(p["w"], p["w"])


@row(normals(scale=40.0, w=(8, 8)), ARGUMENT, f32=True)
def square_norm_by_ravel(p, inputs):
    return p["w"].ravel() @ p["w"].ravel(), jnp.tensordot(p["w"], p["w"], 2)


@row(normals(scale=40.0, w=(8, 8)), ARGUMENT, f32=True)
def trace_by_einsum(p, inputs):
    return jnp.einsum("ij,ij->", p["w"], p["w"]), jnp.einsum("ij,ji", p["w"], p["w"])


@row(normals(scale=40.0, a=(8, 8), b=(64,)), ARGUMENT, f32=True)
def tree_dot(p, inputs):
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(p))


@row(normals(scale=40.0, w=(16, 64)), ARGUMENT, f32=True)
def vdot_under_vmap(p, inputs):
    return jax.vmap(jnp.vdot)(p["w"], p["w"])


@row(weights(w=(8, 64)), both(normals(scale=20.0, x=(8,))))
def norm_of_an_activation_by_dot(p, inputs):
    h = inputs["x"] @ p["w"]
    return jnp.dot(h, h), h / jnp.sqrt(h @ h)


@row(MATRIX, both(ARGUMENT, uniform(0.5, 2.0, d=(8,))), f32=True)
def quadratic_form(p, inputs):
    return inputs["b"] @ (p["a"] * inputs["d"][None]).sum(1)


# Structured matrices.
def band(p, inputs):
    low, high = 0.3 * jnp.tanh(inputs["x"] @ p["w"]), 0.2 * jnp.tanh(p["b"])
    return low, jnp.ones(16), high


@row(both(weights(w=(8, 16)), normals(b=(16,))), normals(x=(8,), y=(16,)))
def tridiagonal_solve_by_thomas(p, inputs):
    low, middle, high = band(p, inputs)

    def down(carry, terms):
        c, d = carry
        a, b, u, y = terms
        under = b - a * c
        return (u / under, (y - a * d) / under), (u / under, (y - a * d) / under)

    start = (high[0] / middle[0], inputs["y"][0] / middle[0])
    rest = (low[1:], middle[1:], high[1:], inputs["y"][1:])
    _, (c, d) = jax.lax.scan(down, start, rest)

    def up(x, both):
        x = both[1] - both[0] * x
        return x, x

    return jax.lax.scan(up, d[-1], (c[:-1], d[:-1]), reverse=True)[1]


@row(both(weights(w=(8, 16)), normals(b=(16,))), normals(x=(8,), y=(16, 1)))
def tridiagonal_solve(p, inputs):
    low, middle, high = band(p, inputs)
    low, high = low.at[0].set(0.0), high.at[-1].set(0.0)
    return jax.lax.linalg.tridiagonal_solve(low, middle, high, inputs["y"])


@row(both(weights(w=(8, 40)), normals(v=(16,))), normals(x=(8,)))
def sparse_product_by_segments(p, inputs):
    rows, columns = jnp.arange(40) % 16, jnp.arange(40) * 7 % 16
    values = inputs["x"] @ p["w"]
    v = p["v"]
    for _ in range(8):
        v = v + 0.1 * jax.ops.segment_sum(values * v[columns], rows, 16)
    return v


@row(weights(w=(8, 40)), both(normals(x=(8,)), integers(16, rows=(40,))))
def page_rank(p, inputs):
    rows, columns = inputs["rows"], jnp.arange(40) % 16
    values = jax.nn.softplus(inputs["x"] @ p["w"])
    out = jax.ops.segment_sum(values, columns, 16)

    def turn(rank, _):
        sent = values / out[columns] * rank[columns]
        return 0.15 / 16 + 0.85 * jax.ops.segment_sum(sent, rows, 16), None

    return jax.lax.scan(turn, jnp.full(16, 1 / 16), None, length=100)[0]
