"""Optimizers of half-precision parameters that lose no update.

An update is often smaller than half the distance of two half-precision numbers: added
to the parameter it is gone, 1.0 + 1e-3 in bfloat16 is 1.0 for ever. Three remedies,
each an optax transformation around an optimizer that works in float32: a float32
master of every parameter (4 more bytes each), a compensation that remembers the error
of rounding (2), rounding at random so that its error is zero on average (0).

All three return the float32 difference between two half-precision numbers, so that
`optax.apply_updates` arrives at the second.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_amp.policies.dtypes import F32, PyTree
from jmp_amp.training.digits import (
    WEIGHT_STATES,
    Half,
    KahanState,
    MasterWeightsState,
    StochasticRoundingState,
    WeightState,
    check_state,
    first_values,
)
from jmp_amp.training.rounding import key_parts, random_seeds
from jmp_amp.training.states import LossScaleState
from jmp_amp.training.structures import (
    TreeStructure,
    check_gradients,
    check_half,
    is_half_parameter,
    nodes_of,
    telling_foreign_states,
)
from jmp_amp.training.trainable import (
    owned,
    promote_gradient,
    takes_part,
    taking_part,
    untrained_update,
    updates_of,
    with_extra_args,
)

Optimizer = optax.GradientTransformation | optax.MultiSteps


def with_master_weights(
    inner: Optimizer, *, init_from: PyTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with a float32 master copy of the half-precision parameters.

    `inner` updates the masters, in float32, with float32 gradients and moments, as if
    the parameters were float32 (Micikevicius et al. 2018, arXiv:1710.03740, section
    3.1; Apex's O2, DeepSpeed's and Megatron's mixed-precision optimizers). The updates
    it returns take half-precision parameters to the masters, rounded to nearest:
    `optax.apply_updates` lands exactly there. Float32 parameters have no master.

    If the caller changed a parameter since the last step, so that it differs from its
    rounded master, the parameter replaces the master.

    The collection `_overwrite_with_gradient` of flax's fp8 layers, their next state, is
    returned among the updates as it is.

    `with_loss_scale` may stand inside or outside. Accumulation belongs inside:
    `with_master_weights(optax.MultiSteps(...))`. If the state is sharded and the
    parameters are not, this is ZeRO's first stage.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      init_from: the parameters before they were cast, a tree (or nnx module) that has a
        floating leaf for every half one of `init`'s; the masters begin with their
        digits. By default masters begin as the half-precision parameters themselves.
        The transformation holds on to this tree; `Recipe.init` does without.

    Returns:
      A transformation whose state is a `MasterWeightsState`. Its `update` needs
      `params`, and returns float32 updates for half-precision parameters. (Under
      strict dtype promotion optax cannot add them: put
      `jax.numpy_dtype_promotion("standard")` around `optax.apply_updates`.)

    Raises:
      TypeError: if `inner` is not a transformation.
      ValueError: from `init`, if a parameter is missing in `init_from` or is not the
        rounded one there, or if `inner` stores half-precision parameters itself; from
        `update`, without `params`, or if the gradients are not a tree like the one that
        `init` was given.

    Example:
      >>> import jmp_amp as amp
      >>> tx, params = amp.with_master_weights(optax.sgd(1.0)), jnp.bfloat16(1.0)
      >>> state = tx.init(params)
      >>> for _ in range(100):
      ...     updates, state = tx.update(jnp.bfloat16(-1e-3), state, params)
      ...     params = (params.astype(F32) + updates).astype(params.dtype)
      >>> params, state.masters.round(3)
      (Array(1.10156, dtype=bfloat16), Array(1.1, dtype=float32))
    """
    return _with_digits(MasterWeightsState, "with_master_weights", inner, init_from)


def with_kahan(
    inner: Optimizer, *, init_from: PyTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with compensated summation of half-precision parameters.

    The error of rounding an update is remembered and added to the next (Kahan
    summation; Zamirai et al. 2020, arXiv:2010.06192, section 3.2). The compensation is
    an int16 that counts 2**-16 of the parameter's last place: together they are a
    float32 in its 4 bytes, where a parameter and its master are 6.

    `inner` sees the sum of both, in float32, with float32 gradients and moments. A zero
    update changes neither parameter nor compensation.

    If the caller changes a parameter, its compensation stays: the sum of both differs
    from the new parameter by at most half of its last place. `with_master_weights`
    takes the new parameter as it is. It also keeps an original beyond the range of the
    half dtype, of which a compensation keeps the end of the range.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      init_from: the parameters before they were cast, as for `with_master_weights`.

    Returns:
      A transformation whose state is a `KahanState`; `update` is that of
      `with_master_weights`.

    Raises:
      TypeError: if `inner` is not a transformation.
      ValueError: as `with_master_weights`.

    Example:
      >>> import jmp_amp as amp
      >>> tx, params = amp.with_kahan(optax.sgd(1.0)), jnp.bfloat16(1.0)
      >>> updates, state = tx.update(jnp.float32(-(2**-10)), tx.init(params), params)
      >>> updates, amp.export_params(params, state)
      (Array(0., dtype=float32), Array(1.0009766, dtype=float32))
    """
    return _with_digits(KahanState, "with_kahan", inner, init_from)


def with_stochastic_rounding(
    inner: Optimizer, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with half-precision parameters rounded at random.

    The sum of a parameter and its update is rounded to one of the two half-precision
    numbers around it, to the nearer one more often, so that it is right on average
    (Gupta et al. 2015, arXiv:1502.02551, section 3.2; Zamirai et al. 2020,
    arXiv:2010.06192). It needs no memory between steps. `inner` works in float32, its
    moments too.

    The random bits are made of `key`, a counter in the state and the place of each
    number: `jax.random` makes two words for each step, an integer hash spreads them
    over parameters and places. A run is repeatable, goes on unchanged from a
    checkpoint, and rounds alike wherever the state is replicated, whatever the sharding
    of the parameters under `jax.jit`. Equal keys draw equal bits: give each part of a
    tree (`optax.partition`) another key. Inside `shard_map` and `vmap` all members have
    one key.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      key: a PRNG key of `jax.random`, new or old style.

    Returns:
      A transformation whose state is a `StochasticRoundingState`; `update` is that of
      `with_master_weights`.

    Raises:
      TypeError: if `inner` is not a transformation, or `key` is not a key.
      ValueError: as `with_master_weights`.

    Example:
      >>> import jmp_amp as amp
      >>> tx = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
      >>> params, gradient = jnp.ones(9999, jnp.bfloat16), jnp.full(9999, -1e-3)
      >>> updates, state = tx.update(gradient, tx.init(params), params)
      >>> jnp.unique(updates), updates.mean().round(3)
      (Array([0.       , 0.0078125], dtype=float32), Array(0.001, dtype=float32))
    """
    call = "with_stochastic_rounding"
    transformation = with_extra_args(inner, call)
    key_data, implementation = key_parts(key, f"{call}(inner, {{}})")

    def init_fn(params: PyTree) -> PyTree:
        return StochasticRoundingState(
            inner_state=_inner_state(transformation, params, call),
            key_data=owned(key_data),
            steps=jnp.asarray(0, jnp.int32),
            structure=TreeStructure.of(params),
        )

    def seeds(state: StochasticRoundingState) -> list[PyTree]:
        base = jax.random.wrap_key_data(state.key_data, impl=implementation)
        halves = sum(map(bool, state.structure.half))
        return random_seeds(base, state.steps, halves)

    def next_state(
        state: StochasticRoundingState, inner_state: PyTree, _: list[PyTree]
    ) -> StochasticRoundingState:
        # A step that was skipped for all parameters has used no bits.
        one_more = jnp.asarray(1, jnp.int32)
        if isinstance(inner_state, LossScaleState):
            one_more = inner_state.last_finite.astype(jnp.int32)
        # After 2**31 steps it wraps: a saturated counter would repeat its bits forever.
        return state._replace(inner_state=inner_state, steps=state.steps + one_more)

    update_fn = _updating(
        StochasticRoundingState, call, transformation, seeds, next_state
    )
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _with_digits(
    kind: type[MasterWeightsState | KahanState],
    call: str,
    inner: Optimizer,
    init_from: PyTree | None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` around parameters whose digits a state of `kind` keeps."""
    transformation = with_extra_args(inner, call)

    def init_fn(params: PyTree) -> PyTree:
        values = first_values(params, init_from, call)
        inner_state = _inner_state(transformation, values, call)
        kept = jax.tree_util.tree_map_with_path(
            lambda path, leaf, value: (
                kind.first(leaf, value)
                if is_half_parameter(path, leaf)
                else optax.MaskedNode()
            ),
            params,
            values,
        )
        return kind(inner_state, kept, TreeStructure.of(params))

    def next_state(
        state: MasterWeightsState | KahanState, inner_state: PyTree, kept: list
    ) -> MasterWeightsState | KahanState:
        tree = jax.tree.structure(state.kept).unflatten(kept)
        return kind(inner_state, tree, state.structure)

    def kept_of(state: MasterWeightsState | KahanState) -> list[jax.Array]:
        return jax.tree.leaves(state.kept)

    update_fn = _updating(kind, call, transformation, kept_of, next_state)
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _updating(
    kind: type[WeightState],
    call: str,
    transformation: optax.GradientTransformationExtraArgs,
    kept_of: Callable[[PyTree], list[PyTree]],
    next_state: Callable[[PyTree, PyTree, list[PyTree]], WeightState],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns the `update` of an optimizer of half-precision parameters.

    Args:
      kind: the class of its state, which knows how a number is read and written.
      call: its name, to begin errors with.
      transformation: the optimizer of float32 parameters inside.
      kept_of: reads what is kept for each half parameter out of the state.
      next_state: makes the next state out of the old one, that of `transformation`, and
        what to keep now.
    """

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        _check_arguments(state, kind, params, call)
        check_gradients(updates, state.structure, params, call)
        halves = _halves(params, state.structure, kept_of(state), call)
        leaves, structure = jax.tree.flatten(params)
        values = structure.unflatten(
            leaf if half is None else kind.value(half)
            for leaf, half in zip(leaves, halves, strict=True)
        )
        trained = taking_part(updates, promote_gradient)
        seen = taking_part(values)
        with telling_foreign_states(transformation.init, seen, state.inner_state, call):
            proposed, inner_state = transformation.update(
                trained, state.inner_state, seen, **extra_args
            )
        remaining = iter(updates_of(proposed, trained, call))
        gradients, structure = jax.tree_util.tree_flatten_with_path(updates)
        chosen, kept = [], []
        for (path, gradient), leaf, half in zip(gradients, leaves, halves, strict=True):
            if not takes_part(path, gradient):
                update = untrained_update(path, gradient, leaf)
                now = half and half.kept
            elif half is None:
                update, now = next(remaining), None
            else:
                update, now = kind.written(half, next(remaining).astype(F32))
            chosen.append(update)
            kept += [] if half is None else [now]
        return structure.unflatten(chosen), next_state(state, inner_state, kept)

    return update_fn


def _halves(
    params: PyTree, structure: TreeStructure, kept: list[PyTree], call: str
) -> list[Half | None]:
    """Returns the half-precision parameters, and None for the others."""
    if not structure.known:
        raise ValueError(
            f"{call}: the state does not say which parameters are half: it "
            "comes from optax.tree.map_params. Map it with jax.tree.map instead."
        )
    check_half(params, structure, call)
    remaining = iter(kept)
    return [
        Half(jnp.asarray(leaf, F32), np.dtype(name), next(remaining)) if name else None
        for leaf, name in zip(jax.tree.leaves(params), structure.half, strict=True)
    ]


def _check_arguments(
    state: PyTree, kind: type[WeightState], params: PyTree | None, call: str
) -> None:
    check_state(isinstance(state, kind), state, call)
    if params is None:
        raise ValueError(
            f"{call}: update was given no parameters, and what they are "
            "rounded to depends on them. Call update(gradients, state, params)."
        )


def _inner_state(
    transformation: optax.GradientTransformation, params: PyTree, call: str
) -> PyTree:
    inner_state = transformation.init(taking_part(params))
    if nodes_of(inner_state, LossScaleState) and nodes_of(inner_state, WEIGHT_STATES):
        raise ValueError(
            f"{call}: the optimizer it was given holds a loss scale, and stores "
            "half-precision parameters already: it has been wrapped before, by "
            "recipe.wrap or by hand. Wrap once, around the whole chain."
        )
    if found := nodes_of(inner_state, WEIGHT_STATES):
        raise ValueError(
            f"{call}: the optimizer it was given has a {type(found[0][1]).__name__} "
            "already, and one is enough to store half-precision parameters. Leave one "
            "of them out."
        )
    return owned(inner_state)
