"""Functions of half-precision parameters are traced as the f32 ones they are."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
STORED = "p=bf16,c=bf16,o=f32"
EPS = float(jnp.finfo(BF16).eps)
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), F32)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return x + nn.Dense(8)(nn.LayerNorm()(x)), None


class Scanned(nn.Module):
    """A scan whose carry begins with an embedding and meets f32 norms."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        x = nn.Embed(16, 8)(tokens)
        return layers()(x, jnp.zeros(3))[0]


TOKENS = jnp.arange(12).reshape(3, 4)


def half_and_full() -> tuple[Any, Any]:
    params = Scanned().init(jax.random.key(0), TOKENS)
    half = amp.cast_params(params, STORED)
    return half, amp.cast_to_full(half)


@pytest.mark.parametrize("policy", [STORED, "mixed_bfloat16"])
def test_a_scan_that_begins_in_half_and_goes_on_in_float32_is_traced(policy):
    half, full = half_and_full()
    with pytest.raises(TypeError), jax.numpy_dtype_promotion("standard"):
        Scanned().apply(half, TOKENS)
    found = amp.autocast(Scanned().apply, policy)(half, TOKENS)
    assert found.dtype == F32
    expected = Scanned().apply(full, TOKENS)
    np.testing.assert_allclose(found, expected, atol=8 * EPS)


def test_gradients_are_those_of_float32_parameters_in_the_dtype_of_each():
    half, full = half_and_full()

    def loss(apply: Any, params: Any) -> jax.Array:
        return jnp.sum(apply(params, TOKENS) ** 2)

    apply = amp.autocast(Scanned().apply, STORED)
    found = jax.grad(functools.partial(loss, apply))(half)
    expected = jax.grad(functools.partial(loss, Scanned().apply))(full)
    for leaf, like, wanted in zip(
        *map(jax.tree.leaves, (found, half, expected)), strict=True
    ):
        assert leaf.dtype == like.dtype
        error = np.linalg.norm(leaf.astype(F32) - wanted) / np.linalg.norm(wanted)
        assert error < 8 * EPS


def test_outputs_are_in_the_dtype_of_the_policy_where_all_parameters_are_half():
    w = jnp.ones((8, 4), BF16)
    fn = lambda w, x: x @ w  # noqa: E731
    assert amp.autocast(fn, STORED)(w, X).dtype == F32
    assert amp.autocast(fn, STORED)(w, X.astype(BF16)).dtype == F32
    assert amp.autocast(fn, "bf16")(w, X).dtype == BF16


def test_products_take_the_stored_weights_as_they_are():
    w = jnp.ones((8, 4), BF16)
    report = amp.explain(lambda w, x: x @ w, STORED)(w, X)
    # The activation and the output are cast, and the weight is not.
    assert report.casts == {"f32 to bf16": (1, X.size), "bf16 to f32": (1, 16)}
    assert report.total.matmuls_in_half == 1


def test_what_an_nnx_module_writes_keeps_its_dtype():
    class Model(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(8, 8, param_dtype=BF16, rngs=nnx.Rngs(0))
            self.last = nnx.BatchStat(jnp.zeros(8, BF16))

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.dense(x)
            self.last[...] = y.mean(0).astype(BF16)
            return y

    model = Model()
    assert amp.autocast(model, STORED)(X).dtype == F32
    assert model.last[...].dtype == BF16
    assert model.dense.kernel[...].dtype == BF16


def test_a_mistake_is_told_as_it_was_made():
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        raise TypeError("no such layer")

    for policy in (STORED, "mixed_bfloat16"):
        with pytest.raises(TypeError, match="no such layer"):
            amp.autocast(fn, policy)(jnp.ones(2, BF16), X)


# Half-precision parameters and decoding caches together


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.MultiHeadDotProductAttention(2, decode=True)(x)


TOKEN = X[:, None]


@pytest.mark.parametrize("policy", [STORED, "mixed_bfloat16"])
@pytest.mark.parametrize("bare", [False, True])
def test_a_half_cache_beside_half_parameters_stays_half_in_linen(policy, bare):
    variables = Decoder().init(jax.random.key(0), jnp.ones((4, 3, 8)))
    params, cache = variables["params"], amp.cast_to_full(variables["cache"])

    def apply(params: Any, cache: Any) -> Any:
        cache = cache if bare else cache["cache"]
        variables = {"params": params, "cache": cache}
        return Decoder().apply(variables, TOKEN, mutable=["cache"])

    half = amp.cast_params(params, STORED), amp.cast_floating(cache, BF16)
    half = half if bare else (half[0], {"cache": half[1]})
    found, written = amp.autocast(apply, policy)(*half)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(written)} == {
        "bfloat16",
        "int32",
    }
    full = (params, cache) if bare else (params, {"cache": cache})
    expected, _ = apply(*full)
    np.testing.assert_allclose(found.astype(F32), expected, atol=8 * EPS)


@pytest.mark.parametrize("policy", [STORED, "mixed_bfloat16"])
def test_a_half_cache_beside_half_parameters_stays_half_in_nnx(policy):
    def made(dtype: Any) -> nnx.Module:
        layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
        layer.init_cache((4, 3, 8), dtype=dtype)
        return layer

    expected = made(F32)(TOKEN)
    layer = amp.cast_params(made(BF16), STORED)
    found = amp.autocast(lambda layer, x: layer(x), policy)(layer, TOKEN)
    assert layer.cached_key[...].dtype == layer.cached_value[...].dtype == BF16
    assert layer.query.kernel[...].dtype == BF16
    np.testing.assert_allclose(found.astype(F32), expected, atol=8 * EPS)


def test_a_function_is_not_traced_again_where_nothing_can_be_widened():
    traces = []

    def fn(w: jax.Array) -> jax.Array:
        traces.append(w.dtype)
        raise TypeError("mine")

    for policy, wanted in ((STORED, [F32]), ("mixed_bfloat16", [BF16, F32])):
        traces.clear()
        with pytest.raises(TypeError, match="mine"):
            amp.autocast(fn, policy)(jnp.ones(2, BF16))
        assert traces == wanted
