"""Layers that keep values of many kinds, what is done with them, and what is kept."""

import collections
import functools

import jax
import jax.numpy as jnp
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.program import jaxprs
from tests.programs import equations


def policy(word, half="bf16"):
    return f"p=f32,c={half},o=f32,s={word}"


def autocast(fn, word, half="bf16"):
    return amp.autocast(fn, policy(word, half))


def norm(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def gelu_layer(x, w):
    return jax.nn.gelu(x @ w) @ w.T


def attention(x, w):
    h = norm(x)
    scores = (h @ w) @ h.T
    mask = jnp.tril(jnp.ones(scores.shape, bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return x + weights @ (h @ w)


def gated(x, w):
    return x + (jax.nn.silu(x @ w) * jnp.tanh(x @ w.T)) @ w


def rectified(x, w):
    return jax.nn.relu(x @ w) @ w.T


def dropout(x, w):
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return jnp.where(keep, jnp.tanh(x @ w) * 2, 0) @ w


def sorted_layer(x, w):
    return jnp.sin(jnp.sort(x @ w, axis=-1)) @ w


def looked_up(x, w):
    # More than there are: to keep the rows takes less than to keep the lookup.
    rows = jnp.arange(4 * len(x)) % len(x)
    found = jnp.tanh((x @ w)[rows]).reshape(4, *x.shape)
    return jnp.sum(found * jnp.sin(found), axis=0) @ w


def shared(x, w):
    """`h` is read three times, by a chain that is made again and beside it."""
    h = x @ w
    return (h + jnp.tanh(h) * jnp.exp(-h * h)) @ w + jnp.sin(h)


def activated_twice(x, w):
    """`h` is read twice in each `silu`: the cotangents of all four are added up."""
    h = x @ w
    return (jax.nn.silu(h) @ w + jax.nn.silu(h) * jnp.sin(x)) @ w + jnp.tanh(h)


def residual(x, w):
    """The derivative of `tanh` uses its tangent twice, and `h` is read after it."""
    h = x @ w
    return jnp.tanh(h) @ w + h + jnp.sin(h)


def branches(x, w):
    return lax.cond(w[0, 0] > 0, gelu_layer, gated, x, w)


def checkpointed(x, w):
    return jax.checkpoint(gelu_layer)(x, w)


LAYER = {
    fn.__name__: fn
    for fn in (
        *(gelu_layer, attention, gated, rectified, dropout, sorted_layer, looked_up),
        *(shared, activated_twice, residual, branches, checkpointed),
    )
}


def unrolled(layer, w, x):
    for each in w:
        x = layer(x, each)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def scanned(layer, w, x):
    x, _ = lax.scan(lambda x, each: (layer(x, each), None), x, w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def jitted(layer, w, x):
    """Too large to be written out: the user's own function."""
    return unrolled(jax.jit(layer), w, x)


FORMS = {"unrolled": unrolled, "scanned": scanned, "jitted": jitted}


@functools.cache
def differentiated(layer, form, word):
    """The loss and its gradients: one function, so that it is traced once."""
    loss = functools.partial(FORMS[form], LAYER[layer])
    return jax.value_and_grad(autocast(loss, word), argnums=(0, 1))


TRANSFORMED = {
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (w,)),
    "linearize": lambda f: lambda w: jax.linearize(f, w)[1](w),
    "vmap outside": lambda f: jax.vmap(jax.grad(f), in_axes=1, out_axes=1),
    "vmap inside": lambda f: jax.grad(lambda w: jnp.sum(jax.vmap(f, in_axes=1)(w))),
    "in a checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "in a scan": lambda f: (
        lambda w: lax.scan(lambda c, _: (c - 0.1 * jax.grad(f)(c), None), w, length=2)[
            0
        ]
    ),
}


DEAR = ("dot_general", "sort", "gather", "random_bits", "scan", "while", "scatter-add")


def counted(fn, *args):
    names = (e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args).jaxpr))
    return {n: c for n, c in collections.Counter(names).items() if n in DEAR}


def kept(fn, *args):
    """Returns the arrays that differentiation keeps, but arguments."""
    traced = jax.make_jaxpr(lambda *xs: jax.tree.leaves(jax.vjp(fn, *xs)[1]))(*args)
    jaxpr = traced.jaxpr
    found = dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, jaxprs.Var))
    return [v.aval for v in found if v not in jaxpr.invars]
