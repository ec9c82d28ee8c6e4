"""Marked functions, which have a policy of their own, in every place."""

import jax
import jax.numpy as jnp
from jax import lax

import jmp_amp as amp
from tests.constructs.branches import layer
from tests.constructs.devices import sharded
from tests.constructs.row import row
from tests.rounding import ROUNDINGS, X

full = amp.full_precision
half_out = amp.with_policy("p=f32,c=f16,o=f16")

# Each runs `block(h, w)` in a construct of its own.
PLACES = {
    "plain": lambda block: block,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda block: (
        lambda h, w: lax.scan(lambda h, _: (block(h, w), None), h, None, length=2)[0]
    ),
    "vmap": lambda block: lambda h, w: jax.vmap(lambda x: block(x[None], w)[0])(h),
    "cond": lambda block: (
        lambda h, w: lax.cond(w[0, 0] < 9, block, lambda h, w: h, h, w)
    ),
    "while": lambda block: (
        lambda h, w: lax.fori_loop(
            0, 2 + (w[0, 0] > 9).astype(int), lambda _, h: block(h, w), h
        )
    ),
    "scan_of_jit_of_checkpoint": lambda block: PLACES["scan"](
        jax.jit(jax.checkpoint(block))
    ),
}


def around(place, block):
    """A region between two products, in a place."""
    return lambda w: PLACES[place](block)(X @ w, w) @ w


# The dtypes that `attention` and its rule saw.
traced_in: list[str] = []


@jax.custom_vjp
def attention(q, k):
    traced_in.append(q.dtype.name)
    return jax.nn.softmax(q @ k.T) @ k


def attention_backward(kept, g):
    traced_in.extend([kept[0].dtype.name, g.dtype.name])
    _, backward = jax.vjp(lambda q, k: jax.nn.softmax(q @ k.T) @ k, *kept)
    dq, dk = backward(g)
    # Three times the true derivative: it shows whether the rule is used.
    return 3 * dq, 3 * dk


attention.defvjp(lambda q, k: (attention(q, k), (q, k)), attention_backward)


def attending(h, w):
    return amp.cast_inputs(attention)(h @ w, h)


@jax.custom_jvp
def marked_rule(x):
    return full(jnp.sin)(x)


marked_rule.defjvp(
    lambda p, t: (marked_rule(*p), full(lambda x, dx: 5 * jnp.cos(x) * dx)(*p, *t))
)


@jax.custom_vjp
def marked_backward(x):
    return full(jnp.sin)(x)


marked_backward.defvjp(
    lambda x: (marked_backward(x), x),
    lambda x, g: (full(lambda x, g: 3 * g * jnp.cos(x))(x, g),),
)


def on_devices(w):
    def block(x, w):
        h = full(jnp.tanh)(x @ w)
        return lax.psum(amp.cast_inputs(jnp.matmul)(h, w), "data")

    fn = sharded(block)
    return full(fn)(X @ w, w) @ w + fn(X, w)


def stream(h, w):
    def turn(h, _):
        return half_out(layer)(h, w) + h, None

    return lax.scan(turn, h, None, length=3)[0]


# Fast where the plan has a body, or a length, to think of.
FAST = "plain", "scan", "cond", "while"


def tags(place, of_while):
    slow = () if place in FAST else ("slow",)
    return (*slow, of_while) if place == "while" else slow


ROWS = {
    **{
        f"f32_in_{place}": row(around(place, full(layer)), *tags(place, "forward"))
        for place in PLACES
    },
    **{
        f"cast_inputs_in_{place}": row(
            around(place, attending),
            # A `custom_vjp` has no derivative in forward mode.
            *("half", *tags(place, "value")),
            # The scores are rounded too.
            roundings=2 * ROUNDINGS,
        )
        for place in PLACES
    },
    "two_regions": row(
        lambda w: attending(full(layer)(X @ w, w), w) @ w,
        "once",
        roundings=2 * ROUNDINGS,
    ),
    "region_in_custom_jvp": lambda w: marked_rule(X @ w) @ w,
    "region_in_custom_vjp": lambda w: marked_backward(X @ w) @ w,
    "region_in_shard_map": on_devices,
    "region_in_gradient": lambda w: jax.grad(
        lambda w: jnp.mean(jnp.square(full(layer)(X @ w, w)))
    )(w),
    "scan_in_cast_inputs": lambda w: (
        amp.cast_inputs(
            lambda h, w: lax.scan(lambda h, _: (layer(h, w), h), h, None, length=3)
        )(X @ w, w)[1]
        @ w
    ),
    "softmax_in_cast_inputs": lambda w: amp.cast_inputs(jax.nn.softmax)(X @ w) @ w,
    "cast_inputs_in_cast_inputs": lambda w: amp.cast_inputs(
        lambda h, w: amp.cast_inputs(lambda h: jnp.tanh(h) * 2)(h @ w) @ w
    )(X @ w, w),
    "f32_in_cast_inputs": lambda w: amp.cast_inputs(
        lambda h, w: full(lambda h: jnp.exp(-(h**2)))(h) @ w
    )(X @ w, w),
    "cast_inputs_to_f32": lambda w: (
        amp.cast_inputs(lambda h: jnp.exp(-(h**2)), jnp.float32)(X @ w) @ w
    ),
    "carry_through_a_region": lambda w: stream(X @ w, w),
    "scan_in_a_region": lambda w: full(stream)(X @ w, w) @ w,
    "regions_as_branches": lambda w: (
        lax.cond(w[0, 0] < 9, full(layer), half_out(lambda h, w: h), X @ w, w) @ w
    ),
}
