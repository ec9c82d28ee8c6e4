"""The state of loss scaling, and the functions that find and read it."""

import numbers
from collections.abc import Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer

from jmp_amp.policies.dtypes import PyTree
from jmp_amp.training.digits import warn_of_chain
from jmp_amp.training.finite import choose, is_inexact
from jmp_amp.training.loss_scale import LossScale
from jmp_amp.training.structures import (
    TreeStructure,
    leaves_by_path,
    nodes_at,
    nodes_of,
)


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

    inner_state: PyTree
    loss_scale: LossScale
    last_finite: jax.Array
    skipped_total: jax.Array
    skipped_in_a_row: jax.Array
    applied: jax.Array
    structure: TreeStructure


SCALES = (LossScaleState, LossScale)


def loss_scale_of(opt_state: PyTree) -> LossScale:
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


def last_step_finite(opt_state: PyTree) -> jax.Array:
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


def keep_if_finite(opt_state: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` if the last step was applied, and `old` if it was skipped.

    For the values that a step writes besides the parameters: batch statistics, moving
    averages, fp8 state, step counters. A whole flax `TrainState` may be given: loss
    scales inside of it, and their counters, are not taken back.

    Args:
      opt_state: the state that `update` returned in this step, or anything that
        `loss_scale_of` searches.
      new: a pytree, as the step wrote it; or an nnx module, which is written back in
        place and returned. Variables that the step made stay as they are.
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
        scaled = _with_scales_of(new, old)
        return choose(finite, new, scaled, "keep_if_finite", ("new", "old"))
    if old is new or not isinstance(old, nnx.Module):
        found = "the same module" if old is new else f"a {type(old).__name__}"
        raise ValueError(
            f"keep_if_finite(opt_state, {type(new).__name__}(...), old): old is "
            f"{found}. Make a copy before the step: old = nnx.clone(model)."
        )
    after, before = nnx.state(new), nnx.state(old)
    # A first call makes variables, such as those that are sown: there is no old one.
    known = {path for path, _ in nnx.to_flat_state(before)} - _paths_of_scales(new)
    after, before = (
        nnx.as_pure(nnx.filter_state(state, lambda path, _: path in known))
        for state in (after, before)
    )
    kept = choose(finite, after, before, "keep_if_finite", ("new", "old"))
    nnx.update(new, kept)
    return new


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns the values of a loss scale to log, as scalars on the device.

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


def check_scale(opt_state: PyTree, max_skips_in_a_row: int) -> None:
    """Raises once more than `max_skips_in_a_row` steps in a row were skipped.

    Runs on the host and waits for the step that wrote `opt_state`: call it every so
    many steps, outside `jax.jit`.

    Args:
      opt_state: anything that `loss_scale_of` searches.
      max_skips_in_a_row: an int, at least 0.

    Raises:
      FloatingPointError: if `skipped_in_a_row` exceeds it.
      TypeError: if the state is traced, or `max_skips_in_a_row` is no number.
      ValueError: if it is a number, but not such an int.

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
    written = f"{call}(opt_state, max_skips_in_a_row={max_skips_in_a_row!r})"
    _check_limit(max_skips_in_a_row, written)
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
        scale = float(np.min(state.loss_scale.value))
        remedy = (
            f"{_not_finite(opt_state)}A skipped step changed nothing: "
            "amp.diagnose(loss_fn, policy)(params, batch) tells where it became "
            "infinite or NaN, and what mends it. If all is finite there, lower "
            "min_scale or the learning rate."
        )
        if hidden := what_hides_overflows(opt_state):
            remedy = f"{_not_finite(opt_state)}{hidden}"
        if scale == 0 or not np.isfinite(scale):
            remedy = (
                "With it no gradient is finite, and nothing here makes such a scale. "
                "Go on from another: "
                "state._replace(loss_scale=amp.static_loss_scale(2.0**10))."
            )
        raise FloatingPointError(
            f"{call}: {skips} step{'s' * (skips > 1)} in a row had gradients that are "
            f"not finite (max_skips_in_a_row={max_skips_in_a_row}); "
            f"{skipped} skipped and {applied} applied in all, {when}; "
            f"the loss scale is now {scale}. {remedy}"
        )


def what_hides_overflows(opt_state: PyTree) -> str:
    """Returns what keeps overflows from a loss scale, and the remedy; "" if nothing."""
    kinds = (optax.MultiStepsState, optax.ApplyIfFiniteState)
    for _, node in nodes_of(opt_state, kinds):
        sums = isinstance(node, optax.MultiStepsState)
        if not nodes_of(node.inner_opt_state if sums else node.inner_state, SCALES):
            continue
        if not sums:
            return (
                "optax.apply_if_finite around with_loss_scale leaves overflows out, so "
                "that the scale does not back off. Leave it away: with_loss_scale "
                "skips such steps itself."
            )
        effect = "leaves overflows out, so that the scale does not back off"
        if not node.skip_state:
            # MultiSteps clears the sum by multiplying it by zero.
            effect = "keeps an overflow in its sum, and no later step is applied"
        return (
            f"optax.MultiSteps around with_loss_scale {effect}. Put it inside: "
            "with_loss_scale(optax.MultiSteps(tx, n), loss_scale)."
        )
    return ""


def _not_finite(opt_state: PyTree, limit: int = 3) -> str:
    """Returns which leaves of a state are not finite, in words; "" if all are.

    A scalar may be infinite, as the best loss of `reduce_on_plateau` is at first.
    """
    paths = [
        path
        for path, leaf in leaves_by_path(nnx.as_pure(opt_state))
        if is_inexact(leaf)
        and not (jnp.isfinite(leaf) if np.ndim(leaf) else ~jnp.isnan(leaf)).all()
    ]
    if not paths:
        return ""
    more = f" and {len(paths) - limit} more" * (len(paths) > limit)
    verb = "is" if len(paths) == 1 else "are"
    return f"Not finite in this state {verb} {', '.join(paths[:limit])}{more}. "


def _check_limit(limit: object, call: str) -> None:
    """Raises if a number of steps is not an int, 0 or more."""
    is_array = isinstance(limit, jax.Array | np.ndarray) and not np.shape(limit)
    is_number = isinstance(limit, numbers.Real) and not isinstance(limit, bool)
    if isinstance(limit, Tracer) or not (is_number or is_array):
        raise TypeError(
            f"{call}: the number of steps is of type {type(limit).__name__}. Use an "
            "int, 0 or more."
        )
    number = float(cast(float, limit))
    if not (number >= 0 and number.is_integer()):
        raise ValueError(f"{call}: not a number of steps. Use an int, 0 or more.")


def _with_scales_of(new: PyTree, old: PyTree) -> PyTree:
    """Returns `old` with the loss scales of `new`, and their counters.

    To a scale that was taken back the overflow has never been: it would not back off,
    and every further step would be skipped.
    """
    scales = iter([node for _, node in nodes_at(new, _is_scale)])

    def scaled(node: PyTree) -> PyTree:
        if not _is_scale(node):
            return node
        now = next(scales, node)
        if isinstance(node, LossScaleState) and isinstance(now, LossScaleState):
            return now._replace(inner_state=node.inner_state)
        if isinstance(node, Mapping) and isinstance(now, Mapping):
            inner = {name: node[name] for name in node if name == "inner_state"}
            return cast(PyTree, type(now))({**now, **inner})
        return now

    return jax.tree.map(scaled, old, is_leaf=_is_scale)


def _is_scale(node: object) -> bool:
    """Returns whether a node is a loss scale, or its state as nnx and flax write it."""
    names = set(node) if isinstance(node, Mapping) else set()
    is_written = names >= set(LossScaleState._fields) - {"inner_state", "structure"}
    return is_written or isinstance(node, SCALES)


def _paths_of_scales(module: nnx.Module) -> set[tuple[object, ...]]:
    """Returns the paths of what `_with_scales_of` replaces in the state of a module."""
    nodes = [(path, node) for path, node in nnx.iter_graph(module)]
    scales = [(path, node) for path, node in nodes if isinstance(node, SCALES)]
    return {
        path
        for path, _ in nodes
        for scale, node in scales
        if path[: len(scale)] == scale
        and not (
            isinstance(node, LossScaleState)
            and path[len(scale) : len(scale) + 1] == ("inner_state",)
        )
    }


def find_loss_scale(tree: PyTree, call: str) -> LossScale:
    """Returns `loss_scale_of(tree)`; error messages begin with `call`."""
    found = _only_node(tree, call, (LossScale, LossScaleState))
    # An nnx.Optimizer wraps every array of its state in a Variable.
    return nnx.as_pure(found.loss_scale if isinstance(found, LossScaleState) else found)


def find_counters(tree: PyTree, call: str) -> LossScaleState:
    """Returns the one `LossScaleState` in `tree`, without the inner state."""
    found = _only_node(tree, call, (LossScaleState,))
    return nnx.as_pure(found._replace(inner_state=()))


def read_without_target(tree: PyTree) -> str:
    """Returns what to do about a state that is dictionaries and lists, in words."""
    return (
        f"this {type(tree).__name__} has the data of a state and not its types, as a "
        "checkpoint has that was read without a target. Restore it with "
        "target=tx.init(params)."
    )


def _only_node(tree: PyTree, call: str, kinds: tuple[type, ...]) -> PyTree:
    """Returns the one node of `tree` that holds a loss scale."""
    warn_of_chain(tree, call)
    found = nodes_of(tree, kinds)
    if not found and nodes_at(tree, _is_scale):
        raise ValueError(f"{call}: {read_without_target(tree)}")
    if not found:
        raise ValueError(
            f"{call}: there is no loss scale in this {type(tree).__name__}. Wrap the "
            "optimizer in with_loss_scale(tx, dynamic_loss_scale()), or in "
            "with_loss_scale(tx, no_loss_scale()), and pass the state of its init."
        )
    if len(found) > 1:
        places = " and ".join(path for path, _ in found)
        raise ValueError(
            f"{call}: this {type(tree).__name__} holds {len(found)} loss scales, at "
            f"{places}. Pass the part that holds the one you mean."
        )
    return found[0][1]
