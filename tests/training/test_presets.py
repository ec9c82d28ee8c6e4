"""Presets by the names of other systems; `oracle/test_gradscaler` has their traces."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp

NAMES = (
    "torch apex paddle mindspore megatron deepspeed colossalai keras flax jmp".split()
)
TORCH = json.loads(
    (Path(__file__).parents[1] / "oracle" / "gradscaler_torch.json").read_text()
)["scenarios"]
LARGEST = float(jnp.finfo(jnp.float32).max)
SMALLEST = float(jnp.finfo(jnp.float32).tiny)


# From SCALERS of the systems: scale, interval, overflows, floor, cap.
@pytest.mark.parametrize(
    ("name", "scale", "interval", "overflows", "floor", "cap"),
    [
        ("torch", 2.0**16, 2000, 1, SMALLEST, LARGEST),
        ("apex", 2.0**16, 2000, 1, SMALLEST, 2.0**24),
        ("paddle", 2.0**16, 2000, 1, SMALLEST, LARGEST),
        ("mindspore", 2.0**24, 2000, 1, 1.0, LARGEST),
        ("megatron", 2.0**32, 1000, 2, 1.0, LARGEST),
        ("deepspeed", 2.0**16, 1000, 2, 1.0, LARGEST),
        ("colossalai", 2.0**16, 1000, 2, 1.0, 2.0**32),
        ("keras", 2.0**15, 2000, 1, SMALLEST, LARGEST),
        ("flax", 2.0**16, 2000, 1, SMALLEST, LARGEST),
        ("jmp", 2.0**15, 2000, 1, 1.0, LARGEST),
    ],
)
def test_defaults_are_those_of_the_system(name, scale, interval, overflows, floor, cap):
    preset = amp.loss_scale_preset(name)
    assert preset.value.dtype == jnp.float32
    assert float(preset.value) == scale
    assert (preset.growth_factor, preset.backoff_factor) == (2.0, 0.5)
    assert preset.growth_interval == interval
    assert preset.hysteresis == overflows
    assert (preset.min_scale, preset.max_scale) == (floor, cap)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", NAMES)
def test_no_scale_leaves_the_normal_numbers(name):
    @jax.jit
    def after(scale, finite):
        return jax.lax.fori_loop(0, 400, lambda _, s: s.adjust(finite), scale)

    scale = amp.loss_scale_preset(name, growth_interval=1)
    for finite in (True, False):
        value = float(after(scale, finite).value)
        assert SMALLEST <= value <= LARGEST
        assert math.isfinite(float(scale.unscale(jnp.float32(value))))


@pytest.mark.parametrize(
    ("name", "given", "ours"),
    [
        ("paddle", {"incr_every_n_steps": 7}, {"growth_interval": 7}),
        ("paddle", {"incr_ratio": 3.0, "decr_ratio": 0.25}, {"growth_factor": 3.0}),
        ("apex", {"scale_factor": 4.0}, {"growth_factor": 4.0, "backoff_factor": 0.25}),
        ("mindspore", {"scale_window": 9}, {"growth_interval": 9}),
        ("jmp", {"period": 5, "factor": 4}, {"growth_interval": 5}),
        ("flax", {"minimum_scale": 8.0}, {"min_scale": 8.0}),
        ("deepspeed", {"delayed_shift": 3}, {"hysteresis": 3}),
        ("torch", {"hysteresis": 2, "min_scale": 1.0}, {"hysteresis": 2}),
    ],
)
def test_parameters_go_by_the_systems_names_and_by_ours(name, given, ours):
    preset = amp.loss_scale_preset(name, **given)
    for field, value in ours.items():
        assert getattr(preset, field) == value


def test_an_unknown_system_is_refused_with_the_closest_one():
    with pytest.raises(ValueError, match=r"'Torch'.*Did you mean \"torch\"\?.*'jmp'"):
        amp.loss_scale_preset("Torch")


def test_an_unknown_or_doubled_parameter_is_refused():
    with pytest.raises(TypeError, match=r"growth=2\): unknown.*growth_factor"):
        amp.loss_scale_preset("torch", growth=2)
    with pytest.raises(TypeError, match="growth_interval is given twice"):
        amp.loss_scale_preset("paddle", incr_every_n_steps=3, growth_interval=4)
    with pytest.raises(ValueError, match="growth_factor"):
        amp.loss_scale_preset("apex", scale_factor=0)


@pytest.mark.parametrize("scenario", TORCH[:6], ids=lambda s: s["name"])
def test_a_state_of_torch_comes_and_goes(scenario):
    config = scenario["config"]
    state = {
        "scale": float(scenario["scale"][-1]),
        "growth_factor": config["growth_factor"],
        "backoff_factor": config["backoff_factor"],
        "growth_interval": config["growth_interval"],
        "_growth_tracker": int(scenario["growth_tracker"][-1]),
    }
    if not 0 < state["backoff_factor"] < 1:
        pytest.skip("torch lets the sign flip")
    scale = amp.loss_scale_from_torch(state)
    assert scale.growth_tracker.dtype == jnp.int32
    back = amp.loss_scale_to_torch(scale)
    assert back == state
    assert {type(v) for v in back.values()} <= {int, float}


def test_a_disabled_scaler_of_torch_has_an_empty_state():
    scale = amp.loss_scale_from_torch({})
    assert not scale.dynamic and float(scale.value) == 1.0


def test_a_wrong_state_of_torch_is_refused():
    state = amp.loss_scale_to_torch(amp.loss_scale_preset("torch"))
    with pytest.raises(ValueError, match="'scale' is missing"):
        amp.loss_scale_from_torch({k: v for k, v in state.items() if k != "scale"})
    with pytest.raises(ValueError, match="'another' is unknown"):
        amp.loss_scale_from_torch(state | {"another": 1})
    with pytest.raises(TypeError, match=r"5 is no dictionary. Pass what GradScaler"):
        amp.loss_scale_from_torch(5)
    with pytest.raises(TypeError, match="'scale' is 'a', which is no number"):
        amp.loss_scale_from_torch(state | {"scale": "a"})


def test_the_state_of_an_optimizer_tells_torch_its_scale():
    scale = amp.dynamic_loss_scale(2.0**9)
    state = amp.with_loss_scale(optax.sgd(0.1), scale).init(jnp.ones(2))
    assert amp.loss_scale_to_torch(state) == amp.loss_scale_to_torch(scale)
    assert amp.loss_scale_to_torch(state)["scale"] == 2.0**9


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_a_state_of_torch_may_be_of_arrays_without_dimensions(array):
    scale = amp.dynamic_loss_scale(2.0**9, max_scale=math.inf, min_scale=2.0**-126)
    state = amp.loss_scale_to_torch(scale)
    kept = {key: array(value) for key, value in state.items()}
    assert amp.loss_scale_to_torch(amp.loss_scale_from_torch(kept)) == state


def test_a_static_scale_comes_back_from_torch_as_it_went():
    for scale in (amp.static_loss_scale(8.0), amp.no_loss_scale()):
        back = amp.loss_scale_from_torch(amp.loss_scale_to_torch(scale))
        assert not back.dynamic
        assert back.value == scale.value


def test_a_static_scale_stands_still_in_torch():
    state = amp.loss_scale_to_torch(amp.static_loss_scale(128.0))
    assert (state["scale"], state["growth_factor"], state["backoff_factor"]) == (
        128.0,
        1.0,
        1.0,
    )
