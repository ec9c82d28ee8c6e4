"""Calls of functions: compiled, kept for the backward pass, on the host, in kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from tests.constructs.row import row
from tests.rounding import X

dense_tanh = jax.jit(lambda x, w: jnp.tanh(x @ w))


def pallas_double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * jnp.asarray(2, x_ref.dtype)

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


@jax.custom_vjp
def kernel_double(x):
    return pallas_double(x)


kernel_double.defvjp(lambda x: (pallas_double(x), None), lambda _, g: (3 * g,))


def host_sine(x):
    assert x.dtype == np.float32
    return np.sin(x)


@jax.custom_jvp
def called_back(x):
    return jax.pure_callback(
        host_sine, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


called_back.defjvp(lambda p, t: (called_back(*p), t[0] * jnp.cos(p[0])))


def composite(w):
    @functools.partial(lax.composite, name="my.block")
    def block(x, w):
        return jnp.tanh(x @ w)

    return block(X, w) @ w


def mutable(w):
    total = jax.new_ref(jnp.zeros((8, 16)))

    def body(i, h):
        h = jnp.tanh(h @ w)
        total[...] += h
        return h

    lax.fori_loop(0, 3, body, X @ w)
    return total[...] @ w


def mutable_matrix(w):
    matrix = jax.new_ref(X @ w)
    matrix[0] = matrix[0] * 2.0
    return matrix[...] @ w


def ordered_effects(w):
    def body(h, i):
        jax.experimental.io_callback(lambda i: None, None, i, ordered=True)
        return jnp.tanh(h @ w), None

    return lax.scan(body, X @ w, jnp.arange(3))[0]


ROWS = {
    "products": row(lambda w: jnp.tanh(X @ w) @ w, "inside", "once"),
    "jit": row(
        lambda w: jax.jit(lambda x: dense_tanh(dense_tanh(x, w), w) @ w)(X),
        *("inside", "once", "mapped"),
    ),
    "checkpoint": row(
        lambda w: jax.checkpoint(lambda h: jnp.tanh(h @ w))(X @ w),
        *("inside", "once", "transformed", "slow transformations"),
    ),
    "checkpoint_static": lambda w: jax.checkpoint(
        lambda h, n: jnp.tanh(h @ w) * n, static_argnums=1
    )(X @ w, 2),
    "vmap": row(
        lambda w: jax.vmap(lambda row: jnp.tanh(row @ w) @ w)(X),
        "inside",
        "slow inside",
    ),
    "gradient": row(
        lambda w: jax.grad(lambda h: jnp.sum(jnp.tanh(h @ w)))(X), "inside"
    ),
    "named_call": lambda w: (
        jax.named_call(lambda x: jnp.tanh(x @ w), name="block")(X) @ w
    ),
    "pallas": row(lambda w: kernel_double(X @ w) @ w, "some half"),
    "pallas_alone": row(lambda w: pallas_double(X @ w) @ w, "value"),
    "pure_callback": row(lambda w: called_back(X @ w) @ w, "some half"),
    "callback_in_scan": lambda w: lax.scan(
        lambda h, _: (called_back(h @ w), None), X @ w, length=2
    )[0],
    "ordered_effects": row(ordered_effects, "value"),
    "composite": row(composite, "value"),
    "platform": lambda w: lax.platform_dependent(
        X @ w, cpu=lambda h: jnp.tanh(h @ w), default=lambda h: h
    ),
    "barrier": lambda w: functools.reduce(
        jnp.matmul, lax.optimization_barrier((X @ w, w))
    ),
    "mutable": row(mutable, "value"),
    "mutable_matrix": mutable_matrix,
    "linear_transpose": row(
        lambda w: jax.linear_transpose(lambda x: (x @ w) * 2.0, X)(X)[0] @ w, "value"
    ),
}
