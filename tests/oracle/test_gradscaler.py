"""Traces of torch.amp.GradScaler and of other systems' scalers, replayed step by step.

`oracle/README.md` says how the traces were made and how exact they are.
"""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jmp_amp as amp

ORACLE = Path(__file__).parent
TORCH = {
    scenario["name"]: scenario
    for scenario in json.loads((ORACLE / "gradscaler_torch.json").read_text())[
        "scenarios"
    ]
}
OTHERS = json.loads((ORACLE / "scalers_other.json").read_text())["scenarios"]
TINY = float(jnp.finfo(jnp.float32).tiny)


@pytest.fixture(autouse=True)
def _standard_promotion():
    # optax.adam computes `decay**count` with an integer count.
    with jax.numpy_dtype_promotion("standard"):
        yield


def torch_scaler(config: dict) -> amp.LossScale:
    """torch has no floor and no cap below infinity."""
    return amp.dynamic_loss_scale(**config, min_scale=TINY, max_scale=math.inf)


def optimizer(scenario: dict) -> optax.GradientTransformation:
    inner = {
        "sgd": optax.sgd(scenario["lr"]),
        "sgdm": optax.sgd(scenario["lr"], momentum=0.9),
        "adam": optax.adam(scenario["lr"]),
    }[scenario["optimizer"]]
    clips = [a[1] for a in scenario["actions"].values() if a[0] == "unscale_clip"]
    return optax.chain(optax.clip_by_global_norm(clips[0]), inner) if clips else inner


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_step(tx, micro_batches, params, state, gradient):
    """One step on a loss whose gradient is `gradient`, in so many micro-batches."""

    def loss_fn(p):
        return jnp.sum(p * gradient) / micro_batches

    total = jnp.zeros_like(params)
    for _ in range(micro_batches):
        total += amp.grad(loss_fn)(params, loss_scale=state)
    updates, state = tx.update(total, state, params)
    return optax.apply_updates(params, updates), state


def between_steps(action, before, after):
    """`after`, with what torch's user called instead of or besides `update()`."""
    scaler = amp.loss_scale_of(after)
    match action:
        case ["update", new_scale]:
            # torch's update(new_scale) replaces the state machine's own move.
            scaler = dataclasses.replace(
                amp.loss_scale_of(before), value=jnp.float32(new_scale)
            )
        case ["growth_interval", interval]:
            scaler = dataclasses.replace(scaler, growth_interval=interval)
        case ["reload"]:
            saved = serialization.to_bytes(scaler)
            other = amp.dynamic_loss_scale(2.0, 3.0, 0.25, 7, 1.0, 8.0)
            scaler = serialization.from_bytes(other, saved)
    return after._replace(loss_scale=scaler)


def replay(scenario: dict):
    tx = amp.with_loss_scale(optimizer(scenario), torch_scaler(scenario["config"]))
    params = jnp.array(scenario["param0"], jnp.float32)
    state = tx.init(params)
    for step, gradient in enumerate(scenario["grads"]):
        action = scenario["actions"].get(str(step))
        micro_batches = action[1] if action and action[0] == "accumulate" else 1
        before = state
        gradient = jnp.array([float(g) for g in gradient], jnp.float32)
        params, state = train_step(tx, micro_batches, params, state, gradient)
        state = between_steps(action, before, state)
        scaler = amp.loss_scale_of(state)
        yield {
            "scale_before": float(amp.loss_scale_of(before).value),
            "scale": float(scaler.value),
            "growth_tracker": int(scaler.growth_tracker),
            "skipped": int(not amp.last_step_finite(state)),
            "param": np.asarray(params),
        }


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", [n for n in TORCH if n != "backoff_negative"])
def test_a_run_goes_as_with_torchs_gradscaler(name):
    scenario = TORCH[name]
    atol = 2e-6
    if scenario["optimizer"] == "adam":
        atol += 1e-4 * scenario["lr"] * math.sqrt(len(scenario["grads"]))
    dyadic = scenario["config"]["growth_factor"] != 1.1
    steps = 0
    for step, found in enumerate(replay(scenario)):
        for key in ("scale_before", "scale"):
            rtol = 0.0 if dyadic else 1e-6
            np.testing.assert_allclose(found[key], scenario[key][step], rtol=rtol)
        assert found["growth_tracker"] == scenario["growth_tracker"][step]
        assert found["skipped"] == scenario["skipped"][step]
        np.testing.assert_allclose(
            found["param"], scenario["param"][step], rtol=1e-5, atol=atol
        )
        steps += 1
    assert steps == len(scenario["param"])


def test_a_negative_backoff_factor_is_refused_where_torch_flips_the_sign():
    with pytest.raises(ValueError, match=r"backoff_factor=-0\.5.*between 0 and 1"):
        torch_scaler(TORCH["backoff_negative"]["config"])


# What the oracle's configurations are silent about, where it differs from the preset's:
# most were recorded with the defaults of a class, not of the system's own set-up.
CLASS_DEFAULTS = {
    "paddle_static": {
        "init_loss_scaling": 2.0**15,
        "min_scale": 1.0,
        "decr_every_n_nan_or_inf": 2,
    },
    "apex.fp16_utils": {"init_scale": 2.0**32, "scale_window": 1000, "min_scale": 1.0},
    "deepspeed": {"init_scale": 2.0**32, "delayed_shift": 1},
    "colossalai": {"min_scale": TINY, "max_scale": math.inf},
}
PRESETS = {
    "colossalai": "colossalai",
    "apex.amp": "apex",
    "apex.fp16_utils": "apex",
    "paddle": "paddle",
    "paddle_static": "paddle",
    "mindspore": "mindspore",
    "mindspore_manager": "mindspore",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
    "keras": "keras",
}


def preset_of(scenario: dict) -> amp.LossScale:
    system, config = scenario["system"], dict(scenario["config"])
    settings = CLASS_DEFAULTS.get(system, {}) | config
    if settings.pop("consecutive_hysteresis", False):
        settings["hysteresis_mode"] = "consecutive"
    settings.pop("raise_error_at_min_scale", None)
    if system == "apex.fp16_utils":
        settings.setdefault("max_scale", math.inf)
    return amp.loss_scale_preset(PRESETS[system], **settings)


LONGEST = max(len(s["overflow"]) for s in OTHERS)


@jax.jit
def scales_and_trackers(scaler, overflow):
    def step(scaler, overflow):
        scaler = scaler.adjust(~overflow)
        return scaler, (scaler.value, scaler.growth_tracker)

    return jax.lax.scan(step, scaler, overflow)[1]


@pytest.mark.breadth(4)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(s, id=f"{s['system']}-{i}-{s['sequence']}")
        for i, s in enumerate(OTHERS)
    ],
)
def test_the_preset_goes_as_the_system(scenario):
    steps = len(scenario["overflow"])
    # Of one length: those of one configuration are one program.
    overflow = np.zeros(LONGEST, bool)
    overflow[:steps] = scenario["overflow"]
    found = scales_and_trackers(preset_of(scenario), overflow)
    scales, trackers = (np.asarray(each)[:steps] for each in found)
    # A system ends where it raises at its floor, or where its scale is infinite.
    rows = itertools.takewhile(
        lambda row: not isinstance(row, str) and math.isfinite(float(row[0])),
        scenario["trace"],
    )
    trace = np.array(list(rows), float)
    assert len(trace) > 0
    np.testing.assert_array_equal(scales[: len(trace)], trace[:, 0].astype(np.float32))
    assert np.isfinite(scales).all() and (scales >= TINY).all()
    if "growth" in scenario["columns"][1] or scenario["system"].startswith("paddle"):
        np.testing.assert_array_equal(trackers[: len(trace)], trace[:, 1])
