"""What this library keeps in the states of optimizers, and how it is found again."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from jmp_amp.training.finite import choose
from jmp_amp.training.loss_scale import LossScale


class LossScaleState(NamedTuple):
    """The state of an optimizer wrapped in `with_loss_scale`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      loss_scale: the `LossScale` for the next step.
      last_finite: bool[], whether the last step's gradients were all finite.
      skipped_total: int32[], steps skipped so far.
      skipped_in_a_row: int32[], steps skipped since the last one that was applied.
      applied: int32[], steps applied so far.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: Any
    loss_scale: LossScale
    last_finite: jax.Array
    skipped_total: jax.Array
    skipped_in_a_row: jax.Array
    applied: jax.Array
    structure: Any


class MasterWeightsState(NamedTuple):
    """The state of an optimizer wrapped in `with_master_weights`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      masters: a tree like the parameters, float32 where they are half and masked where
        they are not.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: Any
    masters: Any
    structure: Any


class KahanState(NamedTuple):
    """The state of an optimizer wrapped in `with_kahan`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      compensation: a tree like the parameters: int16 where they are half, what has to
        be added to a parameter, in 2**-16 of its last place; masked elsewhere.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: Any
    compensation: Any
    structure: Any


class StochasticRoundingState(NamedTuple):
    """The state of an optimizer wrapped in `with_stochastic_rounding`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      key_data: uint32[...], the PRNG key, as `jax.random.key_data` shows it.
      steps: int32[], steps so far; together with the key they make the bits of one.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: Any
    key_data: jax.Array
    steps: jax.Array
    structure: Any


WEIGHT_STATES = (MasterWeightsState, KahanState, StochasticRoundingState)
WRAPPER_STATES = (LossScaleState, *WEIGHT_STATES)


def loss_scale_of(opt_state: Any) -> LossScale:
    """Returns the loss scale that an optimizer's state holds.

    Args:
      opt_state: a state of `with_loss_scale` or anything that contains one at any
        depth: states of `optax.chain`, `MultiSteps`, `inject_hyperparams`,
        `partition`, a flax `TrainState`, an `nnx.Optimizer`; or a `LossScale`.

    Raises:
      ValueError: if it holds none, or more than one.

    Example:
      >>> import jax.numpy as jnp, jmp_amp as amp, optax
      >>> tx = amp.with_loss_scale(optax.sgd(0.1), amp.static_loss_scale(128.0))
      >>> amp.loss_scale_of(tx.init(jnp.zeros(3)))
      LossScale(value=128.0, dynamic=False)
    """
    return find_loss_scale(opt_state, "loss_scale_of")


def last_step_finite(opt_state: Any) -> jax.Array:
    """Returns whether the last step's gradients were all finite: bool[].

    True before the first step. `opt_state` is anything that `loss_scale_of` searches.

    Example:
      >>> import jax.numpy as jnp, jmp_amp as amp, optax
      >>> tx = amp.with_loss_scale(optax.sgd(0.5), amp.no_loss_scale())
      >>> _, state = tx.update(jnp.nan, tx.init(jnp.float32(0.0)))
      >>> amp.last_step_finite(state)
      Array(False, dtype=bool)
    """
    return find_counters(opt_state, "last_step_finite").last_finite


def keep_if_finite(opt_state: Any, new: Any, old: Any) -> Any:
    """Returns `new` if the last step was applied, and `old` if it was skipped.

    For what a step writes besides the parameters: batch statistics, moving averages,
    fp8 state, step counters.

    Args:
      opt_state: the state that `update` returned in this step, or anything that
        `loss_scale_of` searches.
      new: a pytree, as the step wrote it; or an nnx module, which is written back in
        place and returned.
      old: the same tree before the step; of a module a copy, `nnx.clone(model)`, and of
        an `nnx.State` one made by `nnx.as_pure`: Variables change in place.

    Raises:
      ValueError: if the trees differ in structure or shape, or `old` is `new` itself.
      TypeError: if they differ in dtype.

    Example:
      >>> import jax.numpy as jnp, jmp_amp as amp, optax
      >>> tx = amp.with_loss_scale(optax.sgd(0.5), amp.no_loss_scale())
      >>> _, state = tx.update(jnp.nan, tx.init(jnp.float32(0.0)))
      >>> amp.keep_if_finite(state, {"mean": jnp.inf}, {"mean": jnp.float32(0.5)})
      {'mean': Array(0.5, dtype=float32)}
    """
    finite = find_counters(opt_state, "keep_if_finite").last_finite
    if not isinstance(new, nnx.Module):
        return choose(finite, new, old, "keep_if_finite", ("new", "old"))
    if old is new or not isinstance(old, nnx.Module):
        found = "the same module" if old is new else f"a {type(old).__name__}"
        raise ValueError(
            f"keep_if_finite(opt_state, {type(new).__name__}(...), old): old is "
            f"{found}. Make a copy before the step: old = nnx.clone(model)."
        )
    states = nnx.as_pure(nnx.state(new)), nnx.as_pure(nnx.state(old))
    kept = choose(finite, *states, "keep_if_finite", ("new", "old"))
    nnx.update(new, kept)
    return new


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Returns what to log of a loss scale, as scalars on the device.

    Args:
      opt_state: anything that `loss_scale_of` searches.

    Returns:
      `scale` float32[], the scale of the next step; `finite` bool[], whether the last
      step was applied; `skipped_total`, `skipped_in_a_row` and `applied`, int32[].

    Example:
      >>> import jax.numpy as jnp, jmp_amp as amp, optax
      >>> tx = amp.with_loss_scale(optax.sgd(0.5), amp.static_loss_scale(128.0))
      >>> _, state = tx.update(jnp.nan, tx.init(jnp.float32(0.0)))
      >>> {name: value.item() for name, value in amp.metrics(state).items()}
      {'scale': 128.0, 'finite': False, 'skipped_total': 1, 'skipped_in_a_row': 1,
       'applied': 0}
    """
    state = find_counters(opt_state, "metrics")
    return {
        "scale": state.loss_scale.value,
        "finite": state.last_finite,
        "skipped_total": state.skipped_total,
        "skipped_in_a_row": state.skipped_in_a_row,
        "applied": state.applied,
    }


def check_scale(opt_state: Any, max_skips_in_a_row: int) -> None:
    """Raises once more than `max_skips_in_a_row` steps in a row were skipped.

    Runs on the host and waits for the step that wrote `opt_state`: call it every so
    many steps, outside `jax.jit`.

    Args:
      opt_state: anything that `loss_scale_of` searches.
      max_skips_in_a_row: an int, at least 0.

    Raises:
      FloatingPointError: if `skipped_in_a_row` exceeds it.
      TypeError: if the state is traced.
      ValueError: if `max_skips_in_a_row` is no such int.

    Example:
      >>> import jax.numpy as jnp, jmp_amp as amp, optax
      >>> tx = amp.with_loss_scale(optax.sgd(0.5), amp.dynamic_loss_scale(4.0))
      >>> _, state = tx.update(jnp.nan, tx.init(jnp.float32(0.0)))
      >>> amp.check_scale(state, 1)
      >>> amp.check_scale(state, 0)
      Traceback (most recent call last):
      FloatingPointError: check_scale: 1 step in a row had gradients that are not ...
    """
    call = "check_scale"
    if max_skips_in_a_row < 0 or max_skips_in_a_row != int(max_skips_in_a_row):
        raise ValueError(
            f"{call}: max_skips_in_a_row={max_skips_in_a_row!r}. Use an int, 0 or more."
        )
    state = find_counters(opt_state, call)
    if isinstance(state.skipped_in_a_row, Tracer):
        raise TypeError(
            f"{call}: the state is traced, so its values are not known yet. Call it on "
            "the state that the jitted step returned; inside, use metrics(opt_state)."
        )
    skips = int(np.max(state.skipped_in_a_row))
    if skips > max_skips_in_a_row:
        skipped, applied = int(np.max(state.skipped_total)), int(np.max(state.applied))
        last = skipped + applied - skips
        when = f"the last finite step was number {last}" if last else "none was finite"
        raise FloatingPointError(
            f"{call}: {skips} step{'s' * (skips > 1)} in a row had gradients that are "
            f"not finite (max_skips_in_a_row={max_skips_in_a_row}); "
            f"{skipped} skipped and {applied} applied in all, {when}; "
            "the loss scale is now "
            f"{float(np.min(state.loss_scale.value))}. Look for a NaN in the data or "
            "the loss; if there is none, lower min_scale or the learning rate."
        )


def find_loss_scale(tree: Any, call: str) -> LossScale:
    """`loss_scale_of` for a caller whose error messages begin with `call`."""
    found = find_state(tree, call, (LossScale, LossScaleState))
    # An nnx.Optimizer wraps every array of its state in a Variable.
    return nnx.as_pure(found.loss_scale if isinstance(found, LossScaleState) else found)


def find_counters(tree: Any, call: str) -> LossScaleState:
    """Returns the one `LossScaleState` in `tree`, without the inner state."""
    found: LossScaleState = find_state(tree, call, LossScaleState)
    return nnx.as_pure(found._replace(inner_state=()))


def find_state(tree: Any, call: str, kinds: type | tuple[type, ...]) -> Any:
    """Returns the one node of `tree` that is an instance of `kinds`.

    Raises:
      ValueError: if there is none, or more than one; the message begins with `call`.

    Example:
      >>> import jmp_amp as amp
      >>> from jmp_amp.training.states import find_state
      >>> find_state({"at": [3, amp.no_loss_scale()]}, "f", amp.LossScale)
      LossScale(value=1.0, dynamic=False)
    """
    found = nodes_of(tree, kinds)
    if not found:
        raise ValueError(
            f"{call}: there is no loss scale in this {type(tree).__name__}. Wrap the "
            "optimizer in with_loss_scale(tx, dynamic_loss_scale()), or in "
            "with_loss_scale(tx, no_loss_scale()), and pass the state of its init."
        )
    if len(found) > 1:
        places = " and ".join(jax.tree_util.keystr(path) for path, _ in found)
        raise ValueError(
            f"{call}: this {type(tree).__name__} holds {len(found)} loss scales, at "
            f"{places}. Pass the part that holds the one you mean."
        )
    return found[0][1]


def nodes_of(
    tree: Any, kinds: type | tuple[type, ...]
) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the key paths and nodes of `tree` that are instances of `kinds`.

    What is inside of such a node is not searched.

    Example:
      >>> from jmp_amp.training.states import nodes_of
      >>> nodes_of({"a": [1, 2.0]}, float)
      [((DictKey(key='a'), SequenceKey(idx=1)), 2.0)]
    """
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, kinds)
    )
    return [(path, node) for path, node in nodes if isinstance(node, kinds)]
