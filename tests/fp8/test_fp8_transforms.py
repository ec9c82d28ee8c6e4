"""fp8 products under the transformations of JAX, and their one derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_amp as amp
from tests.fp8 import reference
from tests.fp8.programs import (
    E5M2_ERROR,
    assert_close,
    compiled,
    numbers,
    quantisations,
)
from tests.fp8.reference import HALF_EPS, relative_error

X, W, V = numbers(32, 64), numbers(64, 48, seed=1, scale=0.1), numbers(48, 16, seed=2)


def model(params, x):
    w, v = params
    return jnp.tanh(x @ w) @ v


def loss(params, x):
    return jnp.mean(amp.autocast(model, "fp8")(params, x) ** 2)


def exact_loss(params, x):
    return jnp.mean(model(params, x) ** 2)


PARAMS = (W, V)


def assert_same(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@functools.cache
def gradients():
    return compiled(jax.grad(loss))(PARAMS, X)


def test_every_way_to_a_gradient_gives_it():
    @compiled
    def everything(params, x):
        value, backward = jax.vjp(loss, params, x)
        return {
            "vjp": backward(jnp.ones_like(value))[0],
            "value_and_grad": jax.value_and_grad(loss)(params, x)[1],
            "amp": amp.value_and_grad(loss)(params, x)[1],
            "autocast of the loss": jax.grad(amp.autocast(exact_loss, "fp8"))(
                params, x
            ),
            "jit": jax.grad(jax.jit(loss))(params, x),
        }

    found = everything(PARAMS, X)
    exact = compiled(jax.grad(exact_loss))(PARAMS, X)
    assert_close(gradients(), exact, 2 * E5M2_ERROR)
    for name, each in found.items():
        assert_same(each, gradients()), name


@pytest.mark.slow
def test_eager_gradients_are_those_of_jit():
    with jax.disable_jit():
        eager = jax.grad(loss)(PARAMS, X)
    assert_close(eager, gradients(), HALF_EPS)


# Forward mode: tangents are not quantised


def test_tangents_meet_the_quantised_operand():
    fn = amp.autocast(jnp.dot, "fp8")
    t, s = numbers(32, 64, seed=5), numbers(64, 48, seed=6)

    @compiled
    def both(x, w, t, s):
        y, dy = jax.jvp(fn, (x, w), (t, s))
        z, linear = jax.linearize(fn, x, w)
        return y, dy, z, linear(t, s), jax.jvp(lambda x: fn(x, w), (x,), (t,))[1]

    y, dy, z, dz, dx = both(X, W, t, s)
    qx, qw = (reference.quantised(each).exact() for each in (X, W))
    t, s = map(reference.half, (t, s))
    # The sum of two results of bf16 is one.
    np.testing.assert_allclose(dy, t @ qw + qx @ s, atol=0.1, rtol=2 * HALF_EPS)
    np.testing.assert_allclose(dx, t @ qw, atol=1e-3, rtol=2 * HALF_EPS)
    assert_same((z, dz), (y, dy))


def test_forward_and_reverse_mode_agree_on_a_jacobian():
    x, w = numbers(16, 16, seed=3), numbers(16, 16, seed=4)
    fn = lambda w: jnp.sum(amp.autocast(jnp.dot, "fp8")(x, w), axis=0)  # noqa: E731

    @compiled
    def both(w):
        return jax.jacfwd(fn)(w), jax.jacrev(fn)(w)

    forward, backward = both(w)
    # Sums over quantised x: cotangents of ones are exact in e5m2.
    qx = reference.quantised(x).exact()
    expected = np.einsum("k,nm->nkm", qx.sum(0), np.eye(16))
    for found in (forward, backward):
        np.testing.assert_allclose(found, expected, atol=0.05, rtol=2 * HALF_EPS)


# vmap


def test_gradients_of_examples_are_those_of_a_loop_bit_by_bit():
    xs = np.stack([numbers(16, 64, seed=i, scale=4.0**i) for i in range(4)])
    each = compiled(jax.grad(loss))
    mapped = compiled(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(PARAMS, xs)
    mapped = jax.tree.map(np.asarray, mapped)
    for i, x in enumerate(xs):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], mapped), each(PARAMS, x))


@pytest.mark.slow
def test_the_gradient_of_mapped_examples_is_the_sum():
    xs = jnp.stack([numbers(16, 64, seed=i) for i in range(4)])

    def total(params, xs):
        return jnp.sum(jax.vmap(loss, in_axes=(None, 0))(params, xs))

    @compiled
    def both(params, xs):
        summed = jax.tree.map(
            lambda g: jnp.sum(g, axis=0),
            jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, xs),
        )
        return jax.grad(total)(params, xs), summed

    found, expected = both(PARAMS, xs)
    assert_close(found, expected, 4 * HALF_EPS)


# Loops and branches

STACK = np.stack([numbers(32, 32, seed=i, scale=0.2) for i in range(4)])
STATE = numbers(16, 32, seed=9)


def unrolled(stack, x):
    for w in stack:
        x = jnp.tanh(x @ w)
    return x


def scanned(stack, x, wrap=lambda fn: fn):
    turn = wrap(lambda x, w: (jnp.tanh(x @ w), None))
    return jax.lax.scan(turn, x, stack)[0]


def whiled(stack, x):
    def turn(carry):
        i, x = carry
        return i + 1, jnp.tanh(x @ jnp.asarray(stack)[i])

    return jax.lax.while_loop(lambda carry: carry[0] < 4, turn, (0, x))[1]


def branched(stack, x):
    for i, w in enumerate(stack):
        x = jax.lax.cond(i < 4, lambda x, w: jnp.tanh(x @ w), lambda x, w: x, x, w)
    return x


def squared(fn, policy="fp8"):
    return lambda stack, x: jnp.mean(amp.autocast(fn, policy)(stack, x) ** 2)


def remat(policy=None):
    return functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)


POLICIES = jax.checkpoint_policies
LOOPS = {
    "scan": scanned,
    "branches": branched,
    "checkpoint": remat()(unrolled),
    "scan of checkpoints": functools.partial(scanned, wrap=remat()),
    "saves all": functools.partial(scanned, wrap=remat(POLICIES.everything_saveable)),
    "saves dots": functools.partial(
        scanned, wrap=remat(POLICIES.dots_with_no_batch_dims_saveable)
    ),
    "saves 8 bits": functools.partial(
        scanned, wrap=remat(POLICIES.save_only_these_names("fp8_lhs", "fp8_rhs"))
    ),
    "saves every name": functools.partial(
        scanned, wrap=remat(POLICIES.save_any_names_but_these("other"))
    ),
}


@functools.cache
def plainly(policy):
    return compiled(jax.value_and_grad(squared(unrolled, policy)))(STACK, STATE)


FAST = ("scan", "saves 8 bits")


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(fn, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, fn in LOOPS.items()
    ],
)
def test_loops_branches_and_checkpoints_have_the_gradient_of_the_plain_program(fn):
    @compiled
    def both(stack, x):
        return jax.value_and_grad(squared(fn))(stack, x)

    # What a loop carries may be f32 where straight code has half: a number at a tie of
    # its cotangent's 8 bits then goes the other way.
    found = both(STACK, STATE)
    assert_close(found, plainly("fp8"), E5M2_ERROR)
    assert_close(found, plainly("float32"), 2 * E5M2_ERROR)
    jaxpr_of = jax.grad(squared(fn))
    assert "float8_e5m2" in quantisations(jaxpr_of, STACK, STATE)


def test_a_while_loop_has_8_bit_products_forward():
    fn = amp.autocast(whiled, "fp8")
    assert quantisations(fn, STACK, STATE) == ["float8_e4m3fn"] * 2
    expected = compiled(amp.autocast(unrolled, "fp8"))(STACK, STATE)
    found = compiled(fn)(STACK, STATE)
    assert relative_error(found, np.asarray(expected, np.float64)) < 0.03


# One derivative

SECOND = {
    "hessian": lambda fn, w: jax.hessian(fn)(w),
    "grad of grad": lambda fn, w: jax.grad(lambda w: jnp.sum(jax.grad(fn)(w)))(w),
    "hvp": lambda fn, w: jax.jvp(jax.grad(fn), (w,), (w,))[1],
    "jvp of jvp": lambda fn, w: jax.jvp(
        lambda w: jax.jvp(fn, (w,), (w,))[1], (w,), (w,)
    )[1],
    "jacfwd of jacrev": lambda fn, w: jax.jacfwd(jax.jacrev(fn))(w),
    "jacrev of jacfwd": lambda fn, w: jax.jacrev(jax.jacfwd(fn))(w),
}
HEADS = {"square": lambda y: jnp.sum(y**2), "linear": jnp.sum}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    "second",
    [
        pytest.param(fn, id=name, marks=pytest.mark.slow if "jac" in name else ())
        for name, fn in SECOND.items()
    ],
)
def test_a_second_derivative_is_refused_and_names_place_and_remedy(second, head, jit):
    x, w = numbers(16, 16), numbers(16, 16, seed=1)

    def fn(w):
        with jax.named_scope("block"):
            return head(amp.autocast(lambda x, w: x @ w, "fp8")(x, w))

    fn = jax.jit(fn) if jit else fn
    with pytest.raises(NotImplementedError) as raised:
        jax.eval_shape(functools.partial(second, fn), w)
    for part in ("second derivative", "test_fp8_transforms.py", "mixed_bfloat16"):
        assert part in str(raised.value)


def test_a_second_derivative_names_the_module():
    net = nn.Sequential([nn.Dense(16), nn.Dense(16)])
    variables = jax.eval_shape(net.init, jax.random.key(0), X)

    def fn(variables):
        policy = amp.PolicyMap("mixed_bfloat16", {"**/layers_1": "fp8"})
        return jnp.sum(amp.autocast(net.apply, policy)(variables, X) ** 2)

    with pytest.raises(NotImplementedError, match=r"layers_1.*PolicyMap"):
        jax.eval_shape(lambda v: jax.jvp(jax.grad(fn), (v,), (v,)), variables)


def test_a_second_derivative_past_an_fp8_product_is_there():
    """That of what follows a product whose operands do not move."""
    fixed = numbers(16, 16, seed=1)

    def fn(scale):
        y = amp.autocast(lambda x, w: x @ w, "fp8")(X[:16, :16], fixed)
        return jnp.sum((scale * y) ** 3)

    found = compiled(jax.grad(jax.grad(fn)))(np.float32(2.0))
    q = [reference.quantised(each).exact() for each in (X[:16, :16], fixed)]
    expected = 12 * np.sum((q[0] @ q[1]) ** 3)
    assert abs(found - expected) < 0.02 * abs(expected)


def test_the_policy_of_the_remedy_has_second_derivatives():
    fn = lambda w: jnp.sum(amp.autocast(jnp.dot, "mixed_bfloat16")(X, w) ** 2)  # noqa: E731
    found = compiled(lambda w: jax.jvp(jax.grad(fn), (w,), (w,))[1])(W)
    assert np.isfinite(found).all()
