import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2)


# all_finite


@pytest.mark.breadth(3)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_number_is_seen(dtype, value, jit):
    check = jax.jit(amp.all_finite) if jit else amp.all_finite
    good = {"a": jnp.ones(3, dtype), "b": [jnp.ones((2, 2))]}
    assert check(good)
    bad = good | {"a": jnp.array([1.0, value, 1.0], dtype)}
    found = check(bad)
    assert not found
    assert (found.dtype, found.shape) == (jnp.bool_, ())


def test_the_largest_float16_is_finite_and_a_nan_of_float8_is_not():
    assert amp.all_finite(jnp.float16(65504.0))
    assert not amp.all_finite(jnp.array([jnp.nan], jnp.float8_e4m3fn))


@pytest.mark.parametrize("part", [0, 1])
def test_a_bad_part_of_a_complex_number_is_seen(part):
    parts = [jnp.ones(3), jnp.ones(3)]
    parts[part] = parts[part].at[1].set(jnp.inf)
    assert not amp.all_finite(jax.lax.complex(*parts))


def test_a_nan_among_float64_values_is_seen():
    with jax.enable_x64(True):
        assert amp.all_finite(jnp.float64(1e300))
        assert not amp.all_finite(jnp.float64(jnp.nan))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("bad", range(40))
def test_a_nan_is_seen_in_whichever_layer_it_is(bad):
    # More layers than are checked together, in two shapes.
    tree = {f"layer_{i}": jnp.ones((2, 1 + i % 2)) for i in range(40)}
    tree[f"layer_{bad}"] *= jnp.nan
    assert not jax.jit(amp.all_finite)(tree)


def test_leaves_that_are_no_floats_do_not_count():
    tree = [3, True, "nan", None, jax.random.key(0), np.zeros(2, jax.dtypes.float0)]
    assert amp.all_finite([*tree, jnp.arange(3), {}])
    assert not amp.all_finite([*tree, float("nan")])
    assert amp.all_finite({})


def scaled_update(axis_name):
    tx = amp.with_loss_scale(optax.sgd(0.1), amp.no_loss_scale(), axis_name=axis_name)
    state = tx.init(jnp.ones(2))
    return lambda x: tx.update(jnp.ones(2), state)[0] + x


# Each takes the name of an axis and returns a function to call inside of a map.
OVER_AXES = {
    "all_finite(tree, axis_name=": lambda axis: lambda x: amp.all_finite(x, axis) + x,
    "psum_in_f32(tree, ": lambda axis: lambda x: amp.psum_in_f32(x, axis),
    "with_loss_scale(inner, scale, axis_name=": scaled_update,
}


def inside_shard_map(fn, check_vma):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": P(), "out_specs": P()}
    return jax.shard_map(fn, mesh=mesh, check_vma=check_vma, **specs)


# JAX's own collectives raise an AssertionError without a word.
@pytest.mark.parametrize("call", OVER_AXES)
@pytest.mark.parametrize(
    ("around", "told"),
    [
        *(
            (functools.partial(inside_shard_map, check_vma=check), "The mesh here has")
            for check in (True, False)
        ),
        (functools.partial(jax.vmap, axis_name="data"), "Call it inside of jax"),
        (lambda fn: fn, "Call it inside of jax"),
    ],
    ids=["shard_map", "shard_map, unchecked", "vmap", "nothing"],
)
def test_an_unknown_axis_is_named_with_the_remedy(call, around, told):
    with pytest.raises(NameError) as raised:
        jax.eval_shape(around(OVER_AXES[call]("batch")), jnp.ones((2, 2), jnp.int32))
    message = str(raised.value)
    assert message.startswith(f"{call}'batch'): no mapped axis is called 'batch'")
    assert told in message and ("'data'" in message) == (told == "The mesh here has")


@pytest.mark.parametrize("axis_name", [0, ("data", 1), [{}]])
@pytest.mark.parametrize("call", OVER_AXES)
def test_what_is_no_name_of_an_axis_is_refused(call, axis_name):
    with pytest.raises(TypeError, match="is not the name of a mapped axis") as raised:
        OVER_AXES[call](axis_name)(jnp.ones(2, jnp.int32))
    assert str(raised.value).startswith(f"{call}{axis_name!r}): ")


def test_a_number_as_an_axis_is_refused_before_the_first_update():
    with pytest.raises(TypeError, match="Give the name that the mesh of shard_map has"):
        amp.with_loss_scale(optax.sgd(0.1), amp.no_loss_scale(), axis_name=0)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
def test_all_devices_agree_over_every_axis(mode):
    x = jnp.ones((2, 4)).at[1, 2].set(jnp.nan)
    alone = lambda x: amp.all_finite(x)[None, None]  # noqa: E731
    one = lambda x: amp.all_finite(x, "b")[None, None]  # noqa: E731
    both = lambda x: amp.all_finite(x, ("a", "b"))[None, None]  # noqa: E731

    if mode == "vmap":

        def run(f):
            inner = jax.vmap(f, axis_name="b")
            return jax.vmap(inner, axis_name="a")(x)[..., 0, 0]

    else:
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

        def run(f):
            return jax.shard_map(
                f, mesh=mesh, out_specs=P("a", "b"), in_specs=P("a", "b")
            )(x)

    expected = np.ones((2, 4), bool)
    expected[1, 2] = False
    np.testing.assert_array_equal(run(alone), expected)
    expected[1] = False
    np.testing.assert_array_equal(run(one), expected)
    expected[:] = False
    np.testing.assert_array_equal(run(both), expected)


def test_layers_sharded_differently_are_checked_where_they_are():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    specs = [P("d", None), P(None, "d"), P()]
    tree = {
        f"w{i}": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))
        for i, spec in enumerate(specs)
    }
    with jax.set_mesh(mesh):
        assert jax.jit(amp.all_finite)(tree)
        assert not jax.jit(amp.all_finite)(tree | {"w1": tree["w1"] * jnp.inf})


def test_layers_sharded_alike_are_checked_without_moving_them():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("d"))
    tree = {f"w{i}": jax.device_put(jnp.ones((8, 8)), sharding) for i in range(4)}
    text = jax.jit(amp.all_finite).lower(tree).compile().as_text()
    assert set(re.findall(r"all-\w+|collective-\w+", text)) <= {"all-reduce"}


# select_tree


@pytest.mark.parametrize("jit", [False, True])
def test_what_is_not_chosen_leaves_no_trace(jit):
    select = jax.jit(amp.select_tree) if jit else amp.select_tree
    bad = {"w": jnp.full(3, jnp.nan, jnp.float16), "count": jnp.int32(7)}
    good = {"w": jnp.arange(3, dtype=jnp.float16), "count": jnp.int32(6)}
    for chosen in (select(True, good, bad), select(False, bad, good)):
        np.testing.assert_array_equal(chosen["w"], [0, 1, 2])
        assert chosen["w"].dtype == jnp.float16
        assert chosen["count"] == 6


def test_keys_numbers_and_equal_constants_can_be_chosen():
    a = {"key": jax.random.key(1), "lr": 0.1, "name": "adam", "n": 3}
    b = {"key": jax.random.key(2), "lr": 0.2, "name": "adam", "n": 4}
    found = amp.select_tree(jnp.asarray(False), a, b)
    assert found["key"] == b["key"]
    assert (found["lr"], found["name"], found["n"]) == (jnp.float32(0.2), "adam", 4)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        ({"x": 1.0}, {"y": 1.0}, ValueError, r"differ in structure.*\['x'\]"),
        ({"x": [1.0]}, {"x": [1.0, 2.0]}, ValueError, r"\['x'\]\[1\]"),
        (
            {"x": jnp.ones(3)},
            {"x": jnp.ones(1)},
            ValueError,
            r"\['x'\].*float32\[3\].*float32\[1\]",
        ),
        (
            {"x": jnp.ones(3)},
            {"x": jnp.ones(3, jnp.float16)},
            TypeError,
            r"\['x'\].*float32.*float16.*Cast one",
        ),
        ({"x": "adam"}, {"x": "sgd"}, TypeError, r"\['x'\].*'adam'.*'sgd'"),
    ],
    ids=["keys", "lengths", "shapes", "dtypes", "text"],
)
def test_trees_that_do_not_match_are_refused(a, b, error, message):
    with pytest.raises(error, match="^select_tree: .*" + message):
        amp.select_tree(True, a, b)
