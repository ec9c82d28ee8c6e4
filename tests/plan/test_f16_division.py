"""Quotients in f16: their gradients are those of f32 wherever f16 holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests.programs import equations

F16, BF16 = "mixed_float16", "mixed_bfloat16"
EYE = jnp.eye(4)


def quotient(x, y):
    """A quotient of what products make, which a product reads."""
    return ((x @ EYE) / (y @ EYE)) @ EYE


def names(fn, *args):
    return {e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args).jaxpr)}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("denominator", [0.02, 1.0, 200.0, 300.0, 3000.0])
def test_the_gradient_of_a_quotient_is_right_for_all_denominators(denominator):
    x, y = jnp.full((2, 4), 8.0), jnp.full((2, 4), denominator)
    fn = amp.autocast(lambda x, y: quotient(x, y).sum(), F16)
    dx, dy = jax.jit(jax.grad(fn, argnums=(0, 1)))(x, y)
    np.testing.assert_allclose(dx, 1 / np.float64(y), rtol=3e-3)
    # The smallest f16 is 2**-24.
    np.testing.assert_allclose(dy, -8 / np.float64(y) ** 2, rtol=3e-3, atol=2**-24)


def test_it_is_differentiated_forward_twice_and_in_batches():
    x, y = jnp.full((2, 4), 8.0), jnp.full((2, 4), 4.0)
    fn = amp.autocast(quotient, F16)
    _, moved = jax.jit(lambda *xs: jax.jvp(fn, xs, (y, x)))(x, y)
    # 4 / 4 - 8 * 8 / 16
    np.testing.assert_allclose(moved, jnp.full((2, 4), -3.0), rtol=3e-3)
    for args, argnum, want in (((x, y), 0, 0.0), ((x, y), 1, 2 * 8 / 4.0**3)):
        twice = jax.grad(
            lambda *xs, argnum=argnum: jax.grad(
                lambda *xs: fn(*xs).sum(), argnums=argnum
            )(*xs).sum(),
            argnums=argnum,
        )
        np.testing.assert_allclose(jax.jit(twice)(*args), want, rtol=5e-3, atol=1e-6)
    batch = jax.vmap(fn)(x[None], y[None])
    np.testing.assert_allclose(batch, jnp.full((1, 2, 4), 2.0))


def test_what_does_not_move_has_no_derivative():
    x, y = jnp.ones((2, 4)), jnp.ones((2, 4))
    fn = amp.autocast(quotient, F16)
    tangent = jax.make_jaxpr(lambda x: jax.jvp(lambda x: fn(x, y), (x,), (x,)))(x)
    assert not {"neg", "sub", "mul"} & {e.primitive.name for e in equations(tangent)}


def test_other_quotients_are_as_jax_differentiates_them():
    x, y = jnp.ones((2, 4)), jnp.ones((2, 4))

    def gradient(fn, policy):
        return jax.grad(lambda x, y: amp.autocast(fn, policy)(x, y).sum(), (0, 1))

    assert "integer_pow" in names(gradient(quotient, BF16), x, y)
    assert "integer_pow" not in names(gradient(quotient, F16), x, y)
    constant = gradient(lambda x, y: ((x @ EYE) / 300.0) @ EYE * y, F16)
    assert "custom_jvp_call" not in names(constant, x, y)
    # Computed in f32, because it is returned so.
    assert "integer_pow" in names(
        gradient(lambda x, y: (x @ EYE) / (y @ EYE), F16), x, y
    )


def test_linear_attention_learns_in_f16():
    def attention(q, k, v, w):
        q, k, v = (jax.nn.elu(each @ w) + 1 for each in (q, k, v))
        numerator = jnp.einsum("tk,sk,sv->tv", q, k, v)
        total = q @ k.sum(0)[:, None]
        return ((numerator / total) @ w).sum()

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((64, 16)), jnp.float32) for _ in "qkv")
    w = jnp.asarray(rng.standard_normal((16, 16)) / 2, jnp.float32)
    exact = jax.jit(jax.grad(attention, argnums=(0, 1)))(q, k, v, w)
    half = jax.jit(jax.grad(amp.autocast(attention, F16), argnums=(0, 1)))(q, k, v, w)
    for found, want in zip(half, exact, strict=True):
        assert np.linalg.norm(found - want) < 0.03 * np.linalg.norm(want)
