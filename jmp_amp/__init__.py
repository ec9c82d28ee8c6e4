"""Automatic mixed precision for JAX and Flax.

* Policies: a `Policy` is three dtypes, `get_policy` reads its text, `half_dtype` is
  what this machine multiplies fastest. `Fp8` has the settings of 8-bit products. A
  `PolicyMap` gives Flax modules policies of their own; its patterns see a `ModuleInfo`.
  `cast_floating`, `cast_to_half`, `cast_to_full` cast by hand.
* Transforms: `autocast` returns a function in mixed precision. `with_policy` and
  `full_precision` give a part of it another policy; `cast_inputs` puts a kernel or a
  custom derivative rule into half precision.
* Loss scaling: `value_and_grad` and `grad` return true gradients of a scaled loss. The
  scale is a `LossScale`, made by `dynamic_loss_scale`, `static_loss_scale` or
  `no_loss_scale`; `loss_scale_preset` is that of another system,
  `loss_scale_from_torch` and `loss_scale_to_torch` read and write the state of torch's
  GradScaler.
* Training: `with_loss_scale` is an optimizer that skips steps which overflowed.
  `loss_scale_of`, `last_step_finite` and `metrics` read its state, `check_scale` raises
  after too many skips, `keep_if_finite` takes back what else a skipped step wrote;
  `all_finite` and `select_tree` are the parts of these. `cast_params` stores parameters
  in half precision, and `with_master_weights`, `with_kahan` and
  `with_stochastic_rounding` keep their small updates. `with_low_precision_state` stores
  moments in half or a quarter of the bytes. `export_params`, `export_opt_state` and
  `import_opt_state` are for checkpoints that any precision reads. `psum_in_f32` adds up
  half-precision gradients over devices in f32.
* Reports: `explain` returns a `Report` of what autocast decides, and why.
* Numerics: `diagnose` runs a function beside f32 and returns a `Diagnosis`: where a
  value first became infinite or NaN, what underflows, where the error is made, which
  loss scale and policy mend it. `tune` finds the cheapest `PolicyMap` within a bound on
  the gradient's error, and returns a `Tuning` of `Step` and `Tuned`.
* Recipes: `recipe` returns a `Recipe`, the whole setup by a word of another system,
  such as "O2". The module `jmp` runs code that was written for DeepMind's jmp.
* Plots: the module `plots` draws reports, diagnoses and tunings.

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
    from jmp_amp.policies.dtypes import cast_floating as cast_floating
    from jmp_amp.policies.dtypes import cast_to_full as cast_to_full
    from jmp_amp.policies.dtypes import cast_to_half as cast_to_half
    from jmp_amp.policies.dtypes import half_dtype as half_dtype
    from jmp_amp.policies.fp8 import Fp8 as Fp8
    from jmp_amp.policies.patterns import ModuleInfo as ModuleInfo
    from jmp_amp.policies.policy import Policy as Policy
    from jmp_amp.policies.policy import get_policy as get_policy
    from jmp_amp.policies.policy_map import PolicyMap as PolicyMap
    from jmp_amp.recipes import Recipe as Recipe
    from jmp_amp.recipes import recipe as recipe
    from jmp_amp.reports.explaining import explain as explain
    from jmp_amp.reports.report import Report as Report
    from jmp_amp.training.checkpoints import export_opt_state as export_opt_state
    from jmp_amp.training.checkpoints import export_params as export_params
    from jmp_amp.training.checkpoints import import_opt_state as import_opt_state
    from jmp_amp.training.collectives import all_finite as all_finite
    from jmp_amp.training.collectives import psum_in_f32 as psum_in_f32
    from jmp_amp.training.gradients import grad as grad
    from jmp_amp.training.gradients import value_and_grad as value_and_grad
    from jmp_amp.training.half_weights import with_kahan as with_kahan
    from jmp_amp.training.half_weights import with_master_weights as with_master_weights
    from jmp_amp.training.half_weights import (
        with_stochastic_rounding as with_stochastic_rounding,
    )
    from jmp_amp.training.loss_scale import LossScale as LossScale
    from jmp_amp.training.loss_scale import dynamic_loss_scale as dynamic_loss_scale
    from jmp_amp.training.loss_scale import no_loss_scale as no_loss_scale
    from jmp_amp.training.loss_scale import static_loss_scale as static_loss_scale
    from jmp_amp.training.loss_scale_state import check_scale as check_scale
    from jmp_amp.training.loss_scale_state import keep_if_finite as keep_if_finite
    from jmp_amp.training.loss_scale_state import last_step_finite as last_step_finite
    from jmp_amp.training.loss_scale_state import loss_scale_of as loss_scale_of
    from jmp_amp.training.loss_scale_state import metrics as metrics
    from jmp_amp.training.loss_scale_state import select_tree as select_tree
    from jmp_amp.training.low_precision_state import (
        with_low_precision_state as with_low_precision_state,
    )
    from jmp_amp.training.parameters import cast_params as cast_params
    from jmp_amp.training.presets import loss_scale_from_torch as loss_scale_from_torch
    from jmp_amp.training.presets import loss_scale_preset as loss_scale_preset
    from jmp_amp.training.presets import loss_scale_to_torch as loss_scale_to_torch
    from jmp_amp.training.skip_steps import with_loss_scale as with_loss_scale
    from jmp_amp.transform.autocasting import autocast as autocast
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
    "policies.dtypes": "cast_floating cast_to_full cast_to_half half_dtype",
    "policies.patterns": "ModuleInfo",
    "policies.fp8": "Fp8",
    "policies.policy": "Policy get_policy",
    "policies.policy_map": "PolicyMap",
    "recipes": "Recipe recipe",
    "reports.explaining": "explain",
    "reports.report": "Report",
    "training.checkpoints": "export_opt_state export_params import_opt_state",
    "training.gradients": "grad value_and_grad",
    "training.loss_scale": "LossScale dynamic_loss_scale no_loss_scale "
    "static_loss_scale",
    "training.collectives": "all_finite psum_in_f32",
    "training.low_precision_state": "with_low_precision_state",
    "training.skip_steps": "with_loss_scale",
    "training.parameters": "cast_params",
    "training.presets": "loss_scale_from_torch loss_scale_preset loss_scale_to_torch",
    "training.loss_scale_state": "check_scale keep_if_finite last_step_finite "
    "loss_scale_of metrics select_tree",
    "training.half_weights": "with_kahan with_master_weights with_stochastic_rounding",
    "transform.autocasting": "autocast",
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
