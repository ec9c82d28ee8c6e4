"""Which leaves of a tree of parameters an optimizer trains, and how it sees them.

The wrappers of this library hand their inner optimizer a tree of float32, float64 and
complex leaves: half-precision ones are promoted, so that its moments are float32, and
those that are not trained are masked.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

from jmp_amp.policies.dtypes import is_fp8, is_half
from jmp_amp.training.finite import first_difference, is_inexact, key_paths
from jmp_amp.training.loss_scale import promote_half


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class TreeStructure:
    """The key paths of a tree, and which of its leaves are half: without leaves itself.

    Kept in the state so that `update` can say which gradient is missing. An empty one
    is unknown and equal to any: `optax.tree.map_params` calls `init` with a
    placeholder, and matches the state that it gets against the real one.

    Attributes:
      paths: the key path of every leaf.
      half: for every leaf "bfloat16", "float16" or "", in the order of `paths`.

    Example:
      >>> TreeStructure.of({"w": jnp.ones(2, jnp.bfloat16), "b": 0.0})
      <2 leaves, 1 of them half>
      >>> TreeStructure.of({"w": 0.0}) == TreeStructure(())
      True
    """

    paths: tuple[str, ...]
    half: tuple[str, ...] = ()

    @classmethod
    def of(cls, tree: Any) -> TreeStructure:
        """Returns the structure of `tree`."""
        half = [_half_name(leaf) for leaf in jax.tree.leaves(tree)]
        return cls(key_paths(tree), tuple(half))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeStructure):
            return NotImplemented
        unknown = not self.paths or not other.paths
        return unknown or (self.paths, self.half) == (other.paths, other.half)

    def __hash__(self) -> int:
        return hash(TreeStructure)

    def __repr__(self) -> str:
        return f"<{len(self.paths)} leaves, {sum(map(bool, self.half))} of them half>"


serialization.register_serialization_state(
    TreeStructure, lambda _: {}, lambda target, _: target
)


def takes_part(leaf: Any) -> bool:
    """Returns whether an optimizer trains a leaf: floats and complex numbers, not fp8.

    Example:
      >>> takes_part(jnp.ones(2)), takes_part(3), takes_part("w")
      (True, False, False)
    """
    return is_inexact(leaf) and not is_fp8(getattr(leaf, "dtype", None))


def taking_part(tree: Any, of: Callable[[Any], Any] = promote_half) -> Any:
    """Returns `tree` with `of` each leaf that is trained and the others masked.

    Example:
      >>> taking_part({"w": jnp.float16(2.0), "steps": 3})
      {'steps': MaskedNode(), 'w': Array(2., dtype=float32)}
    """
    return jax.tree.map(
        lambda leaf: of(leaf) if takes_part(leaf) else optax.MaskedNode(), tree
    )


def owned(tree: Any) -> Any:
    """Returns `tree` with its arrays copied, of strong dtypes, shared with nobody.

    Example:
      >>> owned({"count": 3})["count"].dtype
      dtype('int32')
    """
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for index, leaf in enumerate(leaves):
        # In place, so that each original can be freed before the next one is copied.
        leaves[index] = _owned_leaf(leaf)
    return structure.unflatten(leaves)


def with_extra_args(inner: Any, call: str) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer as a transformation that takes extra arguments.

    Raises:
      TypeError: if `inner` is no optimizer; `call` is the call to speak of.

    Example:
      >>> type(with_extra_args(optax.sgd(0.1), "f")).__name__
      'GradientTransformationExtraArgs'
    """
    if isinstance(inner, optax.MultiSteps):
        init, update = cast(Any, inner.init), cast(Any, inner.update)
        return optax.GradientTransformationExtraArgs(init, update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{call}({inner!r}, ...): not an optax transformation. Pass the "
            "optimizer to wrap, such as optax.adamw(3e-4)."
        )
    return optax.with_extra_args_support(inner)


def check_gradients(
    gradients: Any, structure: TreeStructure, params: Any, call: str
) -> None:
    """Raises if the gradients are not a tree like that of `init` or of `params`.

    Raises:
      ValueError: with the first difference; the message begins with `call`.

    Example:
      >>> check_gradients({"w": 1.0}, TreeStructure.of({"w": 0.0}), None, "f")
    """
    found, seen = key_paths(gradients), structure.paths
    if seen and found != seen:
        raise ValueError(
            f"{call}: update was given gradients of structure {_shown(found)} "
            f"but init saw {_shown(seen)}; first difference at "
            f"{first_difference(found, seen)}. Differentiate with respect to the tree "
            "that init was given."
        )
    if params is None:
        return
    if found != (expected := key_paths(params)):
        raise ValueError(
            f"{call}: update was given gradients of structure {_shown(found)} "
            f"but params of {_shown(expected)}; first difference at "
            f"{first_difference(found, expected)}. Pass the parameters that the "
            "gradients belong to."
        )
    leaves, _ = jax.tree_util.tree_flatten_with_path(gradients)
    for (path, gradient), param in zip(leaves, jax.tree.leaves(params), strict=True):
        if np.shape(gradient) != np.shape(param):
            raise ValueError(
                f"{call}: the gradient at {jax.tree_util.keystr(path)} has "
                f"shape {np.shape(gradient)} but the parameter has {np.shape(param)}. "
                "Reduce the gradient over the axes that the parameter lacks."
            )


def zero_update(gradient: Any, like: Any) -> Any:
    """Returns a zero update for a leaf that takes no part, if there is such a number.

    Args:
      gradient: what came in place of its gradient; returned if there is none.
      like: the parameter, if it is known.

    Example:
      >>> zero_update("frozen", "frozen"), zero_update(None, jnp.arange(2))
      ('frozen', Array([0, 0], dtype=int32))
    """
    for leaf in (like, gradient):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and any(
            jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_)
        ):
            return jnp.zeros(leaf.shape, dtype)
    return gradient


def _half_name(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    return jnp.dtype(cast(Any, dtype)).name if is_half(dtype) else ""


def _owned_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | numbers.Number):
        return leaf
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jnp.array(leaf, copy=True)
    return leaf if dtype == jax.dtypes.float0 else jnp.array(leaf, dtype, copy=True)


def _shown(paths: Sequence[str], limit: int = 8) -> str:
    more = f", ... ({len(paths)} leaves)" if len(paths) > limit else ""
    return f"{{{', '.join(path or '*' for path in paths[:limit])}{more}}}"
