import copy
import dataclasses
import fractions
import math
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_amp as amp
from tests.training.wrappers import HALF, kinds

MODES = ("until_growth", "consecutive", "rearming")
SETTINGS = {
    "init_scale": 64.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
    "min_scale": 8.0,
    "max_scale": 4096.0,
    "hysteresis": 2,
    "hysteresis_mode": "rearming",
}


def scales(loss_scale, steps):
    """The scale after each step; "f" is a finite one."""
    values = []
    for step in steps:
        loss_scale = loss_scale.adjust(step == "f")
        values.append(float(loss_scale.value))
    return values


# The state machine


STORIES = {
    "grows after exactly growth_interval finite steps": (
        *({"init_scale": 2.0, "growth_interval": 3}, "fffffff"),
        [2.0, 2.0, 4.0, 4.0, 4.0, 8.0, 8.0],
    ),
    "an overflow starts the growth count anew": (
        *({"init_scale": 8.0, "growth_interval": 3}, "ffoffof"),
        [8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0],
    ),
    "growth that would pass the cap is refused, not clamped": (
        dict(init_scale=1e3, growth_factor=3.0, growth_interval=1, max_scale=1e4),
        *("ffff", [3000.0, 9000.0, 9000.0, 9000.0]),
    ),
    "a cap of infinity is the largest float32": (
        {"init_scale": 2.0**126, "growth_interval": 1, "max_scale": math.inf},
        *("fff", [2.0**127] * 3),
    ),
    "hysteresis until growth is used up once": (
        *({"init_scale": 1024.0, "growth_interval": 4, "hysteresis": 3},),
        *("oofooffffooo", [1024.0] * 3 + [512.0] + [256.0] * 4 + [512.0] * 3 + [256.0]),
    ),
    "consecutive hysteresis refills on every finite step": (
        {"init_scale": 1024.0, "hysteresis": 2, "hysteresis_mode": "consecutive"},
        *("ofofooofo", [1024.0] * 5 + [512.0, 256.0, 256.0, 256.0]),
    ),
    "rearming hysteresis counts anew after every backoff": (
        {"init_scale": 1024.0, "hysteresis": 2, "hysteresis_mode": "rearming"},
        *("ofooooofo", [1024.0] * 3 + [512.0] * 2 + [256.0] * 4),
    ),
    "hysteresis of zero behaves as one": (
        *({"init_scale": 4.0, "hysteresis": 0}, "o", [2.0]),
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_the_scale_after_each_step_is_that_of_the_story(story):
    settings, steps, expected = STORIES[story]
    assert scales(amp.dynamic_loss_scale(**settings), steps) == expected


def test_the_floor_holds():
    for adjust in (amp.LossScale.adjust, jax.jit(amp.LossScale.adjust)):
        loss_scale = amp.dynamic_loss_scale(32.0, min_scale=8.0)
        for expected in (16.0, 8.0, 8.0, 8.0):
            loss_scale = adjust(loss_scale, False)
            assert loss_scale.value == expected


@pytest.mark.parametrize(("finite", "end"), [(False, 2.0**-14), (True, 2.0**24)])
def test_the_default_scale_stops_where_its_reciprocal_is_exact(finite, end):
    loss_scale = amp.dynamic_loss_scale(growth_interval=1)
    loss_scale = jax.lax.fori_loop(0, 1000, lambda _, s: s.adjust(finite), loss_scale)
    assert loss_scale.value == end
    assert loss_scale.unscale(jnp.float32(1.0)) == 1 / end


def test_growth_that_is_refused_starts_the_count_anew():
    scale = amp.dynamic_loss_scale(9.0, growth_interval=1, max_scale=10.0)
    assert scale.adjust(True).growth_tracker == 0


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("cap", [2.0**24, np.inf])
def test_a_scale_that_somebody_spoiled_goes_on_from_the_cap(value, cap):
    good = amp.dynamic_loss_scale(max_scale=cap)
    bad = dataclasses.replace(good, value=jnp.float32(value))
    assert bad.adjust(False).value == min(cap, np.finfo(np.float32).max)


def test_an_initial_scale_outside_the_range_is_clipped_into_it():
    assert amp.dynamic_loss_scale(2.0**32).value == 2.0**24
    assert amp.dynamic_loss_scale(2.0**-30).value == 2.0**-14


def test_the_growth_count_stops_at_the_largest_integer():
    # As after a checkpoint whose interval was lowered: growth is due after an overflow.
    largest = jnp.asarray(np.iinfo(np.int32).max)
    scale = dataclasses.replace(amp.dynamic_loss_scale(4.0), growth_tracker=largest)
    assert scale.adjust(True).growth_tracker == largest
    assert scale.adjust(True).adjust(False).growth_tracker == 0


def reference(config, overflow):
    """The tables of the reference systems, in Python's float64."""
    scale, growth, left = config["init_scale"], 0, config["hysteresis"]
    mode = config["hysteresis_mode"]
    for bad in overflow:
        if bad:
            growth, left = 0, left - 1
            if left <= 0:
                scale = max(scale * config["backoff_factor"], config["min_scale"])
                left = config["hysteresis"] if mode == "rearming" else 0
        else:
            growth += 1
            left = left if mode == "until_growth" else config["hysteresis"]
            if growth == config["growth_interval"]:
                growth = 0
                left = config["hysteresis"]
                grown = scale * config["growth_factor"]
                scale = grown if grown <= config["max_scale"] else scale
        yield scale, growth


@settings(max_examples=60, deadline=None)
@given(
    overflow=st.lists(st.booleans(), min_size=1, max_size=60),
    mode=st.sampled_from(MODES),
    hysteresis=st.integers(1, 4),
    interval=st.integers(1, 4),
)
def test_any_run_follows_the_reference_state_machine(
    overflow, mode, hysteresis, interval
):
    config = SETTINGS | {
        "hysteresis_mode": mode,
        "hysteresis": hysteresis,
        "growth_interval": interval,
    }
    loss_scale = amp.dynamic_loss_scale(**config)
    for bad, (scale, growth) in zip(overflow, reference(config, overflow), strict=True):
        loss_scale = loss_scale.adjust(not bad)
        assert loss_scale.value == scale
        assert loss_scale.growth_tracker == growth


@pytest.mark.parametrize(
    "loss_scale", [amp.static_loss_scale(128), amp.no_loss_scale()]
)
@pytest.mark.parametrize("finite", [False, True])
def test_a_static_scale_does_not_move(loss_scale, finite):
    assert loss_scale.adjust(finite) is loss_scale


def test_no_loss_scale_is_one():
    assert amp.no_loss_scale().value == 1.0


# What survives


def scanned(loss_scale):
    return jax.lax.scan(lambda s, _: (s, None), loss_scale, None, length=2)[0]


def mapped(loss_scale):
    batched = jax.tree.map(lambda leaf: leaf[None], loss_scale)
    adjusted = jax.vmap(lambda s: s.adjust(True))(batched)
    return jax.tree.map(lambda leaf: leaf[0], adjusted)


def from_state_dict(loss_scale):
    saved = serialization.to_state_dict(loss_scale)
    return serialization.from_state_dict(amp.dynamic_loss_scale(2.0), saved)


def from_bytes(loss_scale):
    saved = serialization.to_bytes(loss_scale)
    return serialization.from_bytes(amp.dynamic_loss_scale(2.0), saved)


COPIES = {
    "jit": lambda loss_scale: jax.jit(lambda s: s)(loss_scale),
    "scan": scanned,
    "tree_map": lambda loss_scale: jax.tree.map(lambda leaf: leaf, loss_scale),
    "vmap": mapped,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loss_scale: pickle.loads(pickle.dumps(loss_scale)),
    "state_dict": from_state_dict,
    "msgpack": from_bytes,
    "replace": dataclasses.replace,
    "device_get": jax.device_get,
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("way", COPIES)
def test_every_setting_survives(way):
    found = COPIES[way](amp.dynamic_loss_scale(**SETTINGS))
    for name, value in SETTINGS.items():
        if name != "init_scale":
            assert getattr(found, name) == value, name
    assert found.dynamic
    assert found.value == 64.0


def test_a_checkpoint_keeps_the_counters():
    loss_scale = amp.dynamic_loss_scale(**SETTINGS).adjust(False).adjust(True)
    found = from_bytes(loss_scale)
    chex.assert_trees_all_equal(found, loss_scale)
    assert kinds(found) == kinds(loss_scale)


def test_a_checkpoint_of_unknown_fields_is_refused():
    with pytest.raises(ValueError, match=r"unknown fields.*'patience'"):
        serialization.from_state_dict(amp.dynamic_loss_scale(), {"patience": 3})


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "init_scale",
    [
        64.0,
        64,
        np.float64(64.0),
        np.float16(64.0),
        jnp.float16(64.0),
        jnp.bfloat16(64.0),
        jnp.asarray(64.0),
        jnp.asarray(64),
    ],
    ids=lambda value: f"{type(value).__name__}-{jnp.result_type(value)}",
)
def test_one_compilation_whatever_the_initial_scale_was(init_scale):
    traces = []

    @jax.jit
    def adjust(loss_scale, finite):
        traces.append(None)
        return loss_scale.adjust(finite)

    loss_scale = amp.dynamic_loss_scale(init_scale, growth_interval=2)
    assert kinds(loss_scale)[1] == [
        ((), jnp.float32, False),
        ((), jnp.int32, False),
        ((), jnp.int32, False),
    ]
    for finite in (True, True, False, True):
        loss_scale = adjust(loss_scale, jnp.asarray(finite))
    assert loss_scale.value == 64.0
    assert len(traces) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("finite", [False, True, np.True_])
def test_adjust_returns_the_type_it_was_given(mode, finite):
    loss_scale = amp.dynamic_loss_scale(**SETTINGS | {"hysteresis_mode": mode})
    assert kinds(loss_scale.adjust(finite)) == kinds(loss_scale)


def test_adjust_works_in_scan_and_under_vmap():
    overflow = jnp.array([[0, 0, 1, 0], [1, 1, 0, 0]], bool)
    loss_scale = amp.dynamic_loss_scale(16.0, growth_interval=2)

    def run(overflow):
        def step(s, bad):
            s = s.adjust(~bad)
            return s, s.value

        return jax.lax.scan(step, loss_scale, overflow)[1]

    found = jax.vmap(run)(overflow)
    np.testing.assert_array_equal(found, [[16, 32, 16, 16], [8, 4, 4, 8]])


def test_a_scale_can_be_made_from_a_traced_number():
    make = jax.jit(lambda x: amp.dynamic_loss_scale(x, max_scale=1024.0))
    assert make(jnp.float16(2.0**12)).value == 1024.0
    assert jax.jit(amp.static_loss_scale)(jnp.float32(3.0)).value == 3.0


# Scaling and unscaling


@pytest.mark.parametrize("dtype", HALF)
def test_half_numbers_are_scaled_and_unscaled_in_float32(dtype):
    loss, gradient = jnp.asarray(4.0, dtype), jnp.asarray(5e-4, dtype)
    scaled = amp.dynamic_loss_scale().scale(loss)
    found = amp.static_loss_scale(2.0**24).unscale(gradient)
    assert scaled.dtype == found.dtype == jnp.float32
    assert scaled == 4.0 * 2.0**16
    assert float(found) == float(gradient) * 2.0**-24


def test_unscaling_undoes_scaling_exactly():
    tree = {"w": jnp.linspace(-3.0, 3.0, 7), "loss": jnp.float32(1e-7)}
    loss_scale = amp.static_loss_scale(2.0**20)
    chex.assert_trees_all_equal(loss_scale.unscale(loss_scale.scale(tree)), tree)


@pytest.mark.parametrize("jit", [False, True])
def test_float64_leaves_are_unscaled_with_all_their_digits(jit):
    with jax.enable_x64(True):
        unscale = jax.jit(amp.LossScale.unscale) if jit else amp.LossScale.unscale
        gradient = np.arange(1.0, 100.0)
        tree = {"f64": jnp.asarray(gradient), "c128": jnp.asarray(gradient * (1 - 3j))}
        found = unscale(amp.static_loss_scale(1000.0), tree)
        for name, leaf in tree.items():
            assert found[name].dtype == leaf.dtype
            eps = float(jnp.finfo(leaf.dtype).eps)
            np.testing.assert_allclose(found[name], np.asarray(leaf) / 1e3, rtol=eps)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [jnp.float32, *HALF])
@pytest.mark.parametrize("jit", [False, True])
def test_other_leaves_are_multiplied_by_the_reciprocal_in_float32(dtype, jit):
    # As torch's GradScaler.unscale_: scale.double().reciprocal().float().
    unscale = jax.jit(amp.LossScale.unscale) if jit else amp.LossScale.unscale
    gradient = np.arange(1.0, 100.0, dtype=np.float32)
    expected = gradient * np.float32(1 / 1000.0)
    assert np.any(expected != gradient / np.float32(1000.0))
    tree = [jnp.asarray(gradient, dtype), jnp.asarray(gradient * (1 - 1j), "complex64")]
    real, pair = unscale(amp.static_loss_scale(1000.0), tree)
    for found, sign in ((real, 1), (pair.real, 1), (pair.imag, -1)):
        np.testing.assert_array_equal(found, sign * expected, strict=True)


@pytest.mark.parametrize("power", [127, -126])
def test_a_scale_at_the_edge_of_float32_unscales_right(power):
    loss_scale = jax.jit(lambda s: s)(amp.static_loss_scale(2.0**power))
    gradient = jnp.float32(2.0 ** (power - 27 if power > 0 else power + 27))
    assert jax.jit(lambda s, g: s.unscale(g))(loss_scale, gradient) == (
        2.0**-27 if power > 0 else 2.0**27
    )


def test_float64_and_complex_leaves_keep_their_type():
    with jax.enable_x64(True):
        loss_scale = amp.static_loss_scale(2.0**10)
        tree = {
            "f64": jnp.float64(1.0 + 2.0**-40),
            "c64": jnp.complex64(1.0 + 2.0j),
            "c128": jnp.complex128(3.0 - 2.0**-40 * 1j),
        }
        for method, factor in (("scale", 2.0**10), ("unscale", 2.0**-10)):
            found = getattr(loss_scale, method)(tree)
            for name, leaf in tree.items():
                assert found[name].dtype == leaf.dtype
                assert complex(found[name]) == complex(leaf) * factor


def test_an_infinite_part_of_a_complex_leaf_leaves_the_other_alone():
    found = amp.static_loss_scale(2.0).scale(jax.lax.complex(jnp.inf, 3.0))
    assert (found.real, found.imag) == (jnp.inf, 6.0)


@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_leaves_that_are_no_floats_come_back_as_the_same_objects(method):
    untouched = {
        "int": jnp.int8(100),
        "bool": jnp.asarray(True),
        "python": 100,
        "float0": np.zeros(3, jax.dtypes.float0),
        "key": jax.random.key(0),
        "fp8": jnp.ones(3, jnp.float8_e4m3fn),
        "function": math.sin,
        "text": "relu",
    }
    found = getattr(amp.dynamic_loss_scale(), method)(untouched)
    for name, leaf in untouched.items():
        assert found[name] is leaf, name


def test_none_stays_none_and_a_python_float_is_scaled():
    assert amp.dynamic_loss_scale().unscale({"frozen": None}) == {"frozen": None}
    assert amp.static_loss_scale(128.0).scale(0.5) == 64.0


def test_scaling_works_under_vmap():
    batch = jax.vmap(lambda x: amp.dynamic_loss_scale(x))(jnp.array([2.0, 8.0]))
    found = jax.vmap(lambda s, x: s.scale(x))(batch, jnp.array([1.0, 3.0]))
    np.testing.assert_array_equal(found, [2.0, 24.0])


# Bad input, and what is shown


# Values of a setting, and what is said of them besides the setting and the value.
WRONG_VALUES = {
    "init_scale": {0: "positive and finite", -2.0: "positive", math.inf: "finite"},
    "growth_factor": {1.0: "above 1", 0.5: "", math.inf: ""},
    "backoff_factor": {0.0: "between 0 and 1", 1.0: "", -0.5: ""},
    "growth_interval": {0: "at least 1", -3: "", 2.5: "Use an int", math.inf: ""},
    "min_scale": {0.0: "floor"},
    "hysteresis": {-1: ""},
}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        *(
            ({name: value}, ValueError, re.escape(f"{name}={value}") + f".*{told}")
            for name, values in WRONG_VALUES.items()
            for value, told in values.items()
        ),
        *(
            ({name: math.nan}, ValueError, f"{name}=nan")
            for name in ("init_scale", "growth_factor", "max_scale")
        ),
        ({"init_scale": jnp.float16(jnp.inf)}, ValueError, "positive and finite"),
        ({"init_scale": "dynamic"}, TypeError, "'dynamic'.*not a real number"),
        *(
            ({"init_scale": value}, TypeError, "not a real number")
            for value in (None, True, jnp.ones(1))
        ),
        ({"growth_factor": "2"}, TypeError, "growth_factor='2'"),
        ({"growth_interval": None}, TypeError, "growth_interval=None"),
        ({"min_scale": 1e-44}, ValueError, "normal float32"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "below the floor"),
        ({"hysteresis_mode": "always"}, ValueError, "'until_growth', 'consecutive'"),
    ],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name(settings, error, message):
    with pytest.raises(error, match=r"^dynamic_loss_scale\(.*" + message):
        amp.dynamic_loss_scale(**settings)


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, 1e39, 1e-44])
def test_a_bad_static_scale_is_refused(scale):
    with pytest.raises(ValueError, match=r"^static_loss_scale\(scale=.*power of two"):
        amp.static_loss_scale(scale)


def test_a_setting_that_is_traced_is_refused():
    with pytest.raises(TypeError, match="known before the program runs"):
        jax.jit(lambda x: amp.dynamic_loss_scale(growth_factor=x))(2.0)


def test_repr_shows_values_and_says_when_there_are_none():
    loss_scale = amp.dynamic_loss_scale(64.0, growth_interval=3)
    assert repr(loss_scale).startswith("LossScale(value=64.0, growth_tracker=0, ")
    assert "growth_interval=3" in repr(loss_scale)
    seen = []
    jax.jit(lambda s: seen.append(repr(s)))(loss_scale)
    assert seen[0].startswith("LossScale(value=<traced float32[]>, ")
    loss_scale.value.delete()
    assert repr(loss_scale).startswith("LossScale(value=<deleted>, ")
    assert repr(amp.static_loss_scale(8)) == "LossScale(value=8.0, dynamic=False)"
    shapes = jax.eval_shape(lambda: amp.static_loss_scale(8))
    assert "ShapeDtypeStruct" in repr(shapes)


@pytest.mark.parametrize(
    "make",
    [amp.dynamic_loss_scale, amp.static_loss_scale, lambda _: amp.no_loss_scale()],
)
def test_a_scale_that_is_made_while_jax_traces_is_no_tracer(make):
    made = []
    jax.jit(lambda: made.append(make(8.0)))()
    assert made[0].value in (1.0, 8.0)


def test_fractions_are_numbers():
    third = fractions.Fraction(1, 3)
    scale = amp.dynamic_loss_scale(8.0, backoff_factor=third)
    assert scale.backoff_factor == 1 / 3
