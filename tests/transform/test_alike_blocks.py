"""Blocks that are alike: traced once, and each with its own names and values."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.experimental.xla_metadata import set_xla_metadata

import jmp_amp as amp
from tests.programs import equations

ROWS, WIDTH, LAYERS = 4, 8, 3
X = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
W = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / WIDTH**0.5


def checkpoints(fn, *args):
    """Returns the bodies of the blocks of a function."""
    jaxpr = jax.make_jaxpr(amp.autocast(fn))(*args)
    return [
        e.params["jaxpr"]
        for e in equations(jaxpr)
        if e.primitive.name in ("checkpoint", "remat2")
    ]


def kinds(fn, *args):
    """Returns how many blocks a function has, and how many of them are traced."""
    found = checkpoints(fn, *args)
    return len(found), len({id(body) for body in found})


def layers(each):
    """Returns a loss: layers that differ as `each(scores, number)` does."""

    def loss(w):
        x = X
        for number in range(LAYERS):
            x = each(x @ w, number) @ w
        return jnp.mean(x**2)

    return loss


def test_layers_of_a_loop_are_traced_once():
    assert kinds(layers(lambda s, i: jax.nn.softmax(s)), W) == (LAYERS + 1, 2)


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "each",
    [
        lambda s, i: jnp.exp(jnp.tanh(s * [0.5, -1.5, 2.5][i])),
        lambda s, i: jnp.exp(jnp.tanh(s) ** (i + 1)),
        lambda s, i: jax.nn.softmax(s * [1, -1, 2][i]),
        lambda s, i: jax.nn.softmax(s, axis=i % 2),
        lambda s, i: jnp.log1p(jnp.exp(s)) if i == 1 else jnp.exp(jnp.log1p(s * s)),
        lambda s, i: jnp.exp(jnp.tanh(s)) if i else jnp.exp(jnp.tanh(s).T).T,
        lambda s, i: jax.nn.softmax(s if i else s[:, ::-1]),
        lambda s, i: jnp.exp((a := jnp.tanh(s)) - (b := jnp.sin(s))) - (b, a)[i % 2],
        # Other results of the same equations are read.
        lambda s, i: (jnp.exp(jnp.tanh(s)), jnp.exp(jnp.sin(s)))[i % 2],
    ],
)
def test_what_differs_is_computed_apart(each):
    loss = layers(each)
    want = jax.jit(jax.grad(loss))(W)
    got = jax.jit(jax.grad(amp.autocast(loss, "mixed_float16")))(W)
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_literals_are_told_by_their_bits(value):
    # 1 / (x * 0.0) and 1 / (x * -0.0) have other signs.
    def fn(w):
        x = jnp.abs(X @ w)
        signs = [jnp.exp(jnp.sign(1 / (x * zero))) for zero in (0.0, value)]
        return [(s @ w).sum() for s in signs]

    first, second = amp.autocast(fn)(W)
    want = [float(y) for y in fn(W)]
    np.testing.assert_allclose([first, second], want, rtol=0.02)
    assert np.signbit(value) == (want[0] != want[1])


def test_every_block_has_the_names_of_its_layer():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(nn.LayerNorm()(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(WIDTH)(x)
            for _ in range(LAYERS):
                x = Layer()(x)
            return x

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), X)

    def loss(params):
        return jnp.mean(model.apply(params, X) ** 2)

    assert kinds(loss, params) == (LAYERS + 1, 2)
    compiled = jax.jit(jax.grad(amp.autocast(loss))).lower(params).compile()
    text = compiled.as_text()
    named = re.findall(r" rsqrt\(.*op_name=\"([^\"]+)\"", text)
    for number in range(LAYERS):
        path = rf"\bModel\)?/Layer_{number}/.*LayerNorm_0"
        assert any(re.search(path, name) for name in named), named
    assert all(len(set(re.findall(r"Layer_\d", name))) == 1 for name in named), named


def test_scopes_inside_of_a_block_stay_apart():
    def each(scores, number):
        with jax.named_scope(f"inner_{number}"):
            scores = jnp.tanh(scores)
        return jnp.exp(scores)

    loss = layers(each)
    assert kinds(loss, W) == (LAYERS + 1, LAYERS + 1)
    text = jax.jit(amp.autocast(loss)).lower(W).compile().as_text()
    for number in range(LAYERS):
        assert f"inner_{number}/tanh" in text


def test_xla_gets_the_program_that_it_would_get_anyway():
    def apart(scores, number):
        # Alike but for a name, so each is traced.
        with jax.named_scope(f"inner_{number}"):
            halved = scores / 2
        return jax.nn.softmax(halved)

    losses = layers(lambda s, i: jax.nn.softmax(s / 2)), layers(apart)
    assert [kinds(loss, W)[1] for loss in losses] == [2, LAYERS + 1]
    shared, unshared = (
        jax.jit(jax.value_and_grad(amp.autocast(loss))).lower(W).as_text()
        for loss in losses
    )
    assert shared == unshared


def test_every_layer_keeps_its_metadata():
    def each(scores, number):
        with set_xla_metadata(my_key=f"layer_{number}"):
            return jax.nn.softmax(scores)

    text = jax.jit(amp.autocast(layers(each))).lower(W).as_text()
    counts = {text.count(f'"layer_{number}"') for number in range(LAYERS)}
    assert len(counts) == 1 and counts != {0}


def test_every_layer_keeps_its_policy():
    halves = ["bfloat16", "float16", "bfloat16"]

    def each(scores, number):
        policy = amp.get_policy(f"params=float32,compute={halves[number]}")
        return amp.with_policy(policy)(lambda x: jax.nn.softmax(x @ W))(scores)

    found = [
        {v.aval.dtype.name for v in body.invars}
        for body in checkpoints(layers(each), W)[:LAYERS]
    ]
    assert found == [{"bfloat16"}, {"float16"}, {"bfloat16"}]


def test_lines_of_two_layers_stay_apart():
    def loss(w):
        x = jax.nn.softmax(X @ w) @ w
        x = jax.nn.softmax(x) @ w
        return jnp.mean(x**2)

    assert kinds(loss, W) == (3, 3)


def test_shapes_may_differ():
    def loss(ws):
        total = 0.0
        for w in ws:
            total += jnp.mean((jnp.exp(jnp.tanh(X @ w)) @ w.T) ** 2)
        return total

    ws = [W, W[:, :5]]
    got = jax.jit(jax.grad(amp.autocast(loss)))(ws)
    for g, want in zip(got, jax.jit(jax.grad(loss))(ws), strict=True):
        assert g.shape == want.shape
        assert np.linalg.norm(g - want) < 0.05 * np.linalg.norm(want)


def test_blocks_hold_no_tracers():
    loss = amp.autocast(layers(lambda s, i: jax.nn.softmax(s)))
    with jax.checking_leaks():
        jax.make_jaxpr(jax.grad(loss))(W)
        jax.make_jaxpr(jax.vmap(jax.grad(loss)))(W[None])
        jax.make_jaxpr(jax.hessian(loss))(W)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.grad])
def test_what_a_call_held_is_free_when_it_ends(transform):
    def called():
        # The loss closes over an array of this call.
        x = X + 1
        fn = transform(amp.autocast(lambda w: jnp.mean(jax.nn.softmax(x @ w) @ w)))
        fn(W)
        return weakref.ref(x)

    called()
    gc.disable()
    try:
        assert called()() is None
    finally:
        gc.enable()
