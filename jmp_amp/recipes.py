"""One word for the whole setup: the recipes of other systems, in ours.

A recipe is plain data: a policy for `autocast`, the dtype that parameters are stored
in, whether the optimizer keeps masters, a loss scale. What a word means in the system
that it comes from is a row of `_RECIPES`; the rest is what these systems let one
change.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import jax
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike

from jmp_amp.dtypes import F32, floating_dtype, half_dtype, is_half, short_name
from jmp_amp.exports import export_params
from jmp_amp.interpreter import autocast
from jmp_amp.leaves import TreeStructure
from jmp_amp.loss_scale import LossScale, no_loss_scale, static_loss_scale
from jmp_amp.optimizers import with_loss_scale
from jmp_amp.parameters import cast_params
from jmp_amp.policy import Policy
from jmp_amp.policy_map import PolicyMap
from jmp_amp.presets import loss_scale_preset, parameters_of
from jmp_amp.rules import ARITHMETIC
from jmp_amp.states import WEIGHT_STATES, LossScaleState, nodes_of
from jmp_amp.tables import Table, as_text
from jmp_amp.weights import begin_with, with_kahan

_F16, _BF16 = np.dtype("float16"), np.dtype(jax.numpy.bfloat16)


class _Row(NamedTuple):
    """What a name means.

    Attributes:
      system: whose name it is.
      scaler: whose loss scaler, for `loss_scale_preset`.
      half: the half dtype, if the name says which.
      by_operation: f32 parameters, half precision operation by operation.
      stored_half: half-precision parameters.
      keep_norms: norm parameters stay f32 then.
      masters: the optimizer has f32 masters.
      scaled: the loss scale is dynamic in f16.
      products_only: only matrix products and convolutions are in half.
    """

    system: str
    scaler: str
    half: np.dtype | None = None
    by_operation: bool = False
    stored_half: bool = False
    keep_norms: bool | None = None
    masters: bool | None = None
    scaled: bool = True
    products_only: bool = False


_RECIPES = {
    "O0": _Row("Apex", "apex", masters=False, scaled=False),
    "O1": _Row("Apex", "apex", by_operation=True),
    "O2": _Row("Apex", "apex", stored_half=True, keep_norms=True, masters=True),
    "O3": _Row(
        *("Apex", "apex"),
        stored_half=True,
        keep_norms=False,
        masters=False,
        scaled=False,
    ),
    "OD": _Row("Paddle", "paddle", by_operation=True, products_only=True),
    "auto": _Row("MindSpore", "mindspore", by_operation=True),
    "fp16": _Row("Colossal-AI", "torch", _F16, by_operation=True),
    "bf16": _Row("Colossal-AI", "torch", _BF16, by_operation=True),
    "fp16_apex": _Row("Colossal-AI", "apex", _F16, by_operation=True),
    "fp16_naive": _Row(
        *("Colossal-AI", "colossalai", _F16),
        stored_half=True,
        keep_norms=True,
        masters=True,
    ),
    "mixed_float16": _Row("Keras", "keras", _F16, by_operation=True),
    "mixed_bfloat16": _Row("Keras", "keras", _BF16, by_operation=True),
    "float32": _Row("Keras", "keras", masters=False, scaled=False),
}

# Names of operations in Paddle's lists that are others here.
_PADDLE_NAMES: dict[str, str] = {
    **dict.fromkeys(("conv2d", "conv3d", "conv1d"), "conv_general_dilated"),
    **dict.fromkeys(("matmul", "matmul_v2", "bmm", "einsum"), "dot_general"),
    **{f"elementwise_{name}": name for name in ("add", "sub", "mul", "div", "pow")},
    **{"sigmoid": "logistic", "erfinv": "erf_inv", "reduce_mean": "mean"},
}

# What Apex and Paddle call the same; the first name is that of the field.
_ALIASES = {
    "master_weight": "master_weights",
    "patch_torch_functions": "patch_functions",
}

_PROPERTIES = (
    "loss_scale",
    "keep_batchnorm_fp32",
    "master_weights",
    "cast_model_type",
    "cast_model_outputs",
    "patch_functions",
    "num_losses",
    "enabled",
    "custom_white_list",
    "custom_black_list",
    "excluded_layers",
    "master_grad",
    "save_dtype",
)


# Where the parameters of the scaler are among them.
_SCALER = "(scaler)"


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """How to train in mixed precision, as `recipe` puts it together.

    Attributes:
      name: what `recipe` was given.
      system: whose name that is.
      policy: for `autocast`; a `PolicyMap` where layers are excluded.
      loss_scale: the first `LossScale`; the scale 1 where there is no scaling.
      cast_model_type: the dtype of parameters; None where they are left as they are.
      keep_batchnorm_fp32: whether norm parameters stay f32 then.
      master_weights: whether the optimizer keeps what parameters lack of f32.
      cast_model_outputs: the dtype of f32 outputs, if not f32.
      num_losses: how many `loss_scales` there are.
      enabled: False is f32 throughout.
      save_dtype: what `export_params` returns.

    Example:
      >>> import jmp_amp as amp
      >>> print(amp.recipe("O2", half_dtype="float16"))
      O2 of Apex
      <BLANKLINE>
       parameters   compute   outputs   norms   masters   loss scale      losses
      ───────────────────────────────────────────────────────────────────────────
       f16          f16       f32       f32     yes       dynamic, 2^16        1
    """

    name: str
    system: str
    policy: Policy | PolicyMap
    loss_scale: LossScale
    cast_model_type: np.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    cast_model_outputs: np.dtype | None = None
    num_losses: int = 1
    enabled: bool = True
    save_dtype: np.dtype = F32

    @property
    def loss_scales(self) -> tuple[LossScale, ...]:
        """One loss scale for each of `num_losses` losses, to carry along.

        For several losses whose gradients are added up: each is scaled, unscaled and
        adjusted for itself, `scale.adjust(all_finite(its_grads))`.
        """
        return (self.loss_scale,) * self.num_losses

    def autocast(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn`, or an nnx module, as `amp.autocast` does under the policy.

        Example:
          >>> import jax.numpy as jnp, jmp_amp as amp
          >>> amp.recipe("O1").autocast(jnp.matmul)(jnp.eye(2), jnp.eye(2)).dtype
          dtype('float32')
        """
        return autocast(fn, self.policy, enabled=self.enabled)

    def wrap(
        self,
        tx: optax.GradientTransformation | optax.MultiSteps,
        *,
        axis_name: str | Sequence[str] | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Returns an optimizer with the recipe's masters and loss scale around it.

        Masters are those of `with_kahan`: the 16 bits that a half-precision parameter
        lacks of a float32, so that both are no larger than one.

        Args:
          tx: an optimizer or a chain.
          axis_name: as for `with_loss_scale`.

        Example:
          >>> import jax.numpy as jnp, jmp_amp as amp, optax
          >>> tx = amp.recipe("bf16").wrap(optax.sgd(0.1))
          >>> amp.loss_scale_of(tx.init(jnp.zeros(2)))
          LossScale(value=1.0, dynamic=False)
        """
        # A master is a float32, of which the parameter has one half already.
        inner = with_kahan(tx) if self.master_weights else tx
        return with_loss_scale(inner, self.loss_scale, axis_name=axis_name)

    def cast_params(self, params: Any, *, model: Any = None) -> Any:
        """Returns parameters in the dtypes that the recipe stores them in.

        Args:
          params: as for `amp.cast_params`.
          model: as for `amp.cast_params`.

        Example:
          >>> import jax.numpy as jnp, jmp_amp as amp
          >>> params = {"Dense_0": {"kernel": jnp.ones((2, 2))}}
          >>> amp.recipe("O3", "f16").cast_params(params)["Dense_0"]["kernel"].dtype
          dtype('float16')
        """
        if not self.enabled or self.cast_model_type is None:
            return params
        keep = self.keep_batchnorm_fp32 is not False
        return cast_params(params, self.policy, model=model, keep_norms=keep)

    def init(
        self, tx: optax.GradientTransformation, params: Any, *, model: Any = None
    ) -> tuple[Any, Any]:
        """Returns parameters and the state of the optimizer to begin with.

        Parameters are cast as `cast_params` does; masters begin with the digits of the
        f32 originals.

        Args:
          tx: an optimizer that `wrap` returned.
          params: the f32 parameters; or an nnx module.
          model: as for `amp.cast_params`.

        Returns:
          `(params, opt_state)`; for an nnx module `(model, nnx.Optimizer)`.

        Raises:
          ValueError: if `tx` has not been wrapped.

        Example:
          >>> import jax, jax.numpy as jnp, jmp_amp as amp, optax
          >>> recipe = amp.recipe("O2", "bf16")
          >>> tx = recipe.wrap(optax.sgd(0.1))
          >>> params, opt_state = recipe.init(tx, {"w": jnp.float32(1.001)})
          >>> params, amp.export_params(params, opt_state)
          ({'w': Array(1, dtype=bfloat16)}, {'w': Array(1.001, dtype=float32)})
        """
        stored = self.cast_params(params, model=model)
        if isinstance(stored, nnx.Module):
            originals = nnx.state(params, nnx.Param)
            optimizer = nnx.Optimizer(stored, tx, wrt=nnx.Param)
            self._check_wrapped(optimizer.opt_state, nnx.state(stored, nnx.Param))
            begin_with(optimizer.opt_state, nnx.state(stored, nnx.Param), originals)
            return stored, optimizer
        opt_state = tx.init(stored)
        self._check_wrapped(opt_state, stored)
        return stored, begin_with(opt_state, stored, params)

    def export_params(self, params: Any, opt_state: Any = None) -> Any:
        """Returns `amp.export_params` of them in `save_dtype`: f32, unless asked.

        Example:
          >>> import jax.numpy as jnp, jmp_amp as amp
          >>> recipe = amp.recipe("O2", save_dtype="float16")
          >>> recipe.export_params({"w": jnp.float32(1.5)})
          {'w': Array(1.5, dtype=float16)}
        """
        return export_params(params, opt_state, self.save_dtype)

    def _check_wrapped(self, opt_state: Any, params: Any) -> None:
        is_half_model = any(TreeStructure.of(params).half)
        kept = bool(nodes_of(opt_state, WEIGHT_STATES))
        lacks = None
        if not nodes_of(opt_state, LossScaleState):
            lacks = "no loss scale"
        elif self.master_weights and is_half_model and not kept:
            lacks = "no masters"
        if lacks:
            raise ValueError(
                f"recipe({self.name!r}).init(tx, params): the optimizer has {lacks}: "
                "this recipe has not wrapped it. Use tx = recipe.wrap(tx) before."
            )

    def __str__(self) -> str:
        policy = self.policy
        default = policy.default if isinstance(policy, PolicyMap) else policy
        stored = default.param_dtype
        norms = F32 if self.keep_batchnorm_fp32 is not False else stored
        dtypes = (stored, default.compute_dtype, default.output_dtype, norms)
        value = _power(self.loss_scale.value)
        row = (
            *map(short_name, dtypes),
            "yes" if self.master_weights else "no",
            f"dynamic, {value}" if self.loss_scale.dynamic else value,
            str(self.num_losses),
        )
        columns = ("parameters", "compute", "outputs", "norms", "masters", "loss scale")
        note = "" if self.enabled else "Not enabled: f32 throughout."
        if isinstance(policy, PolicyMap):
            note += f"In f32: {', '.join(_pattern_name(p) for p, _ in policy.entries)}."
        table = Table("", (*columns, " losses"), [row], note)
        return as_text(f"{self.name} of {self.system}", [table], 100)

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)[2:]
            if getattr(self, field.name) != field.default
        ]
        return f"Recipe({self.name!r}, {', '.join(shown)})"


def recipe(name: str, half_dtype: DTypeLike | None = None, **overrides: Any) -> Recipe:
    """Returns the setup that another system calls by this name.

    ================== =========== ========== ========== ======= ======= ============
    name               system      parameters operations norms   masters scaler (f16)
    ================== =========== ========== ========== ======= ======= ============
    O0, float32        Apex, Keras f32        f32        f32     no      none
    O1                 Apex        f32        autocast   f32     no      apex
    O2                 Apex        half       autocast   f32     yes     apex
    O3                 Apex        half       autocast   half    no      none
    OD                 Paddle      f32        products   f32     no      paddle
    auto               MindSpore   f32        autocast   f32     no      mindspore
    fp16, bf16         Colossal-AI f32        autocast   f32     no      torch
    fp16_apex          Colossal-AI f32        autocast   f32     no      apex
    fp16_naive         Colossal-AI half       autocast   f32     yes     colossalai
    mixed_float16, ... Keras       f32        autocast   f32     no      keras
    ================== =========== ========== ========== ======= ======= ============

    Operations that need f32 have it in all of them: of O2 and O3, which run whole
    models in half elsewhere, the storage of parameters is kept. "products" has only
    matrix products and convolutions in half. There is no scaling in bf16 unless asked
    for. Sources: apex/amp/frontend.py; paddle/amp/auto_cast.py; mindspore/train/amp.py;
    colossalai/booster/mixed_precision; keras/src/dtype_policies.

    Args:
      name: from the table.
      half_dtype: float16 or bfloat16, if the name does not say; by default what this
        machine multiplies fastest, `amp.half_dtype()`.
      **overrides: one by one what these systems let one change; None is as if it were
        not given.

        * `loss_scale`: "dynamic", a number, or a `LossScale`; and the parameters of the
          scaler by its own names and ours (`init_scale`, `growth_interval`, ...).
        * `cast_model_type`: the dtype of parameters. `keep_batchnorm_fp32`: whether
          norms of a model that is cast stay f32. `master_weights` (or `master_weight`):
          whether the optimizer keeps f32 masters of one.
        * `cast_model_outputs`: the dtype of f32 outputs. `num_losses`: see
          `Recipe.loss_scales`. `enabled`: False is f32 throughout.
        * `custom_white_list`, `custom_black_list`: names of operations that run in half
          and in f32, those of Paddle or ours. `excluded_layers`: classes of modules, or
          path globs, in f32.
        * `master_grad`: gradients are f32 here, whatever this says. `save_dtype`: see
          `Recipe.export_params`.
        * `opt_level`: of "fp16_apex", "O0" to "O3".

    Raises:
      ValueError: if the name is unknown, or a property contradicts it.
      TypeError: if a property is unknown, or of the wrong kind.
      NotImplementedError: for "fp8".

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_amp as amp
      >>> recipe = amp.recipe("O1", half_dtype="float16", init_scale=2.0**10)
      >>> apply = recipe.autocast(lambda w, x: x @ w)
      >>> tx = recipe.wrap(optax.sgd(0.5))
      >>> w, opt_state = recipe.init(tx, jnp.ones((2, 1)))
      >>> loss_fn = lambda w: jnp.mean(apply(w, jnp.eye(2)) ** 2)
      >>> loss, grads = amp.value_and_grad(loss_fn)(w, loss_scale=opt_state)
      >>> updates, opt_state = tx.update(grads, opt_state, w)
      >>> loss, updates.tolist()
      (Array(1., dtype=float32), [[-0.5], [-0.5]])
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    call = _Call(name, half_dtype, given)
    row = call.row()
    properties = call.properties(row)
    return _put_together(call, row, properties)


class _Call(NamedTuple):
    """A call of `recipe`, to speak of it in errors."""

    name: Any
    half_dtype: Any
    overrides: Mapping[str, Any]

    def refuse(self, fact: str, key: str = "", error: type = ValueError) -> NoReturn:
        """Raises an error about this call, or about one of its overrides."""
        given = f", {key}={self.overrides[key]!r}" if key else ""
        raise error(f"recipe({self.name!r}{given}): {fact}")

    def row(self) -> _Row:
        """What the name means."""
        if self.name == "fp8":
            self.refuse(
                "there is no recipe for fp8 yet. In half precision there are "
                f"{', '.join(_RECIPES)}.",
                error=NotImplementedError,
            )
        if not isinstance(self.name, str) or self.name not in _RECIPES:
            known = f"There are {', '.join(_RECIPES)}."
            text = str(self.name)
            if text[:1] == "0" and (letter := f"O{text[1:]}") in _RECIPES:
                self.refuse(
                    "unknown recipe. It is the letter O, not the digit zero: "
                    f'"{letter}". {known}'
                )
            lower = {each.lower(): each for each in _RECIPES}
            close = difflib.get_close_matches(text.lower(), lower, n=1)
            hint = f'Did you mean "{lower[close[0]]}"? ' if close else ""
            self.refuse(f"unknown recipe. {hint}{known}")
        if self.name != "fp16_apex" or "opt_level" not in self.overrides:
            return _RECIPES[self.name]
        level = self.overrides["opt_level"]
        if level not in ("O0", "O1", "O2", "O3"):
            hint = "It is the letter O. " if str(level)[:1] == "0" else ""
            self.refuse(f"unknown level. {hint}There are O0, O1, O2, O3.", "opt_level")
        return _RECIPES[level]._replace(system="Colossal-AI", half=_F16)

    def scaler(self, row: _Row) -> str:
        """Whose scaler it is: Paddle has O1 and O2 as well, and names of its own."""
        of_paddle = set(parameters_of("paddle")) - set(parameters_of(row.scaler))
        is_level = row.system == "Apex"
        return "paddle" if is_level and of_paddle & set(self.overrides) else row.scaler

    def properties(self, row: _Row) -> dict[str, Any]:
        """The overrides by their one name; those of the scaler together."""
        scaler = parameters_of(self.scaler(row))
        properties = _PROPERTIES + ("opt_level",) * (self.name == "fp16_apex")
        found: dict[str, Any] = {_SCALER: {}}
        for key, value in self.overrides.items():
            ours = _ALIASES.get(key, key)
            if ours in found:
                self.refuse("given twice. Give it once.", key, TypeError)
            if ours in properties:
                found[ours] = value
            elif key in scaler:
                found[_SCALER][key] = value
            else:
                known = [*properties, *_ALIASES, *scaler]
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
        names = [key for key, ours in _ALIASES.items() if ours == name]
        return next((key for key in names if key in self.overrides), name)


def _put_together(call: _Call, row: _Row, properties: Mapping[str, Any]) -> Recipe:
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
    return Recipe(
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


def _check_levels(call: _Call, row: _Row, properties: Mapping[str, Any]) -> None:
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


def _half(call: _Call, row: _Row, properties: Mapping[str, Any]) -> np.dtype:
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
    row: _Row,
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
    return frozenset(str(_PADDLE_NAMES.get(name, name)) for name in names)


def _loss_scale(
    call: _Call, row: _Row, properties: Mapping[str, Any], half: np.dtype
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
    if is_dynamic or scaler or (row.scaled and half == _F16):
        return loss_scale_preset(call.scaler(row), **scaler)
    return no_loss_scale()


def _power(value: jax.Array) -> str:
    """A loss scale, as a power of two if it is one."""
    if isinstance(value, Tracer):
        return "traced"
    mantissa, exponent = math.frexp(float(value))
    is_power = mantissa == 0.5 and exponent != 1
    return f"2^{exponent - 1}" if is_power else f"{float(value):g}"


def _pattern_name(pattern: Any) -> str:
    return getattr(pattern, "__name__", str(pattern))
