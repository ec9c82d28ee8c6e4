"""Branches: of values, of constants, and what they have to agree on."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.constructs.row import row
from tests.rounding import X


def layer(h, w):
    return jnp.tanh(h @ w)


def cond_in_scan_in_cond(w):
    def body(h, i):
        return lax.cond(i % 2 == 0, lambda h: layer(h, w), lambda h: h * 0.5, h), None

    def loop(h):
        return lax.scan(body, h, jnp.arange(4))[0]

    return lax.cond(w[0, 0] < 9, loop, lambda h: h, X @ w)


def masked_branch(w):
    # -1e9 has no place in f16.
    def masked(h):
        return jnp.where(h > 0, h, -1e9)

    h = lax.cond(w[0, 0] < 9, masked, lambda h: h, X @ w)
    return jax.nn.softmax(h) @ w


def oversize_constant_branch(w):
    h = lax.cond(w[0, 0] > 9, lambda h: h, lambda h: h * 0 + 1e6, X @ w)
    return h * 1e-6 + X @ w


def branches_of_different_origins(w):
    branches = (
        lambda h: h @ w,  # low
        lambda h: jnp.exp(-jnp.square(h)),  # full
        lambda h: jnp.ones_like(h),  # a constant
        lambda h: X,  # free
    )
    first = (w[0, 0] > 9).astype(int)
    return [lax.switch(first + i, branches, X @ w) @ w for i in range(4)]


def integer_branch(w):
    h, i = lax.cond(
        w[0, 0] < 9, lambda h: (h * 2, jnp.int32(3)), lambda h: (h, jnp.int32(5)), X @ w
    )
    return h * i.astype(jnp.float32)


ROWS = {
    "cond": row(
        lambda w: lax.cond(w[0, 0] < 9, lambda h: layer(h, w), lambda h: h, X @ w),
        *("half", "inside", "once", "transformed", "slow transformations"),
    ),
    "cond_other": row(
        lambda w: lax.cond(w[0, 0] > 9, lambda h: layer(h, w), lambda h: h, X @ w),
        "slow",
    ),
    "switch": row(
        lambda w: lax.switch(
            (w[0, 0] < 9).astype(int),
            [lambda h: h, lambda h: layer(h, w), lambda h: h * 2.0],
            X @ w,
        ),
        "once",
    ),
    "cond_in_scan_in_cond": cond_in_scan_in_cond,
    "masked_branch": row(masked_branch, "half"),
    "oversize_constant_branch": oversize_constant_branch,
    "origins": branches_of_different_origins,
    "integer_branch": integer_branch,
    "unused_operands": row(
        lambda w: lax.cond(
            w[0, 0] > 9, lambda a, b, c: a @ c, lambda a, b, c: jnp.tanh(b), X, X @ w, w
        ),
        "half",
    ),
    "vmap_of_cond": lambda w: jax.vmap(
        lambda x: lax.cond(x[0] > 0, lambda h: layer(h, w), lambda h: h, x @ w)
    )(X),
    "vmap_of_switch": lambda w: jax.vmap(
        lambda x, i: lax.switch(i, [lambda h: layer(h, w), lambda h: h, jnp.exp], x @ w)
    )(X, jnp.arange(8) % 3),
    # JAX writes the boolean into the program as Python's, not as an array.
    "boolean_of_python": row(
        lambda w: jnp.where(X.ndim > 1, X @ w, 0.0) @ w, "once", "mapped"
    ),
    "booleans_of_python_inside": row(
        lambda w: lax.scan(
            lambda h, i: (jnp.where(True, layer(h, w), h) * jnp.sum(w, where=True), i),
            *(X @ w, jnp.arange(3)),
        )[0]
    ),
    "select": lambda w: lax.select(X > 0, X @ w, jnp.zeros((8, 16))) @ w,
}
