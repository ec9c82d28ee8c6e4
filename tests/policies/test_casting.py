"""Casting trees: which leaves follow, which stay, and under which transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

import jmp_amp as amp

HALF = [jnp.float16, jnp.bfloat16]
FP8 = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz, jnp.float8_e3m4]


def rounded_to_bfloat16(x):
    """Closed form: bf16 is the upper half of an f32, rounded to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounding = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + rounding) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize(
    ("dtype", "rounded"),
    [("bf16", rounded_to_bfloat16), ("f16", lambda x: x.astype(np.float16))],
)
def test_values_are_rounded_to_nearest_even(dtype, rounded):
    values = np.random.default_rng(0).normal(size=64, scale=100.0).astype(np.float32)

    def cast(x):
        return amp.cast_floating(x, dtype)

    for result in (cast(values), cast(jnp.asarray(values)), jax.jit(cast)(values)):
        assert result.dtype == amp.get_policy(dtype).compute_dtype
        np.testing.assert_array_equal(
            np.asarray(result, np.float32), rounded(values).astype(np.float32)
        )


@pytest.mark.breadth(2)
@pytest.mark.parametrize("source", [*HALF, jnp.float32])
@pytest.mark.parametrize("target", [*HALF, jnp.float32])
def test_every_castable_dtype_becomes_every_other(source, target):
    tree = {"jax": jnp.ones((2, 3), source), "numpy": np.ones((2, 3), source)}
    result = amp.cast_floating(tree, target)
    for name, leaf in result.items():
        assert leaf.dtype == target, name
        assert leaf.shape == (2, 3)
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), 1.0)
    if source == target:
        assert result["jax"] is tree["jax"]
        assert result["numpy"] is tree["numpy"]


class Untouched:
    """An object that no dtype applies to."""

    dtype = np.dtype("float32")


UNTOUCHED = {
    "int": jnp.arange(3),
    "uint8": jnp.arange(3, dtype=jnp.uint8),
    "int4": jnp.ones(3, jnp.int4),
    "bool": jnp.array([True, False]),
    "complex": jnp.ones(2, jnp.complex64),
    "key": jax.random.key(0),
    "old_key": jax.random.PRNGKey(0),
    "e4m3": jnp.ones(2, jnp.float8_e4m3fn),
    "e5m2": jnp.ones(2, jnp.float8_e5m2),
    "numpy_e4m3": np.ones(2, jnp.float8_e4m3fn),
    "fp4": np.ones(2, jnp.float4_e2m1fn),
    "numpy_int": np.arange(3),
    "numpy_int_scalar": np.int32(3),
    "numpy_bool": np.bool_(True),
    "numpy_complex": np.ones(2, np.complex128),
    "numpy_text": np.array(["a", "b"]),
    "numpy_object": np.array([None, "a"], object),
    "float0": np.zeros(3, jax.dtypes.float0),
    "python_float": 1.5,
    "python_int": 3,
    "python_bool": True,
    "python_complex": 1j,
    "text": "adam",
    "bytes": b"adam",
    "function": jnp.tanh,
    "type": jnp.float32,
    "dtype": np.dtype("float32"),
    "object": Untouched(),
    "integer_struct": jax.ShapeDtypeStruct((2,), jnp.int32),
    "fp8_struct": jax.ShapeDtypeStruct((2,), jnp.float8_e4m3fn),
}


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f8_e5m2"])
def test_everything_else_than_a_float_comes_back_as_the_same_object(dtype):
    tree = UNTOUCHED | {"none": None}
    result = amp.cast_floating(tree, dtype)
    assert result.keys() == tree.keys()
    for name, leaf in tree.items():
        assert result[name] is leaf, name


def test_a_mutable_array_comes_back_as_the_same_object():
    reference = jax.new_ref(jnp.ones(3))
    assert amp.cast_floating([reference], "bf16")[0] is reference

    @jax.jit
    def inside(reference):
        assert amp.cast_floating([reference], "bf16")[0] is reference
        return reference[...]

    assert inside(reference).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [*HALF, jnp.float32])
def test_numpy_stays_numpy(dtype):
    tree = [np.ones((2, 3)), np.array(1.0), np.float32(1.0), np.float64(1.0)]
    result = amp.cast_floating(tree, dtype)
    assert [type(leaf) for leaf in result[:2]] == [np.ndarray, np.ndarray]
    assert all(isinstance(leaf, np.generic) for leaf in result[2:])
    for leaf, before in zip(result, tree, strict=True):
        assert leaf.dtype == dtype
        assert leaf.shape == before.shape
        assert leaf.sum(dtype=np.float32) == before.size


def test_numpy_of_the_other_byte_order_is_converted():
    big_endian = np.array([1.0, -2.5], ">f4")
    result = amp.cast_to_full(big_endian)
    assert result.dtype == np.dtype("float32")
    np.testing.assert_array_equal(result, [1.0, -2.5])


# jmp casts f64 as well, and without x64 numpy's default f64 is what users feed.
@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [*HALF, jnp.float32])
def test_an_f64_leaf_follows_an_explicit_request(dtype):
    assert amp.cast_floating(np.ones(2), dtype).dtype == dtype
    with jax.enable_x64(True):
        array = jnp.full(2, 1 / 3, jnp.float64)
        assert amp.cast_floating(array, dtype).dtype == dtype
        assert amp.cast_floating(array, "f64") is array
        assert amp.cast_floating(jnp.ones(2, dtype), "f64").dtype == jnp.float64


def test_f64_that_jax_does_not_have_is_its_warning():
    with pytest.warns(UserWarning, match="float64 .* is not available"):
        amp.cast_floating(jnp.ones(2), "f64")


def test_a_shape_dtype_struct_changes_its_dtype_only():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    struct = jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=sharding)
    assert amp.cast_floating(struct, "bf16") == jax.ShapeDtypeStruct(
        (16, 3), jnp.bfloat16, sharding=sharding
    )


@pytest.mark.breadth(2)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("dtype", ["bf16", "f8_e4m3"])
def test_sharding_is_kept(dtype, axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    array = jax.device_put(jnp.ones((16, 3)), sharding)

    def cast(x):
        return amp.cast_floating(x, dtype)

    assert cast(array).sharding.is_equivalent_to(sharding, 2)
    assert jax.jit(cast)(array).sharding.is_equivalent_to(sharding, 2)


def test_an_array_stays_on_its_device_and_in_its_memory():
    device = jax.devices()[5]
    array = jax.device_put(
        jnp.ones(3), SingleDeviceSharding(device, memory_kind="pinned_host")
    )
    result = amp.cast_floating(array, "bf16")
    assert result.devices() == {device}
    assert result.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("dtype", HALF)
def test_jit_vmap_and_scan_cast_as_without(dtype):
    tree = {"x": jnp.arange(6.0).reshape(2, 3), "n": jnp.arange(2)}

    def cast(tree):
        return amp.cast_floating(tree, dtype)

    for transformed in (
        jax.jit(cast),
        jax.vmap(cast),
        jax.jit(jax.vmap(cast)),
        lambda t: jax.lax.scan(lambda carry, x: (carry, cast(x)), None, t)[1],
    ):
        result = transformed(tree)
        assert result["x"].dtype == dtype
        assert result["n"].dtype == jnp.int32
        np.testing.assert_array_equal(result["x"].astype(np.float32), tree["x"])
        np.testing.assert_array_equal(result["n"], tree["n"])


@pytest.mark.parametrize("dtype", HALF)
def test_gradient_through_a_cast_has_the_dtype_of_the_parameter(dtype):
    def loss(w):
        return (amp.cast_floating(w, dtype) * jnp.asarray(3.0, dtype)).sum()

    gradient = jax.grad(loss)(jnp.arange(4.0))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, np.full(4, 3.0))
    _, tangent = jax.jvp(loss, (jnp.arange(4.0),), (jnp.ones(4),))
    assert tangent.dtype == dtype
    assert float(tangent) == 12.0


@pytest.mark.breadth(2)
@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize("source", [*HALF, jnp.float32, np.float64])
def test_what_is_too_large_for_fp8_saturates_and_nan_stays(source, target):
    largest = float(jnp.finfo(target).max)
    values = [1.0, -0.5, 1e4, -6e4, np.inf, -np.inf, np.nan]
    wanted = np.clip(values, -largest, largest).astype(target)
    result = amp.cast_floating(np.array(values, source), target)
    assert result.dtype == target
    np.testing.assert_array_equal(result.astype(np.float32), wanted.astype(np.float32))
    if source is not np.float64:
        result = amp.cast_floating(jnp.array(values, source), target)
        assert result.dtype == target
        np.testing.assert_array_equal(
            np.asarray(result, np.float32), wanted.astype(np.float32)
        )


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_an_fp8_format_wider_than_f16_takes_every_f16(asarray):
    # f8_e8m0, the format of block scales, reaches to 2^127.
    given = asarray(np.array([4.0, 32768.0], np.float16))
    result = amp.cast_floating(given, "f8_e8m0fnu")
    np.testing.assert_array_equal(np.asarray(result, np.float32), [4.0, 32768.0])


def test_what_is_too_large_for_f16_becomes_inf():
    result = amp.cast_floating(jnp.array([1e5, -1e5, 65504.0]), "f16")
    np.testing.assert_array_equal(result, np.array([np.inf, -np.inf, 65504], "f2"))


def test_cast_to_half_and_full_are_cast_floating():
    tree = {"f16": jnp.ones(2, jnp.float16), "f32": jnp.ones(2), "n": jnp.arange(2)}
    half = amp.cast_to_half(tree)
    assert {k: v.dtype.name for k, v in half.items()} == {
        "f16": amp.half_dtype().name,
        "f32": amp.half_dtype().name,
        "n": "int32",
    }
    full = amp.cast_to_full(half)
    assert {k: v.dtype.name for k, v in full.items()} == {
        "f16": "float32",
        "f32": "float32",
        "n": "int32",
    }
    assert full["n"] is tree["n"]


def test_flax_containers_keep_their_type_and_metadata():
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    cast = amp.cast_floating(module, "bf16")
    assert isinstance(cast, nnx.BatchNorm)
    leaves = jax.tree.leaves(nnx.state(cast))
    assert len(leaves) == 4
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(module)))
    boxed = amp.cast_floating(nn.Partitioned(jnp.ones(3), ("model",)), "bf16")
    assert boxed.names == ("model",)
    assert boxed.value.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["int32", jnp.int8, bool, jnp.complex64, None, 3])
def test_casting_to_another_dtype_than_a_float_is_a_type_error(dtype):
    with pytest.raises(TypeError, match=r"^cast_floating\(tree, .*\): .* Use one of"):
        amp.cast_floating({"x": jnp.ones(2)}, dtype)


def test_casting_to_an_unknown_dtype_is_an_error_that_names_it():
    message = r"^cast_floating\(tree, 'fp17'\): unknown dtype 'fp17'. Use one of f16"
    with pytest.raises(ValueError, match=message):
        amp.cast_floating({"x": jnp.ones(2)}, "fp17")
