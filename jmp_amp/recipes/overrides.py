"""From a call of `recipe` to the fields of a `Recipe`.

An override that contradicts the name is refused, with an error that quotes the call.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp_amp.plan.tables.operations import ARITHMETIC
from jmp_amp.policies.arguments import quoting
from jmp_amp.policies.dtypes import (
    BF16,
    F16,
    F32,
    floating_dtype,
    half_dtype,
    is_half,
    short_name,
)
from jmp_amp.policies.patterns import GlobIfPresent
from jmp_amp.policies.policy import Fp8, Policy, get_policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.recipes import levels
from jmp_amp.training.loss_scale import LossScale, no_loss_scale, static_loss_scale
from jmp_amp.training.presets import loss_scale_preset, parameters_of

_FULL = get_policy("float32")


def fields_of(
    name: str, half_dtype: DTypeLike | None, overrides: Mapping[str, object]
) -> dict[str, Any]:
    """Returns the fields of the `Recipe` that a call of `recipe` asks for."""
    call = _RecipeCall(name, half_dtype, overrides)
    level = call.level
    _check_level(call)
    half = _half(call)
    enabled = call.flag("enabled", True)
    stored = _stored(call, half)
    compute = half if level.by_operation or is_half(stored) else F32
    outputs = call.dtype("cast_model_outputs")
    matmul = Fp8() if level.fp8 else None
    losses = call.properties.get("num_losses", 1)
    if isinstance(losses, bool) or not isinstance(losses, int) or losses < 1:
        call.refuse("a number of losses is an int, at least 1.", "num_losses")
    call.flag("master_grad", True)
    masters = call.flag("master_weights", level.master_weights)
    with quoting(f"recipe({name!r})"):
        policy = Policy(
            *(stored or F32, compute, outputs or F32),
            matmul=matmul,
            saved=cast(str | None, call.properties.get("saved")),
            reduce_dtype=cast(Any, call.properties.get("reduce_dtype")),
        )
    fields = dict(
        name=name,
        system=level.system,
        policy=_policy(call, policy),
        loss_scale=_loss_scale(call, half if enabled else F32),
        cast_model_type=stored,
        keep_batchnorm_fp32=call.flag("keep_batchnorm_fp32", level.keep_batchnorm_fp32),
        # Parameters that are f32 need no masters.
        master_weights=False if masters and not is_half(stored) else masters,
        cast_model_outputs=outputs,
        num_losses=losses,
        enabled=enabled,
        save_dtype=call.dtype("save_dtype") or F32,
    )
    if not enabled:
        fields.update(policy=Policy(F32, F32, F32), loss_scale=no_loss_scale())
        fields.update(cast_model_type=F32, cast_model_outputs=None)
        fields.update(master_weights=False)
    return fields


class _RecipeCall:
    """A call of `recipe`, for errors to quote.

    Attributes:
      name, half_dtype, overrides: the arguments, without those that are None.
      level: the meaning of the name.
      scaler: the system whose loss scaler it is.
      scaler_overrides: the overrides that are parameters of the scaler.
      properties: the other overrides, by their first names.
      keys: the name that each property was given by.
    """

    def __init__(
        self, name: str, half_dtype: DTypeLike | None, overrides: Mapping[str, object]
    ):
        self.name: object = name
        self.half_dtype = half_dtype
        self.overrides = {k: v for k, v in overrides.items() if v is not None}
        self.properties: dict[str, object] = {}
        self.scaler_overrides: dict[str, object] = {}
        self.keys: dict[str, str] = {}
        self.level = self._named_level()
        # Paddle has O1 and O2 as well, and its own names for the scaler.
        self.scaler = self.level.scaler
        of_paddle = set(parameters_of("paddle")) - set(parameters_of(self.scaler))
        if self.level.system == "Apex" and of_paddle & set(self.overrides):
            self.scaler = "paddle"
        self._sort_overrides()

    def refuse(
        self, fact: str, name: str = "", error: type[Exception] = ValueError
    ) -> NoReturn:
        """Raises an error about this call, or about the property `name` of it."""
        key = self.keys.get(name, name)
        given = f", {key}={self.overrides[key]!r}" if key else ""
        raise error(f"recipe({self.name!r}{given}): {fact}")

    def flag(self, name: str, default: bool | None) -> bool | None:
        """Returns a property that is true or false; Apex has them as words too."""
        value = self.properties.get(name, default)
        if isinstance(value, str):
            value = {"True": True, "False": False}.get(value, value)
        if value is not None and not isinstance(value, bool | np.bool_):
            self.refuse("neither True nor False.", name, TypeError)
        return value if value is None else bool(value)

    def dtype(self, name: str) -> np.dtype | None:
        """Returns a property that is a floating dtype."""
        if name not in self.properties:
            return None
        # Any object: `floating_dtype` raises if it is no dtype.
        given = cast(DTypeLike, self.properties[name])
        return floating_dtype(given, f"recipe({self.name!r}, {name}={{}})")

    def names(self, name: str) -> frozenset[str]:
        """Returns a property that is a set of operations, by our names."""
        names = self.properties.get(name, ())
        if isinstance(names, Iterable) and not isinstance(names, str):
            given = list(names)
            found = [each for each in given if isinstance(each, str)]
            if len(found) == len(given):
                return frozenset(levels.PADDLE_NAMES.get(each, each) for each in found)
        self.refuse("not a collection of names. Use a set of strings.", name, TypeError)

    def _named_level(self) -> levels.Level:
        names = ", ".join(levels.LEVELS)
        if not isinstance(self.name, str) or self.name not in levels.LEVELS:
            hint = _hint(str(self.name))
            self.refuse(f"unknown recipe. {hint}There are {names}.")
        if self.name != "fp16_apex" or "opt_level" not in self.overrides:
            return levels.LEVELS[self.name]
        level = self.overrides["opt_level"]
        if level not in ("O0", "O1", "O2", "O3"):
            hint = "It is the letter O. " if str(level)[:1] == "0" else ""
            self.refuse(f"unknown level. {hint}There are O0, O1, O2, O3.", "opt_level")
        return levels.LEVELS[str(level)]._replace(system="Colossal-AI", half=F16)

    def _sort_overrides(self) -> None:
        scaler = parameters_of(self.scaler)
        known = levels.PROPERTIES + ("opt_level",) * (self.name == "fp16_apex")
        for key, value in self.overrides.items():
            name = levels.ALIASES.get(key, key)
            is_second = name in self.keys
            self.keys[name] = key
            if is_second:
                self.refuse("given twice. Give it once.", name, TypeError)
            if name in known:
                self.properties[name] = value
            elif key in scaler:
                self.scaler_overrides[key] = value
            elif key in ("level", "opt_level", "amp_level"):
                fact = f"the level is the name. Write recipe({value!r}, ...)."
                self.refuse(fact, name, TypeError)
            elif key in levels.PRINTING:
                fact = "nothing is printed here. Leave it out: amp.metrics tells more."
                self.refuse(fact, name, TypeError)
            elif key == "target":
                fact = "a recipe is for every machine, a function may be for one. "
                remedy = f"Write recipe.autocast(fn, target={value!r})."
                self.refuse(fact + remedy, name, TypeError)
            else:
                names = ["half_dtype", *known, *levels.ALIASES, *scaler]
                fact = f"unknown property. {_names_near(key, names)}"
                self.refuse(fact, name, TypeError)


def _names_near(key: str, names: Sequence[str]) -> str:
    """Returns the sentences that say which properties `key` may mean."""
    words = set(key.split("_"))
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    # Not a slip of the fingers: other words for it.
    near = near or [name for name in names if words & set(name.split("_"))][:3]
    near = near or difflib.get_close_matches(key, names)
    if not near:
        return f"There are {', '.join(names)}."
    others = ", ".join(name for name in names if name not in near)
    return f"Did you mean {' or '.join(near)}? There are also {others}."


def _hint(text: str) -> str:
    """Returns the sentence that says which name `text` may mean, or nothing."""
    if text[:1] == "0" and (letter := f"O{text[1:]}") in levels.LEVELS:
        return f'It is the letter O, not the digit zero: "{letter}". '
    lower = {each.lower(): each for each in levels.LEVELS}
    close = difflib.get_close_matches(text.lower(), lower, n=1)
    meant = levels.MEANT.get(text.lower()) or (lower[close[0]] if close else "")
    return f'Did you mean "{meant}"? ' if meant else ""


def _check_level(call: _RecipeCall) -> None:
    """Raises where a property contradicts the name, as in Apex."""
    patched, by_operation = call.flag("patch_functions", None), call.level.by_operation
    if patched and not by_operation:
        fact = "half precision operation by operation is another recipe. Use O1."
        call.refuse(fact, "patch_functions")
    if not by_operation:
        return
    if patched is False:
        call.refuse(
            "half precision operation by operation is what this recipe is. Use O0 for "
            "f32, O2 or O3 for half-precision parameters.",
            "patch_functions",
        )
    for name, fact in {
        "keep_batchnorm_fp32": "norms are f32 in it already, with all parameters.",
        "master_weights": "its parameters are f32 and need no masters.",
    }.items():
        if name in call.properties:
            call.refuse(f"{fact} It is for models that are cast: use O2.", name)
    if call.dtype("cast_model_type") not in (None, F32):
        call.refuse(
            "its parameters are f32; half precision is decided operation by operation. "
            "Use O2 or O3 to cast them.",
            "cast_model_type",
        )


def _half(call: _RecipeCall) -> np.dtype:
    """Returns the half dtype: the name's, the call's, the model's or the machine's."""
    named, given = call.level.half, call.half_dtype
    text = f"recipe({call.name!r}, half_dtype={{}})"
    asked = None if given is None else floating_dtype(given, text)
    stored = call.dtype("cast_model_type")
    if asked not in (None, BF16) and call.level.fp8:
        call.refuse(
            f"half_dtype={given!r}, but what is not fp8 is bf16: f16 has no room for "
            "products of 8-bit floats. Leave half_dtype out."
        )
    if asked is not None and not is_half(asked):
        call.refuse(f"half_dtype={given!r} is no half dtype. Use float16 or bfloat16.")
    if asked is not None and named not in (None, asked):
        call.refuse(
            f"half_dtype={given!r}, but the name says {short_name(named)}. Leave "
            "half_dtype out, or use O1."
        )
    stored = stored if is_half(stored) else None
    if stored is not None and named not in (None, stored):
        call.refuse(f"the name says {short_name(named)}.", "cast_model_type")
    if stored is not None and asked not in (None, stored):
        call.refuse(f"but half_dtype={given!r}. Give one of them.", "cast_model_type")
    return named or asked or stored or half_dtype()


def _stored(call: _RecipeCall, half: np.dtype) -> np.dtype | None:
    """Returns the dtype of parameters; None leaves them as they are."""
    stored = call.dtype("cast_model_type")
    if stored not in (None, F32) and not is_half(stored):
        fact = "parameters are trained in float16, bfloat16 or float32."
        call.refuse(fact, "cast_model_type")
    if stored is None and not call.level.by_operation:
        return half if call.level.stored_half else F32
    return stored


def _policy(call: _RecipeCall, policy: Policy) -> Policy | PolicyMap:
    """Returns `policy` with the operations and layers that are moved."""
    white, black = call.names("custom_white_list"), call.names("custom_black_list")
    if both := sorted(white & black):
        fact = "is in custom_white_list too. An operation is in one list."
        call.refuse(f"{both[0]!r} {fact}", "custom_black_list")
    if call.level.products_only:
        black |= ARITHMETIC - white
    policy = policy.with_low(*sorted(white)).with_full(*sorted(black))
    layers = call.properties.get("excluded_layers", ())
    if isinstance(layers, str | type) or not isinstance(layers, Iterable):
        layers = (layers,)
    layers = list(dict.fromkeys(layers))
    entries: list[tuple[Any, Policy]] = [(each, _FULL) for each in layers]
    if call.level.fp8:
        heads = dataclasses.replace(policy, matmul=None)
        own = [each for each in levels.HEADS if each not in layers]
        entries = [*((each, heads) for each in own), *entries]
        # Heads in what is excluded are excluded too, else they would stay bf16.
        globs = [each for each in layers if isinstance(each, str) and each != "**"]
        inside = [GlobIfPresent(f"{each}/**".lstrip("/")) for each in globs]
        entries += [(each, _FULL) for each in inside if each not in layers]
    return PolicyMap(policy, entries) if entries else policy


def _loss_scale(call: _RecipeCall, half: np.dtype) -> LossScale:
    asked = call.properties.get("loss_scale")
    if asked is None or (isinstance(asked, str) and asked == "dynamic"):
        is_scaled = call.level.scaled and half == F16
        if asked is None and not call.scaler_overrides and not is_scaled:
            return no_loss_scale()
        try:
            return loss_scale_preset(call.scaler, **call.scaler_overrides)
        except (TypeError, ValueError) as error:
            raise type(error)(f"recipe({call.name!r}): {error}") from error
    is_scalar = isinstance(asked, numbers.Real | str) and not isinstance(asked, bool)
    is_scalar |= isinstance(asked, jax.Array | np.ndarray) and np.ndim(asked) == 0
    if not is_scalar and not isinstance(asked, LossScale):
        fact = 'neither "dynamic" nor a number, nor a LossScale.'
        call.refuse(fact, "loss_scale", TypeError)
    if call.scaler_overrides:
        first = next(iter(call.scaler_overrides))
        fact = "is of a dynamic scale, which this is not. Leave one of them out."
        call.refuse(f"{first} {fact}", "loss_scale", TypeError)
    if isinstance(asked, LossScale):
        return asked
    try:
        return static_loss_scale(float(cast(float, asked)))
    except ValueError:
        fact = 'neither "dynamic" nor a positive number, nor a LossScale.'
        call.refuse(fact, "loss_scale")
