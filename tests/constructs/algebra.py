"""Products, convolutions, linear algebra and solvers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import sparse
from jax.experimental.ode import odeint

from tests.constructs.row import row
from tests.rounding import X, mean_square


def positive(w):
    return w @ w.T + jnp.eye(16)


def image(w):
    return (X @ w).reshape(2, 4, 4, 4)


def conv(h, w, padding="SAME", **options):
    return lax.conv_general_dilated(
        h, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def kernel(w):
    return w[:9].reshape(3, 3, 4, 4)


def sparse_product(w):
    matrix = sparse.BCOO.fromdense(jnp.where(jnp.abs(X) > 1, X, 0), nse=128)
    return (matrix @ w) @ w


def custom_solve(w):
    a = w @ w.T + 2 * jnp.eye(16)
    b = (X @ w).T

    def solve(matvec, b):
        return jnp.linalg.solve(a, b)

    return lax.custom_linear_solve(lambda x: a @ x, b, solve, solve)


def custom_root(w):
    target = mean_square(X @ w) + 1.0

    def f(x):
        return x**2 - target

    def newton(f, x):
        return lax.fori_loop(0, 8, lambda _, x: x - f(x) / (2 * x), x)

    return lax.custom_root(f, target, newton, lambda g, y: y / g(jnp.float32(1)))


def ode(w):
    def field(y, t, w):
        return -y + jnp.tanh(y @ w) * jnp.cos(t)

    return odeint(field, X @ w, jnp.array([0.0, 0.5]), w, rtol=1e-3)[-1]


ROWS = {
    "einsum": lambda w: jnp.einsum("ij,jk,kl,il->ij", X, w, w, X @ w),
    "einsum_trace": lambda w: jnp.einsum("ij,jk,ki->", w, w, w @ w.T + jnp.eye(16)),
    "ragged_dot": lambda w: lax.ragged_dot(
        X @ w, jnp.stack([w, 2 * w, -w]), jnp.array([3, 1, 4], jnp.int32)
    ),
    "polyval": row(lambda w: jnp.polyval(w[0], 0.1 * (X @ w)), "slow"),
    "sparse": row(sparse_product, "some half"),
    "conv": row(lambda w: conv(image(w), kernel(w)), "inside"),
    "conv_dilated": row(
        lambda w: conv(image(w), kernel(w), ((1, 2), (2, 1)), rhs_dilation=(2, 2)),
        "slow",
    ),
    "conv_transpose": lambda w: lax.conv_transpose(image(w), kernel(w), (2, 2), "SAME"),
    "depthwise": row(
        lambda w: conv(image(w), w[:9, :4].reshape(3, 3, 1, 4), feature_group_count=4),
        "slow",
    ),
    "solve": row(
        lambda w: jnp.linalg.solve(positive(w), (X @ w).T) * 1.0,
        *("f32 algebra", "inside"),
    ),
    "cholesky": row(lambda w: jnp.linalg.cholesky(positive(w)) @ w, "f32 algebra"),
    "inv": row(lambda w: jnp.linalg.inv(positive(w)) @ w, "f32 algebra", "slow"),
    "det": row(lambda w: jnp.log(jnp.linalg.det(positive(w))), "f32 algebra"),
    "slogdet": row(lambda w: jnp.linalg.slogdet(positive(w))[1], "slow"),
    "qr": row(lambda w: jnp.linalg.qr((X @ w).T)[1], "f32 algebra"),
    "eigh": row(
        lambda w: jnp.linalg.eigvalsh(positive(w)) + 1.0, "f32 algebra", "slow"
    ),
    "svd": row(
        lambda w: jnp.linalg.svd(X @ w, compute_uv=False) @ w[:8],
        *("f32 algebra", "inside", "slow inside"),
    ),
    "lstsq": row(lambda w: jnp.linalg.lstsq(positive(w), (X @ w).T)[0], "slow"),
    "expm": row(
        lambda w: jax.scipy.linalg.expm(0.1 * (w @ w)) @ w, "f32 algebra", "slow"
    ),
    "fft": row(
        lambda w: jnp.fft.irfft(jnp.fft.rfft(X @ w) * 0.5) @ w,
        *("f32 algebra", "inside", "slow inside"),
    ),
    "custom_linear_solve": row(custom_solve, "some half"),
    "custom_root": row(custom_root, "slow"),
    "odeint": row(ode, "some half", "slow"),
}
