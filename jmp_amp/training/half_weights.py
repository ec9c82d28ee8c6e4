"""Optimizers of half-precision parameters that lose no update.

An update is often smaller than half the distance of two half-precision numbers: added
to the parameter it is gone, 1.0 + 1e-3 in bfloat16 is 1.0 for ever. Three remedies,
each an optax transformation around an optimizer that works in float32: a float32
master of every parameter (4 more bytes each), a compensation that remembers the error
of rounding (2), rounding at random so that its error is zero on average (0).

They are one mechanism with three parameters: what is kept of a parameter at first, the
number that a parameter and what is kept of it stand for, and what an update writes. All
three return the float32 difference between two half-precision numbers, so that
`optax.apply_updates` arrives at the second.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.tree_util import KeyPath

from jmp_amp.policies.arguments import warn
from jmp_amp.policies.dtypes import F32, PyTree
from jmp_amp.training.parameters import first_values, new_float32
from jmp_amp.training.rounding import (
    Seeds,
    key_parts,
    land_on,
    next_on_grid,
    once_a_shape,
    random_seeds,
    remainder_of,
    round_at_random,
    with_remainder,
)
from jmp_amp.training.structures import (
    Optimizer,
    TreeStructure,
    check_gradients,
    check_half,
    check_state,
    is_half_parameter,
    is_variable,
    leaves_by_path,
    nodes_of,
    owned,
    promote_gradient,
    taking_part,
    telling_foreign_states,
    updates_of,
    with_extra_args,
)

# A function of arrays and a dtype, the third argument, traced once for a shape.
_of_dtype = functools.partial(once_a_shape, static_argnums=2)


class MasterWeightsState(NamedTuple):
    """The state of an optimizer wrapped in `with_master_weights`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      masters: a tree like the parameters, float32 where they are half and masked where
        they are not.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: PyTree
    masters: PyTree
    structure: TreeStructure


class KahanState(NamedTuple):
    """The state of an optimizer wrapped in `with_kahan`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      compensation: a tree like the parameters: int16 where they are half, to be added
        to a parameter in units of 2**-16 of its last place; masked elsewhere.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: PyTree
    compensation: PyTree
    structure: TreeStructure


class StochasticRoundingState(NamedTuple):
    """The state of an optimizer wrapped in `with_stochastic_rounding`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      key_data: uint32[...], the PRNG key, as `jax.random.key_data` shows it.
      steps: int32[], steps so far; together with the key they make the bits of one.
      structure: which leaves `init` saw; holds no arrays.
    """

    inner_state: PyTree
    key_data: jax.Array
    steps: jax.Array
    structure: TreeStructure


DIGIT_STATES = (MasterWeightsState, KahanState)
WEIGHT_STATES = (*DIGIT_STATES, StochasticRoundingState)
WeightState = MasterWeightsState | KahanState | StochasticRoundingState


def step_to(param: Array, landing: Array, dtype: np.dtype) -> tuple[Array, Array]:
    """Returns the update toward `landing`, and the number that it really reaches.

    Both are float32[...]. The update is rounded where the two numbers are as far apart
    as 1 and 1e-6. The sum is a number of `dtype` all the same, as it is a multiple of
    the last place of the update and small; or it is `landing`, or one float32 less
    where that is a power of two: the same in `dtype`.
    """
    # A parameter that is inf stays: inf - inf is NaN.
    step = jnp.where(landing == param, 0.0, landing - param)
    return step, next_on_grid(param + step, dtype)


@_of_dtype
def _of_master(param: Array, kept: Array, dtype: np.dtype) -> Array:
    # A parameter that was changed outside is no longer its rounded master.
    return jnp.where(land_on(kept, dtype) == param, kept, param)


@_of_dtype
def _to_master(param: Array, kept: Array, dtype: np.dtype, update: Array) -> Any:
    master = _of_master(param, kept, dtype) + update
    landing = land_on(master, dtype)
    _, reached = step_to(param, landing, dtype)
    # If the update was rounded, the master gives way, by less than the last place of
    # the old parameter in f32.
    master = jnp.where(reached == landing, master, reached)
    # The update is computed from the new master, not beside it: XLA's CPU makes a loop
    # for each result, and of two loops that both read the old master and the old
    # parameter neither can write in place.
    return step_to(param, land_on(master, dtype), dtype)[0], master


@jax.jit
def _first_compensation(param: Array, original: Array) -> Array:
    return remainder_of(original, jnp.asarray(param, F32), param.dtype)


@_of_dtype
def _to_compensation(param: Array, kept: Array, dtype: np.dtype, update: Array) -> Any:
    wanted = with_remainder(param, kept, dtype) + update
    step, reached = step_to(param, land_on(wanted, dtype), dtype)
    left = remainder_of(wanted, reached, dtype)
    # With a zero update nothing is written: rounding anew would move a tie.
    still = update == 0
    return jnp.where(still, 0.0, step), jnp.where(still, kept, left)


@_of_dtype
def _at_random(param: Array, kept: Seeds, dtype: np.dtype, update: Array) -> Any:
    return step_to(param, round_at_random(param + update, dtype, kept), dtype)[0], kept


# The three parameters. `param` is the float32 value of a parameter, `kept` its master,
# float32[...], its compensation, int16[...], or its seeds:
#   first: (parameter, original in float32) -> what is kept at first;
#   value: (param, kept, dtype) -> the number that they stand for, float32[...];
#   written: (param, kept, dtype, update) -> the update of the parameter itself,
#     float32[...], and what is kept now.
WAYS: dict[type, tuple[Any, Any, Any]] = {
    MasterWeightsState: (lambda _, original: original, _of_master, _to_master),
    KahanState: (_first_compensation, _of_dtype(with_remainder), _to_compensation),
    StochasticRoundingState: (None, lambda param, *_: param, _at_random),
}


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
    return _stores_half(MasterWeightsState, "with_master_weights", inner, init_from)


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
    return _stores_half(KahanState, "with_kahan", inner, init_from)


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
    return _stores_half(StochasticRoundingState, call, inner, None, key)


def _stores_half(
    kind: Any, call: str, inner: Optimizer, init_from: PyTree, key: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` around half-precision parameters, with a state of `kind`."""
    first, value, written = WAYS[kind]
    tx, is_random = with_extra_args(inner, call), kind is StochasticRoundingState
    parts: Any = key_parts(key, f"{call}(inner, {{}})") if is_random else ()

    def init_fn(params: PyTree) -> PyTree:
        values = first_values(params, init_from, call)
        inner_state, seen = tx.init(taking_part(values)), TreeStructure.of(params)
        if found := nodes_of(inner_state, WEIGHT_STATES):
            fact = f"the optimizer inside has a {type(found[0][1]).__name__} already"
            raise ValueError(f"{call}: {fact}. Wrap once, around the whole chain.")
        if is_random:
            steps = jnp.asarray(0, jnp.int32)
            return kind(owned(inner_state), owned(parts[0]), steps, seen)

        def begun(path: KeyPath, leaf: PyTree, value: PyTree) -> PyTree:
            is_kept = is_half_parameter(path, leaf)
            return first(leaf, value) if is_kept else optax.MaskedNode()

        kept = jax.tree_util.tree_map_with_path(begun, params, values)
        return kind(owned(inner_state), kept, seen)

    def update_fn(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> Any:
        check_state(isinstance(state, kind), state, call)
        if params is None:
            remedy = "Call update(gradients, state, params)."
            raise ValueError(f"{call}: update was given no parameters. {remedy}")
        check_gradients(updates, state.structure, params, call)
        if not (seen := state.structure).known:
            remedy = "Map it with jax.tree.map instead."
            raise ValueError(f"{call}: optax.tree.map_params made the state. {remedy}")
        check_half(params, seen, call)
        kept = jax.tree.leaves(state[1])
        if is_random:
            own_key = jax.random.wrap_key_data(state.key_data, impl=parts[1])
            kept = random_seeds(own_key, state.steps, sum(map(bool, seen.half)))
        leaves, structure = jax.tree.flatten(params)
        before = iter(kept)
        halves = [
            (jnp.asarray(leaf, F32), next(before), np.dtype(name)) if name else None
            for leaf, name in zip(leaves, seen.half, strict=True)
        ]
        pairs = zip(leaves, halves, strict=True)
        wide = structure.unflatten(value(*half) if half else x for x, half in pairs)
        trained, wide = taking_part(updates, promote_gradient), taking_part(wide)
        with telling_foreign_states(tx.init, wide, state.inner_state, call):
            proposed, inner_state = tx.update(trained, state.inner_state, wide, **extra)
        found = []
        proposals = updates_of(proposed, trained, updates, params, call)
        for (is_trained, update), half in zip(proposals, halves, strict=True):
            row = update, half and half[1]
            if half and is_trained:
                row = written(*half, update.astype(F32))
            found.append(row)
        chosen = jax.tree.structure(updates).unflatten(update for update, _ in found)
        if is_random:
            # A step that was skipped for all parameters has used no bits. After 2**31
            # steps it wraps: a saturated counter would repeat its bits forever.
            one_more = jnp.asarray(getattr(inner_state, "last_finite", True), jnp.int32)
            return chosen, kind(inner_state, state[1], state.steps + one_more, seen)
        now = [kept for (_, kept), half in zip(found, halves, strict=True) if half]
        tree = jax.tree.structure(state[1]).unflatten(now)
        return chosen, kind(inner_state, tree, seen)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def warn_of_chain(opt_state: PyTree, call: str) -> None:
    """Warns if others come after a state of half-precision weights in an `optax.chain`.

    What they do to its updates takes the parameters elsewhere: a master that is not the
    parameter, rounded, is overwritten by it in each step.
    """

    def is_chain(node: object) -> bool:
        # The state of a chain is a tuple, and nothing more.
        return type(node) is tuple and bool(nodes_of(node[:-1], WEIGHT_STATES))

    for node in filter(is_chain, jax.tree.leaves(opt_state, is_leaf=is_chain)):
        name = type(nodes_of(node[:-1], WEIGHT_STATES)[0][1]).__name__
        warn(
            f"{call}: in an optax.chain something comes after the transformation of "
            f"{name} and changes its updates, so that parameters miss the numbers "
            "that it keeps, in each step. Put the whole chain inside: "
            "with_master_weights(optax.chain(...))."
        )


def begin_with(opt_state: PyTree, params: PyTree, originals: PyTree) -> PyTree:
    """Returns a new optimizer state that has all digits of the original parameters.

    As `init_from=` of `with_master_weights` and `with_kahan`, for a state that began
    without it.

    Args:
      opt_state: any optimizer's state. `nnx.Variable`s in it are changed in place.
      params: the half-precision parameters.
      originals: the parameters before they were cast.
    """
    halves = dict(leaves_by_path(nnx.as_pure(params)))
    found = dict(leaves_by_path(nnx.as_pure(originals)))

    def begun(node: PyTree) -> PyTree:
        def of(path: KeyPath, old: PyTree) -> PyTree:
            at = jax.tree_util.keystr(path)
            if not jax.tree.leaves(old):  # A Variable that is masked.
                return old
            new = WAYS[type(node)][0](halves[at], new_float32(found[at], halves[at]))
            if not isinstance(old, nnx.Variable):
                return new
            old.set_value(new)
            return old

        if not isinstance(node, DIGIT_STATES):
            return node
        kept = jax.tree_util.tree_map_with_path(of, node[1], is_leaf=is_variable)
        return type(node)(node[0], kept, node[2])

    return jax.tree.map(begun, opt_state, is_leaf=lambda x: isinstance(x, DIGIT_STATES))
