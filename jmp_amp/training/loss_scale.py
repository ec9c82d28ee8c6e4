"""The loss scale and its state machine.

A `LossScale` is a value. `scale` multiplies a loss by it, `unscale` divides gradients
by it, `adjust` returns the next one; nothing is updated in place. Dynamic scaling is
that of Micikevicius et al. 2018 (arXiv:1710.03740, section 3.2): grow after a number of
finite steps, back off on a step whose gradients overflowed.
"""

import dataclasses
import functools
import math
import numbers
import operator
import sys
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from jax.core import Tracer
from jax.typing import ArrayLike

from jmp_amp.policies.dtypes import F32, PyTree
from jmp_amp.training.structures import map_trained, promote_gradient

_HYSTERESIS_MODES = ("until_growth", "consecutive", "rearming")
_F32_MAX = float(jnp.finfo(F32).max)
F32_TINY = float(jnp.finfo(F32).tiny)
_LARGEST = sys.float_info.max
_static: Any = functools.partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class LossScale:
    """A loss scale and the counters that decide when it moves: a frozen pytree.

    Made by `dynamic_loss_scale`, `static_loss_scale` and `no_loss_scale`. The first
    three fields are its leaves, always of a strong dtype; the others are static.

    Attributes:
      value: float32[], the scale.
      growth_tracker: int32[], finite steps since the scale last moved.
      hysteresis_tracker: int32[], overflows left before the scale backs off.
      dynamic: whether `adjust` does anything.
      growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis,
        hysteresis_mode: see `dynamic_loss_scale`.

    Example:
      >>> import jmp_amp as amp
      >>> loss_scale = amp.dynamic_loss_scale(1024.0, growth_interval=2)
      >>> for finite in (False, True, True):
      ...     loss_scale = loss_scale.adjust(finite)
      ...     print(loss_scale.value)
      512.0
      512.0
      1024.0
    """

    value: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    dynamic: bool = _static()
    growth_factor: float = _static()
    backoff_factor: float = _static()
    growth_interval: int = _static()
    min_scale: float = _static()
    max_scale: float = _static()
    hysteresis: int = _static()
    hysteresis_mode: str = _static()

    def scale(self, tree: PyTree) -> PyTree:
        """Returns `tree` with its inexact leaves multiplied by the scale.

        f16 and bf16 leaves are multiplied in float32 and come back float32: a loss of
        2.0 at a scale of 2**16 is inf in f16. float32, float64 and complex leaves keep
        their dtype. Everything else (integers, fp8, `float0`, keys, functions,
        strings) comes back as the same object, and so does the collection
        `_overwrite_with_gradient` of flax's fp8 layers.

        Example:
          >>> import jmp_amp as amp
          >>> amp.static_loss_scale(2.0**16).scale(jnp.float16(2.0))
          Array(131072., dtype=float32)
        """
        return _mapped(operator.mul, tree, self.value)

    def unscale(self, tree: PyTree) -> PyTree:
        """Returns `tree` with its inexact leaves divided by the scale.

        f16 and bf16 leaves become float32 first, so that a small gradient survives the
        division. What is float32 is multiplied by the float32 nearest to 1 / scale, as
        in torch; float64 and complex128 leaves are divided, and so is all if
        `max_scale` is above 2**126. Otherwise as `scale`.

        Example:
          >>> import jmp_amp as amp
          >>> gradients = {"w": jnp.float16(5e-4), "frozen": None}
          >>> amp.static_loss_scale(2.0**15).unscale(gradients)
          {'frozen': None, 'w': Array(1.526...e-08, dtype=float32)}
        """
        # Beyond 2**126 it may be a subnormal, which XLA flushes to zero.
        reciprocal = 1.0 / self.value if self.max_scale <= 2.0**126 else None

        def divided(leaf: jax.Array, scale: jax.Array) -> jax.Array:
            # The reciprocal has no more than the digits of f32.
            if leaf.dtype != F32 or reciprocal is None:
                return leaf / scale
            return leaf * reciprocal

        return _mapped(divided, tree, self.value)

    def adjust(self, finite: ArrayLike) -> Self:
        """Returns the loss scale of the next step, of the same structure and dtypes.

        See `dynamic_loss_scale` for the algorithm; a static scale returns itself.

        Args:
          finite: bool[], whether every gradient of this step was finite.

        Raises:
          TypeError: if `finite` is not boolean.
          ValueError: if it is no scalar.

        Example:
          >>> import jmp_amp as amp
          >>> amp.dynamic_loss_scale(2.0**16).adjust(False).value
          Array(32768., dtype=float32)
        """
        finite = checked_condition(finite, "LossScale.adjust(finite)")
        if not self.dynamic:
            return self
        # torch.amp compares for equality, and so does this: an interval lowered below
        # the counter takes effect after the next overflow.
        tracker = jnp.asarray(optax.safe_increment(self.growth_tracker))
        due = finite & (tracker == self.growth_interval)
        value, left = map(jnp.asarray, (self.value, self.hysteresis_tracker))
        grown = value * self.growth_factor
        grown = jnp.where(due & (grown <= self.max_scale), grown, value)
        # Half of an infinite scale is infinite, and half of NaN is NaN. From the cap
        # the next overflow backs off.
        reduced = value * self.backoff_factor
        floored = jnp.maximum(reduced, self.min_scale)
        reduced = jnp.where(reduced <= self.max_scale, floored, self.max_scale)
        left = jnp.where(finite, left, jnp.maximum(left - 1, 0))
        back_off = ~finite & (left == 0)
        is_full = dict(until_growth=due, consecutive=finite, rearming=finite | back_off)
        refill = is_full[self.hysteresis_mode]
        return dataclasses.replace(
            self,
            value=jnp.where(back_off, reduced, grown),
            growth_tracker=jnp.where(finite & ~due, tracker, 0),
            hysteresis_tracker=jnp.where(refill, self.hysteresis, left),
        )

    def __repr__(self) -> str:
        fields = {name: f"{name}={_show(x)}" for name, x in vars(self).items()}
        dynamic = fields.pop("dynamic")
        shown = fields.values() if self.dynamic else (fields["value"], dynamic)
        return f"LossScale({', '.join(shown)})"


def dynamic_loss_scale(
    init_scale: ArrayLike = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-14,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    hysteresis_mode: str = "until_growth",
) -> LossScale:
    """Returns a loss scale that grows while gradients are finite and backs off if not.

    After each step::

      if finite:  # No gradient of the step held an inf or a NaN.
        tracker += 1
        if tracker == growth_interval:
          tracker = 0
          if scale * growth_factor <= max_scale:
            scale *= growth_factor
      else:
        tracker = 0
        left = max(left - 1, 0)  # Begins as `hysteresis`.
        if left == 0:
          scale = max(scale * backoff_factor, min_scale)
      if <refill>:
        left = hysteresis

    A scale that somebody made infinite or NaN backs off to `max_scale`. Powers of two
    keep the scaling exact. With `hysteresis` n, only the n-th overflow backs off. The
    `hysteresis_mode` says when the count is refilled:

    * "until_growth" (Megatron-LM, Colossal-AI): when growth is due. Once the count is
      used up, every further overflow backs off.
    * "consecutive" (Apex's `update_scale_hysteresis`): after any finite step.
    * "rearming" (Paddle): after any finite step, and every backoff.

    A checkpoint by `flax.serialization` or pickle brings back all arguments of the run
    that saved it, whatever those of the target are. Orbax saves the scale and its
    counters alone: the other arguments are those of the target.

    Args:
      init_scale: the first scale, any scalar; the next one within
        `[min_scale, max_scale]` if it lies outside.
      growth_factor: larger than 1.
      backoff_factor: between 0 and 1.
      growth_interval: an int, at least 1 and below 2**31.
      min_scale: positive, a normal float32.
      max_scale: not below `min_scale`; inf means the largest float32.
      hysteresis: an int; 0 behaves as 1, as in Colossal-AI.
      hysteresis_mode: see above.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if it is out of range.

    Example:
      >>> import jmp_amp as amp
      >>> amp.dynamic_loss_scale(growth_interval=100).value
      Array(65536., dtype=float32)
    """
    call = "dynamic_loss_scale"
    given = dict(
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
    )
    settings = {name: _number(call, name, value) for name, value in given.items()}
    least, most = settings["min_scale"], min(settings["max_scale"], _F32_MAX)
    if not most >= least:
        raise ValueError(
            f"{call}(max_scale={max_scale!r}): the cap is below the floor, "
            f"min_scale={min_scale!r}. Use a larger one."
        )
    if hysteresis_mode not in _HYSTERESIS_MODES:
        remedy = f"Use one of {', '.join(map(repr, _HYSTERESIS_MODES))}."
        fact = f"{call}(hysteresis_mode={hysteresis_mode!r}): unknown mode"
        raise ValueError(f"{fact}. {remedy}")
    if isinstance(init_scale, Tracer):
        value = jnp.clip(jnp.asarray(init_scale, F32), least, most)
    else:  # A number of Python: no tracer, wherever this is called.
        value = min(max(_number(call, "init_scale", init_scale), least), most)
    count = max(settings["hysteresis"], 1)
    settings |= dict(max_scale=most, hysteresis=count, hysteresis_mode=hysteresis_mode)
    counters = jnp.asarray(0, jnp.int32), jnp.asarray(count, jnp.int32)
    return LossScale(jnp.asarray(value, F32), *counters, dynamic=True, **settings)


def static_loss_scale(scale: ArrayLike) -> LossScale:
    """Returns a loss scale that never moves.

    Steps whose gradients are not finite are skipped all the same.

    Raises:
      TypeError: if `scale` is not a number.
      ValueError: if it is not positive, or no normal float32.

    Example:
      >>> import jmp_amp as amp
      >>> amp.static_loss_scale(128)
      LossScale(value=128.0, dynamic=False)
    """
    least, most = F32_TINY, _F32_MAX
    if not isinstance(scale, Tracer):
        least = most = _number("static_loss_scale", "scale", scale)
    fixed = dynamic_loss_scale(scale, min_scale=least, max_scale=most)
    return dataclasses.replace(fixed, dynamic=False)


def no_loss_scale() -> LossScale:
    """Returns the loss scale 1, for bf16 and f32, which need none.

    Example:
      >>> import jmp_amp as amp
      >>> amp.no_loss_scale()
      LossScale(value=1.0, dynamic=False)
    """
    return static_loss_scale(1.0)


def _mapped(operation: Callable[..., jax.Array], tree: PyTree, by: PyTree) -> PyTree:
    """Returns `operation(leaf, by)` of trained leaves, in float32 at least."""

    def of(leaf: PyTree) -> PyTree:
        leaf = jnp.asarray(promote_gradient(leaf))
        factor = by.astype(jnp.finfo(leaf.dtype).dtype)
        if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return operation(leaf, factor)
        # Part by part: (inf + 0j) * (2 + 0j) would have a NaN.
        parts = operation(leaf.real, factor), operation(leaf.imag, factor)
        return jax.lax.complex(*parts)

    return map_trained(of, tree)


def checked_condition(condition: ArrayLike, call: str) -> jax.Array:
    """Returns a condition as an array: bool[]. Text and numbers are refused."""
    dtype = getattr(condition, "dtype", None)
    is_bool = isinstance(condition, bool) or dtype == jnp.bool_
    if not is_bool or np.shape(condition):
        raise (ValueError if is_bool else TypeError)(
            f"{call}: the condition has shape {np.shape(condition)} and is not one "
            f"boolean: {condition!r}. Use True, False or jnp.all of an array of them, "
            "such as all_finite(grads)."
        )
    return jnp.asarray(condition)


def _show(leaf: object) -> str:
    if not isinstance(leaf, jax.Array):
        return repr(leaf)
    if isinstance(leaf, Tracer):
        return f"<traced {jax.typeof(leaf)}>"
    if leaf.is_deleted():
        return "<deleted>"
    here = leaf.is_fully_addressable or leaf.is_fully_replicated
    return repr(leaf.tolist()) if here else f"<{jax.typeof(leaf)} on other hosts>"


# The least and the largest value of each setting, and what to use.
_SETTINGS = {
    "init_scale": (5e-324, _LARGEST, "a positive and finite power of two: 2.0**16"),
    "scale": (F32_TINY, _F32_MAX, "a power of two, a normal float32: 2.0**16"),
    "growth_factor": (math.nextafter(1, 2), _LARGEST, "a factor above 1, such as 2.0"),
    "backoff_factor": (5e-324, math.nextafter(1, 0), "a factor between 0 and 1: 0.5"),
    "growth_interval": (1, 2**31 - 1, "an int, at least 1 and below 2**31"),
    "min_scale": (F32_TINY, _F32_MAX, "a floor that is a normal float32: 2.0**-14"),
    "max_scale": (-math.inf, math.inf, "a number that is not below min_scale"),
    "hysteresis": (0, 2**31 - 1, "an int, at least 0 and below 2**31"),
}


def _number(call: str, name: str, value: PyTree) -> Any:
    """Returns the value of a setting, a scalar that is known now: an int or a float."""
    least, largest, wanted = _SETTINGS[name]
    real = isinstance(value, numbers.Real | np.ndarray | np.generic | jax.Array)
    if not real or isinstance(value, bool | Tracer) or getattr(value, "shape", ()):
        raise TypeError(
            f"{call}({name}={value!r}): not a real number that is known before the "
            f"program runs. Use {wanted}."
        )
    kind = int if isinstance(least, int) else float
    number: Any = getattr(value, "item", lambda: value)()
    if not least <= number <= largest or (kind is int and number % 1):
        raise ValueError(f"{call}({name}={value!r}): out of range. Use {wanted}.")
    return kind(number)


def _from_state_dict(target: LossScale, state: dict[str, PyTree]) -> LossScale:
    """The saved configuration wins over the target's, as with torch's state_dict."""
    if unknown := sorted(set(state) - set(vars(target))):
        raise ValueError(f"LossScale: a checkpoint with unknown fields {unknown}.")
    kinds = {name: type(value) for name, value in vars(target).items()}
    as_int32 = functools.partial(jnp.asarray, dtype=jnp.int32)
    kinds |= dict(value=lambda value: jnp.asarray(value, F32))
    kinds |= dict(growth_tracker=as_int32, hysteresis_tracker=as_int32)
    saved = {name: kinds[name](value) for name, value in state.items()}
    return dataclasses.replace(target, **saved)


serialization.register_serialization_state(
    LossScale, lambda loss_scale: vars(loss_scale).copy(), _from_state_dict
)
