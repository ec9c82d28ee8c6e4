"""Automatic mixed precision for JAX and Flax.

* Which dtypes: `Policy`, `get_policy`, `half_dtype`; matrix products of 8-bit floats:
  `Fp8`. By hand, `cast_floating`, `cast_to_half`, `cast_to_full`.
* A function in mixed precision: `autocast`. Parts of it with a policy of their own:
  `with_policy`, `full_precision`; kernels and custom rules in half: `cast_inputs`. What
  it decides, and why: `explain` returns a `Report`, `plots` draws it.
* What its numbers do: `diagnose` runs it beside f32 and returns a `Diagnosis`: where a
  value first became infinite or NaN, what underflows, where the error is made, the loss
  scale and the policy that mend it.
* One word for all of it: `recipe("O2")` returns a `Recipe`. Code written for DeepMind's
  jmp runs with `from jmp_amp import jmp`.
* Exceptions by Flax module: `PolicyMap`, whose patterns see a `ModuleInfo`. As few of
  them as a bound on the gradient's error needs: `tune` returns a `Tuning`.
* Parameters in half precision: `cast_params` puts them into the dtypes of their
  modules' policies. An optimizer that does not lose their small updates:
  `with_master_weights`, `with_kahan`, `with_stochastic_rounding`. One whose moments
  take half or a quarter of the bytes: `with_low_precision_state`. Checkpoints that any
  precision reads: `export_params`, `export_opt_state`, `import_opt_state`.
* Gradients of a scaled loss: `value_and_grad`, `grad`; the scale is a `LossScale`, made
  by `dynamic_loss_scale`, `static_loss_scale` or `no_loss_scale`, or as another system
  has it by `loss_scale_preset`; torch's own state comes and goes by
  `loss_scale_from_torch` and `loss_scale_to_torch`.
* An optimizer that skips steps which overflowed: `with_loss_scale`. Its state tells
  `loss_scale_of`, `last_step_finite` and `metrics`; `keep_if_finite` takes back what
  else a skipped step wrote, `check_scale` raises after too many; `all_finite` and
  `select_tree` are what they are made of.

Example:
  >>> import jax, jax.numpy as jnp, optax
  >>> import jmp_amp as amp
  >>> predict = amp.autocast(lambda w, x: jnp.tanh(x @ w), "mixed_float16")
  >>> tx = amp.with_loss_scale(optax.sgd(0.5), amp.dynamic_loss_scale(2.0**10))
  >>> @jax.jit
  ... def train_step(w, opt_state, x, y):
  ...     loss_fn = lambda w: jnp.mean((predict(w, x) - y) ** 2)
  ...     loss, grads = amp.value_and_grad(loss_fn)(w, loss_scale=opt_state)
  ...     updates, opt_state = tx.update(grads, opt_state, w)
  ...     return optax.apply_updates(w, updates), opt_state, loss
  >>> w, x, y = jnp.zeros(2), jnp.eye(2), jnp.array([0.5, -0.5])
  >>> w, opt_state, loss = train_step(w, tx.init(w), x, y)
  >>> w, loss
  (Array([ 0.25, -0.25], dtype=float32), Array(0.25, dtype=float32))
"""

import importlib
from typing import TYPE_CHECKING

# For type checkers. At run time a room is imported when one of its names is first used.
if TYPE_CHECKING:
    from jmp_amp import jmp as jmp
    from jmp_amp import plots as plots
    from jmp_amp.numerics.diagnose.diagnosing import diagnose as diagnose
    from jmp_amp.numerics.diagnose.diagnosis import Diagnosis as Diagnosis
    from jmp_amp.numerics.tune.tuner import tune as tune
    from jmp_amp.numerics.tune.tuning import Step as Step
    from jmp_amp.numerics.tune.tuning import Tuned as Tuned
    from jmp_amp.numerics.tune.tuning import Tuning as Tuning
    from jmp_amp.policies.casting import cast_floating as cast_floating
    from jmp_amp.policies.casting import cast_to_full as cast_to_full
    from jmp_amp.policies.casting import cast_to_half as cast_to_half
    from jmp_amp.policies.dtypes import half_dtype as half_dtype
    from jmp_amp.policies.fp8 import Fp8 as Fp8
    from jmp_amp.policies.patterns import ModuleInfo as ModuleInfo
    from jmp_amp.policies.policy import Policy as Policy
    from jmp_amp.policies.policy import get_policy as get_policy
    from jmp_amp.policies.policy_map import PolicyMap as PolicyMap
    from jmp_amp.recipes.recipes import Recipe as Recipe
    from jmp_amp.recipes.recipes import recipe as recipe
    from jmp_amp.reports.explaining import explain as explain
    from jmp_amp.reports.report import Report as Report
    from jmp_amp.training.checkpoints import export_opt_state as export_opt_state
    from jmp_amp.training.checkpoints import export_params as export_params
    from jmp_amp.training.checkpoints import import_opt_state as import_opt_state
    from jmp_amp.training.collectives import psum_in_f32 as psum_in_f32
    from jmp_amp.training.finite import all_finite as all_finite
    from jmp_amp.training.finite import select_tree as select_tree
    from jmp_amp.training.gradients import grad as grad
    from jmp_amp.training.gradients import value_and_grad as value_and_grad
    from jmp_amp.training.loss_scale import LossScale as LossScale
    from jmp_amp.training.loss_scale import dynamic_loss_scale as dynamic_loss_scale
    from jmp_amp.training.loss_scale import no_loss_scale as no_loss_scale
    from jmp_amp.training.loss_scale import static_loss_scale as static_loss_scale
    from jmp_amp.training.low_precision import (
        with_low_precision_state as with_low_precision_state,
    )
    from jmp_amp.training.optimizers import with_loss_scale as with_loss_scale
    from jmp_amp.training.parameters import cast_params as cast_params
    from jmp_amp.training.presets import loss_scale_from_torch as loss_scale_from_torch
    from jmp_amp.training.presets import loss_scale_preset as loss_scale_preset
    from jmp_amp.training.presets import loss_scale_to_torch as loss_scale_to_torch
    from jmp_amp.training.states import check_scale as check_scale
    from jmp_amp.training.states import keep_if_finite as keep_if_finite
    from jmp_amp.training.states import last_step_finite as last_step_finite
    from jmp_amp.training.states import loss_scale_of as loss_scale_of
    from jmp_amp.training.states import metrics as metrics
    from jmp_amp.training.weights import with_kahan as with_kahan
    from jmp_amp.training.weights import with_master_weights as with_master_weights
    from jmp_amp.training.weights import (
        with_stochastic_rounding as with_stochastic_rounding,
    )
    from jmp_amp.transform.interpreter import autocast as autocast
    from jmp_amp.transform.markers import cast_inputs as cast_inputs
    from jmp_amp.transform.markers import full_precision as full_precision
    from jmp_amp.transform.markers import with_policy as with_policy

# The names that each room has; those without a room are rooms themselves.
_NAMES = {
    "": "jmp plots",
    "numerics.diagnose.diagnosing": "diagnose",
    "numerics.diagnose.diagnosis": "Diagnosis",
    "numerics.tune.tuner": "tune",
    "numerics.tune.tuning": "Step Tuned Tuning",
    "policies.casting": "cast_floating cast_to_full cast_to_half",
    "policies.dtypes": "half_dtype",
    "policies.fp8": "Fp8",
    "policies.patterns": "ModuleInfo",
    "policies.policy": "Policy get_policy",
    "policies.policy_map": "PolicyMap",
    "recipes.recipes": "Recipe recipe",
    "reports.explaining": "explain",
    "reports.report": "Report",
    "training.checkpoints": "export_opt_state export_params import_opt_state",
    "training.finite": "all_finite select_tree",
    "training.gradients": "grad value_and_grad",
    "training.loss_scale": "LossScale dynamic_loss_scale no_loss_scale "
    "static_loss_scale",
    "training.collectives": "psum_in_f32",
    "training.low_precision": "with_low_precision_state",
    "training.optimizers": "with_loss_scale",
    "training.parameters": "cast_params",
    "training.presets": "loss_scale_from_torch loss_scale_preset loss_scale_to_torch",
    "training.states": "check_scale keep_if_finite last_step_finite loss_scale_of "
    "metrics",
    "training.weights": "with_kahan with_master_weights with_stochastic_rounding",
    "transform.interpreter": "autocast",
    "transform.markers": "cast_inputs full_precision with_policy",
}
__version__ = "0.1.0"
_ROOMS = {name: room for room, names in _NAMES.items() for name in names.split()}
__all__ = list(_ROOMS)  # pyright: ignore[reportUnsupportedDunderAll]

_SCALER = "with_loss_scale(optimizer, dynamic_loss_scale()), around an optax optimizer"
# Names of torch, Apex, Flax and jmp, and what there is in their place.
_ELSEWHERE = {
    "GradScaler": _SCALER,
    "DynamicScale": _SCALER,
    "scale_loss": "value_and_grad(loss_fn)(params, loss_scale=opt_state)",
    "initialize": 'recipe("O1")',
    "custom_fwd": "cast_inputs(fn)",
    "custom_bwd": "cast_inputs(fn), for the function with its derivative",
    "DynamicLossScale": "dynamic_loss_scale(), or jmp_amp.jmp for the API of jmp",
    "StaticLossScale": "static_loss_scale(2.0**16), or jmp_amp.jmp for the API of jmp",
    "NoOpLossScale": "no_loss_scale(), or jmp_amp.jmp for the API of jmp",
}


# A type checker that saw it would take every name for one of the package.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _ROOMS:
            remedy = f". Use {_ELSEWHERE[name]}." if name in _ELSEWHERE else ""
            told = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(told + remedy)
        room = _ROOMS[name]
        module = importlib.import_module(f"{__name__}.{room or name}")
        value = getattr(module, name) if room else module
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
