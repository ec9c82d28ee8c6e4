"""One word for the whole setup, named as in other systems.

A recipe is plain data: a policy for `autocast`, the dtype that parameters are stored
in, whether the optimizer keeps masters, a loss scale. The meaning of a name is a row of
a table; the options of the other systems override its columns.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike

from jmp_amp.plan.tables.operations import ARITHMETIC
from jmp_amp.policies import dtypes
from jmp_amp.policies.arguments import checked_flag, quoting, warn
from jmp_amp.policies.dtypes import (
    BF16,
    F16,
    F32,
    PyTree,
    floating_dtype,
    is_half,
    short_name,
)
from jmp_amp.policies.fp8 import Fp8
from jmp_amp.policies.patterns import (
    GlobIfPresent,
    Pattern,
    attend_of_embedding,
)
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap, as_policy_map
from jmp_amp.reports.tables import Table, as_text, scale_text
from jmp_amp.training.checkpoints import export_params
from jmp_amp.training.half_weights import WEIGHT_STATES, begin_with, with_kahan
from jmp_amp.training.loss_scale import LossScale, no_loss_scale, static_loss_scale
from jmp_amp.training.loss_scale_state import LossScaleState
from jmp_amp.training.parameters import cast_params
from jmp_amp.training.presets import loss_scale_preset, parameters_of
from jmp_amp.training.skip_steps import with_loss_scale
from jmp_amp.training.structures import nodes_of
from jmp_amp.transform.autocasting import autocast

_Model = nn.Module | nnx.Module | None
P = ParamSpec("P")
R = TypeVar("R")
_FULL = Policy(F32, F32, F32)


class _Row(NamedTuple):
    """The meaning of a name.

    Attributes:
      system: the system that the name is from.
      scaler: the system whose loss scaler it has, for `loss_scale_preset`.
      how: "full" is f32 throughout. Half precision with f32 parameters is decided by
        "operation", for "products" only, or with "fp8" products. Half parameters have
        "masters" and f32 norms, or are "rounded".
      half: the half dtype, if the name says which.
    """

    system: str
    scaler: str
    how: str
    half: np.dtype | None = None


# Sources: apex/amp/frontend.py; paddle/amp/auto_cast.py and amp_lists.py;
# mindspore/train/amp.py; colossalai/booster/mixed_precision; keras/src/dtype_policies.
_ROWS = {
    "O0": _Row("Apex", "apex", "full"),
    "O1": _Row("Apex", "apex", "operation"),
    "O2": _Row("Apex", "apex", "masters"),
    "O3": _Row("Apex", "apex", "rounded"),
    "OD": _Row("Paddle", "paddle", "products"),
    "auto": _Row("MindSpore", "mindspore", "operation"),
    "fp16": _Row("Colossal-AI", "torch", "operation", F16),
    "bf16": _Row("Colossal-AI", "torch", "operation", BF16),
    "fp8": _Row("Colossal-AI", "torch", "fp8", BF16),
    "fp16_apex": _Row("Colossal-AI", "apex", "operation", F16),
    "fp16_naive": _Row("Colossal-AI", "colossalai", "masters", F16),
    "mixed_float16": _Row("Keras", "keras", "operation", F16),
    "mixed_bfloat16": _Row("Keras", "keras", "operation", BF16),
    "float32": _Row("Keras", "keras", "full"),
}
# Words that are close to the spelling of another name than the one they mean.
_MEANT = {
    **dict.fromkeys(("float16", "f16", "half", "torch", "mixed"), "fp16"),
    **dict.fromkeys(("fp32", "f32", "none", "no"), "O0"),
    **{"bfloat16": "bf16", "float8": "fp8", "f8": "fp8", "e4m3": "fp8"},
}
# What makes logits, and runs in bf16 in "fp8". In 8 bits it makes the error of the
# gradient of a small GPT half as large again, .068 in place of .045.
_HEADS: tuple[Pattern, ...] = (
    *map(GlobIfPresent, ("**/lm_head", "**/head", "**/logits", "**/classifier")),
    attend_of_embedding,
)
# Paddle's names of operations that have another name here.
_PADDLE_NAMES = {
    **dict.fromkeys(("conv2d", "conv3d", "conv1d"), "conv_general_dilated"),
    **dict.fromkeys(("matmul", "matmul_v2", "bmm", "einsum"), "dot_general"),
    **{f"elementwise_{name}": name for name in ("add", "sub", "mul", "div", "pow")},
    **{"sigmoid": "logistic", "erfinv": "erf_inv", "reduce_mean": "mean"},
}
_FLAGS = (
    "keep_batchnorm_fp32 master_weights patch_functions enabled master_grad".split()
)
_DTYPES = "cast_model_type cast_model_outputs save_dtype".split()
_OPTIONS = (
    *("loss_scale", "num_losses", "saved", "reduce_dtype", *_FLAGS, *_DTYPES),
    *("custom_white_list", "custom_black_list", "excluded_layers"),
)
_ALIASES = {
    "master_weight": "master_weights",
    "patch_torch_functions": "patch_functions",
}
_LEVELS = ["O0", "O1", "O2", "O3"]
_BY_OPERATION = ("operation", "products", "fp8")
# What to write in place of options that are not here.
_ELSEWHERE = {
    **dict.fromkeys(
        ("level", "opt_level", "amp_level"),
        'the level is the name. Write recipe("O2", ...)',
    ),
    **dict.fromkeys(
        ("verbosity", "verbose", "log_num_zeros_in_grad"),
        "nothing is printed here. Leave it out: amp.metrics tells more",
    ),
    "target": "a recipe is for every machine. Write recipe.autocast(fn, target=...)",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A setup for training in mixed precision; `recipe` makes it.

    Attributes:
      name: the name that `recipe` was given.
      system: the system that the name is from.
      policy: for `autocast`; a `PolicyMap` where layers are excluded.
      loss_scale: the first `LossScale`; the scale 1 where there is no scaling.
      cast_model_type: the dtype of parameters; None leaves them as they are.
      keep_batchnorm_fp32: whether norm parameters stay f32 then.
      master_weights: whether the optimizer keeps the missing digits of parameters.
      cast_model_outputs: the dtype of f32 outputs, if not f32.
      num_losses: the number of `loss_scales`.
      enabled: False is f32 throughout.
      save_dtype: the dtype of `export_params`.

    Example:
      >>> import jmp_amp as amp
      >>> print(amp.recipe("O2", half_dtype="float16"))
      O2 of Apex
      <BLANKLINE>
       parameters   compute   outputs   norms   masters   loss scale       losses
      ────────────────────────────────────────────────────────────────────────────
       f16          f16       f32       f32     yes       dynamic, 2**16        1
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
        """One loss scale for each of `num_losses` losses whose gradients are added up.

        Each loss has its scale adjusted: `scale.adjust(all_finite(its_grads))`.
        """
        return (self.loss_scale,) * self.num_losses

    def _settings(self) -> tuple[Any, ...]:
        """Returns all fields; of a loss scale the bytes, as far as they are known."""
        leaves, structure = jax.tree.flatten(self.loss_scale)
        values = [
            id(x)
            if isinstance(x, Tracer) or x.is_deleted()
            else np.asarray(x).tobytes()
            for x in map(jnp.asarray, leaves)
        ]
        return tuple((vars(self) | {"loss_scale": (structure, *values)}).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash((self.name, self.policy, self.num_losses, self.save_dtype))

    def autocast(
        self, fn: Callable[P, R], *, target: str | None = None
    ) -> Callable[P, R]:
        """Returns `amp.autocast(fn, policy)`; `fn` is a function or an nnx module.

        `target` is that of `amp.autocast`: "auto" is JAX's default backend.

        Example:
          >>> import jax.numpy as jnp, jmp_amp as amp
          >>> amp.recipe("O1").autocast(jnp.matmul)(jnp.eye(2), jnp.eye(2)).dtype
          dtype('float32')
        """
        return autocast(fn, self.policy, enabled=self.enabled, target=target)

    def wrap(
        self,
        tx: optax.GradientTransformation | optax.MultiSteps,
        *,
        axis_name: str | Sequence[str] | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Returns an optimizer with the recipe's masters and loss scale around it.

        Masters are those of `with_kahan`: the 16 bits that a half-precision parameter
        lacks of a float32, 4 bytes together.

        Args:
          tx: an optimizer or a chain.
          axis_name: as for `with_loss_scale`.

        Example:
          >>> import jax.numpy as jnp, jmp_amp as amp, optax
          >>> tx = amp.recipe("bf16").wrap(optax.sgd(0.1))
          >>> amp.loss_scale_of(tx.init(jnp.zeros(2)))
          LossScale(value=1.0, dynamic=False)
        """
        inner = with_kahan(tx) if self.master_weights else tx
        wrapped = with_loss_scale(inner, self.loss_scale, axis_name=axis_name)

        def init_fn(params: PyTree) -> PyTree:
            self._warn_of_f32(params)
            return wrapped.init(params)

        return optax.GradientTransformationExtraArgs(init_fn, wrapped.update)

    def cast_params(self, params: PyTree, *, model: _Model = None) -> PyTree:
        """Returns parameters in the dtypes that the recipe stores them in.

        Args:
          params: as for `amp.cast_params`.
          model: likewise.

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
        self, tx: optax.GradientTransformation, params: PyTree, *, model: _Model = None
    ) -> tuple[PyTree, PyTree]:
        """Returns parameters and the state of the optimizer to begin with.

        Parameters are cast as `cast_params` does; masters begin with the digits of the
        f32 originals (copies that `tx` itself keeps, as schedule-free optimizers do,
        begin with the rounded ones). Arrays that stay f32 are not copied: a step that
        is given them as donated arguments takes them from the caller too.

        Args:
          tx: an optimizer that `wrap` returned.
          params: the f32 parameters; or an nnx module.
          model: as for `amp.cast_params`.

        Returns:
          `(params, opt_state)`; for an nnx module a new `(model, nnx.Optimizer)`.

        Raises:
          TypeError: if `tx` is no optimizer.
          ValueError: if `tx` has not been wrapped; if there are half-precision
            parameters that the recipe would train without masters.

        Example:
          >>> import jax, jax.numpy as jnp, jmp_amp as amp, optax
          >>> recipe = amp.recipe("O2", "bf16")
          >>> tx = recipe.wrap(optax.sgd(0.1))
          >>> params, opt_state = recipe.init(tx, {"w": jnp.float32(1.001)})
          >>> params, amp.export_params(params, opt_state)
          ({'w': Array(1, dtype=bfloat16)}, {'w': Array(1.001, dtype=float32)})
        """
        call = f"recipe({self.name!r}).init(tx, params)"
        if not isinstance(tx, optax.GradientTransformation):
            raise TypeError(
                f"{call}: tx is of {type(tx)}. Give the optimizer first, as "
                "recipe.wrap(tx) returned it."
            )
        stored = self.cast_params(params, model=model)
        if not isinstance(stored, nnx.Module):
            opt_state = tx.init(stored)
            self._check_wrapped(opt_state, stored, call)
            return stored, begin_with(opt_state, stored, params)
        if stored is params:  # Training must not change the caller's module.
            stored = nnx.clone(params)
        optimizer = nnx.Optimizer(stored, tx, wrt=nnx.Param)
        state = nnx.state(stored, nnx.Param)
        self._check_wrapped(optimizer.opt_state, state, call)
        begin_with(optimizer.opt_state, state, nnx.state(params, nnx.Param))
        return stored, optimizer

    def export_params(self, params: PyTree, opt_state: PyTree = None) -> PyTree:
        """Returns `amp.export_params(params, opt_state, save_dtype)`.

        Raises:
          ValueError: if there are masters, and no state that has them.

        Example:
          >>> import jax.numpy as jnp, jmp_amp as amp
          >>> recipe = amp.recipe("O2", save_dtype="float16")
          >>> recipe.export_params({"w": jnp.float32(1.5)})
          {'w': Array(1.5, dtype=float16)}
        """
        leaves = nnx.state(params) if isinstance(params, nnx.Module) else params
        if opt_state is None and self.master_weights and _has_half(leaves):
            raise ValueError(
                f"recipe({self.name!r}).export_params(params): the optimizer keeps "
                "what half-precision parameters lack. Give its state too."
            )
        return export_params(params, opt_state, self.save_dtype)

    def _warn_of_f32(self, params: PyTree) -> None:
        """Warns if half-precision parameters were forgotten: none is, and one may be.

        Norms, which stay f32, have no matrix.
        """
        leaves = jax.tree.leaves(params)
        is_f32 = any(getattr(x, "dtype", 0) == F32 and np.ndim(x) > 1 for x in leaves)
        if is_half(self.cast_model_type) and is_f32 and not _has_half(params):
            warn(
                f"recipe({self.name!r}).wrap(tx).init(params): the parameters are f32, "
                "and this recipe trains half ones. Begin with params, opt_state = "
                "recipe.init(tx, params)."
            )

    def _check_wrapped(self, opt_state: PyTree, params: PyTree, call: str) -> None:
        loses = _has_half(params) and not nodes_of(opt_state, WEIGHT_STATES)
        if loses and self.cast_model_type is None:
            raise ValueError(
                f"{call}: its parameters are f32, but some of these are half, and "
                "would lose small updates. Give f32 ones: amp.export_params(params, "
                "opt_state) of the run that they come from, or "
                "amp.cast_to_full(params). O2 stores half ones."
            )
        is_scaled = bool(nodes_of(opt_state, LossScaleState))
        if not is_scaled or (self.master_weights and loses):
            lacks = "no masters" if is_scaled else "no loss scale"
            raise ValueError(
                f"{call}: the optimizer has {lacks}: this recipe has not wrapped it. "
                "Use tx = recipe.wrap(tx) before."
            )

    def __str__(self) -> str:
        policies, value = as_policy_map(self.policy, ""), self.loss_scale.value
        policy = policies.default
        scale = "traced" if isinstance(value, Tracer) else scale_text(float(value))
        stored = short_name(policy.param_dtype)
        products = "" if policy.matmul is None else ", products fp8"
        row = {
            "parameters": stored,
            "compute": f"{short_name(policy.compute_dtype)}{products}",
            "outputs": short_name(policy.output_dtype),
            "norms": stored if self.keep_batchnorm_fp32 is False else "f32",
            "masters": "yes" if self.master_weights else "no",
            "loss scale": f"dynamic, {scale}" if self.loss_scale.dynamic else scale,
            "losses": str(self.num_losses),
        }
        if policy.full >= ARITHMETIC - policy.low:
            # OD names nearly all operations, which its name says.
            policy = dataclasses.replace(policy, full=policy.full - ARITHMETIC)
        note = "" if self.enabled else "Not enabled: f32 throughout."
        # The row says all of a policy of three dtypes.
        plain = Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
        if policies.entries or policy != plain:
            note = f"Policy: {PolicyMap(policy, policies.entries)}"
        if policy.reduce_dtype is not None:
            note += "\nGradients are summed in f32 (of half: amp.value_and_grad)."
        table = Table("", tuple(row), [tuple(row.values())], ("losses",), note)
        return as_text(f"{self.name} of {self.system}", [table], 100)


def recipe(
    name: str, half_dtype: DTypeLike | None = None, **overrides: object
) -> Recipe:
    """Returns the setup that has this name in another system.

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
    fp8                Colossal-AI f32        fp8        f32     no      torch
    fp16_apex          Colossal-AI f32        autocast   f32     no      apex
    fp16_naive         Colossal-AI half       autocast   f32     yes     colossalai
    mixed_float16, ... Keras       f32        autocast   f32     no      keras
    ================== =========== ========== ========== ======= ======= ============

    Operations that need f32 run in f32 in all of them: O2 and O3 run whole models in
    half elsewhere, but here they only store parameters in half. "products": only matrix
    products and convolutions run in half. There is no loss scale for bf16 by default.
    "fp16" and "bf16" are mixed precision here; as policies, `get_policy("fp16")`, they
    are half throughout, parameters and results too. "fp8" is "bf16" with matrix
    products of 8-bit floats, see `amp.Fp8`; heads (`**/lm_head`, `**/head`,
    `**/logits`, `**/classifier`, `attend` of an embedding) stay bf16. Sources:
    apex/amp/frontend.py; paddle/amp/auto_cast.py; mindspore/train/amp.py;
    colossalai/booster/mixed_precision; keras/src/dtype_policies.

    Args:
      name: from the table.
      half_dtype: float16 or bfloat16, if the name does not say which; by default
        `amp.half_dtype()`.
      **overrides: the options of these systems; None counts as not given.

        * `loss_scale`: "dynamic", a number, or a `LossScale`. The parameters of the
          scaler, by the system's names or ours (`init_scale`, `growth_interval`, ...),
          make it dynamic.
        * `cast_model_type`: the dtype of parameters. If it is half,
          `keep_batchnorm_fp32`: whether norms stay f32; `master_weights` (or
          `master_weight`): whether the optimizer keeps f32 masters.
        * `cast_model_outputs`: the dtype of f32 outputs. `num_losses`: see
          `Recipe.loss_scales`. `enabled`: False is f32 throughout, nothing is scaled.
        * `custom_white_list`, `custom_black_list`: operations that run in half and in
          f32, by Paddle's names or ours. `excluded_layers`: classes of modules, or path
          globs, in f32. In "fp8" a head inside of such a class stays bf16; inside of a
          glob it is f32 too.
        * `saved`: what is kept for the backward pass, see `Policy`: "all", "auto" or
          "least". `reduce_dtype`: "float32" sums gradients over devices in f32, those
          of half parameters under `amp.value_and_grad`.
        * `master_grad`: gradients are f32 here, whatever this says. `save_dtype`: see
          `Recipe.export_params`.
        * `opt_level`: of "fp16_apex", "O0" to "O3".

    Raises:
      ValueError: if the name is unknown, or a property contradicts it.
      TypeError: if a property is unknown, or of the wrong kind.

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
    row, given, scaler = _read(name, overrides)
    half = _half(name, row, half_dtype, given.get("cast_model_type"))
    by_how = {"full": F32, "masters": half, "rounded": half}
    stored = given.get("cast_model_type", by_how.get(row.how))
    masters = {"masters": True, "rounded": False, "full": False}.get(row.how)
    losses = given.get("num_losses", 1)
    if isinstance(losses, bool) or not isinstance(losses, int) or losses < 1:
        call = f"recipe({name!r}, num_losses={losses!r})"
        raise ValueError(f"{call}: a number of losses is an int, at least 1.")
    found = Recipe(
        name,
        row.system,
        _policy(name, row, half, stored, given),
        _loss_scale(name, row, half, given, scaler),
        stored,
        given.get(
            "keep_batchnorm_fp32", {"rounded": False, "masters": True}.get(row.how)
        ),
        # Parameters that are f32 need no masters.
        given.get("master_weights", masters) and is_half(stored),
        given.get("cast_model_outputs"),
        losses,
        save_dtype=given.get("save_dtype", F32),
    )
    if given.get("enabled", True):
        return found
    off: dict[str, Any] = {"policy": _FULL, "loss_scale": no_loss_scale()}
    off |= {"cast_model_type": F32, "cast_model_outputs": None, "master_weights": False}
    return dataclasses.replace(found, enabled=False, **off)


def _read(
    name: str, overrides: Mapping[str, object]
) -> tuple[_Row, dict[str, Any], dict[str, Any]]:
    """Returns the meaning of a name, the options and the parameters of the scaler.

    Options are by their first names; those that are None are left out. Raises if one is
    unknown or contradicts the name, as in Apex.
    """
    asked = {key: value for key, value in overrides.items() if value is not None}
    row = _row(name, asked.pop("opt_level", "O1") if name == "fp16_apex" else None)
    # Paddle has O1 and O2 as well, and its own names for the scaler.
    of_paddle = set(parameters_of("paddle")) - set(parameters_of(row.scaler))
    if row.system == "Apex" and of_paddle & asked.keys():
        row = row._replace(scaler="paddle")
    parameters, by_operation = parameters_of(row.scaler), row.how in _BY_OPERATION
    given: dict[str, Any] = {}
    for key, value in asked.items():
        call, option = f"recipe({name!r}, {key}={value!r})", _ALIASES.get(key, key)
        if option in given:
            raise TypeError(f"{call}: given twice. Give it once.")
        if option not in (*_OPTIONS, *parameters):
            raise TypeError(f"{call}: {_remedy(key, parameters)}")
        if option in _FLAGS:  # words in Apex
            value = {"True": True, "False": False}.get(str(value), value)
            value = checked_flag(value, call)
        if option in _DTYPES:
            value = floating_dtype(cast(DTypeLike, value), call)
        given[option] = value
        is_wrong = {
            "patch_functions": value is not by_operation,
            "keep_batchnorm_fp32": by_operation,
            "master_weights": by_operation,
            "cast_model_type": option in _DTYPES
            and value != F32
            and (by_operation or not is_half(value)),
        }
        if is_wrong.get(option):
            raise ValueError(f"{call}: {_STORES_F32 if by_operation else _STORES_HALF}")
    return row, given, {key: given.pop(key) for key in parameters if key in given}


_STORES_F32 = (
    "its parameters are f32, norms too, and need no masters: half precision is decided "
    "operation by operation. Use O2 or O3 for half parameters, O0 for f32 throughout."
)
_STORES_HALF = (
    "its parameters are float16, bfloat16 or float32; half precision operation by "
    "operation is another recipe. Use O1."
)


def _row(name: object, level: object) -> _Row:
    """Returns the meaning of a name; "fp16_apex" is one of the levels of Apex."""
    is_level = level is not None
    asked, names = (level, _LEVELS) if is_level else (name, [*_ROWS])
    if isinstance(asked, str) and asked in names:
        row = _ROWS[asked]
        return row._replace(system="Colossal-AI", half=F16) if is_level else row
    lower = {each.lower(): each for each in names}
    word = str(asked).lower()
    close = difflib.get_close_matches(word, lower, n=1)
    meant = _MEANT.get(word) or (lower[close[0]] if close else "")
    hint = f'Did you mean "{meant}"? ' if meant else ""
    if word[:1] == "0" and f"O{word[1:]}" in names:
        hint = f'It is the letter O, not the digit zero: "O{word[1:]}". '
    what = f"level {level!r}" if is_level else "recipe"
    fact = f"unknown {what}. {hint}There are {', '.join(names)}."
    raise ValueError(f"recipe({name!r}): {fact}")


def _remedy(key: str, parameters: Sequence[str]) -> str:
    """Returns what to write in place of an option that recipes do not have."""
    if key in _ELSEWHERE:
        return f"{_ELSEWHERE[key]}."
    known = ["half_dtype", *_OPTIONS, *_ALIASES, *parameters]
    near = difflib.get_close_matches(key, known, 1, 0.8)
    near = near or difflib.get_close_matches(key, known, 3, 0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"unknown property. {hint}There are {', '.join(known)}."


def _half(
    name: str, row: _Row, given: DTypeLike | None, stored: np.dtype | None
) -> np.dtype:
    """Returns the half dtype: the name's, the call's, the model's or the machine's."""
    call = f"recipe({name!r}, half_dtype={given!r})"
    said = {
        "the name": row.half,
        "half_dtype": None if given is None else floating_dtype(given, call),
        "cast_model_type": stored if is_half(stored) else None,
    }
    said = {where: dtype for where, dtype in said.items() if dtype is not None}
    if len(set(said.values())) > 1 or not all(map(is_half, said.values())):
        found = [f"{short_name(dtype)} by {where}" for where, dtype in said.items()]
        fact = f"the half dtype is {' and '.join(found)}"
        if len(said) == 1:
            fact = f"half_dtype={given!r} is no half dtype"
        raise ValueError(f"{call}: {fact}. Give float16 or bfloat16, in one place.")
    return next(iter(said.values()), None) or dtypes.half_dtype()


def _policy(
    name: str,
    row: _Row,
    half: np.dtype,
    stored: np.dtype | None,
    given: Mapping[str, Any],
) -> Policy | PolicyMap:
    """Returns the policy, with the operations and layers that are moved."""
    with quoting(f"recipe({name!r})"):
        policy = Policy(
            stored or F32,
            half if row.how in _BY_OPERATION or is_half(stored) else F32,
            given.get("cast_model_outputs", F32),
            matmul=Fp8() if row.how == "fp8" else None,
            saved=given.get("saved"),
            reduce_dtype=given.get("reduce_dtype"),
        )
    for option, to in {"custom_white_list": "low", "custom_black_list": "full"}.items():
        with quoting(f"recipe({name!r}, {option}={given.get(option)!r})"):
            found = getattr(Policy(**{to: given.get(option, ())}), to)
            names = {_PADDLE_NAMES.get(each, each) for each in found}
            policy = dataclasses.replace(policy, **{to: names})
    if row.how == "products":
        policy = policy.with_full(*(ARITHMETIC - policy.low))
    layers = given.get("excluded_layers", ())
    if isinstance(layers, str | type) or not isinstance(layers, Iterable):
        layers = (layers,)
    entries: dict[Any, Policy] = dict.fromkeys(layers, _FULL)
    if row.how == "fp8":
        # Heads in what is excluded are excluded too, else they would stay bf16.
        globs = [each for each in entries if isinstance(each, str) and each != "**"]
        inside = [GlobIfPresent(f"{each}/**".lstrip("/")) for each in globs]
        heads = [each for each in _HEADS if each not in entries]
        of_heads = dict.fromkeys(heads, dataclasses.replace(policy, matmul=None))
        entries = of_heads | entries | dict.fromkeys(inside, _FULL)
    return PolicyMap(policy, entries) if entries else policy


def _loss_scale(
    name: str,
    row: _Row,
    half: np.dtype,
    given: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> LossScale:
    asked = given.get("loss_scale")
    is_scaled = half == F16 and row.how not in ("full", "rounded")
    if asked is None and not is_scaled and not parameters:
        return no_loss_scale()
    if asked is None or (isinstance(asked, str) and asked == "dynamic"):
        with quoting(f"recipe({name!r})"):
            return loss_scale_preset(row.scaler, **parameters)
    call = f"recipe({name!r}, loss_scale={asked!r})"
    if parameters:
        fact = "is of a dynamic scale, which this is not. Leave one of them out."
        raise TypeError(f"{call}: {next(iter(parameters))} {fact}")
    if isinstance(asked, LossScale):
        return asked
    try:
        if isinstance(asked, bool) or np.ndim(asked):
            raise TypeError
        return static_loss_scale(float(asked))
    except (TypeError, ValueError) as error:
        fact = 'neither "dynamic" nor a positive number, nor a LossScale.'
        raise type(error)(f"{call}: {fact}") from None


def _has_half(params: PyTree) -> bool:
    leaves = jax.tree.leaves(params)
    return any(is_half(getattr(leaf, "dtype", None)) for leaf in leaves)
