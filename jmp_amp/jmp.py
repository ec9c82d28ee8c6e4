"""jmp's API, made of this library's parts: `from jmp_amp import jmp`.

Code written for jmp (https://github.com/google-deepmind/jmp, version 0.0.4) runs with
no other change. Results differ where jmp is wrong:

* Gradients are unscaled in f32, and f16 and bf16 ones come back f32. A half-precision
  loss is scaled in f32 as well. Integer, fp8 and non-array leaves are left alone.
* A dynamic scale is a strong f32 and its counter a strong i32. All its settings survive
  `jit`, `tree_map` and checkpoints, `min_loss_scale` too.
* A dynamic scale never passes 2**126 (jmp's reaches 2**127, whose reciprocal is 0 to
  XLA) nor falls below 2**-126. A scale of inf, NaN or 0 is refused, and
  `jnp.float16(2**16)` is inf.
* `get_policy` takes spaces, any case and fp8 names and refuses a key given twice.
  Policies hold numpy dtypes (`np.dtype("float16")`, equal to `jnp.float16`) and print
  f32 as `f32`, not `full`.
* Casts leave fp8 values alone: they mean nothing without their scale.

`half_dtype()` is jmp's: f16 except on TPUs, on which loops that scale their loss count.
`jmp_amp.half_dtype` knows newer GPUs.

A step that overflowed must be undone whole: optimizer state, batch statistics and all,
not the parameters alone. `jmp_amp.with_loss_scale` does so by itself.

Example:
  >>> import jax, jax.numpy as jnp
  >>> from jmp_amp import jmp
  >>> policy = jmp.get_policy("params=float32,compute=float16,output=float32")
  >>> def loss_fn(w, loss_scale, x):
  ...     w, x = policy.cast_to_compute((w, x))
  ...     return loss_scale.scale(policy.cast_to_output(jnp.sum(w * x)))
  >>> @jax.jit
  ... def train_step(w, loss_scale, x):
  ...     grads = loss_scale.unscale(jax.grad(loss_fn)(w, loss_scale, x))
  ...     finite = jmp.all_finite(grads)
  ...     loss_scale = loss_scale.adjust(finite)
  ...     return jmp.select_tree(finite, w - 0.5 * grads, w), loss_scale
  >>> w, loss_scale = jnp.ones(2), jmp.DynamicLossScale(jmp.half_dtype()(2**15))
  >>> for x in (jnp.array([1.0, 9.0]), jnp.array([1.0, 1.5])):
  ...     w, loss_scale = train_step(w, loss_scale, x)
  ...     print(w, loss_scale.loss_scale)
  [1. 1.] 16384.0
  [0.5  0.25] 16384.0
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.core import Tracer
from jax.typing import ArrayLike

from jmp_amp.policies import policy as policies
from jmp_amp.policies.dtypes import F32, cast_floating, cast_leaf, is_half
from jmp_amp.policies.dtypes import cast_to_full as cast_to_full
from jmp_amp.policies.policy import Policy as Policy
from jmp_amp.training.collectives import all_finite as all_finite
from jmp_amp.training.loss_scale import LossScale as StateMachine
from jmp_amp.training.loss_scale import dynamic_loss_scale, static_loss_scale
from jmp_amp.training.loss_scale_state import select_tree as select_same_dtypes

# The version of jmp whose API this is.
__version__ = "0.0.4"

Tree = TypeVar("Tree")

# The largest power of two whose reciprocal is a normal f32, and that reciprocal.
_MAX_SCALE = 2.0**126
_MIN_SCALE = 2.0**-126
# The least and the largest value of each setting of a dynamic scale, and what it is.
_SETTINGS = {
    "period": (1, 2**31 - 1, "a count of steps"),
    "factor": (1, _MAX_SCALE, "a number"),
    "min_loss_scale": (0, _MAX_SCALE, "a number"),
}


def half_dtype() -> type:
    """Returns `jnp.bfloat16` on TPUs and `jnp.float16` elsewhere.

    Example:
      >>> from jmp_amp import jmp
      >>> jmp.half_dtype()(2**15).dtype
      dtype('float16')
    """
    on_tpu = jax.local_devices()[0].platform == "tpu"
    return jnp.bfloat16 if on_tpu else jnp.float16


def cast_to_half(tree: Tree) -> Tree:
    """Returns `tree` with its floating-point leaves in jmp's `half_dtype()`.

    See `jmp_amp.cast_floating` for which leaves are cast.

    Example:
      >>> from jmp_amp import jmp
      >>> jmp.cast_to_half({"w": jnp.ones(2), "step": 3})
      {'step': 3, 'w': Array([1., 1.], dtype=float16)}
    """
    return cast_floating(tree, half_dtype())


def get_policy(policy_name: str) -> Policy:
    """Returns `jmp_amp.get_policy(policy_name)` with jmp's `half_dtype()` as "half".

    Raises:
      ValueError: if a word of the text is unknown; the message says which.
      TypeError: if it is no text.

    Example:
      >>> from jmp_amp import jmp
      >>> print(jmp.get_policy("p=full, c=half"))
      p=f32,c=f16,o=f16
    """
    half = jnp.dtype(half_dtype()).name
    if isinstance(policy_name, str):
        # Only where a dtype stands: `low=half` is an operation of that name.
        dtype_of_key = r"((?:^|,)\s*(?:[pco]\w*\s*=)?\s*)half(?=\s*(?:,|$))"
        policy_name = re.sub(dtype_of_key, rf"\1{half}", policy_name, flags=re.I)
    try:
        return policies.get_policy(policy_name)
    except ValueError as error:
        # jmp's words, for code that looks for them.
        told = str(error).replace("unknown policy", "unknown dtype")
        raise ValueError(re.sub("unknown (dtype|key)", r"Unknown \1", told)) from None


def select_tree(pred: ArrayLike, a: Tree, b: Tree) -> Tree:
    """Returns `a` if `pred` holds and `b` otherwise, leaf by leaf.

    As `jmp_amp.select_tree`, except that an f32 leaf may meet a half one, and is
    rounded to its dtype: an f16 parameter is f32 after a step with f32 gradients.

    Args:
      pred: bool[].
      a: a pytree of arrays and numbers.
      b: a pytree of the same structure, shapes and dtypes.

    Raises:
      AssertionError: if `pred` is not one boolean.
      ValueError, TypeError: as `jmp_amp.select_tree`.

    Example:
      >>> from jmp_amp import jmp
      >>> jmp.select_tree(jnp.bool_(True), jnp.ones(2), jnp.zeros(2, jnp.float16))
      Array([1., 1.], dtype=float16)
    """
    _check_boolean("select_tree", pred)

    def to_half(leaf: object, other: object) -> object:
        dtype = getattr(other, "dtype", F32)
        is_f32 = getattr(leaf, "dtype", None) == F32
        return cast_leaf(leaf, dtype) if is_f32 and is_half(dtype) else leaf

    if jax.tree.structure(a) == jax.tree.structure(b):
        a, b = jax.tree.map(to_half, a, b), jax.tree.map(to_half, b, a)
    return select_same_dtypes(pred, a, b)


class _Scaling:
    """The part that the loss scales have in common."""

    def _state_machine(self) -> StateMachine:
        raise NotImplementedError

    def scale(self, tree: Tree) -> Tree:
        """Returns `tree` with its inexact leaves multiplied by the scale, in f32."""
        return self._state_machine().scale(tree)

    def unscale(self, tree: Tree) -> Tree:
        """Returns `tree` with its inexact leaves divided by the scale, in f32."""
        return self._state_machine().unscale(tree)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns the loss scale of the next step: this one, unless it is dynamic."""
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(_Scaling):
    """A loss scale that does nothing: a pytree without leaves.

    Example:
      >>> from jmp_amp import jmp
      >>> jmp.NoOpLossScale().scale(3.0), jmp.NoOpLossScale().loss_scale
      (3.0, 1)
    """

    loss_scale: ClassVar[int] = 1

    def scale(self, tree: Tree) -> Tree:
        """Returns `tree` itself."""
        return tree

    unscale = scale


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaling):
    """A loss scale that never moves: a pytree without leaves.

    Attributes:
      loss_scale: a positive number. An array of one becomes a Python number, so that
        the scale can be hashed and passed to `jax.jit`.

    Example:
      >>> from jmp_amp import jmp
      >>> jmp.StaticLossScale(2**15).unscale(jnp.float16(5e-4))
      Array(1.526...e-08, dtype=float32)
    """

    loss_scale: ArrayLike

    def __post_init__(self):
        if not isinstance(self.loss_scale, int | float | Tracer):
            object.__setattr__(self, "loss_scale", np.asarray(self.loss_scale).item())

    def _state_machine(self) -> StateMachine:
        _check_scale(self, self.loss_scale)
        return static_loss_scale(self.loss_scale)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """A loss scale that grows while gradients are finite and shrinks if not.

    After `period` finite steps in a row it is multiplied by `factor`, unless that would
    pass 2**126. A step whose gradients are not finite divides it by `factor`, but not
    below `min_loss_scale`, and sets the counter to 0.

    Attributes:
      loss_scale: f32[], the factor of a loss; a leaf. At most 2**126.
      counter: i32[], finite steps since the scale last moved; a leaf.
      period: finite steps until the scale grows.
      factor: the factor of growth and the divisor of a backoff, at least 1.
      min_loss_scale: the least scale; 0 means 2**-126.

    Raises:
      ValueError: if one of them is out of range; a scale has to be positive and finite.
      TypeError: if one of the last three, which are static, is traced.

    Example:
      >>> from jmp_amp import jmp
      >>> jmp.DynamicLossScale(2.0**15, period=1).adjust(True).loss_scale
      Array(65536., dtype=float32)
    """

    loss_scale: ArrayLike
    counter: ArrayLike = 0
    period: int = 2000
    factor: float = 2
    min_loss_scale: ArrayLike = 1.0

    def __post_init__(self):
        for name in ("loss_scale", "min_loss_scale"):
            dtype = getattr(getattr(self, name), "dtype", F32)
            if not jnp.issubdtype(dtype, jnp.floating):
                message = f"Expected floating type for {name}, got {dtype}"
                warnings.warn(message, stacklevel=3)
        _check_scale(self, self.loss_scale)
        settings = {name: _setting(name, getattr(self, name)) for name in _SETTINGS}
        scale = jnp.minimum(jnp.asarray(self.loss_scale, F32), _MAX_SCALE)
        counter = jnp.asarray(self.counter, jnp.int32)
        vars(self).update(settings, loss_scale=scale, counter=counter)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns the loss scale of the next step.

        Args:
          grads_finite: bool[], whether every gradient of this step was finite.

        Raises:
          AssertionError: if it is not one boolean.
        """
        _check_boolean("DynamicLossScale.adjust", grads_finite)
        following = self._state_machine().adjust(grads_finite)
        (_, settings), leaves = (
            _flatten(self),
            (following.value, following.growth_tracker),
        )
        return _unflatten(settings, leaves)

    def _state_machine(self) -> StateMachine:
        return dataclasses.replace(
            dynamic_loss_scale(max_scale=_MAX_SCALE),
            value=self.loss_scale,
            # A counter that was restored, or set to the step, may be past the period.
            growth_tracker=jnp.asarray(self.counter) % self.period,
            growth_factor=self.factor,
            backoff_factor=1.0 / self.factor,
            growth_interval=self.period,
            min_scale=float(np.maximum(self.min_loss_scale, _MIN_SCALE)),
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def _flatten(loss_scale: DynamicLossScale) -> tuple[Any, tuple[object, ...]]:
    scale, counter, *settings = vars(loss_scale).values()
    leaves = {"loss_scale": scale, "counter": counter}
    keyed = [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in leaves.items()]
    return keyed, tuple(settings)


def _unflatten(settings: Iterable[object], leaves: Iterable[object]) -> Any:
    # Not by the constructor: leaves may be anything, such as axes or shardings.
    made = object.__new__(DynamicLossScale)
    names = [field.name for field in dataclasses.fields(made)]
    vars(made).update(zip(names, (*leaves, *settings), strict=True))
    return made


jax.tree_util.register_pytree_with_keys(DynamicLossScale, _flatten, _unflatten)
for kind in (NoOpLossScale, StaticLossScale, DynamicLossScale):
    serialization.register_serialization_state(
        kind,
        lambda loss_scale: dict(vars(loss_scale)),
        lambda target, state: dataclasses.replace(target, **state),
    )


def _check_boolean(call: str, flag: ArrayLike) -> None:
    found = jnp.asarray(flag)
    if found.dtype != jnp.bool_ or found.shape:
        # The exception that jmp raises.
        raise AssertionError(
            f"{call}: expected boolean scalar, got {found.dtype}{list(found.shape)}. "
            "all_finite(grads) is one."
        )


def _check_scale(loss_scale: _Scaling, value: ArrayLike) -> None:
    if isinstance(value, Tracer) or not getattr(value, "is_fully_addressable", True):
        return
    number = np.asarray(value, float)
    if not np.all(np.isfinite(number) & (number > 0)):
        raise ValueError(
            f"{type(loss_scale).__name__}(loss_scale={value!r}): a scale has to be "
            "positive and finite. Use jnp.float32(2.0**15); f16 ends at 65504, before "
            "2**16."
        )


def _setting(name: str, value: ArrayLike) -> object:
    least, most, kind = _SETTINGS[name]
    call = f"DynamicLossScale({name}={value!r})"
    if isinstance(value, Tracer):
        fact = "it is traced, but has to be known before the program runs"
        raise TypeError(f"{call}: {fact}. Use a Python number.")
    number = np.asarray(value).item()
    if not least <= number <= most or (name == "period" and number % 1):
        raise ValueError(f"{call}: out of range. Use {kind} from {least} to {most:g}.")
    return {"period": int, "min_loss_scale": np.float32}.get(name, float)(number)
