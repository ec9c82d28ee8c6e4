"""The f32 originals of half-precision parameters: what optimizers may begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jmp_amp.policies.dtypes import F32, is_castable, is_half
from jmp_amp.training.rounding import remainder_of
from jmp_amp.training.states import WEIGHT_STATES, KahanState, MasterWeightsState


def originals_of(params: Any, init_from: Any, call: str) -> dict[str, Any]:
    """Returns the leaves of `init_from` for the half ones of `params`, by their path.

    Args:
      params: what `init` was given.
      init_from: the tree (or nnx module) that they were cast from, or None.
      call: the optimizer's name, to begin errors with.

    Raises:
      ValueError: if one is missing in `init_from` or is not the rounded one there.
    """
    if init_from is None:
        return {}
    call = f"{call}(inner, init_from=...)"
    if isinstance(init_from, nnx.Module):
        init_from = nnx.state(init_from)
    found = dict(_leaves_by_path(nnx.as_pure(init_from)))
    originals = {}
    pure = _leaves_by_path(nnx.as_pure(params))
    for (name, leaf), (path, _) in zip(pure, _leaves_by_path(params), strict=True):
        if not is_half(getattr(leaf, "dtype", None)):
            continue
        original = found.get(name)
        is_float = is_castable(getattr(original, "dtype", None))
        if not is_float or np.shape(cast(Any, original)) != leaf.shape:
            fact = jax.typeof(original) if hasattr(original, "dtype") else "nothing"
            raise ValueError(
                f"{call}: the parameter at {name} is {jax.typeof(leaf)}, but there it "
                f"is {fact}. Give the tree that the parameters were cast from."
            )
        original = _beside(original, leaf)
        if _differs(leaf, original):
            raise ValueError(
                f"{call}: the parameter at {name} is not the one there, rounded to "
                f"{leaf.dtype.name}. Give the tree that the parameters were cast from."
            )
        originals[path] = original
    return originals


def begin_with(opt_state: Any, params: Any, originals: Any) -> Any:
    """Returns a new optimizer state that has all digits of the original parameters.

    As `init_from=` of `with_master_weights` and `with_kahan`, for a state of theirs
    that was begun without.

    Args:
      opt_state: a state that holds such ones, or none. What is in `nnx.Variable`s is
        changed in place.
      params: the half-precision parameters.
      originals: the parameters before they were cast.

    Example:
      >>> import jmp_amp as amp, optax
      >>> from jmp_amp.training.originals import begin_with
      >>> state = amp.with_master_weights(optax.sgd(0.1)).init(jnp.bfloat16(1.001))
      >>> begin_with(state, jnp.bfloat16(1.001), jnp.float32(1.001)).masters
      Array(1.001, dtype=float32)
    """
    cast, found = (
        dict(_leaves_by_path(nnx.as_pure(each))) for each in (params, originals)
    )

    def begun(node: Any) -> Any:
        if isinstance(node, MasterWeightsState):
            of = lambda name: jnp.array(  # noqa: E731
                _beside(found[name], cast[name]), F32, copy=True
            )
            return node._replace(masters=_replaced(node.masters, of))
        if isinstance(node, KahanState):
            of = lambda name: remainder(  # noqa: E731
                cast[name], _beside(found[name], cast[name])
            )
            return node._replace(compensation=_replaced(node.compensation, of))
        return node

    return jax.tree.map(
        begun, opt_state, is_leaf=lambda node: isinstance(node, WEIGHT_STATES)
    )


def _replaced(tree: Any, of: Callable[[str], jax.Array]) -> Any:
    """`tree` with `of` the path of each leaf in its place."""
    names = iter(_leaves_by_path(nnx.as_pure(tree)))
    leaves, structure = jax.tree.flatten(
        tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for index, leaf in enumerate(leaves):
        if not jax.tree.leaves(leaf):
            continue  # A Variable whose value is masked.
        value = of(next(names)[0])
        if isinstance(leaf, nnx.Variable):
            leaf.set_value(value)
        else:
            leaves[index] = value
    return structure.unflatten(leaves)


@jax.jit
def remainder(param: Any, original: Any) -> jax.Array:
    """Returns what a half-precision parameter lacks of its original: int16.

    Counted in 2**-16 of its last place, as in a `KahanState`.
    """
    rounded = jnp.asarray(param, F32)
    return remainder_of(jnp.asarray(original, F32), rounded, param.dtype)


def _leaves_by_path(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _beside(original: Any, leaf: Any) -> Any:
    """`original` on the devices of `leaf`, split as it is."""
    if isinstance(original, Tracer) or not _is_at_hand(leaf):
        return original
    # What is put somewhere stays there, and a step with such an argument is compiled
    # for it: anew, if what the step returns is not.
    return jax.device_put(original, leaf.sharding) if leaf.committed else original


def _is_at_hand(array: Any) -> bool:
    is_known = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return is_known and array.is_fully_addressable


def _differs(leaf: Any, original: Any) -> bool:
    """Whether `leaf` is surely not `original` rounded."""
    if not (_is_at_hand(leaf) and _is_at_hand(original)):
        return False
    rounded = jnp.asarray(original).astype(leaf.dtype)
    return not bool(jnp.array_equal(rounded, leaf, equal_nan=True))
