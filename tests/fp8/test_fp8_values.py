"""Numbers that are none, infinities, zeros, and modules, in fp8 products."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.fp8 import reference
from tests.fp8.programs import (
    E5M2_ERROR,
    assert_close,
    compiled,
    numbers,
    quantisations,
)
from tests.fp8.reference import E5M2, HALF_EPS, relative_error

X, W, V = numbers(32, 64), numbers(64, 48, seed=1, scale=0.1), numbers(48, 16, seed=2)

# Numbers that are none


@pytest.mark.parametrize(
    "where", ["x", *(pytest.param(each, marks=pytest.mark.slow) for each in "wg")]
)
def test_nan_stays_in_the_gradient_where_the_finite_check_sees_it(where):
    arrays = {"x": X, "w": W, "g": numbers(32, 48, seed=3)}
    arrays[where] = arrays[where].at[3, 5].set(jnp.nan)

    @compiled
    def gradient(x, w, g):
        y, backward = jax.vjp(amp.autocast(jnp.dot, "fp8"), x, w)
        return y, backward(g)

    y, (dx, dw) = gradient(**arrays)
    assert not amp.all_finite({"dx": dx, "dw": dw})
    expected = {"x": ("y", "dw"), "w": ("y", "dx"), "g": ("dx", "dw")}[where]
    for name, found in {"y": y, "dx": dx, "dw": dw}.items():
        assert bool(jnp.isnan(found).any()) is (name in expected)
        assert not jnp.isnan(found).all()


def test_an_infinity_saturates_at_the_largest_number():
    x = X.at[3, 5].set(jnp.inf)
    y = compiled(amp.autocast(jnp.dot, "fp8"))(x, W)
    q, scale = reference.quantised(x)
    # Its array has the scale 1: small numbers lose digits, large ones are clipped.
    assert q[3, 5] == 448 and scale == 1
    expected = q.astype(float) @ reference.quantised(W).exact()
    assert relative_error(y, expected) < 2 * HALF_EPS


@pytest.mark.parametrize(
    "where", ["all", *(pytest.param(each, marks=pytest.mark.slow) for each in "xwg")]
)
def test_arrays_of_zeros_have_products_and_gradients_of_zeros(where):
    arrays = {"x": X, "w": W, "g": numbers(32, 48, seed=3)}
    for name in arrays if where == "all" else where:
        arrays[name] = jnp.zeros_like(arrays[name])

    @compiled
    def gradient(x, w, g):
        y, backward = jax.vjp(amp.autocast(jnp.dot, "fp8"), x, w)
        return dict(zip(("y", "dx", "dw"), (y, *backward(g)), strict=True))

    found = gradient(**arrays)
    zero = {"x": ("y", "dw"), "w": ("y", "dx"), "g": ("dx", "dw")}
    for name, each in found.items():
        assert jnp.isfinite(each).all()
        assert bool((each == 0).all()) is (name in zero.get(where, found))


def test_tiny_cotangents_do_not_vanish():
    """1e-30 is far below the smallest e5m2: the scale brings it up."""
    g = numbers(32, 48, seed=3) * 2.0**-100
    _, backward = jax.vjp(amp.autocast(jnp.dot, "fp8"), X, W)
    dx, _ = compiled(backward)(g)
    expected = reference.quantised(g, E5M2).exact() @ reference.quantised(W).exact().T
    assert relative_error(dx, expected) < 2 * HALF_EPS


# Flax


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(32)(x))
        return nn.Dense(16)(x)


def test_linen_and_nnx_modules_have_fp8_gradients():
    variables = jax.jit(Linen().init)(jax.random.key(0), X)
    kernels = [variables["params"][f"Dense_{i}"] for i in range(2)]

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(64, 32, rngs=rngs)
            self.last = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.gelu(self.first(x)))

    module = Nnx(nnx.Rngs(0))
    for layer, params in zip((module.first, module.last), kernels, strict=True):
        layer.kernel[...] = params["kernel"]
        layer.bias[...] = params["bias"]

    def linen_loss(variables):
        return jnp.mean(amp.autocast(Linen().apply, "fp8")(variables, X) ** 2)

    def nnx_loss(module):
        return jnp.mean(amp.autocast(lambda m, x: m(x), "fp8")(module, X) ** 2)

    linen = jax.jit(jax.grad(linen_loss))(variables)["params"]
    state = nnx.jit(nnx.grad(nnx_loss))(module)
    for layer, params in zip((state.first, state.last), linen.values(), strict=True):
        assert_close(layer.kernel[...], params["kernel"], 4 * HALF_EPS)
    exact = jax.jit(jax.grad(lambda v: jnp.mean(Linen().apply(v, X) ** 2)))(variables)
    assert_close(linen, exact["params"], 2 * E5M2_ERROR)
    assert quantisations(jax.grad(linen_loss), variables).count("float8_e5m2") == 2


@pytest.mark.parametrize(("reduced", "is_rounded"), [("", True), (",r=f32", False)])
def test_a_gradient_that_is_reduced_in_f32_has_more_digits_than_bf16(
    reduced, is_rounded
):
    keys = jax.random.split(jax.random.key(0))
    w, x = (jax.random.normal(key, (32, 32)) for key in keys)
    policy = f"p=f32,c=bf16,o=f32,m=fp8{reduced}"
    loss = amp.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), policy)
    gradient = jax.jit(jax.grad(loss))(w, x)
    rounded = gradient.astype(jnp.bfloat16).astype(jnp.float32)
    assert bool((gradient == rounded).all()) is is_rounded
