"""Loss scaling as an optax transformation.

`with_loss_scale(inner, ...)` runs `inner` on every step and then selects, element by
element, the new value or the old one. There is no branch on the device: a `lax.cond`
would keep XLA from fusing the update with what comes before and after it. On a GPU the
select is part of the kernel that writes the new value. XLA's CPU copies old moments,
masters and parameters for it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jmp_amp.plan.dataflow.dead_code import inputs_read
from jmp_amp.policies.arguments import checked_flag
from jmp_amp.policies.dtypes import PyTree, is_half
from jmp_amp.training.collectives import all_finite, checked_axes, mapped_axes
from jmp_amp.training.half_weights import WEIGHT_STATES, warn_of_chain
from jmp_amp.training.loss_scale import LossScale
from jmp_amp.training.loss_scale_state import LossScaleState, choose
from jmp_amp.training.rounding import once_a_shape
from jmp_amp.training.structures import (
    TreeStructure,
    check_gradients,
    check_half,
    check_state,
    nodes_of,
    owned,
    promote_gradient,
    taking_part,
    telling_foreign_states,
    updates_of,
    with_extra_args,
)

# The updates and the state.
Results = tuple[PyTree, PyTree]


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScale,
    *,
    unscale: bool = False,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with a loss scale in its state and non-finite steps skipped.

    On a step whose gradients hold an inf or a NaN the updates are zero, the state of
    `inner` (moments, counts, schedules) stays unchanged bit for bit, and the scale
    backs off. On any other step `inner` runs and the growth counter moves. It never
    gives up and never lets a non-finite gradient through: `metrics` counts the skipped
    steps, `check_scale` raises after too many, `keep_if_finite` takes back all other
    values that the step wrote.

    Only gradients that `inner` reads are checked: a frozen part, such as one of
    `optax.set_to_zero` in an `optax.partition`, skips no step. A mask that freezes is
    first in a chain, `optax.chain(optax.transforms.freeze(mask), optax.adamw(1e-3))`:
    what stands before it reads all gradients, and so does `optax.clip_by_global_norm`
    before a partition. Put this around the whole chain: a transformation outside, such
    as `optax.clip`, may hide an overflow from it.

    Gradients of single examples are legal if `inner` adds them up, as
    `optax.contrib.differentially_private_aggregate` does. Each has one axis more than
    its parameter, in front. What adds them up is first in a chain, outside of other
    wrappers and of `optax.partition`.

    Optimizers that evaluate more gradients (`optax.contrib.sam`) or keep several copies
    of the parameters (`optax.lookahead`) belong outside.

    `inner` works in float32: f16 and bf16 gradients reach it as float32, f16 and bf16
    parameters too, and so its moments are float32. With `params` given to `update` the
    updates come back in the dtype of half parameters, ready for `optax.apply_updates`;
    in float32 if `inner` is one of `with_master_weights`, `with_kahan` and
    `with_stochastic_rounding`, which add them without loss. `inner` does not see fp8
    leaves, nor those that are neither float nor complex: their updates are zero.

    The collection `_overwrite_with_gradient` of flax's fp8 layers holds the next state
    of the layers, and no gradients. It comes back in `updates` as it is, in a skipped
    step and in each micro-step of an accumulation too. It is not for
    `optax.apply_updates` (apply `updates["params"]`), and `keep_if_finite` takes it
    back after a skipped step.

    For accumulation put this outside: `with_loss_scale(optax.MultiSteps(...))` skips a
    bad micro-step and keeps the sum. Inside, `optax.MultiSteps(with_loss_scale(...))`,
    the sum turns NaN and stays NaN, because MultiSteps clears it by multiplying by
    zero: nothing is ever written to the parameters again, and `check_scale` says so.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      loss_scale: from `dynamic_loss_scale`, `static_loss_scale` or `no_loss_scale`.
      unscale: whether the incoming gradients are still those of the scaled loss
        (`jax.grad` of `loss_scale.scale(loss)`). By default they are unscaled, as
        `value_and_grad` returns them. It raises if it is given a state that unscales.
      axis_name: mapped axes (of `shard_map`, `vmap`, `pmap`) over which a step is
        skipped together, so that replicas keep one scale. Inside `shard_map` take the
        mean over devices in the loss, `jax.lax.pmean(loss, "data")`: with `check_vma`,
        its default, gradients of replicated parameters arrive summed already.

    Returns:
      A transformation whose state is a `LossScaleState`. Its `init` copies the arrays
      it is given, so that the state may be donated.

    Raises:
      TypeError: if `inner` is not a transformation, `loss_scale` not a `LossScale`,
        `unscale` not a bool or `axis_name` no name; from `update`, if the state is
        another optimizer's.
      NameError: from `update`, if there is no mapped axis of that name.
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
    call = "with_loss_scale"
    tx = with_extra_args(inner, call)
    unscale = checked_flag(unscale, f"{call}(inner, scale, unscale={{}})")
    if not isinstance(loss_scale, LossScale):
        remedy = "Use dynamic_loss_scale(), static_loss_scale(...) or no_loss_scale()."
        raise TypeError(f"{call}(inner, {loss_scale!r}): not a LossScale. {remedy}")
    over_axes = f"{call}(inner, scale, axis_name={axis_name!r})"
    checked_axes(axis_name, over_axes)

    def init_fn(params: PyTree) -> PyTree:
        first, finite = owned(_first_state(tx, params)), jnp.asarray(True)
        total, in_a_row, applied = (jnp.asarray(0, jnp.int32) for _ in range(3))
        seen = dataclasses.replace(TreeStructure.of(params), unscales=unscale)
        scale = owned(loss_scale)
        return LossScaleState(first, scale, finite, total, in_a_row, applied, seen)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        check_state(isinstance(state, LossScaleState), state, call)
        if shape := np.shape(state.loss_scale.value):
            remedy = "Map update too: jax.vmap(tx.update)(gradients, state, params)."
            raise ValueError(f"{call}: its loss scales are of shape {shape}. {remedy}")
        mapped_axes(axis_name, over_axes)
        known = updates, state.structure, params, call
        is_batch = check_gradients(*known, batched=True)
        gradients = taking_part(updates, promote_gradient)
        if unscale:
            gradients = state.loss_scale.unscale(gradients)
        trained = None if params is None else taking_part(params)
        stores = bool(nodes_of(state.inner_state, WEIGHT_STATES))
        if stores and params is not None:
            check_half(params, state.structure, call)

        def step(gradients: PyTree) -> tuple[PyTree, PyTree]:
            return tx.update(gradients, state.inner_state, trained, **extra_args)

        first_state = functools.partial(_first_state, tx)
        seen = updates if params is None else params
        try:
            with telling_foreign_states(first_state, seen, state.inner_state, call):
                # Unscaling keeps an inf or NaN, and with a scale below 1 may make a new
                # one: looked at after it, both are seen.
                found, finite = update_and_finite(step, gradients, axis_name)
                proposed, inner_state = found
                what = f"{call}: inner changed the type of its state"
                names = "the new state", "the old one"
                kept = choose(finite, inner_state, state.inner_state, what, names)
        except Exception:
            if is_batch:
                # That nothing reduces it may be the reason.
                check_gradients(*known)
            raise
        if is_batch and _shapes(proposed) != _shapes(trained):
            check_gradients(*known)  # Nothing reduces it.
        likes = jax.tree.leaves(updates if params is None else params)
        found = updates_of(proposed, gradients, updates, params, call)
        is_rounded, chosen = params is not None and not stores, []
        for (is_trained, update), like in zip(found, likes, strict=True):
            if is_trained:
                update = _or_zeros(finite, update)
                # Wrappers that store half parameters get updates that are not rounded.
                if is_rounded and is_half(getattr(like, "dtype", None)):
                    update = update.astype(like.dtype)
            chosen.append(update)
        counts = state.skipped_total, state.skipped_in_a_row, state.applied
        total, in_a_row, applied = map(optax.safe_increment, counts)
        return jax.tree.structure(updates).unflatten(chosen), state._replace(
            inner_state=kept,
            loss_scale=state.loss_scale.adjust(finite),
            last_finite=finite,
            skipped_total=jnp.where(finite, state.skipped_total, total),
            skipped_in_a_row=jnp.where(finite, 0, in_a_row),
            applied=jnp.where(finite, applied, state.applied),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@once_a_shape
def _or_zeros(finite: jax.Array, update: jax.Array) -> jax.Array:
    return jax.lax.select(finite, update, jnp.zeros_like(update))


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return list(map(np.shape, jax.tree.leaves(tree)))


def _first_state(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns the first state of an optimizer of float32 parameters.

    Transformations that store half-precision parameters themselves, such as
    `with_master_weights`, begin with the parameters as they are; all others begin with
    float32 ones. A state shows which is which, and `optax.partition` may hold both:
    `init` runs twice if there are half parameters and a transformation that stores
    them.
    """
    state = tx.init(taking_part(params))
    warn_of_chain(state, "with_loss_scale(inner, scale).init")
    if nodes_of(state, LossScaleState):
        fact = "the optimizer it was given holds a loss scale already"
        raise ValueError(f"with_loss_scale: {fact}. Wrap once, around the whole chain.")
    if not any(TreeStructure.of(params).half) or not nodes_of(state, WEIGHT_STATES):
        return state

    def is_stored(node: object) -> bool:
        return isinstance(node, WEIGHT_STATES)

    def begun(node: PyTree, other: PyTree) -> PyTree:
        if not is_stored(node):
            return other
        # Its `update` is given the half parameters as float32.
        structure = dataclasses.replace(node.structure, promoted=True)
        return node._replace(structure=structure)

    # The moments in there are freed before they are made again.
    others = jax.tree.map(
        lambda node: None if is_stored(node) else node, state, is_leaf=is_stored
    )
    del state
    stored = tx.init(taking_part(params, lambda leaf: leaf))
    return jax.tree.map(begun, stored, others, is_leaf=is_stored)


def update_and_finite(
    step: Callable[[PyTree], Results],
    gradients: PyTree,
    axis_name: str | Sequence[str] | None,
) -> tuple[Results, jax.Array]:
    """Returns `step(gradients)`, and whether all gradients that it reads are finite.

    While JAX traces, `step` is called once. Else it runs as it is, one operation
    after the other; if a gradient is not finite, it is traced before.

    Args:
      step: a function of the gradients; its results may hold leaves of any type.
      gradients: any pytree.
      axis_name: mapped axes to agree over.

    Returns:
      The results; and bool[].
    """
    finite = all_finite(gradients, axis_name)
    is_traced = isinstance(finite, Tracer)
    if not is_traced and finite:
        return step(gradients), finite
    leaves, structure = jax.tree.flatten(gradients)
    others: list[PyTree] = []

    @jax.jit
    def update(leaves: list[jax.Array]) -> list[jax.Array]:
        results, tree = jax.tree.flatten(step(structure.unflatten(leaves)))
        others[:] = tree, [None if isinstance(x, jax.Array) else x for x in results]
        return [leaf for leaf in results if isinstance(leaf, jax.Array)]

    try:
        program = update.trace(leaves).jaxpr
    except Exception:
        if is_traced:
            raise
        # An update that asks for the values of gradients reads all of them.
        return step(gradients), finite
    # Arrays that `step` closes over come before its argument.
    is_read = inputs_read(program)[len(program.in_avals) - len(leaves) :]
    if not all(is_read):
        pairs = zip(leaves, is_read, strict=True)
        read = (leaf if is_read else optax.MaskedNode() for leaf, is_read in pairs)
        finite = all_finite(structure.unflatten(read), axis_name)
    if not is_traced:
        return step(gradients), finite
    arrays, (tree, results) = iter(update(leaves)), others
    return tree.unflatten(next(arrays) if x is None else x for x in results), finite
