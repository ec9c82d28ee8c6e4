"""What may be changed about a recipe, and what its name rules out.

From a call of `recipe`, as it was written, to the fields of a `Recipe`.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp_amp.plan.operations import ARITHMETIC
from jmp_amp.policies.dtypes import (
    F16,
    F32,
    floating_dtype,
    half_dtype,
    is_half,
    short_name,
)
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.recipes.levels import (
    ALIASES,
    LEVELS,
    MEANT,
    PADDLE_NAMES,
    PRINTING,
    PROPERTIES,
    Level,
)
from jmp_amp.training.loss_scale import LossScale, no_loss_scale, static_loss_scale
from jmp_amp.training.presets import loss_scale_preset, parameters_of

# Where the parameters of the scaler are among them.
_SCALER = "(scaler)"


def fields_of(
    name: str, half_dtype: DTypeLike | None, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields of the `Recipe` that is asked for.

    Args:
      name: as for `recipe`, whose errors these are.
      half_dtype: likewise.
      overrides: likewise; None is as if it were not given.

    Example:
      >>> from jmp_amp.recipes.overrides import fields_of
      >>> fields = fields_of("O2", "float16", {"loss_scale": 128.0})
      >>> fields["cast_model_type"], fields["loss_scale"]
      (dtype('float16'), LossScale(value=128.0, dynamic=False))
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    call = _Call(name, half_dtype, given)
    row = call.row()
    return _put_together(call, row, call.properties(row))


class _Call(NamedTuple):
    """A call of `recipe`, to speak of it in errors."""

    name: Any
    half_dtype: Any
    overrides: Mapping[str, Any]

    def refuse(self, fact: str, key: str = "", error: type = ValueError) -> NoReturn:
        """Raises an error about this call, or about one of its overrides."""
        given = f", {key}={self.overrides[key]!r}" if key else ""
        raise error(f"recipe({self.name!r}{given}): {fact}")

    def row(self) -> Level:
        """What the name means."""
        if self.name == "fp8":
            self.refuse(
                "there is no recipe for fp8 yet. In half precision there are "
                f"{', '.join(LEVELS)}.",
                error=NotImplementedError,
            )
        if not isinstance(self.name, str) or self.name not in LEVELS:
            known = f"There are {', '.join(LEVELS)}."
            text = str(self.name)
            if text[:1] == "0" and (letter := f"O{text[1:]}") in LEVELS:
                self.refuse(
                    "unknown recipe. It is the letter O, not the digit zero: "
                    f'"{letter}". {known}'
                )
            lower = {each.lower(): each for each in LEVELS}
            close = difflib.get_close_matches(text.lower(), lower, n=1)
            meant = MEANT.get(text.lower()) or (lower[close[0]] if close else "")
            hint = f'Did you mean "{meant}"? ' if meant else ""
            self.refuse(f"unknown recipe. {hint}{known}")
        if self.name != "fp16_apex" or "opt_level" not in self.overrides:
            return LEVELS[self.name]
        level = self.overrides["opt_level"]
        if level not in ("O0", "O1", "O2", "O3"):
            hint = "It is the letter O. " if str(level)[:1] == "0" else ""
            self.refuse(f"unknown level. {hint}There are O0, O1, O2, O3.", "opt_level")
        return LEVELS[level]._replace(system="Colossal-AI", half=F16)

    def scaler(self, row: Level) -> str:
        """Whose scaler it is: Paddle has O1 and O2 as well, and names of its own."""
        of_paddle = set(parameters_of("paddle")) - set(parameters_of(row.scaler))
        is_level = row.system == "Apex"
        return "paddle" if is_level and of_paddle & set(self.overrides) else row.scaler

    def properties(self, row: Level) -> dict[str, Any]:
        """The overrides by their one name; those of the scaler together."""
        scaler = parameters_of(self.scaler(row))
        properties = PROPERTIES + ("opt_level",) * (self.name == "fp16_apex")
        found: dict[str, Any] = {_SCALER: {}}
        for key, value in self.overrides.items():
            ours = ALIASES.get(key, key)
            if ours in found:
                self.refuse("given twice. Give it once.", key, TypeError)
            if ours in properties:
                found[ours] = value
            elif key in scaler:
                found[_SCALER][key] = value
            elif key in ("level", "opt_level", "amp_level"):
                fact = f"the level is the name. Write recipe({value!r}, ...)."
                self.refuse(fact, key, TypeError)
            elif key in PRINTING:
                fact = "nothing is printed here. Leave it out: amp.metrics tells more."
                self.refuse(fact, key, TypeError)
            else:
                known = [*properties, *ALIASES, *scaler]
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"Did you mean {close[0]}? " if close else ""
                self.refuse(
                    f"unknown property. {hint}There are {', '.join(known)}.",
                    key,
                    TypeError,
                )
        return found

    def flag(self, properties: Mapping[str, Any], name: str, default: Any) -> Any:
        """A property that is true or false; Apex reads words from command lines."""
        value = properties.get(name, default)
        if isinstance(value, str):
            value = {"True": True, "False": False}.get(value, value)
        if value is not None and not isinstance(value, bool):
            self.refuse("neither True nor False.", self.key_of(name), TypeError)
        return value

    def dtype(self, properties: Mapping[str, Any], name: str) -> np.dtype | None:
        """A property that is a floating dtype."""
        if name not in properties:
            return None
        text = f"recipe({self.name!r}, {self.key_of(name)}={{}})"
        return floating_dtype(properties[name], text)

    def key_of(self, name: str) -> str:
        """The name by which a property was given."""
        names = [key for key, ours in ALIASES.items() if ours == name]
        return next((key for key in names if key in self.overrides), name)


def _put_together(
    call: _Call, row: Level, properties: Mapping[str, Any]
) -> dict[str, Any]:
    _check_levels(call, row, properties)
    half = _half(call, row, properties)
    enabled = call.flag(properties, "enabled", True)
    stored = call.dtype(properties, "cast_model_type")
    if stored not in (None, F32) and not is_half(stored):
        call.refuse(
            "parameters are trained in float16, bfloat16 or float32.", "cast_model_type"
        )
    if stored is None and not row.by_operation:
        stored = half if row.stored_half else F32
    outputs = call.dtype(properties, "cast_model_outputs")
    losses = properties.get("num_losses", 1)
    if isinstance(losses, bool) or not isinstance(losses, int) or losses < 1:
        call.refuse("a number of losses is an int, at least 1.", "num_losses")
    is_half_model = is_half(stored)
    call.flag(properties, "master_grad", True)
    policy = _policy(call, row, properties, half, stored, outputs)
    masters = call.flag(properties, "master_weights", row.masters)
    loss_scale = _loss_scale(call, row, properties, half if enabled else F32)
    return dict(
        name=call.name,
        system=row.system,
        policy=policy if enabled else Policy(F32, F32, F32),
        loss_scale=loss_scale if enabled else no_loss_scale(),
        cast_model_type=stored if enabled else F32,
        keep_batchnorm_fp32=call.flag(
            properties, "keep_batchnorm_fp32", row.keep_norms
        ),
        master_weights=masters if enabled and (is_half_model or not masters) else False,
        cast_model_outputs=outputs if enabled else None,
        num_losses=losses,
        enabled=enabled,
        save_dtype=call.dtype(properties, "save_dtype") or F32,
    )


def _check_levels(call: _Call, row: Level, properties: Mapping[str, Any]) -> None:
    """Raises where a property contradicts the name, as in Apex."""
    patched = call.flag(properties, "patch_functions", None)
    if patched and not row.by_operation:
        call.refuse(
            "half precision operation by operation is another recipe. Use O1.",
            call.key_of("patch_functions"),
        )
    if patched is False and row.by_operation:
        call.refuse(
            "half precision operation by operation is what this recipe is. Use O0 for "
            "f32, O2 or O3 for half-precision parameters.",
            call.key_of("patch_functions"),
        )
    if not row.by_operation:
        return
    for name, fact in {
        "keep_batchnorm_fp32": "norms are f32 in it already, with all parameters.",
        "master_weights": "its parameters are f32 and need no masters.",
    }.items():
        if name in properties:
            call.refuse(
                f"{fact} It is for models that are cast: use O2.", call.key_of(name)
            )
    stored = call.dtype(properties, "cast_model_type")
    if stored is not None and stored != F32:
        call.refuse(
            "its parameters are f32; half precision is decided operation by operation. "
            "Use O2 or O3 to cast them.",
            "cast_model_type",
        )


def _half(call: _Call, row: Level, properties: Mapping[str, Any]) -> np.dtype:
    """The half dtype of the recipe."""
    text = f"recipe({call.name!r}, half_dtype={{}})"
    given = call.half_dtype
    asked = None if given is None else floating_dtype(given, text)
    stored = call.dtype(properties, "cast_model_type")
    if asked is not None and not is_half(asked):
        call.refuse(f"half_dtype={given!r} is no half dtype. Use float16 or bfloat16.")
    if asked is not None and row.half not in (None, asked):
        call.refuse(
            f"half_dtype={given!r}, but the name says {short_name(row.half)}. Leave "
            "half_dtype out, or use O1."
        )
    wanted = stored if is_half(stored) else None
    if wanted is not None and row.half not in (None, wanted):
        call.refuse(f"the name says {short_name(row.half)}.", "cast_model_type")
    if wanted is not None and asked not in (None, wanted):
        call.refuse(f"but half_dtype={given!r}. Give one of them.", "cast_model_type")
    return row.half or asked or wanted or np.dtype(half_dtype())


def _policy(
    call: _Call,
    row: Level,
    properties: Mapping[str, Any],
    half: np.dtype,
    stored: np.dtype | None,
    outputs: np.dtype | None,
) -> Policy | PolicyMap:
    compute = half if row.by_operation or is_half(stored) else F32
    policy = Policy(stored or F32, compute, outputs or F32)
    white = _names(call, properties, "custom_white_list")
    black = _names(call, properties, "custom_black_list")
    if both := sorted(white & black):
        call.refuse(
            f"{both[0]!r} is in custom_white_list too. An operation is in one list.",
            "custom_black_list",
        )
    if row.products_only:
        black |= ARITHMETIC - white
    policy = policy.with_low(*sorted(white)).with_full(*sorted(black))
    layers = properties.get("excluded_layers", ())
    if isinstance(layers, str | type) or not isinstance(layers, Iterable):
        layers = (layers,)
    return PolicyMap(policy, dict.fromkeys(layers, "float32")) if layers else policy


def _names(call: _Call, properties: Mapping[str, Any], key: str) -> frozenset[str]:
    names = properties.get(key, ())
    is_many = isinstance(names, Iterable) and not isinstance(names, str)
    if not is_many or not all(isinstance(each, str) for each in names):
        call.refuse("not a collection of names. Use a set of strings.", key, TypeError)
    return frozenset(str(PADDLE_NAMES.get(name, name)) for name in names)


def _loss_scale(
    call: _Call, row: Level, properties: Mapping[str, Any], half: np.dtype
) -> LossScale:
    scaler = properties[_SCALER]
    asked = properties.get("loss_scale")
    is_scalar = isinstance(asked, numbers.Real | str) and not isinstance(asked, bool)
    is_scalar |= isinstance(asked, jax.Array | np.ndarray) and np.ndim(asked) == 0
    is_dynamic = isinstance(asked, str) and asked == "dynamic"
    if (is_scalar or isinstance(asked, LossScale)) and not is_dynamic:
        if scaler:
            call.refuse(
                f"{next(iter(scaler))} is of a dynamic scale, which this is not. Leave "
                "one of them out.",
                "loss_scale",
                TypeError,
            )
        if isinstance(asked, LossScale):
            return asked
        try:
            return static_loss_scale(float(cast(Any, asked)))
        except ValueError as error:
            fact = 'neither "dynamic" nor a positive number, nor a LossScale.'
            raise ValueError(
                f"recipe({call.name!r}, loss_scale={asked!r}): {fact}"
            ) from error
    if asked is not None and not is_dynamic:
        call.refuse(
            'neither "dynamic" nor a number, nor a LossScale.', "loss_scale", TypeError
        )
    if is_dynamic or scaler or (row.scaled and half == F16):
        try:
            return loss_scale_preset(call.scaler(row), **scaler)
        except (TypeError, ValueError) as error:
            raise type(error)(f"recipe({call.name!r}): {error}") from error
    return no_loss_scale()
