"""The derivative of `softplus` and its kind: that of f64, and saved in half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jmp_amp as amp
from tests.programs import equations, results_of
from tests.rounding import W, X, mean_square

HALVES = ["bfloat16", "float16"]
EYE = jnp.eye(8)
# Far out the result of `softplus` is all that half precision holds of it.
POINTS = jnp.linspace(-30.0, 30.0, 64).reshape(8, 8)


def autocast(fn, half):
    return amp.autocast(fn, f"mixed_{half}")


def between_products(fn):
    """The function, of what a product makes, and read by another one."""
    return lambda x: fn(x @ EYE) @ EYE


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


FUNCTIONS = {
    "softplus": (nn.softplus, sigmoid),
    "log_sigmoid": (jax.nn.log_sigmoid, lambda x: sigmoid(-np.asarray(x))),
    "of two": (lambda x: jnp.logaddexp(x, 0.5 * x), lambda x: (1 + sigmoid(x / 2)) / 2),
    "with base 2": (
        lambda x: jnp.logaddexp2(x, 1.0),
        lambda x: sigmoid(np.log(2) * (np.asarray(x, np.float64) - 1)),
    ),
    "of a row": (
        lambda x: jnp.logaddexp(x, POINTS[3:4]),
        lambda x: sigmoid(np.asarray(x, np.float64) - np.asarray(POINTS[3:4])),
    ),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_those_of_f64(name, half):
    fn, derivative = FUNCTIONS[name]
    x = POINTS.astype(half).astype(jnp.float32)
    fn = autocast(between_products(fn), half)
    # Several roundings to half; the smallest f16 is 2**-24.
    close = {"rtol": 4 * float(jnp.finfo(half).eps), "atol": 2**-24}
    found = jax.jit(jax.grad(lambda x: jnp.sum(fn(x))))(x)
    np.testing.assert_allclose(found, derivative(x), **close)
    _, moved = jax.jit(lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),)))(x)
    np.testing.assert_allclose(moved, derivative(x), **close)
    rows = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(fn(x[None])))))
    if name != "of a row":
        np.testing.assert_allclose(rows(x), derivative(x), **close)


def test_second_derivatives_are_those_of_f64():
    fn = autocast(lambda x: jnp.sum(between_products(nn.softplus)(x[None])), "bfloat16")
    x = jnp.linspace(-3.0, 3.0, 8).astype(jnp.bfloat16).astype(jnp.float32)
    once = sigmoid(x)
    found = jax.jit(jax.hessian(fn))(x)
    # A few roundings of numbers up to 1.
    np.testing.assert_allclose(
        found, np.diag(once * (1 - once)), atol=4 * float(jnp.finfo("bfloat16").eps)
    )


@pytest.mark.breadth(2)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("fn", [nn.softplus, jax.nn.log_sigmoid])
def test_between_products_nothing_of_it_is_saved_in_f32(fn, half):
    def network(w):
        return mean_square(fn(fn(X @ w) @ w) @ w)

    saved = jax.tree.leaves(
        jax.eval_shape(lambda w: jax.vjp(autocast(network, half), w)[1], W)
    )
    large = [each for each in saved if each.size >= X.size]
    assert {each.dtype.name for each in large} == {half}


def test_its_values_are_computed_in_f32():
    fn = autocast(between_products(nn.softplus), "bfloat16")
    made = [
        eqn.outvars[0].aval.dtype
        for eqn in equations(jax.make_jaxpr(fn)(POINTS).jaxpr)
        if eqn.primitive.name in ("exp", "log1p")
    ]
    assert made == [jnp.float32, jnp.float32]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_in_f32_the_rule_is_that_of_jax(policy):
    """It is so on a CPU too, where all but products is f32."""
    target = "cpu" if policy == "mixed_bfloat16" else None

    def loss(x):
        return jnp.sum(nn.softplus(x) ** 2)

    ours = jax.grad(amp.autocast(loss, policy, target=target))
    np.testing.assert_array_equal(ours(POINTS), jax.grad(loss)(POINTS))


def test_a_function_of_the_same_name_keeps_its_rule():
    @jax.custom_jvp
    def logaddexp(x, y):
        return jnp.logaddexp(x, y)

    @logaddexp.defjvp
    def rule(operands, tangents):
        return logaddexp(*operands), 5.0 * tangents[0]

    fn = autocast(between_products(lambda x: logaddexp(x, 0.0)), "bfloat16")
    found = jax.grad(lambda x: jnp.sum(fn(x)))(POINTS)
    np.testing.assert_array_equal(found, jnp.full_like(POINTS, 5.0))
    # Nor is it f32 for its name.
    moved = equations(jax.make_jaxpr(lambda x: jax.jvp(fn, (x,), (x,)))(POINTS).jaxpr)
    (product,) = (eqn for eqn in moved if eqn.primitive.name == "mul")
    assert product.outvars[0].aval.dtype == jnp.bfloat16


@pytest.mark.breadth(1)
@pytest.mark.parametrize("fn", [jnp.logaddexp, jnp.logaddexp2])
def test_of_f64_the_rule_is_that_of_jax(fn):
    with jax.enable_x64(True):
        x = np.linspace(-3.0, 3.0, 8)
        gradient, expected = (
            jax.grad(lambda x, fn=each: jnp.sum(fn(x, jnp.ones_like(x))))(x)
            for each in (amp.autocast(fn), fn)
        )
        assert gradient.dtype == jnp.float64
        np.testing.assert_array_equal(gradient, expected)


# A graph whose nodes are such functions

NODES = X.shape[0]
EDGES = jnp.arange(4 * NODES) % NODES
FAR = float(jnp.finfo(jnp.float32).min)


def looked_up(of_nodes, edges=EDGES, fill=0.0):
    def fn(w):
        nodes = of_nodes(X @ w, w)
        messages = nodes.at[edges].get(mode="fill", fill_value=fill) * 0.5
        return jax.ops.segment_sum(messages, edges, NODES) @ w

    return fn


def exp(x, w):
    return jnp.exp(x)


def as_index(w):
    places = jnp.clip(jnp.exp(X @ w)[EDGES], 0.0, 15.0).astype(jnp.int32)
    return w[places[:, 0]]


def unmoved(w):
    messages = jnp.exp(X @ w)[EDGES] * 0.5
    return lax.stop_gradient(jax.ops.segment_sum(messages, EDGES, NODES)) @ w


KEPT = {
    "a function of a product": looked_up(exp),
    "no larger than the nodes": looked_up(exp, jnp.arange(NODES)),
    "a quotient by a sum": looked_up(lambda x, w: nn.softmax(x)),
    "a sum": looked_up(lambda x, w: jnp.cumsum(x, axis=0)),
    "of an argument": looked_up(lambda x, w: X + jnp.exp(x)),
    "of a parameter": looked_up(lambda x, w: jnp.logaddexp(x, w[:8])),
    "beside a number that overflows": looked_up(exp, fill=FAR),
    "of which no derivative is asked": unmoved,
    "that are returned": lambda w: jnp.exp(X @ w)[EDGES],
    "that become an index": as_index,
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", KEPT)
def test_edges_look_up_in_f32(name):
    found = results_of(autocast(KEPT[name], "bfloat16"), W, primitive="gather")
    assert found and set(found) == {"float32"}


OTHERS = ["mixed_float16", amp.get_policy("mixed_bfloat16").with_full("exp")]


@pytest.mark.parametrize("policy", OTHERS, ids=str)
def test_edges_look_up_in_f32_what_is_out_of_range_or_a_user_has_in_f32(policy):
    found = results_of(amp.autocast(looked_up(exp), policy), W, primitive="gather")
    assert found == ["float32"]
