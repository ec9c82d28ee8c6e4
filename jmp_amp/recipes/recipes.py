"""One word for the whole setup, named as in other systems.

A recipe is plain data: a policy for `autocast`, the dtype that parameters are stored
in, whether the optimizer keeps masters, a loss scale. The meaning of a name is a row of
`levels.LEVELS`; `overrides` reads the options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from itertools import starmap
from typing import ParamSpec, TypeVar

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike

from jmp_amp.policies.arguments import warn
from jmp_amp.policies.dtypes import F32, PyTree, is_half, short_name
from jmp_amp.policies.policy import Policy
from jmp_amp.policies.policy_map import PolicyMap
from jmp_amp.recipes import recipe_tables
from jmp_amp.recipes.overrides import fields_of
from jmp_amp.reports.tables import as_text
from jmp_amp.training.checkpoints import export_params
from jmp_amp.training.half_weights import WEIGHT_STATES, begin_with, with_kahan
from jmp_amp.training.loss_scale import LossScale
from jmp_amp.training.loss_scale_state import LossScaleState
from jmp_amp.training.parameters import cast_params
from jmp_amp.training.skip_steps import with_loss_scale
from jmp_amp.training.structures import nodes_of
from jmp_amp.transform.autocasting import autocast

_Model = nn.Module | nnx.Module | None
P = ParamSpec("P")
R = TypeVar("R")


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

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Recipe):
            return self is other
        scales = map(jax.tree.leaves, (self.loss_scale, other.loss_scale))
        pairs = zip(*scales, strict=True)
        return self._settings() == other._settings() and all(starmap(_is_same, pairs))

    def __hash__(self) -> int:
        return hash(self._settings())

    def _settings(self) -> tuple[Hashable, ...]:
        """Returns all but the values of the loss scale."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        scale = jax.tree.structure(self.loss_scale)
        return tuple(scale if each is self.loss_scale else each for each in values)

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
        if self.cast_model_type in (None, F32) or _has_half(params):
            return
        leaves = jax.tree.leaves(params)
        if any(getattr(x, "dtype", None) == F32 and np.ndim(x) > 1 for x in leaves):
            warn(
                f"recipe({self.name!r}).wrap(tx).init(params): the parameters are f32, "
                f"and this recipe trains {short_name(self.cast_model_type)} ones. "
                "Begin with params, opt_state = recipe.init(tx, params)."
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
        norms_full = self.keep_batchnorm_fp32 is not False
        note = "" if self.enabled else "Not enabled: f32 throughout."
        table = recipe_tables.of_recipe(
            self.policy,
            self.loss_scale,
            norms="f32" if norms_full else None,
            masters="yes" if self.master_weights else "no",
            losses=str(self.num_losses),
            note=note,
        )
        return as_text(f"{self.name} of {self.system}", [table], 100)

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)[2:]
            if getattr(self, field.name) != field.default
        ]
        return f"Recipe({self.name!r}, {', '.join(shown)})"


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
    return Recipe(**fields_of(name, half_dtype, overrides))


def _has_half(params: PyTree) -> bool:
    leaves = jax.tree.leaves(params)
    return any(is_half(getattr(leaf, "dtype", None)) for leaf in leaves)


def _is_same(one: PyTree, other: PyTree) -> bool:
    """Whether two leaves of loss scales are equal, as far as their values are known."""
    if one is other:
        return True
    for each in (one, other):
        if isinstance(each, Tracer) or (
            isinstance(each, jax.Array) and each.is_deleted()
        ):
            return False
    a, b = np.asarray(one), np.asarray(other)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bool(np.all(a == b))
