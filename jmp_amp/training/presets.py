"""The loss scalers of other systems, as settings of one state machine."""

import dataclasses
import difflib
import inspect
import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.policies.dtypes import PyTree
from jmp_amp.training.loss_scale import (
    F32_TINY,
    LossScale,
    dynamic_loss_scale,
    no_loss_scale,
    static_loss_scale,
)
from jmp_amp.training.loss_scale_state import find_loss_scale

_COLUMNS = (
    "init_scale growth_interval min_scale max_scale hysteresis hysteresis_mode".split()
)
# The defaults of each system. No system has a floor below F32_TINY: a scale that is
# no normal float32 has no reciprocal. Sources:
# torch/amp/grad_scaler.py; apex/amp/scaler.py; paddle/python/paddle/amp/grad_scaler.py;
# mindspore/python/mindspore/train/loss_scale_manager.py;
# megatron/core/optimizer/grad_scaler.py; deepspeed/runtime/config.py;
# colossalai/amp/naive_amp/grad_scaler/dynamic_grad_scaler.py;
# keras/src/optimizers/loss_scale_optimizer.py; flax/training/dynamic_scale.py;
# jmp/_src/loss_scale.py.
_PRESETS: dict[str, tuple[Any, ...]] = {
    "torch": (2.0**16, 2000, F32_TINY, math.inf),
    "apex": (2.0**16, 2000, F32_TINY, 2.0**24),
    "paddle": (2.0**16, 2000, F32_TINY, math.inf, 1, "rearming"),
    "mindspore": (2.0**24, 2000, 1.0, math.inf),
    "megatron": (2.0**32, 1000, 1.0, math.inf, 2),
    "deepspeed": (2.0**16, 1000, 1.0, math.inf, 2),
    "colossalai": (2.0**16, 1000, 1.0, 2.0**32, 2),
    "keras": (2.0**15, 2000, F32_TINY, math.inf),
    "flax": (2.0**16, 2000, F32_TINY, math.inf),
    "jmp": (2.0**15, 2000, 1.0, math.inf),
}
# The names of our parameters in each system: theirs=ours.
_THEIR_NAMES = {
    "apex": "scale_factor=growth_factor scale_window=growth_interval "
    "min_loss_scale=min_scale max_loss_scale=max_scale",
    "paddle": "init_loss_scaling=init_scale incr_ratio=growth_factor decr_ratio="
    "backoff_factor incr_every_n_steps=growth_interval decr_every_n_nan_or_inf="
    "hysteresis",
    "mindspore": "scale_value=init_scale init_loss_scale=init_scale "
    "scale_factor=growth_factor scale_window=growth_interval",
    "megatron": "initial_scale=init_scale",
    "deepspeed": "scale_factor=growth_factor scale_window=growth_interval "
    "loss_scale_window=growth_interval min_loss_scale=min_scale "
    "delayed_shift=hysteresis",
    "colossalai": "initial_scale=init_scale",
    "keras": "initial_scale=init_scale dynamic_growth_steps=growth_interval",
    "flax": "scale=init_scale fin_steps=growth_interval minimum_scale=min_scale",
    "jmp": "loss_scale=init_scale period=growth_interval factor=growth_factor "
    "min_loss_scale=min_scale",
}
_OUR_NAMES = {name: name for name in inspect.signature(dynamic_loss_scale).parameters}
# Names of theirs that set the backoff factor too, to the inverse of the growth factor.
_BOTH_WAYS = ("scale_factor", "factor")
_FACTORS = "growth_factor", "backoff_factor", "growth_interval"
_TORCH_KEYS = ("scale", *_FACTORS, "_growth_tracker")


def loss_scale_preset(name: str, **overrides: Any) -> LossScale:
    """Returns the dynamic loss scale that another system has by default.

    ============ ========= ======== =========== ======= =======
    name         scale     interval overflows   floor   cap
    ============ ========= ======== =========== ======= =======
    torch        2**16     2000     1           none    none
    apex         2**16     2000     1           none    2**24
    paddle       2**16     2000     1           none    none
    mindspore    2**24     2000     1           1       none
    megatron     2**32     1000     2           1       none
    deepspeed    2**16     1000     2           1       none
    colossalai   2**16     1000     2           1       2**32
    keras        2**15     2000     1           none    none
    flax         2**16     2000     1           2**-126 f32 max
    jmp          2**15     2000     1           1       none
    ============ ========= ======== =========== ======= =======

    All grow by 2 and back off by 0.5. Without a floor, the scale of the original falls
    to 0 and writes NaN (torch, Keras); without a cap, it may reach infinity and stay
    there (Paddle's dynamic graph, Megatron, DeepSpeed, Keras). Here "none" is 2**-126
    and the largest float32: growth that would pass that is refused.

    Other differences: flax grows one step late, after `growth_interval` + 1 finite
    steps; DeepSpeed raises at its minimum by default and MindSpore's manager after 1000
    overflows in a row, which `check_scale` does here; Apex does not skip a step with a
    static scale, `with_loss_scale` does.

    Args:
      name: the system.
      **overrides: parameters of `dynamic_loss_scale`, or those of the system itself:
        `incr_every_n_steps`, `scale_window`, ... A `scale_factor` of Apex, MindSpore
        and DeepSpeed, and jmp's `factor`, set both factors.

    Raises:
      ValueError: if the system is unknown, or a value out of range.
      TypeError: if a parameter is unknown, or given twice.

    Example:
      >>> import jmp_amp as amp
      >>> amp.loss_scale_preset("megatron").value
      Array(4.2949673e+09, dtype=float32)
      >>> scale = amp.loss_scale_preset("paddle", decr_every_n_nan_or_inf=2)
      >>> scale.adjust(False).value, scale.adjust(False).adjust(False).value
      (Array(65536., dtype=float32), Array(32768., dtype=float32))
    """
    if name not in _PRESETS:
        close = difflib.get_close_matches(str(name).lower(), _PRESETS, n=1)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        known = f"There are {', '.join(map(repr, _PRESETS))}."
        raise ValueError(f"loss_scale_preset({name!r}): unknown system.{hint} {known}")
    ours, settings = _names_of(name), {}
    for given, value in overrides.items():
        call = f"loss_scale_preset({name!r}, {given}={value!r})"
        if given not in ours:
            raise TypeError(f"{call}: unknown parameter. There are {', '.join(ours)}.")
        factors = {ours[given]: value}
        if given in _BOTH_WAYS and isinstance(value, int | float) and value > 0:
            factors["backoff_factor"] = 1 / value
        if twice := sorted(factors.keys() & settings.keys()):
            raise TypeError(f"{call}: {twice[0]} is given twice. Give it once.")
        settings |= factors
    defaults = dict(zip(_COLUMNS, _PRESETS[name], strict=False))
    return dynamic_loss_scale(**defaults | settings)


def parameters_of(name: str) -> tuple[str, ...]:
    """Returns the parameters of `loss_scale_preset(name, ...)`: theirs, then ours."""
    return tuple(_names_of(name))


def _names_of(name: str) -> dict[str, str]:
    pairs = _THEIR_NAMES.get(name, "").split()
    return dict(pair.split("=") for pair in pairs) | _OUR_NAMES


def loss_scale_from_torch(state_dict: Mapping[str, Any]) -> LossScale:
    """Returns the loss scale that a `torch.amp.GradScaler` had.

    Args:
      state_dict: the result of `GradScaler.state_dict()`: `scale`, `growth_factor`,
        `backoff_factor`, `growth_interval` and `_growth_tracker`. An empty one, of a
        scaler with `enabled=False`, gives the scale 1; factors that are both 1 give a
        static scale.

    Raises:
      TypeError: if it is not a mapping, or a value is not a number.
      ValueError: if a key is missing or unknown, or a value out of range.

    Example:
      >>> import jmp_amp as amp
      >>> state = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
      ...          "growth_interval": 2000, "_growth_tracker": 7}
      >>> scale = amp.loss_scale_from_torch(state)
      >>> scale.value, scale.growth_tracker
      (Array(1024., dtype=float32), Array(7, dtype=int32))
      >>> amp.loss_scale_to_torch(scale) == state
      True
    """
    call = "loss_scale_from_torch"
    keys = f"numbers under the keys {', '.join(_TORCH_KEYS)}"
    remedy = f"Pass what GradScaler.state_dict() returns: {keys}."
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{call}: {state_dict!r} is no dictionary. {remedy}")
    if not state_dict:
        return no_loss_scale()
    if different := set(state_dict) ^ set(_TORCH_KEYS):
        what = "unknown" if min(different) in state_dict else "missing"
        raise ValueError(f"{call}: the key {min(different)!r} is {what}. {remedy}")
    for key, value in state_dict.items():
        # A checkpoint of arrays has them without dimensions.
        kinds = numbers.Real | jax.Array | np.ndarray
        if not isinstance(value, kinds) or isinstance(value, bool) or np.ndim(value):
            fact = f"{key!r} is {value!r}, which is no number"
            raise TypeError(f"{call}: {fact}. {remedy}")
    value, *settings, tracker = map(state_dict.__getitem__, _TORCH_KEYS)
    if settings[:2] == [1, 1]:
        return static_loss_scale(float(value))
    given = dict(zip(_FACTORS, settings, strict=True))
    scale = loss_scale_preset("torch", init_scale=float(value), **given)
    if not 0 <= tracker <= scale.growth_interval or int(tracker) != tracker:
        fact = f"not a count of finite steps up to {scale.growth_interval}"
        remedy = "Set it to 0 to begin an interval."
        raise ValueError(f"{call}: '_growth_tracker' is {tracker!r}, {fact}. {remedy}")
    return dataclasses.replace(scale, growth_tracker=jnp.asarray(int(tracker), "int32"))


def loss_scale_to_torch(loss_scale: PyTree) -> dict[str, float | int]:
    """Returns what `torch.amp.GradScaler.load_state_dict` reads, as Python numbers.

    A static scale is one that neither grows nor shrinks. Floors, caps and hysteresis,
    which torch does not know, are left out.

    Args:
      loss_scale: a `LossScale`, or the state of an optimizer that has one.

    Example:
      >>> import jmp_amp as amp
      >>> amp.loss_scale_to_torch(amp.dynamic_loss_scale(1024.0))["scale"]
      1024.0
    """
    scale = find_loss_scale(loss_scale, "loss_scale_to_torch(loss_scale)")
    found = {key: getattr(scale, key) for key in _FACTORS}
    if not scale.dynamic:
        found |= {"growth_factor": 1.0, "backoff_factor": 1.0}
    tracker = int(scale.growth_tracker)
    return {"scale": float(scale.value), **found, "_growth_tracker": tracker}
