"""The trees that an optimizer is given: which leaves it trains, and how they differ.

The wrappers of this library hand their inner optimizer a tree of float32, float64 and
complex leaves: half leaves are promoted, so that its moments are float32, and leaves
that are not trained are masked.

Flax's fp8 layers (`flax.linen.fp8_ops`) keep scales and histories of maxima in a
collection `_overwrite_with_gradient`. Their derivative rules return the next state in
place of a gradient: nothing may scale, check, cast, clip or accumulate it. Flax's
`TrainState.apply_gradients` does the same for such a collection at the top of a tree.

A leaf is known by its key path, so that the collection may lie at any depth and in any
mapping: dictionaries, `FrozenDict`, a tuple of several trees.
"""

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, serialization
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.core import Tracer
from jax.tree_util import DictKey, KeyPath, keystr, tree_map_with_path

from jmp_amp.plan.program.meshes import in_row_major
from jmp_amp.policies.arguments import type_name
from jmp_amp.policies.dtypes import F32, PyTree, is_fp8, is_half
from jmp_amp.transform.refusals import OtherParametersError

Optimizer = optax.GradientTransformation | optax.MultiSteps


def is_overwritten(path: KeyPath) -> bool:
    """Returns whether the leaf at `path` is overwritten with its gradient."""
    return any(
        isinstance(key, DictKey) and key.key == OVERWRITE_WITH_GRADIENT for key in path
    )


def is_inexact(leaf: PyTree) -> bool:
    """Returns whether a leaf is a float or complex number, or an array of them."""
    is_number = isinstance(leaf, float | complex)
    return is_number or jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.inexact)


def is_half_parameter(path: KeyPath, leaf: PyTree) -> bool:
    """Returns whether a leaf is half, and not overwritten with its gradient."""
    return is_half(getattr(leaf, "dtype", None)) and not is_overwritten(path)


def takes_part(path: KeyPath, leaf: PyTree) -> bool:
    """Returns whether an optimizer trains a leaf: floats and complex numbers, not fp8.

    `None`, integers, keys, strings and functions are not trained, nor is a leaf that is
    overwritten with its gradient.
    """
    is_number = is_inexact(leaf) and not is_fp8(getattr(leaf, "dtype", None))
    return is_number and not is_overwritten(path)


def promote_half(leaf: PyTree) -> PyTree:
    """Returns an f16 or bf16 leaf as float32, and any other as the same object."""
    return jnp.asarray(leaf, F32) if is_half(getattr(leaf, "dtype", None)) else leaf


def promote_gradient(leaf: PyTree) -> PyTree:
    """Casts a half gradient to f32; one that is traced is in row-major layout."""
    if isinstance(leaf, Tracer) and is_half(leaf.dtype):
        leaf = in_row_major(leaf)
    return promote_half(leaf)


def map_trained(of: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Returns `tree` with `of` each trained leaf; others are the same objects."""
    return tree_map_with_path(
        lambda path, leaf: of(leaf) if takes_part(path, leaf) else leaf, tree
    )


def taking_part(tree: PyTree, of: Callable[[PyTree], PyTree] = promote_half) -> PyTree:
    """Returns `tree` with `of` each trained leaf; others are masked."""
    return tree_map_with_path(
        lambda path, leaf: of(leaf) if takes_part(path, leaf) else optax.MaskedNode(),
        tree,
    )


def updates_of(
    proposed: PyTree, trained: PyTree, gradients: PyTree, params: PyTree, call: str
) -> list[tuple[bool, PyTree]]:
    """Returns whether each leaf is trained, and its update.

    None stands for no change, as in `optax.apply_updates`: zeros. So are the updates of
    numbers that are not trained; strings and keys have those that they came with, and
    so has a leaf that is overwritten with its gradient.

    Args:
      proposed: what an optimizer returned: a tree like `trained`, in any containers.
      trained: what it was given, a tree of `taking_part`.
      gradients: the gradients as they came.
      params: the parameters, or None.
      call: what errors begin with.

    Raises:
      ValueError: if there is another number of updates.
    """
    given, structure = jax.tree.flatten(trained)
    leaves = jax.tree.leaves(proposed)
    if len(leaves) != len(given):
        try:
            leaves = structure.flatten_up_to(proposed)
        except ValueError as error:
            count = f"{len(leaves)} updates for {len(given)} gradients"
            raise ValueError(f"{call}: inner returned {count}: {error}") from error
    remaining = zip(leaves, given, strict=True)

    def update_of(path: KeyPath, gradient: PyTree, like: PyTree) -> tuple[bool, PyTree]:
        if takes_part(path, gradient):
            update, given = next(remaining)
            return True, jnp.zeros_like(given) if update is None else update
        found = like if hasattr(like, "dtype") else gradient
        dtype = getattr(found, "dtype", np.dtype(object))
        is_number = jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
        if not is_number or is_overwritten(path):
            return False, gradient
        return False, jnp.zeros(found.shape, dtype)

    likes = jax.tree.leaves(gradients if params is None else params)
    rows = zip(jax.tree_util.tree_leaves_with_path(gradients), likes, strict=True)
    return [update_of(*leaf, like) for leaf, like in rows]


def owned(tree: PyTree) -> PyTree:
    """Returns `tree` with copies of its arrays and numbers, all of strong dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | numbers.Number):
            dtype = jnp.result_type(leaf)
            is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
            if dtype != jax.dtypes.float0:
                # In place, so that each original can be freed before the next copy.
                leaves[index] = jnp.array(leaf, None if is_key else dtype, copy=True)
    return structure.unflatten(leaves)


def with_extra_args(
    inner: Optimizer, call: str
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer as a transformation that takes extra arguments."""
    if isinstance(inner, optax.MultiSteps):
        # Its own `gradient_transformation()` drops extra arguments.
        update: PyTree = inner.update
        return optax.GradientTransformationExtraArgs(inner.init, update)
    if not isinstance(inner, optax.GradientTransformation):
        fact = "not an optax transformation"
        remedy = "Pass the optimizer to wrap, such as optax.adamw(3e-4)."
        raise TypeError(f"{call}({inner!r}, ...): {fact}. {remedy}")
    return optax.with_extra_args_support(inner)


def is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def leaves_by_path(
    tree: PyTree, is_leaf: Callable[[object], bool] = lambda _: False
) -> list[tuple[str, PyTree]]:
    """Returns the key path and the leaf for every leaf; an nnx Variable is one leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_variable(node) or is_leaf(node)
    )
    return [(keystr(path), leaf) for path, leaf in leaves]


def key_paths(tree: PyTree) -> tuple[str, ...]:
    """Returns the key path of every leaf: `("['decoder']['bias']",)`."""
    return tuple(path for path, _ in leaves_by_path(tree))


def nodes_of(tree: PyTree, kinds: type | tuple[type, ...]) -> list[tuple[str, PyTree]]:
    """Returns the key paths and nodes that are of `kinds`, not those inside of them."""
    nodes = leaves_by_path(tree, lambda node: isinstance(node, kinds))
    return [(path, node) for path, node in nodes if isinstance(node, kinds)]


def first_difference(a: Sequence[str], b: Sequence[str]) -> str:
    """Returns the first key path that only one of the two has."""
    in_a, in_b = set(a), set(b)
    extra = [path for path in a if path not in in_b]
    missing = [path for path in b if path not in in_a]
    return (extra or missing or ["a container without leaves"])[0]


@dataclasses.dataclass(frozen=True)
class TreeStructure:
    """The key paths of a tree and which of its leaves are half, without the leaves.

    A static pytree node. An optimizer's state holds it, so that `update` can say which
    gradient is missing, and a step compiles once for each structure.

    Attributes:
      paths: the key path of every leaf.
      half: for every parameter "bfloat16", "float16" or "", in the order of `paths`.
      known: False if `init` was given the placeholder of `optax.tree.map_params`.
      promoted: whether the half parameters come as float32, from `with_loss_scale`.
      unscales: whether the optimizer divides gradients by the scale itself.
    """

    paths: tuple[str, ...]
    half: tuple[str, ...]
    known: bool = True
    promoted: bool = False
    unscales: bool = False

    @classmethod
    def of(cls, tree: PyTree) -> Self:
        """Returns the structure of `tree`."""
        half = (
            np.dtype(leaf.dtype).name if is_half_parameter(path, leaf) else ""
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        )
        paths = key_paths(tree)
        # The placeholder of optax has no leaves, and is no empty container.
        return cls(paths, tuple(half), known=bool(paths) or isinstance(tree, Sized))

    def __repr__(self) -> str:
        return f"<{len(self.paths)} leaves, {sum(map(bool, self.half))} of them half>"


class _AnyStructure:
    """Stands for an unknown structure in a treedef, and equals every other one.

    `optax.tree.map_params` maps over the state of a placeholder and the real state at
    once. JAX compares the static data of their nodes with `==` alone, so the wildcard
    has to be here; a `TreeStructure` itself equals only the same structure.
    """

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


jax.tree_util.register_pytree_node(
    TreeStructure,
    lambda structure: ((), structure if structure.known else _AnyStructure()),
    lambda static, _: (
        static if isinstance(static, TreeStructure) else TreeStructure((), (), False)
    ),
)
serialization.register_serialization_state(
    TreeStructure, lambda _: {}, lambda target, _: target
)


def check_gradients(
    gradients: PyTree,
    structure: TreeStructure,
    params: PyTree | None,
    call: str,
    batched: bool = False,
) -> bool:
    """Raises if the gradients are not a tree like that of `init` or of `params`.

    Args:
      gradients: a tree.
      structure: that of what `init` saw.
      params: the parameters, if they are known.
      call: what errors begin with.
      batched: whether all gradients may have one axis more, in front.

    Returns:
      Whether they have it.

    Raises:
      ValueError: with the first difference; the message begins with `call`.
    """
    found = key_paths(gradients)
    trees = [("init saw", structure.paths)] if structure.known else []
    trees += [] if params is None else [("params of", key_paths(params))]
    for of, paths in trees:
        if found != paths:
            raise ValueError(
                f"{call}: update was given gradients of structure {_shown(found)} but "
                f"{of} {_shown(paths)}; first difference at "
                f"{first_difference(found, paths)}. Differentiate with respect to the "
                "tree that init was given; of an nnx module give nnx.state(model, "
                "nnx.Param) to init and to update; or take nnx.Optimizer. Around an "
                "optimizer write optax.lookahead(wrapped, ...)."
            )
    if params is None:
        return False
    leaves = leaves_by_path(nnx.as_pure(gradients))
    shapes = [np.shape(leaf) for _, leaf in leaves]
    wanted = list(map(np.shape, jax.tree.leaves(params)))
    if shapes == wanted:
        return False
    if batched and shapes == [(*shapes[0][:1], *one) for one in wanted]:
        return True
    for (path, _), shape, one in zip(leaves, shapes, wanted, strict=True):
        if shape != one:
            remedy = "Reduce it over the axes that the parameter lacks."
            if shape[1:] == one:
                remedy = (
                    "Gradients of single examples have one leading axis of one size "
                    "for all, and what adds them up comes first, outside of other "
                    "wrappers: with_loss_scale(optax.chain("
                    "differentially_private_aggregate(...), tx), scale). A mean would "
                    "not be private. Another axis is reduced."
                )
            raise ValueError(
                f"{call}: the gradient at {path or 'the root'} has shape {shape} but "
                f"the parameter has {one}. {remedy}"
            )
    return False


def check_state(is_own: bool, state: PyTree, call: str) -> None:
    """Raises if a state is not of the optimizer that is called."""
    name = type_name(state)
    if not is_own:
        raise TypeError(
            f"{call}: update was given a{'n' * (name[0] in 'aeiou')} {name}, the state "
            "of another optimizer, dtype or key. Call tx.update(gradients, state, "
            "params) with that of tx.init(params). Restore a checkpoint with "
            "target=tx.init(params), or go on from the state of another optimizer "
            "with amp.import_opt_state(tx.init(params), state)."
        )


@contextlib.contextmanager
def telling_foreign_states(
    init: Callable[[PyTree], PyTree], params: PyTree, state: PyTree, call: str
) -> Iterator[None]:
    """While an optimizer runs inside, its error becomes a TypeError about its state.

    If the leaves of `state` are not those that `init` makes, in their shapes; else the
    error stays.
    """
    try:
        yield
    except Exception as error:
        own = state
        with contextlib.suppress(Exception):
            own = jax.eval_shape(init, params)
        given, wanted = map(rows_of, (state, own))
        if given == wanted:
            raise
        has = next((row for row in given if row not in wanted), "nothing more")
        lacks = next((row for row in wanted if row not in given), "nothing more")
        raise TypeError(
            f"{call}: update was given the state of another optimizer: it has {has}, "
            f"and not {lacks}. Begin with tx.init(params) of this one. To go on from "
            "that state: amp.import_opt_state(tx.init(params), state)."
        ) from error


def rows_of(state: PyTree, kind: Callable[[PyTree], object] = np.shape) -> list[str]:
    """Returns the key path and the shape of each leaf; of a code, that of its codes."""

    def is_whole(node: object) -> bool:
        return hasattr(node, "codes") or isinstance(node, optax.EmptyState)

    nodes = leaves_by_path(nnx.as_pure(state), is_whole)
    leaves = [(path, getattr(node, "codes", node)) for path, node in nodes]
    return [f"{path} {x if is_whole(x) else kind(x)}" for path, x in leaves]


def check_half(params: PyTree, structure: TreeStructure, call: str) -> None:
    """Raises an OtherParametersError if others are half than those that `init` saw."""
    if not structure.known:
        return
    now = TreeStructure.of(params)
    for path, found, seen in zip(now.paths, now.half, structure.half, strict=True):
        if found != seen and (found or not structure.promoted):
            raise OtherParametersError(
                f"{call}: the parameter at {path or 'the root'} is "
                f"{found or 'not half'} now, but init saw {seen or 'none that is'}. "
                "Call init with the parameters as they are trained."
            )


def _shown(paths: Sequence[str], limit: int = 8) -> str:
    more = f", ... ({len(paths)} leaves)" if len(paths) > limit else ""
    return f"{{{', '.join(path or '*' for path in paths[:limit])}{more}}}"
