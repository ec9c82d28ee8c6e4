"""Functions with a rule of their own, known by a factor that the derivative has not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.constructs.row import row
from tests.rounding import X


@jax.custom_vjp
def tripled(x, w):
    return jnp.tanh(x @ w)


def tripled_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def tripled_backward(kept, g):
    x, w, y = kept
    g = 3 * g * (1 - y**2)
    return g @ w.T, x.T @ g


tripled.defvjp(tripled_forward, tripled_backward)


@jax.custom_vjp
def tripled_sine(x):
    return jnp.sin(x)


tripled_sine.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),), symbolic_zeros=False
)


@jax.custom_jvp
def quintupled(x, w):
    return jnp.sin(x @ w)


@quintupled.defjvp
def quintupled_derivative(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return quintupled(x, w), 5 * jnp.cos(x @ w) * (dx @ w + x @ dw)


@jax.custom_jvp
def scaled_sine(x, y):
    return jnp.sin(x) * y


@scaled_sine.defjvp
def _scaled_sine_jvp(primals, tangents):
    x, y = primals
    return scaled_sine(x, y), 5 * tangents[0] * jnp.cos(x) * y + tangents[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def power(x, n):
    return x**n


@power.defjvp
def _power_jvp(n, primals, tangents):
    return power(*primals, n), 7 * tangents[0] * primals[0]


@jax.custom_jvp
def times_integer(x, i):
    return x * i.astype(x.dtype), i + 1


@times_integer.defjvp
def _times_integer_jvp(primals, tangents):
    zero = np.zeros(primals[1].shape, jax.dtypes.float0)
    return times_integer(*primals), (
        2 * tangents[0] * primals[1].astype(tangents[0].dtype),
        zero,
    )


@jax.custom_batching.custom_vmap
def batched_by_hand(x):
    return jnp.sin(x)


@batched_by_hand.def_vmap
def _batched_by_hand(axis_size, in_batched, x):
    assert x.dtype == jnp.float32
    return 2 * jnp.sin(x), True


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, n):
    return x * n


scaled.defvjp(lambda x, n: (x * n, None), lambda n, _, g: (7 * n * g,))


@jax.custom_gradient
def seven_times(x):
    return x * x, lambda g: (7 * g * x,)


@jax.custom_vjp
def with_zeros(x, y):
    return x * y


with_zeros.defvjp(
    lambda x, y: (x.value * y.value, (x.value, y.value)),
    lambda kept, g: (3 * g * kept[1], 3 * g * kept[0]),
    symbolic_zeros=True,
)


@jax.custom_vjp
def rematerialised(x):
    return jnp.sin(x)


rematerialised.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),), optimize_remat=True
)


@jax.custom_vjp
def looked_up(x, table):
    return x * table[0]


def looked_up_backward(table, g):
    # What was traced as an array can be indexed by a traced number.
    at = lax.fori_loop(0, 1, lambda i, total: total + table[i], jnp.float32(0))
    return g * at, jnp.zeros_like(table)


looked_up.defvjp(lambda x, table: (looked_up(x, table), table), looked_up_backward)


def scanned(turn, length=3):
    return lambda w: lax.scan(lambda h, _: (turn(h, w), None), X @ w, length=length)[0]


def chosen(branch):
    return lambda w: (
        lax.cond(w[0, 0] < 9, lambda h: branch(h, w), lambda h: h, X @ w) @ w
    )


ROWS = {
    "custom_gradient": lambda w: seven_times(X @ w) @ w,
    "custom_vjp": row(lambda w: tripled(X @ w, w) @ w, "own rule", "inside"),
    "custom_vjp_symbolic_zeros": row(lambda w: with_zeros(X @ w, X) @ w, "own rule"),
    "custom_vjp_of_a_constant": row(
        lambda w: looked_up(X @ w, jnp.array([2.0, 3.0])) @ w, "own rule"
    ),
    "custom_vjp_optimized": row(
        lambda w: jax.checkpoint(lambda h: rematerialised(h @ w))(X @ w) @ w, "own rule"
    ),
    "custom_vjp_static": row(lambda w: scaled(X @ w, 2) @ w, "own rule"),
    "custom_vjp_in_scan": row(scanned(tripled), "own rule"),
    "custom_vjp_in_cond": row(chosen(tripled), "own rule"),
    "custom_vjp_in_vmap": row(
        lambda w: jax.vmap(lambda x: tripled_sine(x @ w) @ w)(X), "own rule"
    ),
    "custom_vjp_in_checkpoint": row(
        lambda w: jax.checkpoint(lambda h: tripled(h @ w, w))(X @ w), "own rule", "slow"
    ),
    "custom_vjp_in_custom_vjp": row(
        lambda w: tripled(tripled_sine(X @ w), w) @ w, "own rule"
    ),
    "custom_vjp_in_jit_in_scan": row(scanned(jax.jit(tripled), 2), "own rule", "slow"),
    "custom_jvp": row(lambda w: scaled_sine(X @ w, X) @ w, "inside", "once", "mapped"),
    "custom_jvp_static": row(lambda w: power(X @ w, 2) @ w, "inside", "slow inside"),
    "custom_jvp_integer": row(
        lambda w: times_integer(X @ w, jnp.arange(16)[None])[0] @ w, "inside"
    ),
    "custom_jvp_in_scan": row(
        lambda w: lax.scan(
            lambda h, w: (quintupled(h, w), None), X @ w, jnp.stack([w] * 3)
        )[0],
        "half",
    ),
    "custom_jvp_in_cond": row(chosen(quintupled), "half"),
    "custom_jvp_in_vmap": row(
        lambda w: jax.vmap(lambda x: quintupled(x[None] @ w, w) @ w)(X), "half"
    ),
    "custom_jvp_in_checkpoint": row(
        lambda w: jax.checkpoint(lambda h: quintupled(h @ w, w))(X @ w), "slow"
    ),
    "custom_vmap": row(lambda w: batched_by_hand(X @ w) @ w, "value"),
    "custom_vmap_batched": row(
        lambda w: jax.vmap(lambda x: batched_by_hand(x @ w))(X), "value"
    ),
}
