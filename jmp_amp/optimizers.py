"""Loss scaling as an optax transformation, and what its state tells.

`with_loss_scale(inner, ...)` runs `inner` on every step and then chooses, element by
element, between what it wrote and what was there. There is no branch on the device: a
`lax.cond` would make the whole update wait for the flag and keep XLA from fusing it,
where a select is part of the fusion that writes the new value anyway.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

from jmp_amp.dtypes import is_fp8, is_half
from jmp_amp.finite import (
    all_finite,
    choose,
    first_difference,
    is_inexact,
    key_paths,
)
from jmp_amp.loss_scale import LossScale, promote_half
from jmp_amp.states import LossScaleState


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScale,
    *,
    unscale: bool = False,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with a loss scale in its state and non-finite steps skipped.

    On a step whose gradients hold an inf or a NaN the updates are zero, the state of
    `inner` (moments, counts, schedules) stays as it was bit for bit, and the scale
    backs off. On any other step `inner` runs and the growth counter moves. It never
    gives up and never lets a non-finite gradient through: `metrics` counts the skipped
    steps, `check_scale` raises after too many, `keep_if_finite` takes back what else
    the step wrote.

    `inner` works in float32: f16 and bf16 gradients reach it as float32, f16 and bf16
    parameters too, and so its moments are float32. With `params` given to `update` the
    updates come back in the dtype of half parameters, ready for `optax.apply_updates`.
    Leaves that are neither float nor complex, and fp8 ones, take no part: `inner` does
    not see them and their updates are zero.

    For accumulation put this outside: `with_loss_scale(optax.MultiSteps(...))` skips a
    bad micro-step and keeps the sum. Inside, `optax.MultiSteps(with_loss_scale(...))`,
    the sum turns NaN and stays NaN, because MultiSteps clears it by multiplying by
    zero: nothing is ever written to the parameters again, and `check_scale` says so.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      loss_scale: from `dynamic_loss_scale`, `static_loss_scale` or `no_loss_scale`.
      unscale: whether the incoming gradients are still those of the scaled loss
        (`jax.grad` of `loss_scale.scale(loss)`). By default they are unscaled, as
        `value_and_grad` returns them.
      axis_name: mapped axes (of `shard_map`, `vmap`, `pmap`) over which a step is
        skipped together, so that replicas keep one scale.

    Returns:
      A transformation whose state is a `LossScaleState`. Its `init` copies what it
      is given: donating the state deletes nobody's arrays.

    Raises:
      TypeError: if `inner` is no transformation or `loss_scale` is no `LossScale`.
      ValueError: from `init`, if `inner` holds a loss scale already; from `update`, if
        the gradients are not a tree like the one that `init` was given.

    Example:
      >>> import jmp_amp as amp
      >>> tx = amp.with_loss_scale(optax.sgd(0.5), amp.dynamic_loss_scale(1024.0))
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([jnp.inf, 1.0]), state, params)
      >>> updates, amp.loss_scale_of(state).value
      (Array([0., 0.], dtype=float32), Array(512., dtype=float32))
    """
    transformation = _with_extra_args(inner)
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"with_loss_scale(inner, {loss_scale!r}): not a LossScale. Use "
            "dynamic_loss_scale(), static_loss_scale(2.0**16) or no_loss_scale()."
        )

    def init_fn(params: Any) -> Any:
        inner_state = _own(transformation.init(_taking_part(params)))
        _refuse_nested(inner_state)
        return LossScaleState(
            inner_state=inner_state,
            loss_scale=_own(loss_scale),
            last_finite=jnp.asarray(True),
            skipped_total=jnp.asarray(0, jnp.int32),
            skipped_in_a_row=jnp.asarray(0, jnp.int32),
            applied=jnp.asarray(0, jnp.int32),
            structure=TreeStructure(key_paths(params)),
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _check_gradients(updates, state.structure, params)
        gradients = _taking_part(updates)
        if unscale:
            gradients = state.loss_scale.unscale(gradients)
        # An inf or NaN stays one when it is unscaled, and a scale below 1 may make a
        # new one: checked here, both are seen.
        finite = all_finite(gradients, axis_name)
        inner_params = None if params is None else _taking_part(params)
        proposed, inner_state = transformation.update(
            gradients, state.inner_state, inner_params, **extra_args
        )
        one_more = finite.astype(jnp.int32)
        return _chosen_updates(finite, proposed, updates, params), LossScaleState(
            inner_state=choose(
                finite,
                inner_state,
                state.inner_state,
                "with_loss_scale: inner changed the type of its state",
                ("the new state", "the old one"),
            ),
            loss_scale=state.loss_scale.adjust(finite),
            last_finite=finite,
            skipped_total=state.skipped_total + (1 - one_more),
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
            applied=state.applied + one_more,
            structure=state.structure,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class TreeStructure:
    """The key paths of a tree: a pytree without leaves.

    Kept in the state so that `update` can say which gradient is missing. An empty one
    is unknown and equal to any: `optax.tree.map_params` calls `init` with a
    placeholder, and matches the state that it gets against the real one.

    Example:
      >>> TreeStructure(("['w']",)) == TreeStructure(())
      True
    """

    paths: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeStructure):
            return NotImplemented
        return not self.paths or not other.paths or self.paths == other.paths

    def __hash__(self) -> int:
        return hash(TreeStructure)

    def __repr__(self) -> str:
        return f"<{len(self.paths)} leaves>"


serialization.register_serialization_state(
    TreeStructure, lambda _: {}, lambda target, _: target
)


def _with_extra_args(inner: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, optax.MultiSteps):
        init, update = cast(Any, inner.init), cast(Any, inner.update)
        return optax.GradientTransformationExtraArgs(init, update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"with_loss_scale({inner!r}, ...): not an optax transformation. Pass the "
            "optimizer to wrap, such as optax.adamw(3e-4)."
        )
    return optax.with_extra_args_support(inner)


def _takes_part(leaf: Any) -> bool:
    return is_inexact(leaf) and not is_fp8(getattr(leaf, "dtype", None))


def _taking_part(tree: Any) -> Any:
    """The tree that `inner` sees: half leaves in float32, those not trained masked."""
    return jax.tree.map(
        lambda leaf: promote_half(leaf) if _takes_part(leaf) else optax.MaskedNode(),
        tree,
    )


def _own(tree: Any) -> Any:
    """`tree` with its arrays copied, of strong dtypes, shared with nobody."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for index, leaf in enumerate(leaves):
        # In place, so that each original can be freed before the next one is copied.
        leaves[index] = _own_leaf(leaf)
    return structure.unflatten(leaves)


def _own_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | numbers.Number):
        return leaf
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jnp.array(leaf, copy=True)
    return leaf if dtype == jax.dtypes.float0 else jnp.array(leaf, dtype, copy=True)


def _refuse_nested(inner_state: Any) -> None:
    nodes = jax.tree.leaves(
        inner_state, is_leaf=lambda node: isinstance(node, LossScaleState)
    )
    if any(isinstance(node, LossScaleState) for node in nodes):
        raise ValueError(
            "with_loss_scale: the optimizer it was given holds a loss scale already. "
            "Wrap once, around the whole chain."
        )


def _check_gradients(gradients: Any, structure: TreeStructure, params: Any) -> None:
    """Raises if the gradients are not a tree like that of `init` or of `params`."""
    found, seen = key_paths(gradients), structure.paths
    if seen and found != seen:
        raise ValueError(
            f"with_loss_scale: update was given gradients of structure {_shown(found)} "
            f"but init saw {_shown(seen)}; first difference at "
            f"{first_difference(found, seen)}. Differentiate with respect to the tree "
            "that init was given."
        )
    if params is None:
        return
    if found != (expected := key_paths(params)):
        raise ValueError(
            f"with_loss_scale: update was given gradients of structure {_shown(found)} "
            f"but params of {_shown(expected)}; first difference at "
            f"{first_difference(found, expected)}. Pass the parameters that the "
            "gradients belong to."
        )
    leaves, _ = jax.tree_util.tree_flatten_with_path(gradients)
    for (path, gradient), param in zip(leaves, jax.tree.leaves(params), strict=True):
        if np.shape(gradient) != np.shape(param):
            raise ValueError(
                f"with_loss_scale: the gradient at {jax.tree_util.keystr(path)} has "
                f"shape {np.shape(gradient)} but the parameter has {np.shape(param)}. "
                "Reduce the gradient over the axes that the parameter lacks."
            )


def _shown(paths: Sequence[str], limit: int = 8) -> str:
    more = f", ... ({len(paths)} leaves)" if len(paths) > limit else ""
    return f"{{{', '.join(path or '*' for path in paths[:limit])}{more}}}"


def _chosen_updates(
    finite: jax.Array, proposed: Any, gradients: Any, params: Any
) -> Any:
    """`proposed` or zeros, half where the parameter is, as a tree like `gradients`."""
    leaves, structure = jax.tree.flatten(gradients)
    likes = leaves if params is None else jax.tree.leaves(params)
    remaining = iter(jax.tree.leaves(proposed))
    chosen = []
    for gradient, like in zip(leaves, likes, strict=True):
        if not _takes_part(gradient):
            chosen.append(_zeros(gradient, like))
            continue
        update = next(remaining)
        update = jnp.where(finite, update, jnp.zeros_like(update))
        half = params is not None and is_half(getattr(like, "dtype", None))
        chosen.append(update.astype(like.dtype) if half else update)
    return structure.unflatten(chosen)


def _zeros(gradient: Any, like: Any) -> Any:
    """A zero update for a leaf that takes no part, if there is such a number."""
    for leaf in (like, gradient):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and any(
            jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_)
        ):
            return jnp.zeros(leaf.shape, dtype)
    return gradient
