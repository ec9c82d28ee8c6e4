"""Optimizers of half-precision parameters that lose no update.

An update is often smaller than half the distance of two half-precision numbers: added
to the parameter it is gone, 1.0 + 1e-3 in bfloat16 is 1.0 for ever. Three remedies,
each an optax transformation around an optimizer that works in float32: a float32
master of every parameter (4 more bytes each), a compensation that remembers what
rounding took (2), rounding at random so that it takes nothing on average (0).

All three return the float32 difference between two half-precision numbers, so that
`optax.apply_updates` arrives at the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_amp.policies.dtypes import F32, is_half
from jmp_amp.training.loss_scale import promote_gradient
from jmp_amp.training.originals import originals_of, remainder
from jmp_amp.training.rounding import (
    land_on,
    remainder_of,
    round_at_random,
    round_to,
    with_remainder,
)
from jmp_amp.training.states import (
    WEIGHT_STATES,
    KahanState,
    LossScaleState,
    MasterWeightsState,
    StochasticRoundingState,
    nodes_of,
)
from jmp_amp.training.trainable import (
    TreeStructure,
    check_gradients,
    owned,
    takes_part,
    taking_part,
    with_extra_args,
    zero_update,
)


def with_master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps, *, init_from: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with a float32 master copy of the half-precision parameters.

    `inner` updates the masters, in float32, with float32 gradients and moments, as if
    the parameters were float32 (Micikevicius et al. 2018, arXiv:1710.03740, section
    3.1; Apex's O2, DeepSpeed's and Megatron's mixed-precision optimizers). The updates
    it returns take half-precision parameters to the masters, rounded to nearest:
    `optax.apply_updates` lands exactly there. Float32 parameters have no master.

    A parameter that somebody else has changed since the last step, so that it is no
    longer its rounded master, is taken as it is, and so is its master.

    Together with loss scaling either goes around the other; so does accumulation,
    which belongs inside: `with_master_weights(optax.MultiSteps(...))`. If the state is
    sharded and the parameters are not, this is ZeRO's first stage.

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
      TypeError: if `inner` is no transformation.
      ValueError: from `init`, if a parameter is missing in `init_from` or is not the
        rounded one there, or if `inner` stores half-precision parameters itself; from
        `update`, without `params`, or if the gradients are not a tree like the one that
        `init` was given.

    Example:
      >>> import jmp_amp as amp
      >>> tx = amp.with_master_weights(optax.sgd(1.0))
      >>> params, gradient = jnp.bfloat16(1.0), jnp.bfloat16(-1e-3)
      >>> state = tx.init(params)
      >>> for _ in range(100):
      ...     updates, state = tx.update(gradient, state, params)
      ...     with jax.numpy_dtype_promotion("standard"):
      ...         params = optax.apply_updates(params, updates)
      >>> params, state.masters.round(3)
      (Array(1.10156, dtype=bfloat16), Array(1.1, dtype=float32))
    """
    call = "with_master_weights"
    transformation = with_extra_args(inner, call)

    def init_fn(params: Any) -> Any:
        originals = originals_of(params, init_from, call)
        masters = _for_half(params, lambda path, leaf: originals.get(path, leaf), F32)
        inner_state = transformation.init(taking_part(_merged(params, masters)))
        return MasterWeightsState(
            inner_state=owned(_not_nested(inner_state, call)),
            masters=masters,
            structure=TreeStructure.of(params),
        )

    def value(half: _Half) -> jax.Array:
        master = half.kept
        return jnp.where(land_on(master, half.dtype) == half.param, master, half.param)

    def written(half: _Half, update: jax.Array) -> tuple[jax.Array, jax.Array]:
        master = value(half) + update
        landing = land_on(master, half.dtype)
        step, reached = _step(half, landing)
        # The difference of two numbers as far apart as 1 and 1e-6 may itself be
        # rounded. Then the master gives way, by less than an f32 of the old size tells.
        return step, jnp.where(reached == landing, master, reached)

    update_fn = _updating("masters", call, transformation, value, written)
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def with_kahan(
    inner: optax.GradientTransformation | optax.MultiSteps, *, init_from: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with compensated summation of half-precision parameters.

    What rounding takes from an update is remembered and added to the next (Kahan
    summation; Zamirai et al. 2020, arXiv:2010.06192, section 3.2). The compensation is
    an int16 that counts 2**-16 of the parameter's last place: together they are a
    float32 in its 4 bytes, where a parameter and its master are 6.

    `inner` sees the sum of both, in float32, with float32 gradients and moments.
    Parameters whose update is zero stay as they are, and so do compensations.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      init_from: the parameters before they were cast, as for `with_master_weights`.

    Returns:
      A transformation whose state is a `KahanState`; `update` is that of
      `with_master_weights`.

    Raises:
      TypeError: if `inner` is no transformation.
      ValueError: as `with_master_weights`.

    Example:
      >>> import jmp_amp as amp
      >>> tx = amp.with_kahan(optax.sgd(1.0))
      >>> params, gradient = jnp.bfloat16(1.0), jnp.bfloat16(-1e-3)
      >>> state = tx.init(params)
      >>> for _ in range(100):
      ...     updates, state = tx.update(gradient, state, params)
      ...     with jax.numpy_dtype_promotion("standard"):
      ...         params = optax.apply_updates(params, updates)
      >>> params
      Array(1.10156, dtype=bfloat16)
    """
    call = "with_kahan"
    transformation = with_extra_args(inner, call)

    def init_fn(params: Any) -> Any:
        originals = originals_of(params, init_from, call)
        values = _for_half(params, lambda path, leaf: originals.get(path, leaf), F32)
        inner_state = transformation.init(taking_part(_merged(params, values)))
        return KahanState(
            inner_state=owned(_not_nested(inner_state, call)),
            compensation=_for_half(
                params,
                lambda path, leaf: remainder(leaf, originals.get(path, leaf)),
                jnp.int16,
            ),
            structure=TreeStructure.of(params),
        )

    def value(half: _Half) -> jax.Array:
        return with_remainder(half.param, half.kept, half.dtype)

    def written(half: _Half, update: jax.Array) -> tuple[jax.Array, jax.Array]:
        wanted = value(half) + update
        step, reached = _step(half, land_on(wanted, half.dtype))
        left = remainder_of(wanted, reached, half.dtype)
        # A tie would be rounded to even again, away from where it was.
        still = update == 0
        return jnp.where(still, 0.0, step), jnp.where(still, half.kept, left)

    update_fn = _updating("compensation", call, transformation, value, written)
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def with_stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps, key: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with half-precision parameters rounded at random.

    A parameter goes to one of the two half-precision numbers around the sum of itself
    and its update, to the nearer one more often, so that it is right on average (Gupta
    et al. 2015, arXiv:1502.02551, section 3.2; Zamirai et al. 2020, arXiv:2010.06192).
    Costs no memory that stays. `inner` works in float32, its moments too.

    The random bits are made of `key` and a counter in the state: a run is repeatable,
    goes on from a checkpoint as it would have gone, and rounds alike wherever the state
    is replicated, whatever the sharding of the parameters under `jax.jit`. Whoever has
    the same key draws the same bits: give parts of a tree (`optax.partition`) keys of
    their own. Inside `shard_map` and `vmap` all members have one key.

    Args:
      inner: an optimizer or a chain; extra arguments of `update` reach it.
      key: a PRNG key of `jax.random`, new or old style.

    Returns:
      A transformation whose state is a `StochasticRoundingState`; `update` is that of
      `with_master_weights`.

    Raises:
      TypeError: if `inner` is no transformation, or `key` is no key.
      ValueError: as `with_master_weights`.

    Example:
      >>> import jmp_amp as amp
      >>> tx = amp.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
      >>> params, gradient = jnp.ones(1000, jnp.bfloat16), jnp.full(1000, -1e-3)
      >>> state = tx.init(params)
      >>> for _ in range(100):
      ...     updates, state = tx.update(gradient, state, params)
      ...     with jax.numpy_dtype_promotion("standard"):
      ...         params = optax.apply_updates(params, updates)
      >>> jnp.mean(params.astype(jnp.float32)).round(2)
      Array(1.1, dtype=float32)
    """
    call = "with_stochastic_rounding"
    transformation = with_extra_args(inner, call)
    key_data, implementation = _key_parts(key, call)

    def init_fn(params: Any) -> Any:
        inner_state = transformation.init(taking_part(params))
        return StochasticRoundingState(
            inner_state=owned(_not_nested(inner_state, call)),
            key_data=owned(key_data),
            steps=jnp.asarray(0, jnp.int32),
            structure=TreeStructure.of(params),
        )

    def value(half: _Half) -> jax.Array:
        return half.param

    def written(half: _Half, update: jax.Array) -> tuple[jax.Array, Any]:
        landing = round_at_random(half.param + update, half.dtype, half.kept)
        return _step(half, landing)[0], None

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _check_state(state, "key_data", call)
        base = jax.random.wrap_key_data(state.key_data, impl=implementation)
        now = jax.random.fold_in(base, state.steps)
        halves = sum(map(bool, state.structure.half))
        keys = [jax.random.fold_in(now, index) for index in range(halves)]
        storage = _Storage(call, transformation, keys, value, written)
        updates, inner_state, _ = storage.update(updates, state, params, extra_args)
        # A step that was skipped for all parameters has used no bits.
        one_more = jnp.asarray(1, jnp.int32)
        if isinstance(inner_state, LossScaleState):
            one_more = inner_state.last_finite.astype(jnp.int32)
        return updates, StochasticRoundingState(
            inner_state, state.key_data, state.steps + one_more, state.structure
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Half(NamedTuple):
    """A half-precision parameter.

    Attributes:
      param: itself, as float32.
      dtype: what it is stored in.
      kept: what belongs to it in the state.
    """

    param: jax.Array
    dtype: np.dtype
    kept: Any


class _Storage(NamedTuple):
    """How an optimizer's float32 updates become those of half-precision parameters.

    Attributes:
      call: to begin errors with.
      transformation: the optimizer.
      kept: what belongs to each half-precision parameter, in their order.
      value: what such a parameter is worth in float32.
      written: the update that takes it to where its float32 update leads, and what is
        kept now.
    """

    call: str
    transformation: optax.GradientTransformationExtraArgs
    kept: Sequence[Any]
    value: Callable[[_Half], jax.Array]
    written: Callable[[_Half, jax.Array], tuple[jax.Array, Any]]

    def update(
        self, gradients: Any, state: Any, params: Any, extra_args: dict[str, Any]
    ) -> tuple[Any, Any, list[Any]]:
        """The updates, the optimizer's state, and what is kept now."""
        if params is None:
            raise ValueError(
                f"{self.call}: update was given no parameters, and what they are "
                "rounded to depends on them. Call update(gradients, state, params)."
            )
        check_gradients(gradients, state.structure, params, self.call)
        halves = self._halves(params, state.structure)
        leaves, structure = jax.tree.flatten(params)
        values = [
            leaf if half is None else self.value(half)
            for leaf, half in zip(leaves, halves, strict=True)
        ]
        proposed, inner_state = self.transformation.update(
            taking_part(gradients, promote_gradient),
            state.inner_state,
            taking_part(structure.unflatten(values)),
            **extra_args,
        )
        remaining = iter(jax.tree.leaves(proposed))
        updates, kept = [], []
        gradient_leaves, structure = jax.tree.flatten(gradients)
        for gradient, leaf, half in zip(gradient_leaves, leaves, halves, strict=True):
            if not takes_part(gradient):
                update, now = zero_update(gradient, leaf), half and half.kept
            elif half is None:
                update, now = next(remaining), None
            else:
                update, now = self.written(half, next(remaining).astype(F32))
            updates.append(update)
            kept += [] if half is None else [now]
        return structure.unflatten(updates), inner_state, kept

    def _halves(self, params: Any, structure: TreeStructure) -> list[_Half | None]:
        """The half-precision parameters, and None for the others."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        if leaves and not structure.paths:
            raise ValueError(
                f"{self.call}: the state does not say which parameters are half: it "
                "comes from optax.tree.map_params. Map it with jax.tree.map instead."
            )
        remaining = iter(self.kept)
        halves = []
        for (path, leaf), name in zip(leaves, structure.half, strict=True):
            dtype = getattr(leaf, "dtype", None)
            if is_half(dtype) and leaf.dtype.name != name:
                where = jax.tree_util.keystr(path) or "the root"
                raise ValueError(
                    f"{self.call}: the parameter at {where} is {leaf.dtype.name} now, "
                    f"but init saw {name or 'no half-precision one'}. Call init with "
                    "the parameters as they are trained."
                )
            halves.append(
                # with_loss_scale promotes parameters before they come here.
                _Half(jnp.asarray(leaf, F32), np.dtype(name), next(remaining))
                if name
                else None
            )
        return halves


def _updating(
    field: str,
    call: str,
    transformation: optax.GradientTransformationExtraArgs,
    value: Callable[[_Half], jax.Array],
    written: Callable[[_Half, jax.Array], tuple[jax.Array, Any]],
) -> Callable[..., tuple[Any, Any]]:
    """The `update` of a state whose `field` is a tree of what is kept."""

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _check_state(state, field, call)
        kept, structure = jax.tree.flatten(getattr(state, field))
        storage = _Storage(call, transformation, kept, value, written)
        updates, inner_state, kept = storage.update(updates, state, params, extra_args)
        now = {"inner_state": inner_state, field: structure.unflatten(kept)}
        return updates, state._replace(**now)

    return update_fn


def _step(half: _Half, landing: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The update that leads to `landing`, and where it really leads."""
    step = landing - half.param
    return step, round_to(half.param + step, half.dtype)


def _for_half(params: Any, of: Callable[[str, Any], Any], dtype: Any) -> Any:
    """A tree like `params`: `of` the path and leaf of the half ones, others masked."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    return structure.unflatten(
        jnp.array(of(jax.tree_util.keystr(path), leaf), dtype, copy=True)
        if is_half(getattr(leaf, "dtype", None))
        else optax.MaskedNode()
        for path, leaf in leaves
    )


def _merged(params: Any, masters: Any) -> Any:
    """`params` with masters in the place of the half ones."""
    leaves, structure = jax.tree.flatten(params)
    remaining = iter(jax.tree.leaves(masters))
    return structure.unflatten(
        next(remaining) if is_half(getattr(leaf, "dtype", None)) else leaf
        for leaf in leaves
    )


def _check_state(state: Any, field: str, call: str) -> None:
    if not hasattr(state, field):
        raise TypeError(
            f"{call}: update was given a {type(state).__name__}, the state of another "
            "optimizer. To go on from that one, begin with amp.import_opt_state("
            "tx.init(params), amp.export_opt_state(state))."
        )


def _not_nested(inner_state: Any, call: str) -> Any:
    if found := nodes_of(inner_state, WEIGHT_STATES):
        raise ValueError(
            f"{call}: the optimizer it was given has a {type(found[0][1]).__name__} "
            "already, and one is enough to store half-precision parameters. Leave one "
            "of them out."
        )
    return inner_state


def _key_parts(key: Any, call: str) -> tuple[jax.Array, Any]:
    """The uint32 of a key, and what makes it a key again."""
    try:
        data, implementation = jax.random.key_data(key), jax.random.key_impl(key)
        if jax.random.wrap_key_data(data, impl=implementation).shape == ():
            return data, implementation
    except (TypeError, ValueError, AttributeError):
        pass
    raise TypeError(f"{call}(inner, {key!r}): not one PRNG key. Use jax.random.key(0).")
