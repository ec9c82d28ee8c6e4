"""A backward pass inside of a program changes no number of its forward pass.

The derivative of `tanh(h)` reads `tanh(h)`, and sums of gradients are f32. A forward
pass with a gradient and one without it are the same function of the same parameters:
their difference is zero, and so is the gradient of its square.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from tests.programs import results_of

K = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(K[0], (16, 8))
P = {
    "w": jax.random.normal(K[1], (8, 8)) / 3,
    "b": jnp.full((8,), 0.1),
    "v": jax.random.normal(K[2], (8, 8)) / 3,
    "o": jax.random.normal(K[3], (8, 2)) / 3,
}
ACTIVATIONS = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "squared relu": lambda h: jax.nn.relu(h) ** 2,
    "sin": jnp.sin,
    "mish": jax.nn.mish,
    "arctan": jnp.arctan,
    "cube": lambda h: h**3,
    "relu": jax.nn.relu,
}


def plain(layer, p):
    h = layer(layer(X, p["w"], p["b"]), p["v"], p["b"])
    return h @ p["o"]


def scanned(layer, p):
    stack = jnp.stack([p["w"], p["v"]])
    h, _ = lax.scan(lambda h, w: (layer(h, w, p["b"]), None), X, stack)
    return h @ p["o"]


def checkpointed(layer, p):
    return plain(jax.checkpoint(layer), p)


def jitted(layer, p):
    return plain(jax.jit(layer), p)


FORMS = {f.__name__: f for f in (plain, jitted, scanned, checkpointed)}


def model(activation, form=plain):
    """Returns p -> (16, 2) outputs of two layers and a head."""

    def layer(h, w, b):
        return ACTIVATIONS[activation](h @ w + b[None])

    return functools.partial(form, layer)


def largest(tree):
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def inside(fn, *args):
    return jax.jit(amp.autocast(fn, "mixed_bfloat16"))(*args)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_of_a_difference_of_equal_passes_is_zero(activation):
    f = model(activation)

    def loss(p):
        return jnp.sum((f(p) - lax.stop_gradient(f(p))) ** 2)

    def loss_of(p, before):
        return jnp.sum((f(p) - before) ** 2)

    def step(p):
        value, grads = jax.value_and_grad(loss_of)(p, f(p))
        return value, grads, jax.grad(loss)(p)

    assert largest(inside(step, P)) == 0


@pytest.mark.breadth(1)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_those_of_the_pass_without_a_gradient(form):
    f = model("tanh", FORMS[form])

    def with_gradient(p):
        y, back = jax.vjp(f, p)
        return y, back(y)

    def square(p):
        return jnp.sum(f(p) ** 2)

    def curved(p):
        value, grads = jax.value_and_grad(square)(p)
        return value, jax.jvp(jax.grad(square), (p,), (grads,))[1]

    y = inside(f, P)
    assert largest(y - jax.jit(f)(P)) > 0  # half precision is
    np.testing.assert_array_equal(inside(with_gradient, P)[0], y)
    np.testing.assert_array_equal(inside(curved, P)[0], inside(square, P))


def test_what_a_checkpoint_computes_again_is_of_its_forward_pass():
    """The first layer, which the second reads again, is in f32 both times."""
    f = jax.checkpoint(model("tanh"))
    step = amp.autocast(jax.grad(lambda p: jnp.sum(f(p) ** 2)), "mixed_bfloat16")
    first, _, again, _ = results_of(step, P, primitive="tanh")
    assert first == again == "float32"


def test_a_loop_of_a_backward_pass_that_begins_with_a_value_leaves_it_in_half():
    """A rule of the user iterates in f32; a product reads the value it begins with."""

    @jax.custom_vjp
    def activation(h):
        return jnp.tanh(h)

    def forward(h):
        return (jnp.tanh(h),) * 2

    def backward(y, g):
        return (lax.fori_loop(0, 8, lambda _, z: z - (z - g * (1 - y**2)) / 9, y),)

    activation.defvjp(forward, backward)
    f = functools.partial(plain, lambda h, w, b: activation(h @ w))
    step = jax.value_and_grad(lambda p: jnp.sum(f(p) ** 2))
    found = results_of(amp.autocast(step, "mixed_bfloat16"), P, primitive="tanh")
    assert found == ["bfloat16"] * 2


@pytest.mark.breadth(1)
@pytest.mark.parametrize("wrap", [jax.value_and_grad, jax.grad])
def test_ratio_of_new_and_old_policies_begins_at_one(wrap):
    """Schulman et al. 2017, equation 7: gradients are those of the first step."""
    f = model("tanh")
    action = jnp.arange(16) % 2
    advantage = jnp.cos(jnp.arange(16.0))

    def log_probability(p):
        return jnp.take_along_axis(jax.nn.log_softmax(f(p)), action[:, None], 1)[:, 0]

    def loss(p, old):
        ratio = jnp.exp(log_probability(p) - old)
        return -jnp.mean(ratio * advantage), ratio

    def step(p):
        return wrap(loss, has_aux=True)(p, log_probability(p))

    found = inside(step, P)
    ratio = found[1] if wrap is jax.grad else found[0][1]
    np.testing.assert_array_equal(ratio, jnp.ones(16))


@pytest.mark.parametrize("wrap", [jax.value_and_grad, jax.grad])
def test_what_the_backward_pass_alone_reads_is_made_for_it(wrap):
    """The gradient of the last bias is a sum: it reads the end of the loss in f32."""
    f = model("relu")

    def loss(p):
        return jnp.sum((f(p) + p["c"] - 1) ** 2)

    step, p = amp.autocast(wrap(loss), "mixed_bfloat16"), P | {"c": jnp.ones((1, 2))}
    assert results_of(step, p, primitive="sub") == ["float32"]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("activation", ["tanh", "sin", "squared relu"])
def test_gradients_are_as_exact_as_where_they_are_taken_around(activation):
    f = model(activation)

    def loss(p):
        return jnp.mean(f(p) ** 2)

    true = jax.jit(jax.grad(loss))(P)

    def error(grads):
        norms = jax.tree.map(
            lambda g, t: np.linalg.norm(g - t) / np.linalg.norm(t), grads, true
        )
        return max(jax.tree.leaves(norms))

    around = jax.jit(jax.grad(amp.autocast(loss, "mixed_bfloat16")))(P)
    assert error(inside(jax.value_and_grad(loss), P)[1]) <= 1.2 * error(around)
