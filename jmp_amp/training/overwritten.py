"""State that is no parameter, although a gradient is taken with respect to it.

Flax's fp8 layers (`flax.linen.fp8_ops`) keep scales and histories of maxima in a
collection `_overwrite_with_gradient`. Their derivative rules return the next state in
place of a gradient: nothing may scale, check, cast, clip or accumulate it. Flax's
`TrainState.apply_gradients` does the same for such a collection at the top of a tree.

A leaf is known by its key path, so that the collection may lie at any depth and in any
mapping: dictionaries, `FrozenDict`, a tuple of several trees.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.tree_util import DictKey, KeyPath

from jmp_amp.policies.dtypes import PyTree

Tree = TypeVar("Tree")


def is_overwritten(path: KeyPath) -> bool:
    """Returns whether the leaf at `path` is overwritten with its gradient."""
    return any(
        isinstance(key, DictKey) and key.key == OVERWRITE_WITH_GRADIENT for key in path
    )


def map_not_overwritten(of: Callable[[PyTree], PyTree], tree: Tree) -> Tree:
    """Returns `tree` with `of` each leaf that is not overwritten with its gradient.

    Those that are come back as the same objects.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_overwritten(path) else of(leaf), tree
    )
