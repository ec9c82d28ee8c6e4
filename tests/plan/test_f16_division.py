"""Quotients in f16: their gradients are those of f32 wherever f16 holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp

F16 = "mixed_float16"
EYE = jnp.eye(4)


def quotient(x, y):
    """A quotient of what products make, which a product reads."""
    return ((x @ EYE) / (y @ EYE)) @ EYE


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


def features(x, size):
    """Positive ones, of Katharopoulos et al. 2020, arXiv:2006.16236, in small units."""
    return size * jax.nn.softplus(x)


@pytest.mark.parametrize("size", [1.0, 3e-4])
def test_a_gradient_inside_divides_by_what_is_near_the_end_of_f16(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 8)).astype(np.float32)
    signs = np.sign(rng.normal(size=(16, 8))).astype(np.float32)
    w, v = (rng.normal(size=(8, 8)).astype(np.float32) / 3 for _ in "wv")

    def loss(w, v):
        q, k = features(x @ w, size), features(x @ v, size)
        return jnp.mean((q @ (k.T @ x)) / (q @ k.sum(0))[:, None] * signs)

    gradient = jax.grad(loss, (0, 1))
    exact = gradient(w, v)
    found = amp.autocast(gradient, F16)(w, v)
    products = amp.recipe("OD", half_dtype="float16").autocast(gradient)(w, v)
    for ours, least, want in zip(found, products, exact, strict=True):
        error = np.linalg.norm(ours - want)
        assert error < 1.5 * np.linalg.norm(least - want) < 0.1 * np.linalg.norm(want)


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
