"""Operations on arrays: activations, reductions, orders, indices, random numbers."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from tests.constructs.row import row
from tests.rounding import KEY, X

COLUMNS = jnp.arange(16.0)[None]
THREE_GROUPS = jnp.arange(8) % 3


def scatters(w):
    h = X @ w
    rows, columns = jnp.array([0, 3, 3]), jnp.array([1, 2, 5])
    h = h.at[rows, columns].add(2.0)
    h = h.at[rows].multiply(0.5)
    h = h.at[rows].min(0.3)
    h = h.at[:, columns].max(-0.2)
    h = h.at[jnp.array([1, 9])].set(7.0, mode="drop")
    h = h.at[2:4].power(2)
    return h @ w


def gathers(w):
    h = X @ w
    taken = jnp.take(h, jnp.array([0, 2, 2]), axis=0)
    along = jnp.take_along_axis(h, jnp.argsort(X, axis=1), axis=1)
    row = lax.dynamic_slice(h, (2, 1), (3, 7))
    item = lax.dynamic_index_in_dim(h, 5)
    updated = lax.dynamic_update_slice(along, row, (1, 1))
    return taken, updated @ w, item, w[jnp.arange(4)] @ w


def windows(w):
    h = (X @ w).reshape(2, 4, 4, 4)
    largest = lax.reduce_window(
        h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )
    total = lax.reduce_window(h, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
    return largest, total


def custom_reductions(w):
    h = X @ w
    product = lax.reduce(h, jnp.float32(0), lambda a, b: a + b, (1,))
    largest, _ = lax.reduce(
        (h, lax.broadcasted_iota(jnp.int32, h.shape, 1)),
        (jnp.float32(-jnp.inf), jnp.int32(0)),
        lambda a, b: (jnp.maximum(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])),
        (1,),
    )
    return product, largest


def random_layers(w):
    h = X @ w
    noise = jax.random.normal(KEY, h.shape)
    keep = jax.random.bernoulli(KEY, 0.8, h.shape)
    uniform = jax.random.uniform(KEY, h.shape, minval=0.5, maxval=1.0)
    permuted = jax.random.permutation(KEY, h)
    gamma = jax.random.gamma(KEY, 2.0 + jnp.abs(h))
    return (jnp.where(keep, h * uniform + noise, 0.0) + permuted + 0.1 * gamma) @ w


ROWS = {
    # Activations and reductions
    "relu": row(lambda w: jax.nn.relu(X @ w) @ w, "inside", "mapped"),
    "gelu": row(lambda w: jax.nn.gelu(X @ w) @ w, "inside", "slow inside"),
    "silu": row(lambda w: jax.nn.silu(X @ w) @ w, "inside", "slow inside"),
    "softplus": row(lambda w: jax.nn.softplus(X @ w) @ w, "inside", "slow inside"),
    "relu_in_scan": row(
        lambda w: lax.scan(
            lambda h, _: (h + jax.nn.gelu(jax.nn.silu(h) @ w), None), X @ w, length=3
        )[0],
        "slow",
    ),
    "softmax": row(lambda w: jax.nn.softmax(X @ w) @ w, "inside", "mapped"),
    "logsumexp": row(lambda w: jax.nn.logsumexp(X @ w, axis=-1), "inside"),
    "attention": row(
        lambda w: (
            jax.nn.dot_product_attention(
                *[(X @ w).reshape(1, 8, 4, 4)] * 3, is_causal=True
            ).reshape(8, 16)
            @ w
        ),
        *("inside", "slow inside", "once"),
    ),
    "norm": row(lambda w: jnp.linalg.norm(X @ w), "inside", "slow inside"),
    "cumsum": row(lambda w: jnp.cumsum(X @ w, axis=0), "inside", "slow inside"),
    "cummax": row(lambda w: lax.cummax(X @ w, axis=1) @ w, "slow"),
    "cumlogsumexp": row(lambda w: lax.cumlogsumexp(X @ w, axis=1) @ w, "slow"),
    "windows": row(windows, "slow"),
    "max_pool": row(
        lambda w: nn.max_pool((X @ w).reshape(1, 8, 16, 1), (2, 2), (2, 2)),
        *("inside", "slow inside"),
    ),
    "custom_reductions": row(custom_reductions, "value"),
    # Orders
    "sort": row(lambda w: jnp.sort(X @ w, axis=1) * COLUMNS, "inside", "slow inside"),
    "top_k": row(
        lambda w: lax.top_k(X @ w + 2 * COLUMNS, 3)[0], "inside", "slow inside"
    ),
    "median": lambda w: jnp.median(X @ w + 2 * COLUMNS, axis=1),
    "quantile": row(lambda w: jnp.quantile(X @ w, 0.3, axis=1) + 1.0, "value"),
    "argsort": row(
        lambda w: jnp.take_along_axis(X @ w, jnp.argsort(-(X @ w), axis=1), axis=1),
        "value",
    ),
    # Indices
    "scatters": row(scatters, "inside", "slow inside"),
    "gathers": row(gathers, "inside"),
    "segment_sum": row(
        lambda w: jax.ops.segment_sum(X @ w, THREE_GROUPS, 3) @ w,
        "inside",
        "slow inside",
    ),
    "segment_max": row(
        lambda w: jax.ops.segment_max(X @ w, THREE_GROUPS, 3) @ w, "slow"
    ),
    "roll": lambda w: jnp.roll(X @ w, 3, axis=1) @ w,
    "resize": row(
        lambda w: jax.image.resize(X @ w, (4, 8), "bilinear"), "inside", "slow inside"
    ),
    "interp": row(
        lambda w: jnp.interp(
            (X @ w).ravel(), jnp.linspace(-4, 4, 16), jnp.cumsum(jnp.abs(w[0]))
        ),
        "slow",
    ),
    # Random numbers
    "random": row(random_layers, "slow"),
    "dropout": row(
        lambda w: (
            jnp.where(jax.random.bernoulli(KEY, 0.5, (8, 16)), X @ w / 0.5, 0.0) @ w
        ),
        *("inside", "slow inside"),
    ),
    "categorical": lambda w: jax.nn.one_hot(jax.random.categorical(KEY, 5 * X), 16) @ w,
    # Kinds of numbers
    "complex": row(
        lambda w: jnp.abs((X @ w).astype(jnp.complex64) @ lax.complex(w, 2 * w)),
        *("inside", "slow inside"),
    ),
    "complex_exp": lambda w: jnp.abs(
        1 + jnp.exp(jnp.complex64(1j) * lax.complex(X @ w, X @ w))
    ),
    "erf": lambda w: jax.scipy.special.erf(X @ w) @ w,
    "ldexp": lambda w: jnp.ldexp(X @ w, jnp.arange(16)[None] % 3) @ w,
    "nan_to_num": lambda w: jnp.nan_to_num(X @ w / 1.5) @ w,
    "stop_gradient": lambda w: lax.stop_gradient(X @ w) * (X @ w) @ w,
    "reduce_precision": lambda w: lax.reduce_precision(X @ w, 8, 5) @ w,
}
