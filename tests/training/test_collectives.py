"""Sums over devices in float32: their error, their messages, their types."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

DEVICES = 8


@pytest.fixture(autouse=True)
def needs_devices():
    if jax.device_count() < DEVICES:
        pytest.skip(f"needs {DEVICES} devices")


def mesh_of(*shape):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def summed(fn, tree, mesh, axis="data"):
    """Returns `fn` of one part of `tree` each; the result is the same on all devices.

    That `shard_map` checks it is part of each test.
    """
    first = jax.tree.map(lambda _: P(axis), tree)
    each = jax.shard_map(
        lambda part: fn(jax.tree.map(lambda leaf: leaf[0], part), axis),
        mesh=mesh,
        in_specs=(first,),
        out_specs=jax.tree.map(lambda _: P(), tree),
    )
    return jax.jit(each)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (64, 16), (0, 4)])
def test_sum_of_half_leaves_is_rounded_once(dtype, shape):
    # The first part is large: in half precision the others would be lost one by one.
    parts = np.random.default_rng(0).uniform(0.1, 0.2, (DEVICES, *shape))
    parts[0] += 100
    parts = jnp.asarray(parts, dtype)
    found = summed(amp.psum_in_f32, parts, mesh_of(DEVICES))(parts)
    exact = np.asarray(parts, np.float64).sum(0)
    assert (found.dtype, found.shape) == (jnp.float32, shape)
    np.testing.assert_array_equal(found, exact.astype(dtype).astype(np.float32))


def test_messages_are_half_and_each_has_a_part():
    parts = jnp.ones((DEVICES, 64, 16), jnp.bfloat16)
    text = summed(amp.psum_in_f32, parts, mesh_of(DEVICES)).lower(parts).as_text()
    found = re.findall(r'"?stablehlo\.(all_\w+|reduce_scatter)"?\(', text)
    assert sorted(found) == ["all_gather", "all_to_all"]
    types = re.findall(r"all_(?:to_all|gather).*?\((tensor<[^>]*>)\) ->", text, re.S)
    assert types == ["tensor<8x128xbf16>", "tensor<128xbf16>"]


def test_other_leaves_are_sums_of_jax():
    tree = {
        "f32": jnp.arange(24, dtype=jnp.float32).reshape(DEVICES, 3) / 7,
        "int": jnp.arange(DEVICES),
    }
    mesh = mesh_of(DEVICES)
    found = summed(amp.psum_in_f32, tree, mesh)(tree)
    expected = summed(jax.lax.psum, tree, mesh)(tree)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found["int"].dtype == tree["int"].dtype


def test_an_array_that_is_the_same_on_all_devices_is_added_up_too():
    x = jnp.asarray([1.5, -2.0], jnp.bfloat16)
    each = jax.shard_map(
        lambda x: amp.psum_in_f32(x, "data"),
        mesh=mesh_of(DEVICES),
        in_specs=P(),
        out_specs=P(),
    )
    assert jax.jit(each)(x).tolist() == [12.0, -16.0]


def test_overflow_and_nan_are_seen():
    parts = jnp.asarray([[6e4, jnp.nan, 1.0]] * DEVICES, jnp.float16)
    found = summed(amp.psum_in_f32, parts, mesh_of(DEVICES))(parts)
    np.testing.assert_array_equal(found, np.float32([np.inf, np.nan, 8.0]))


def test_its_derivative_is_that_of_a_sum():
    parts = jnp.ones((DEVICES, 3), jnp.bfloat16)
    total = summed(amp.psum_in_f32, parts, mesh_of(DEVICES))
    weights = jnp.asarray([1.0, 2.0, 4.0])
    grads = jax.jit(jax.grad(lambda parts: jnp.sum(total(parts) * weights)))(parts)
    assert grads.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grads, np.tile([1.0, 2.0, 4.0], (DEVICES, 1)))


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("axis", "shape"),
    [
        ("data", (1,)),
        (["data"], (DEVICES,)),
        (("data", "model"), (2, DEVICES // 2)),
        (["data", "model"], (2, DEVICES // 2)),
    ],
)
def test_axes_may_be_one_device_and_several_in_a_tuple_or_a_list(axis, shape):
    parts = 1.5 * np.arange(np.prod(shape) * 3).reshape(-1, 3)
    found = jax.shard_map(
        lambda part: amp.psum_in_f32(part[0], axis),
        mesh=mesh_of(*shape),
        in_specs=P(axis if isinstance(axis, str) else tuple(axis)),
        out_specs=P(),
    )(jnp.asarray(parts, jnp.bfloat16))
    np.testing.assert_array_equal(found, np.float32(parts.sum(0)), strict=True)


@pytest.mark.parametrize("axis", [None, (), []])
def test_no_axis_is_refused(axis):
    with pytest.raises(TypeError, match=r"psum_in_f32\(tree, .*\): there is no axis"):
        amp.psum_in_f32(jnp.ones(3, jnp.bfloat16), axis)


def test_outside_of_a_map_no_axis_is_known():
    with pytest.raises(NameError, match="no mapped axis is called 'data'"):
        amp.psum_in_f32(jnp.ones(3, jnp.bfloat16), "data")
