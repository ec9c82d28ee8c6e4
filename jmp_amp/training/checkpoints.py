"""From training with half-precision weights to checkpoints of any precision, and back.

A checkpoint of a mixed-precision run holds wrappers' states: masters, loss scales. What
a plain float32 run of the same optimizer would have saved can be taken out of it, and
put into the state of another setup.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jmp_amp.policies.dtypes import F32, cast_leaf, floating_dtype, is_castable, is_half
from jmp_amp.training.finite import first_difference, key_paths
from jmp_amp.training.rounding import land_on, with_remainder
from jmp_amp.training.states import (
    WEIGHT_STATES,
    WRAPPER_STATES,
    MasterWeightsState,
    StochasticRoundingState,
    nodes_of,
)
from jmp_amp.training.trainable import owned

Tree = TypeVar("Tree")


def export_params(params: Tree, opt_state: Any = None, dtype: DTypeLike = F32) -> Tree:
    """Returns parameters in one dtype, f32 unless asked: for a checkpoint, or to serve.

    Parameters that an optimizer keeps more digits of come from there: the masters of
    `with_master_weights`, and what `with_kahan` adds to them. Batch statistics and all
    other floats of the tree are cast too; integers, float64, complex numbers, keys and
    fp8 are not. Arrays are copied: `params` and `opt_state` may be donated afterwards.

    Args:
      params: a tree, variables or an `nnx.State`; or an nnx module.
      opt_state: the state of the optimizer, or anything that holds it, such as an
        `nnx.Optimizer` or a flax `TrainState`. It may have been made for `params` or
        for `params["params"]`.
      dtype: a floating dtype, or anything that `cast_floating` understands.

    Returns:
      A tree of the same structure; for a module a new one, the old one is left alone.

    Raises:
      TypeError: if `dtype` is not a floating dtype.
      ValueError: if the optimizer keeps a master of a parameter that is not there.

    Example:
      >>> import optax
      >>> import jmp_amp as amp
      >>> params = {"w": jnp.ones(2, jnp.bfloat16), "steps": 3}
      >>> tx = amp.with_master_weights(optax.sgd(1e-3))
      >>> grads = {"w": jnp.ones(2), "steps": 0}
      >>> updates, opt_state = tx.update(grads, tx.init(params), params)
      >>> amp.export_params(params, opt_state)
      {'steps': 3, 'w': Array([0.999, 0.999], dtype=float32)}
    """
    wanted = floating_dtype(dtype, "export_params(params, opt_state, {})")
    if isinstance(params, (*WRAPPER_STATES, nnx.Optimizer)):
        raise TypeError(
            f"export_params(params, opt_state): params is a {type(params).__name__}. "
            "Give the parameters first."
        )
    if isinstance(params, nnx.Module):
        graphdef, state = nnx.split(params)
        return nnx.merge(graphdef, export_params(state, opt_state, wanted))
    kept = _kept(opt_state)
    names = [jax.tree_util.keystr(path) for path, _ in _flat(nnx.as_pure(params))]
    leaves, structure = jax.tree.flatten(params)
    exported = []
    for name, leaf in zip(names, leaves, strict=True):
        found = kept.pop(name, None) or kept.pop(_inside(name), None)
        if found is not None:
            leaf = _with_all_digits(leaf, *found, name)
        castable = is_castable(getattr(leaf, "dtype", None))
        exported.append(owned(cast_leaf(leaf, wanted)) if castable else leaf)
    if kept:
        raise ValueError(
            f"export_params: the optimizer keeps the digits of a parameter at "
            f"{next(iter(kept))}, but there is none in this "
            f"{type(params).__name__}. Pass the tree that its init was given."
        )
    return structure.unflatten(exported)


def export_opt_state(opt_state: Any) -> Any:
    """Returns an optimizer's state as the optimizer without this library has it.

    The states of `with_loss_scale`, `with_master_weights`, `with_kahan` and
    `with_stochastic_rounding` give way to those of what they wrap, at any depth. With
    `export_params` this turns a checkpoint of mixed precision into one of float32. A
    loss scale is lost; `loss_scale_of` has it. Arrays are copied. (For trees of floats
    and complex numbers: of other leaves the wrappers keep no moments.)

    Example:
      >>> import optax
      >>> import jmp_amp as amp
      >>> tx = amp.with_loss_scale(optax.sgd(0.1, momentum=0.9), amp.no_loss_scale())
      >>> amp.export_opt_state(tx.init(jnp.zeros(2)))
      (TraceState(trace=Array([0., 0.], dtype=float32)), EmptyState())
    """
    return jax.tree.map(
        lambda node: (
            export_opt_state(node.inner_state) if _is_wrapper(node) else owned(node)
        ),
        opt_state,
        is_leaf=_is_wrapper,
    )


def import_opt_state(opt_state: Tree, exported: Any) -> Tree:
    """Returns `opt_state` with moments, counts and schedules of another run's.

    The inverse of `export_opt_state`: a float32 run goes on in mixed precision. What
    the wrappers of this library keep (loss scale, counters, masters) stays that of
    `opt_state`.

    Args:
      opt_state: a new state, `tx.init(params)`; for masters with all their digits `tx`
        has been given `init_from`.
      exported: the state of the same optimizer without the wrappers.

    Raises:
      ValueError: if the two are not states of one optimizer.

    Example:
      >>> import optax
      >>> import jmp_amp as amp
      >>> plain = optax.sgd(0.1, momentum=0.9)
      >>> _, trained = plain.update(jnp.ones(2), plain.init(jnp.zeros(2)))
      >>> tx = amp.with_loss_scale(plain, amp.dynamic_loss_scale())
      >>> amp.import_opt_state(tx.init(jnp.zeros(2)), trained).inner_state[0].trace
      Array([1., 1.], dtype=float32)
    """
    own, given = export_opt_state(opt_state), exported
    if jax.tree.structure(own) != jax.tree.structure(given):
        where = first_difference(key_paths(given), key_paths(own))
        raise ValueError(
            "import_opt_state: the state is not one of this optimizer; first "
            f"difference at {where}. Give the state of the optimizer that the wrappers "
            "are around (export_opt_state takes wrappers off), for the same parameters."
        )
    for (path, old), new in zip(_flat(own), jax.tree.leaves(given), strict=True):
        if _kind(old) != _kind(new):
            raise ValueError(
                f"import_opt_state: at {jax.tree_util.keystr(path)} this optimizer has "
                f"{jax.typeof(old)} but the other state has {jax.typeof(new)}. Give a "
                "state for the same parameters, with its moments in float32."
            )
    return _filled(opt_state, iter(jax.tree.leaves(given)))


def _filled(opt_state: Any, leaves: Any) -> Any:
    """`opt_state` with all its leaves but those of wrappers taken from `leaves`."""

    def fill(node: Any) -> Any:
        if not _is_wrapper(node):
            return owned(next(leaves))
        return node._replace(inner_state=_filled(node.inner_state, leaves))

    return jax.tree.map(fill, opt_state, is_leaf=_is_wrapper)


def _kept(opt_state: Any) -> dict[str, tuple[type, Any]]:
    """What the optimizer keeps of parameters, by their path: the kind and the array."""
    kept = {}
    for _, node in nodes_of(opt_state, WEIGHT_STATES):
        if isinstance(node, StochasticRoundingState):
            continue
        is_master = isinstance(node, MasterWeightsState)
        tree = node.masters if is_master else node.compensation
        for path, leaf in _flat(nnx.as_pure(tree)):
            kept[jax.tree_util.keystr(path)] = type(node), leaf
    return kept


def _with_all_digits(param: Any, kind: type, kept: Any, name: str) -> jax.Array:
    """A parameter, in float32, with what the optimizer keeps of it."""
    if np.shape(kept) != np.shape(param) or not is_half(getattr(param, "dtype", None)):
        raise ValueError(
            f"export_params: the parameter at {name} is {jax.typeof(param)}, but the "
            f"optimizer has a half-precision one of shape {np.shape(kept)}. Pass the "
            "parameters that this optimizer trains."
        )
    if kind is MasterWeightsState:
        rounded, now = land_on(kept, param.dtype), jnp.asarray(param, F32)
        return jnp.where(rounded == now, kept, now)
    return with_remainder(jnp.asarray(param, F32), kept, param.dtype)


def _inside(name: str) -> str:
    """The path of a parameter inside of the collection `params`."""
    return name.removeprefix("['params']")


def _kind(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    return np.shape(leaf), jnp.result_type(leaf)


def _flat(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _is_wrapper(node: Any) -> bool:
    return isinstance(node, WRAPPER_STATES)
