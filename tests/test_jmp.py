"""jmp's tests (github.com/google-deepmind/jmp, 0.0.4) as sentences, and its defects."""

import copy
import dataclasses
import functools
import itertools
import json
import pickle
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_amp as amp
from jmp_amp import jmp

# What jmp's `__init__` has.
NAMES = (
    "all_finite DynamicLossScale LossScale NoOpLossScale select_tree StaticLossScale "
    "cast_to_full cast_to_half get_policy half_dtype Policy __version__"
).split()
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
TRACES = [
    scenario
    for scenario in json.loads(
        (Path(__file__).parent / "oracle" / "scalers_other.json").read_text()
    )["scenarios"]
    if scenario["system"] == "mindspore"
]
LARGEST = 2.0**126
F16_EPS = float(jnp.finfo(jnp.float16).eps)
F32_EPS = float(jnp.finfo(jnp.float32).eps)

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
either_jit = pytest.mark.parametrize("jit", [False, True])


def kinds(tree):
    """What a compiled program depends on."""
    return jax.tree.structure(tree), [
        (leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)
    ]


def equal(a, b):
    """Whether two trees hold equal leaves of the same dtypes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


adjusted = jax.jit(lambda loss_scale, finite: loss_scale.adjust(finite))


def scales(loss_scale, steps):
    """The scale and the counter after each step; "f" is a finite one."""
    rows = []
    for step in steps:
        loss_scale = adjusted(loss_scale, step == "f")
        rows.append((float(loss_scale.loss_scale), int(loss_scale.counter)))
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_jmp_is_there(name):
    assert hasattr(jmp, name)


# Policies


@each_dtype
@pytest.mark.parametrize("numpy", [np, jnp])
@pytest.mark.parametrize("part", ["param", "compute", "output"])
def test_each_part_of_a_policy_is_cast_to_its_dtype(part, numpy, dtype):
    dtypes = {f"{other}_dtype": jnp.float64 for other in ("param", "compute", "output")}
    policy = jmp.Policy(**(dtypes | {f"{part}_dtype": dtype}))
    assert getattr(policy, f"{part}_dtype") == dtype
    tree = {"a": numpy.ones([]), "step": 3, "label": numpy.arange(2)}
    cast = getattr(policy, f"cast_to_{part}")(tree)
    assert cast["a"].dtype == dtype
    assert cast["step"] is tree["step"] and cast["label"] is tree["label"]


def test_a_policy_takes_its_dtypes_in_jmps_order():
    policy = jmp.Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    assert policy.param_dtype == jnp.float32
    assert policy.compute_dtype == jnp.float16
    assert policy.output_dtype == jnp.bfloat16


@each_dtype
def test_with_output_dtype_changes_the_output_alone(dtype):
    policy = jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)
    assert policy.with_output_dtype(dtype) == jmp.Policy(
        jnp.float32, jnp.bfloat16, dtype
    )


@pytest.mark.parametrize(
    ("text", "param", "compute", "output"),
    [
        ("float16", "f16", "f16", "f16"),
        ("bfloat16", "bf16", "bf16", "bf16"),
        ("full", "f32", "f32", "f32"),
        ("c=f16", "f32", "f16", "f16"),
        ("c=bfloat16,o=full", "f32", "bf16", "f32"),
        ("p=f16,c=bf16", "f16", "bf16", "bf16"),
        ("p=bf16", "bf16", "bf16", "bf16"),
        ("params=float32,compute=float16,output=float32", "f32", "f16", "f32"),
        ("half", "f16", "f16", "f16"),
        ("p=full,c=half,o=full", "f32", "f16", "f32"),
        # What jmp refuses or, in f64, reads alike.
        ("p=f32, c=f16", "f32", "f16", "f16"),
        (" P = HALF , output = Full", "f16", "f16", "f32"),
        ("c=f64", "f32", "f64", "f64"),
        ("c=f8_e4m3,o=bf16", "f32", "f8_e4m3", "bf16"),
    ],
)
def test_a_policys_text_means_what_it_means_to_jmp(text, param, compute, output):
    policy = jmp.get_policy(text)
    assert policy == jmp.Policy(param, compute, output)
    assert jmp.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("compute_float16", "Unknown dtype"),
        ("c=fp17", "Unknown dtype 'fp17'"),
        ("x=f16", "Unknown key 'x'"),
        ("c=f16,p", "'p' is not of the form key=value"),
        ("c=f16,c=f32", "sets compute_dtype a second time"),
        ("p=half,params=full", "sets param_dtype a second time"),
    ],
)
def test_a_wrong_text_is_refused_in_jmps_words(text, words):
    with pytest.raises(ValueError, match=words):
        jmp.get_policy(text)


def test_half_in_a_policy_is_a_dtype_only_where_a_dtype_stands():
    policy = jmp.get_policy("c=half,low=half+full_name,full=half_way")
    assert policy.compute_dtype == jnp.float16
    assert (policy.low, policy.full) == ({"half", "full_name"}, {"half_way"})


@each_dtype
@pytest.mark.parametrize("form", [lambda d: d, jnp.dtype], ids=["type", "dtype"])
def test_the_text_of_a_policy_names_each_dtype(form, dtype):
    name = {jnp.float16: "f16", jnp.bfloat16: "bf16", jnp.float32: "f32"}[dtype]
    policy = jmp.Policy(*[form(dtype)] * 3)
    assert str(policy) == f"p={name},c={name},o={name}"


def test_a_policy_of_jmp_is_one_for_autocast():
    half = amp.autocast(lambda x: x @ x, jmp.get_policy("half"))
    assert half(jnp.eye(3)).dtype == jnp.float16


# Casts


def test_half_is_f16_wherever_there_is_no_tpu():
    assert jmp.half_dtype() == jnp.float16
    assert jmp.half_dtype()(2**15) == 2**15


def test_casts_to_half_and_full_change_floats_alone():
    some_object = object()
    half = {"o": some_object, "x": jnp.ones(2, jnp.float16), "i": jnp.ones(2, int)}
    full = half | {"x": jnp.ones(2)}
    for cast, tree, dtype in (
        (jmp.cast_to_full, half, jnp.float32),
        (jmp.cast_to_half, full, jnp.float16),
    ):
        found = cast(tree)
        assert found["x"].dtype == dtype
        assert found["o"] is some_object and found["i"] is tree["i"]


def test_fp8_values_are_not_cast_without_their_scale():
    weights = jnp.array([448.0, 0.5], jnp.float8_e4m3fn)
    policy = jmp.get_policy("f16")
    for cast in (jmp.cast_to_half, jmp.cast_to_full, policy.cast_to_compute):
        assert cast({"w": weights})["w"] is weights


# all_finite and select_tree


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_all_finite_sees_one_bad_leaf(value):
    good, bad = jnp.ones([]), jnp.float32(value)
    assert jmp.all_finite(None) and jmp.all_finite({})
    assert jmp.all_finite({"a": good, "b": good})
    for tree in ({"a": bad}, {"a": good, "b": bad}, {"a": bad, "b": good}):
        found = jmp.all_finite(tree)
        assert not found and (found.dtype, found.shape) == (jnp.bool_, ())


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ["scale", "unscale"])
@pytest.mark.parametrize(
    "leaf",
    [
        np.int32(2**30),
        np.zeros(3, jax.dtypes.float0),
        "adam",
        len,
        np.ones(2, jnp.float8_e5m2),
    ],
    ids=["integer", "float0", "string", "function", "fp8"],
)
def test_what_is_no_gradient_passes_as_it_is(leaf, name):
    tree = {"leaf": leaf, "x": jnp.ones(2)}
    for loss_scale in (jmp.StaticLossScale(2**15), jmp.DynamicLossScale(2.0**15)):
        assert getattr(loss_scale, name)(tree)["leaf"] is leaf
    assert jmp.all_finite(tree)


@either_jit
def test_select_tree_takes_one_tree_or_the_other(jit):
    select = jax.jit(jmp.select_tree) if jit else jmp.select_tree
    a = {"a": jnp.ones([]), "b": jnp.zeros([], int), "c": None}
    b = {"a": jnp.full([], jnp.nan), "b": jnp.ones([], int), "c": None}
    assert equal(select(jnp.bool_(True), a, b), a)
    assert np.isnan(select(jnp.bool_(False), a, b)["a"])
    assert select(jnp.bool_(True), None, None) is None


@pytest.mark.parametrize(
    "pred", [jnp.ones([1]), jnp.ones([1], bool), jnp.float32(1), 1, np.array([True])]
)
def test_what_is_not_one_boolean_decides_nothing(pred):
    with pytest.raises(AssertionError, match="expected boolean scalar, got"):
        jmp.select_tree(pred, None, None)
    with pytest.raises(AssertionError, match="expected boolean scalar, got"):
        jmp.DynamicLossScale(2.0).adjust(pred)


@pytest.mark.parametrize("flag", [True, np.bool_(True), jnp.bool_(True)])
def test_any_one_boolean_decides(flag):
    assert jmp.select_tree(flag, jnp.ones(()), jnp.zeros(())) == 1.0
    assert jmp.DynamicLossScale(2.0).adjust(flag).counter == 1


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
def test_an_updated_half_leaf_is_rounded_back_to_half(half):
    old, new = jnp.ones(2, half), jnp.full(2, 1 / 3)
    for found in (jmp.select_tree(True, new, old), jmp.select_tree(False, old, new)):
        assert equal(found, new.astype(half))


def test_trees_that_differ_otherwise_are_refused():
    x = jnp.ones(2)
    with pytest.raises(TypeError, match=r"\['w'\].*float16.*bfloat16"):
        jmp.select_tree(True, {"w": x.astype("f2")}, {"w": x.astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match=r"int32.*float16"):
        jmp.select_tree(True, x.astype(jnp.int32), x.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"first difference at \['b'\]"):
        jmp.select_tree(True, {"w": x, "b": x}, {"w": x})
    with pytest.raises(ValueError, match="shape"):
        jmp.select_tree(True, x, jnp.ones(3))


# Loss scales that do not move


def test_the_no_op_scale_does_nothing():
    loss_scale, tree = jmp.NoOpLossScale(), {"a": jnp.ones([], jnp.float16)}
    assert loss_scale.scale(tree) is tree
    assert loss_scale.unscale(tree) is tree
    assert loss_scale.adjust(jnp.bool_(False)) is loss_scale
    assert loss_scale.loss_scale == 1


@pytest.mark.parametrize("scale", [2, 3.0, 4, 2**15, 2.0**-3])
@pytest.mark.parametrize("kind", [jmp.StaticLossScale, jmp.DynamicLossScale])
def test_scaling_multiplies_and_unscaling_divides(kind, scale):
    loss_scale = kind(scale)
    assert loss_scale.loss_scale == scale
    scaled = loss_scale.scale({"a": jnp.float32(1.0)})
    assert equal(scaled, {"a": jnp.float32(scale)})
    assert equal(loss_scale.unscale(scaled), {"a": jnp.float32(1.0)})


@pytest.mark.parametrize(
    "loss_scale",
    [
        jmp.NoOpLossScale(),
        jmp.StaticLossScale(0),
        # jmp's cannot be passed to jit: arrays have no hash.
        jmp.StaticLossScale(jnp.float16(2**15)),
        jmp.StaticLossScale(np.float32(2**15)),
    ],
)
def test_a_scale_that_does_not_move_is_a_tree_without_leaves(loss_scale):
    assert jax.tree.leaves(loss_scale) == []
    assert jax.jit(lambda s: s.adjust(jnp.bool_(False)))(loss_scale) == loss_scale
    assert isinstance(loss_scale, jmp.LossScale)
    target = type(loss_scale)(*dataclasses.astuple(loss_scale))
    saved = serialization.to_bytes(loss_scale)
    assert serialization.from_bytes(target, saved) == loss_scale


@pytest.mark.parametrize("kind", [jmp.StaticLossScale, jmp.DynamicLossScale])
@pytest.mark.parametrize("scale", [0.0, -2.0, np.inf, np.nan, jnp.float16(np.inf)])
def test_a_scale_that_could_write_nan_is_refused(kind, scale):
    with pytest.raises(ValueError, match=f"{kind.__name__}.*positive and finite"):
        kind(scale).scale(jnp.ones(2))


# The dynamic loss scale


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "scenario", TRACES, ids=lambda s: f"{s['config']['scale_value']}-{s['sequence']}"
)
def test_the_scale_moves_as_in_the_recorded_traces(scenario):
    config = scenario["config"]
    start = jmp.DynamicLossScale(
        jnp.float32(config["scale_value"]),
        jnp.int32(0),
        config["scale_window"],
        config["scale_factor"],
    )

    steps = ["fo"[overflow] for overflow in scenario["overflow"]]
    found, counters = np.array(scales(start, steps)).T
    trace = np.array(scenario["trace"], np.float32)
    np.testing.assert_array_equal(counters, trace[:, 1])
    assert (found <= LARGEST).all()
    # From 2**127 on the trace goes where this scale does not follow.
    same = len(list(itertools.takewhile(lambda s: s <= LARGEST, trace[:, 0])))
    np.testing.assert_array_equal(found[:same], trace[:same, 0])


def test_the_traces_tell_something():
    assert len(TRACES) > 10
    assert sum(np.max([row[0] for row in s["trace"]]) <= LARGEST for s in TRACES) > 10


@pytest.mark.parametrize(("period", "factor"), [(20, 2), (30, 3)])
def test_the_scale_grows_after_exactly_period_finite_steps(period, factor):
    rows = scales(jmp.DynamicLossScale(10.0, 0, period, factor), "f" * (period + 1))
    assert rows[:-2] == [(10.0, i) for i in range(1, period)]
    assert rows[-2:] == [(10.0 * factor, 0), (10.0 * factor, 1)]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("period", "factor", "floor"),
    [(20, 2, 1.0), (30, 3, 1.0), (20, 2, 0.3125), (30, 3, 0.37), (5.0, 2.0, 0.0)],
)
def test_the_scale_shrinks_down_to_its_floor(period, factor, floor):
    loss_scale = jmp.DynamicLossScale(
        jnp.float32(10), jnp.int32(0), period, factor, jnp.asarray(floor)
    )
    rows = scales(loss_scale, "o" * 100)
    expected = [max(floor, 10 / factor**i) for i in range(1, 101)]
    np.testing.assert_allclose([s for s, _ in rows], expected, rtol=100 * F32_EPS)
    assert {counter for _, counter in rows} == {0}


def test_fields_keep_their_names_and_the_leaves_are_two():
    scale, counter = jnp.ones([]), jnp.zeros([], jnp.int32)
    loss_scale = jmp.DynamicLossScale(scale, counter, 2000, 2)
    assert jax.tree.leaves(loss_scale) == [scale, counter]
    assert jax.tree.map(lambda x: x, loss_scale) == loss_scale
    assert (loss_scale.period, loss_scale.factor) == (2000, 2)
    assert loss_scale.min_loss_scale == 1
    keys, _ = jax.tree_util.tree_flatten_with_path(loss_scale)
    assert [jax.tree_util.keystr(key) for key, _ in keys] == [".loss_scale", ".counter"]


SETTINGS = {"period": 7, "factor": 4, "min_loss_scale": 8.0}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "pass_through",
    [
        jax.jit(lambda s: s),
        jax.jit(lambda s: s.adjust(jnp.bool_(True))),
        lambda s: s.adjust(True),
        lambda s: jax.tree.map(lambda leaf: leaf, s),
        lambda s: jax.tree.unflatten(*jax.tree.flatten(s)[::-1]),
        lambda s: jax.lax.scan(lambda s, _: (s.adjust(False), 0), s, None, 5)[0],
        lambda s: jax.vmap(lambda s: s.adjust(True))(
            jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), s)
        ),
        lambda s: dataclasses.replace(s, counter=3),
        lambda s: jmp.select_tree(False, s, s.adjust(False)),
        copy.deepcopy,
        lambda s: pickle.loads(pickle.dumps(s)),
        lambda s: serialization.from_bytes(
            jmp.DynamicLossScale(2.0), serialization.to_bytes(s)
        ),
    ],
)
def test_every_setting_survives(pass_through):
    found = pass_through(jmp.DynamicLossScale(2.0**15, **SETTINGS))
    assert {name: getattr(found, name) for name in SETTINGS} == SETTINGS
    assert (found.loss_scale.dtype, found.counter.dtype) == (jnp.float32, jnp.int32)


def test_the_floor_holds_under_jit():
    loss_scale = jmp.DynamicLossScale(16.0, min_loss_scale=jnp.float32(8))
    assert scales(loss_scale, "ooo") == [(8.0, 0)] * 3


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "init",
    [
        2.0**15,
        2**15,
        np.float64(2**15),
        np.full((), 2**15, np.float32),
        jnp.asarray(2.0**15),
        jnp.float16(2**15),
        jnp.bfloat16(2**15),
        jnp.float32(2**15),
    ],
    ids=lambda init: f"{type(init).__name__}-{getattr(init, 'dtype', '')}",
)
def test_a_step_compiles_once_whatever_the_scale_began_as(init):
    traces = []
    counter = jnp.asarray(0)  # of a weak type, as 0 is

    @jax.jit
    def step(loss_scale, finite):
        traces.append(1)
        return loss_scale.adjust(finite)

    loss_scale = jmp.DynamicLossScale(init, counter, period=2)
    strong = [((), jnp.float32, False), ((), jnp.int32, False)]
    for finite in (True, False, True, True):
        assert kinds(loss_scale)[1] == strong
        loss_scale = step(loss_scale, jnp.bool_(finite))
    assert kinds(loss_scale) == kinds(jmp.DynamicLossScale(init, counter, period=2))
    assert loss_scale.loss_scale == 2.0**15
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
def test_an_integer_array_for_a_scale_is_warned_about(name):
    given = {"loss_scale": 4.0} | {name: jnp.asarray(2, jnp.int32)}
    with pytest.warns(UserWarning, match=f"Expected floating type for {name}, got int"):
        loss_scale = jmp.DynamicLossScale(**given)
    assert getattr(loss_scale, name) == 2
    assert getattr(loss_scale, name).dtype == jnp.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.DynamicLossScale(2**15, min_loss_scale=1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("period", 0),
        ("period", 2.5),
        ("period", 2**31),
        ("factor", 0.5),
        ("factor", np.nan),
        ("min_loss_scale", -1.0),
        ("min_loss_scale", np.inf),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting, value):
    with pytest.raises(
        ValueError, match=rf"DynamicLossScale\({setting}=.*out of range"
    ):
        jmp.DynamicLossScale(2.0, **{setting: value})


def test_a_traced_setting_is_refused():
    with pytest.raises(TypeError, match=r"min_loss_scale=.*known before"):
        jax.jit(lambda m: jmp.DynamicLossScale(2.0, min_loss_scale=m))(1.0)


def test_a_scale_can_be_made_inside_a_program():
    make = jax.jit(lambda s: jmp.DynamicLossScale(s, jnp.int32(3), 5))
    made = make(jnp.float16(8.0))
    assert kinds(made) == kinds(jmp.DynamicLossScale(8.0, 3, 5))
    assert (made.loss_scale, made.counter) == (8.0, 3)
    scaled = jax.jit(lambda s, x: jmp.StaticLossScale(s).scale(x))(4.0, 2.0)
    assert scaled == 8.0


def test_a_factor_of_one_only_counts():
    rows = scales(jmp.DynamicLossScale(64.0, period=2, factor=1), "fofff")
    assert rows == [(64.0, 1), (64.0, 0), (64.0, 1), (64.0, 0), (64.0, 1)]


def test_a_counter_past_its_period_starts_over():
    # `DynamicLossScale(scale, counter=step)` resumes a run; jmp counts modulo period.
    assert scales(jmp.DynamicLossScale(4.0, 103, 5), "fff") == [(4, 4), (8, 0), (8, 1)]


def test_the_tree_may_hold_anything():
    loss_scale = jmp.DynamicLossScale(4.0)
    axes = jax.tree.map(lambda _: 0, loss_scale)
    assert jax.tree.leaves(axes) == [0, 0] and type(axes.loss_scale) is int
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), loss_scale)
    adjust = jax.vmap(lambda s, f: s.adjust(f), in_axes=(axes, 0))
    found = adjust(both, jnp.array([True, False]))
    assert found.loss_scale.tolist() == [4.0, 2.0]
    assert found.counter.tolist() == [1, 0]
    shapes = jax.eval_shape(lambda s: s, loss_scale)
    assert shapes.loss_scale.dtype == jnp.float32


@either_jit
@pytest.mark.parametrize("start", [2.0**124, 3.0e38])
def test_the_scale_stops_where_its_reciprocal_still_is_a_number(start, jit):
    loss_scale = jmp.DynamicLossScale(start, period=1)
    for _ in range(8):
        loss_scale = adjusted(loss_scale, True)
    assert loss_scale.loss_scale == LARGEST
    unscale = jax.jit(lambda s, x: s.unscale(x)) if jit else lambda s, x: s.unscale(x)
    assert unscale(loss_scale, jnp.float32(LARGEST)) == 1.0


# Gradients


@pytest.mark.breadth(2)
@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("kind", [jmp.StaticLossScale, jmp.DynamicLossScale])
@either_jit
def test_a_small_half_gradient_survives_unscaling(jit, kind, half):
    unscale = kind(2.0**15).unscale
    gradient = jnp.array([5e-4, -1.0], half)
    found = (jax.jit(unscale) if jit else unscale)({"w": gradient})["w"]
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.asarray(gradient, np.float64) / 2**15)


def test_a_half_loss_is_scaled_in_f32():
    for kind in (jmp.StaticLossScale, jmp.DynamicLossScale):
        scaled = kind(2.0**15).scale(jnp.float16(100.0))
        assert (scaled.dtype, float(scaled)) == (jnp.float32, 100 * 2.0**15)


def test_shards_agree_on_the_scale_when_told_the_axis():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    def step(loss_scale, grads):
        return loss_scale.adjust(jmp.all_finite(grads, axis_name="data"))

    grads = jnp.ones(8)
    start = jmp.DynamicLossScale(8.0)
    assert jax.jit(step)(start, grads).loss_scale == 8.0
    assert jax.jit(step)(start, grads.at[5].set(jnp.nan)).loss_scale == 4.0


# jmp's README, with the import changed

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = np.tanh(X @ np.array([[1.0], [-2.0], [0.5], [1.5]], np.float32))
OPTIMIZERS = {"sgd": optax.sgd(0.2), "adam": optax.adam(0.02)}


def initial_params():
    numbers = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    return {"first": jnp.array(numbers[:4] / 2), "second": jnp.array(numbers[4:].T / 3)}


def my_loss_fn(params, loss_scale: jmp.LossScale, policy, x, y):
    params, x = policy.cast_to_compute((params, x))
    prediction = jnp.tanh(x @ params["first"]) @ params["second"]
    loss = jnp.mean((policy.cast_to_output(prediction) - y) ** 2)
    return loss_scale.scale(loss)


@functools.partial(jax.jit, static_argnums=(3, 4))
def train_step(params, opt_state, loss_scale: jmp.LossScale, policy, optimizer):
    grads = jax.grad(my_loss_fn)(params, loss_scale, policy, X, Y)
    grads = loss_scale.unscale(grads)
    with jax.numpy_dtype_promotion("standard"):
        updates, new_state = OPTIMIZERS[optimizer].update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
    finite = jnp.bool_(True)
    if isinstance(loss_scale, jmp.DynamicLossScale):
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        new_params = jmp.select_tree(finite, new_params, params)
        new_state = jmp.select_tree(finite, new_state, opt_state)
    return new_params, new_state, loss_scale, finite


@functools.cache
def train_in_f32(optimizer, applied):
    return train(jmp.NoOpLossScale(), "float32", optimizer, applied)[:2]


def train(loss_scale, policy, optimizer, applied):
    """Trains for so many applied steps; also returns how many were skipped."""
    policy = jmp.get_policy(policy)
    params = policy.cast_to_param(initial_params())
    opt_state = OPTIMIZERS[optimizer].init(params)
    kind, skipped = kinds((params, opt_state, loss_scale)), 0
    while applied:
        params, opt_state, loss_scale, finite = train_step(
            params, opt_state, loss_scale, policy, optimizer
        )
        assert kinds((params, opt_state, loss_scale)) == kind
        leaves = jax.tree.leaves((params, opt_state))
        assert all(np.isfinite(leaf).all() for leaf in leaves)
        applied, skipped = applied - bool(finite), skipped + (not finite)
        assert skipped < 40
    loss = my_loss_fn(params, jmp.NoOpLossScale(), jmp.get_policy("f32"), X, Y)
    return params, float(loss), skipped


def distance(a, b):
    a, b = (np.concatenate([np.ravel(x) for x in t.values()], None) for t in (a, b))
    return np.linalg.norm(a - b.astype(float)) / np.linalg.norm(b)


SCALES = {
    "dynamic": lambda: jmp.DynamicLossScale(jmp.half_dtype()(2**15), period=5),
    "too large": lambda: jmp.DynamicLossScale(jnp.float32(2.0**30), period=5),
    "static": lambda: jmp.StaticLossScale(2**10),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", SCALES)
def test_jmps_loop_in_f16_ends_where_f32_ends(scale, optimizer):
    mixed = "params=float32,compute=float16,output=float32"
    expected, end = train_in_f32(optimizer, 60)
    found, loss, skipped = train(SCALES[scale](), mixed, optimizer, 60)
    # A gradient is off by a few roundings to f16, which do not all add up.
    assert distance(found, expected) < 2 * F16_EPS
    start = my_loss_fn(
        initial_params(), jmp.NoOpLossScale(), jmp.get_policy("f32"), X, Y
    )
    assert loss < start / 3 and abs(loss - end) < 8 * F16_EPS * start
    assert (skipped > 0) == (scale != "static")


def test_jmps_loop_runs_on_f16_parameters():
    expected, _ = train_in_f32("sgd", 20)
    loss_scale = jmp.DynamicLossScale(jmp.half_dtype()(2**15), period=2)
    found, _, skipped = train(loss_scale, "p=f16,c=f16,o=f32", "sgd", 20)
    assert jax.tree.leaves(found)[0].dtype == jnp.float16 and skipped > 0
    # Here 20 roundings of the parameters besides, by half an eps at most each.
    assert distance(found, expected) < 10 * F16_EPS
