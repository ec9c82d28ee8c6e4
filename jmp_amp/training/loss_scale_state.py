"""The state of loss scaling, and the functions that find and read it."""

import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike

from jmp_amp.policies.arguments import type_name
from jmp_amp.policies.dtypes import PyTree
from jmp_amp.training.half_weights import warn_of_chain
from jmp_amp.training.loss_scale import LossScale, checked_condition
from jmp_amp.training.structures import (
    TreeStructure,
    first_difference,
    is_inexact,
    key_paths,
    leaves_by_path,
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
        return _kept(finite, new, old)
    if old is new or not isinstance(old, nnx.Module):
        fact = f"old is {'the same module' if old is new else f'a {type_name(old)}'}"
        remedy = "Make a copy before the step: old = nnx.clone(model)."
        raise ValueError(f"keep_if_finite(opt_state, module, old): {fact}. {remedy}")
    after, before = nnx.state(new), nnx.state(old)
    # A first call makes variables, such as those that are sown: there is no old one.
    known = {path for path, _ in nnx.to_flat_state(before)}
    after = nnx.filter_state(after, lambda path, _: path in known)
    nnx.update(new, _kept(finite, *map(nnx.as_pure, (after, before))))
    return new


def select_tree(pred: ArrayLike, a: PyTree, b: PyTree) -> PyTree:
    """Returns `a` if `pred` holds and `b` otherwise, leaf by leaf.

    Both are computed. A NaN in the other one has no effect.

    Args:
      pred: bool[].
      a: a pytree of arrays and numbers.
      b: a pytree of the same structure, shapes and dtypes. Leaves that are not arrays
        have to be equal.

    Raises:
      ValueError: if the two differ in structure or shape; if `pred` is no scalar.
      TypeError: if they differ in dtype, or in a leaf that is not an array; if `pred`
        is not boolean.

    Example:
      >>> import jmp_amp as amp
      >>> amp.select_tree(False, {"mean": jnp.inf}, {"mean": jnp.zeros(())})
      {'mean': Array(0., dtype=float32)}
    """
    return choose(pred, a, b, "select_tree", ("a", "b"))


def choose(
    pred: ArrayLike, a: PyTree, b: PyTree, call: str, names: tuple[str, str]
) -> PyTree:
    """Returns `select_tree` of `a` and `b`; errors speak of `call` and `names`."""
    pred = checked_condition(pred, call)
    if jax.tree.structure(a) != jax.tree.structure(b):
        where = first_difference(key_paths(a), key_paths(b))
        raise ValueError(
            f"{call}: {names[0]} and {names[1]} differ in structure; first difference "
            f"at {where}. They have to be two versions of one tree."
        )

    def of(path: jax.tree_util.KeyPath, a: PyTree, b: PyTree) -> PyTree:
        if a is b:
            return a
        if all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in (a, b)):
            if (a.shape, a.dtype) == (b.shape, b.dtype):
                is_float0 = a.dtype == jax.dtypes.float0
                # Traces faster than `jnp.where`.
                return a if is_float0 else jax.lax.select(pred, a, b)
        elif isinstance(a, ArrayLike) and isinstance(b, ArrayLike):
            return jnp.where(pred, a, b)
        elif a == b:
            return a
        shown = [jax.typeof(x) if hasattr(x, "dtype") else repr(x) for x in (a, b)]
        kind = TypeError if np.shape(a) == np.shape(b) else ValueError
        raise kind(
            f"{call}: at {jax.tree_util.keystr(path) or 'the root'}, {names[0]} is "
            f"{shown[0]} but {names[1]} is {shown[1]}. Numbers and arrays of one shape "
            "and dtype can be chosen while a program runs. Cast one."
        )

    return jax.tree_util.tree_map_with_path(of, a, b)


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
    call, limit = "check_scale", max_skips_in_a_row
    is_number = isinstance(limit, numbers.Real | jax.Array | np.ndarray)
    is_number &= not isinstance(limit, bool | Tracer) and np.shape(limit) == ()
    if not (is_number and limit >= 0 and limit % 1 == 0):
        raise (ValueError if is_number else TypeError)(
            f"{call}(opt_state, max_skips_in_a_row={limit!r}): not a number of steps. "
            "Use an int, 0 or more."
        )
    state = find_counters(opt_state, call)
    if isinstance(state.skipped_in_a_row, Tracer):
        raise TypeError(
            f"{call}: the state is traced, so its values are not known yet. Call it on "
            "the state that the jitted step returned; inside, use metrics(opt_state)."
        )
    counts = state.skipped_total, state.skipped_in_a_row, state.applied
    skipped, skips, applied = (int(np.max(count)) for count in counts)
    if skips <= limit:
        return
    last = skipped + applied - skips
    when = f"the last finite step was number {last}" if last else "none was finite"
    scale = float(np.min(state.loss_scale.value))
    if 0 < scale < np.inf:
        remedy = _not_finite(opt_state) + (
            what_hides_overflows(opt_state)
            or "A skipped step changed nothing: amp.diagnose(loss_fn, policy)(params, "
            "batch) tells where it became infinite or NaN, and what mends it. If all "
            "is finite there, lower min_scale or the learning rate."
        )
    else:
        remedy = (
            "With it no gradient is finite. Go on from another: "
            "state._replace(loss_scale=amp.static_loss_scale(2.0**10))."
        )
    raise FloatingPointError(
        f"{call}: {skips} step{'s' * (skips > 1)} in a row had gradients that are not "
        f"finite (max_skips_in_a_row={limit}); {skipped} skipped and {applied} applied "
        f"in all, {when}; the loss scale is now {scale}. {remedy}"
    )


def what_hides_overflows(opt_state: PyTree) -> str:
    """Returns what keeps overflows from a loss scale, and the remedy; "" if nothing."""
    for _, node in nodes_of(opt_state, optax.MultiStepsState):
        if nodes_of(node.inner_opt_state, SCALES):
            return (
                "optax.MultiSteps around with_loss_scale keeps an overflow in its sum, "
                "so that no later step is applied or the scale does not back off. Put "
                "it inside: with_loss_scale(optax.MultiSteps(tx, n), loss_scale)."
            )
    return ""


def _not_finite(opt_state: PyTree) -> str:
    """Returns which leaf of a state is not finite first, in words; "" if all are.

    A scalar may be infinite, as the best loss of `reduce_on_plateau` is at first.
    """
    for path, leaf in leaves_by_path(nnx.as_pure(opt_state)):
        if is_inexact(leaf):
            good = jnp.isfinite(leaf) if np.ndim(leaf) else ~jnp.isnan(leaf)
            if not good.all():
                return f"Not finite in this state is {path}. "
    return ""


def _kept(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` or `old`, and of loss scales, with their counters, `new`.

    To a scale that was taken back the overflow has never been: it would not back off,
    and every further step would be skipped.
    """
    leaves, structure = jax.tree.flatten(new)
    if key_paths(new) == key_paths(old) and len(leaves) == len(jax.tree.leaves(old)):
        # The settings of a scale may have changed.
        old = structure.unflatten(jax.tree.leaves(old))
    kept = choose(finite, new, old, "keep_if_finite", ("new", "old"))
    pairs = zip(leaves, jax.tree.leaves(kept), _are_of_scales(new), strict=True)
    return structure.unflatten(x if is_of_one else y for x, y, is_of_one in pairs)


def _are_of_scales(tree: PyTree) -> list[bool]:
    """Returns which leaves are of a loss scale or its counters, by their names.

    As these are in a class, a dictionary or an `nnx.State`.
    """
    paths = [
        [str(getattr(key, "name", getattr(key, "key", key))) for key in path]
        for path, _ in jax.tree_util.tree_flatten_with_path(nnx.as_pure(tree))[0]
    ]
    counters = "growth_tracker", "skipped_in_a_row"
    around = [path[:-1] for path in paths if path and path[-1] in counters]
    return [path[:-1] in around and path[-1] != "inner_state" for path in paths]


def find_loss_scale(tree: PyTree, call: str) -> LossScale:
    """Returns `loss_scale_of(tree)`; error messages begin with `call`."""
    found = _only_node(tree, call, (LossScale, LossScaleState))
    # An nnx.Optimizer wraps every array of its state in a Variable.
    return nnx.as_pure(found.loss_scale if isinstance(found, LossScaleState) else found)


def find_counters(tree: PyTree, call: str) -> LossScaleState:
    """Returns the one `LossScaleState` in `tree`, without the inner state."""
    found = _only_node(tree, call, (LossScaleState,))
    return nnx.as_pure(found._replace(inner_state=()))


def _only_node(tree: PyTree, call: str, kinds: tuple[type, ...]) -> PyTree:
    """Returns the one node of `tree` that holds a loss scale."""
    warn_of_chain(tree, call)
    found = nodes_of(tree, kinds)
    if not found:
        raise ValueError(
            f"{call}: there is no loss scale in this {type(tree).__name__}. Wrap the "
            "optimizer in with_loss_scale(tx, dynamic_loss_scale()), or (tx, "
            "no_loss_scale()), and pass the state of its init; restore a checkpoint "
            "with target=tx.init(params)."
        )
    if len(found) > 1:
        places = " and ".join(path for path, _ in found)
        raise ValueError(
            f"{call}: this {type(tree).__name__} holds {len(found)} loss scales, at "
            f"{places}. Pass the part that holds the one you mean."
        )
    return found[0][1]
