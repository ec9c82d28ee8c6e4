"""Decoding caches in half precision, in programs that are f32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.measures import EXACTLY_AS_WRITTEN

LENGTH = 6
X = jax.random.normal(jax.random.key(0), (2, LENGTH, 8))
BF16 = "mixed_bfloat16"
HALF = [(BF16, jnp.bfloat16), ("mixed_float16", jnp.float16)]


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, decode=True)(x)


@functools.cache
def variables():
    return jax.jit(Decoder().init)(jax.random.key(1), X)


def applied(params, cache, x):
    return Decoder().apply({"params": params, "cache": cache}, x, mutable=["cache"])


def apply(cache, x):
    return applied(variables()["params"], cache, x)


def decoded(apply, cache):
    """All tokens, one after another, and the cache after them."""
    outputs = []
    apply = jax.jit(apply, compiler_options=EXACTLY_AS_WRITTEN)
    for t in range(LENGTH):
        y, written = apply(cache, X[:, t : t + 1])
        cache = written["cache"]
        outputs.append(y)
    return jnp.concatenate(outputs, axis=1), cache


@functools.cache
def decoded_in_f32():
    return decoded(apply, variables()["cache"])[0]


def dtypes(cache):
    return {x.dtype.name for x in jax.tree.leaves(cache)}


STORED = "p=bf16,c=bf16,o=f32"
# The policy, the dtype of the cache, and of outputs; whether parameters are half too,
# and whether the cache is an argument itself or in one.
DECODED = [
    *((*each, output, False, True) for each in HALF for output in ("f32", "half")),
    *((p, jnp.bfloat16, "f32", True, bare) for p in (BF16, STORED) for bare in (0, 1)),
]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("policy", "half", "output", "half_params", "bare"), DECODED)
def test_a_half_precision_cache_of_linen_stays_so_and_decodes_as_f32(
    policy, half, output, half_params, bare
):
    wanted = decoded_in_f32()
    policy = amp.get_policy(policy)
    if output == "half":
        policy = policy.with_output_dtype(half)
    params = variables()["params"]
    params = amp.cast_floating(params, half) if half_params else params
    call = applied if bare else lambda p, cache, x: applied(p, cache["cache"], x)
    call = amp.autocast(call, policy)
    found, cache = decoded(
        lambda cache, x: call(params, cache if bare else {"cache": cache}, x),
        amp.cast_floating(variables()["cache"], half),
    )
    assert found.dtype == policy.output_dtype
    assert dtypes(cache) == {jnp.dtype(half).name, "int32"}
    scale = float(jnp.max(jnp.abs(wanted)))
    atol = 8 * float(jnp.finfo(half).eps) * scale
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=0, atol=atol)


def test_a_half_precision_cache_is_written_and_read_without_a_cast():
    policy, half = HALF[0]
    cast = amp.cast_floating(variables()["cache"], half)
    jaxpr = jax.make_jaxpr(amp.autocast(apply, policy))(cast, X[:, :1])
    shape = jax.tree.leaves(cast)[1].shape
    of_caches = [
        (e.primitive.name, e.outvars[0].aval.dtype)
        for e in jaxpr.eqns
        if e.outvars[0].aval.shape == shape
    ]
    assert of_caches == [("dynamic_update_slice", half)] * 2


def decoded_by_nnx(dtype, transform=lambda fn: fn, params_dtype=None):
    """All tokens, one after another, and the layer with its cache after them."""
    layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache(X.shape, dtype=dtype)
    layer = amp.cast_params(layer, params_dtype) if params_dtype else layer
    call = nnx.jit(transform(lambda layer, x: layer(x)))
    steps = [call(layer, X[:, t : t + 1]) for t in range(LENGTH)]
    return jnp.concatenate(steps, axis=1), layer


def test_a_half_precision_cache_of_nnx_stays_so_and_decodes_as_f32():
    wanted, _ = decoded_by_nnx(jnp.float32)
    of_half = (BF16, jnp.bfloat16, "bf16"), (STORED, jnp.bfloat16, "bf16")
    for policy, half, params in (*((*each, None) for each in HALF), *of_half):
        amped = functools.partial(amp.autocast, policy=policy)
        found, layer = decoded_by_nnx(half, amped, params)
        assert layer.cached_key[...].dtype == layer.cached_value[...].dtype == half
        assert layer.query.kernel[...].dtype == (half if params else jnp.float32)
        assert int(layer.cache_index[...]) == LENGTH
        atol = 8 * float(jnp.finfo(half).eps) * float(jnp.max(jnp.abs(wanted)))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def test_a_program_that_takes_its_half_precision_cache_is_traced_with_it():
    seen = []

    def fn(cache, x):
        seen.append(cache["cache"].dtype.name)
        return {"cache": cache["cache"].at[0].set(x.astype(jnp.bfloat16))}

    out = amp.autocast(fn)({"cache": jnp.zeros((2, 8), jnp.bfloat16)}, X[0, 0])
    assert seen == ["bfloat16"] and out["cache"].dtype == jnp.bfloat16


def test_a_mistake_is_told_of_as_it_was_made_with_half_precision_caches_too():
    def fn(cache, x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        amp.autocast(fn)({"cache": jnp.zeros((2, 8), jnp.bfloat16)}, X)


def test_what_is_saved_of_a_program_with_half_precision_caches_is_told():
    policy, half = HALF[0]
    cast = amp.cast_floating(variables()["cache"], half)
    report = amp.explain(apply, policy)(cast, X[:, :1])
    assert report.not_differentiable is None
    assert 0 < report.total.saved
