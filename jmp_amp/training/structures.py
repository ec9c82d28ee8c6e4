"""The key paths of a tree, and where two trees differ."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Self

import jax
import numpy as np
import optax
from flax import nnx, serialization

from jmp_amp.policies.dtypes import PyTree, is_half
from jmp_amp.training.trainable import is_overwritten
from jmp_amp.transform.refusals import OtherParametersError


def leaves_by_path(
    tree: PyTree, is_leaf: Callable[[object], bool] | None = None
) -> list[tuple[str, PyTree]]:
    """Returns the key path and the leaf for every leaf; an nnx Variable is one leaf."""

    def stops(node: object) -> bool:
        return isinstance(node, nnx.Variable) or (is_leaf is not None and is_leaf(node))

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def key_paths(tree: PyTree) -> tuple[str, ...]:
    """Returns the key path of every leaf: `("['decoder']['bias']",)`."""
    return tuple(path for path, _ in leaves_by_path(tree))


def nodes_of(tree: PyTree, kinds: type | tuple[type, ...]) -> list[tuple[str, PyTree]]:
    """Returns the key paths and nodes of `tree` that are instances of `kinds`.

    The inside of such a node is not searched.
    """
    return nodes_at(tree, lambda node: isinstance(node, kinds))


def nodes_at(
    tree: PyTree, is_wanted: Callable[[object], bool]
) -> list[tuple[str, PyTree]]:
    """Returns the key paths and nodes of `tree` that are wanted, likewise."""
    nodes = leaves_by_path(tree, is_wanted)
    return [(path, node) for path, node in nodes if is_wanted(node)]


def first_difference(a: Sequence[str], b: Sequence[str]) -> str:
    """Returns the first key path that only one of the two has."""
    in_a, in_b = set(a), set(b)
    extra = [path for path in a if path not in in_b]
    missing = [path for path in b if path not in in_a]
    return (extra or missing or ["a container without leaves"])[0]


def is_half_parameter(path: jax.tree_util.KeyPath, leaf: PyTree) -> bool:
    """Returns whether a leaf is half, and not overwritten with its gradient."""
    return is_half(getattr(leaf, "dtype", None)) and not is_overwritten(path)


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
        paths = key_paths(tree)
        if not paths and not isinstance(tree, Sized):
            # No empty container: the placeholder of optax.
            return cls((), (), known=False)
        half = (
            np.dtype(leaf.dtype).name if is_half_parameter(path, leaf) else ""
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        )
        return cls(paths, tuple(half))

    def matches(self, other: Self) -> bool:
        """Returns whether the two are equal, as far as both are known."""
        return not (self.known and other.known) or self == other

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


class GradientShapeError(ValueError):
    """The shape of a gradient is not that of its parameter."""


class ForeignStateError(TypeError):
    """A state is not one of the optimizer that was given it."""


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
    if batched and shapes and shapes != wanted and shapes[0]:
        count = shapes[0][0]
        if all(
            shape == (count, *one) for shape, one in zip(shapes, wanted, strict=True)
        ):
            return True
    for (path, _), shape, one in zip(leaves, shapes, wanted, strict=True):
        if shape != one:
            remedy = "Reduce it over the axes that the parameter lacks."
            if shape[1:] == one:
                remedy = (
                    "Gradients of single examples have one leading axis of one size "
                    "for all, and what adds them up comes first, outside of other "
                    "wrappers: with_loss_scale(optax.chain(differentially_private_"
                    "aggregate(...), optimizer), scale). A mean would not be private. "
                    "Another axis is reduced."
                )
            raise GradientShapeError(
                f"{call}: the gradient at {path or 'the root'} has shape {shape} but "
                f"the parameter has {one}. {remedy}"
            )
    return False


def check_state(is_own: bool, state: PyTree, call: str) -> None:
    """Raises if a state is not of the optimizer that is called."""
    if not is_own:
        raise ForeignStateError(
            f"{call}: update was given a {type(state).__name__}, the state of another "
            "optimizer, dtype or key. Begin with tx.init(params), restore a checkpoint "
            "with target=tx.init(params), or use amp.import_opt_state."
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
    except ForeignStateError:
        raise
    except Exception as error:
        own = state
        with contextlib.suppress(Exception):
            own = jax.eval_shape(init, params)
        given, wanted = map(_rows, (state, own))
        if given == wanted:
            raise
        has, lacks = (
            next((row for row in a if row not in set(b)), "nothing more")
            for a, b in ((given, wanted), (wanted, given))
        )
        raise ForeignStateError(
            f"{call}: update was given the state of another optimizer: it has {has}, "
            f"and not {lacks}. Begin with tx.init(params) of this one."
        ) from error


def _rows(state: PyTree) -> list[str]:
    """Returns the key path and the shape of each leaf; of a code, that of its codes."""

    def is_whole(node: object) -> bool:
        return hasattr(node, "codes") or isinstance(node, optax.EmptyState)

    return [
        f"{path} (EmptyState)"
        if isinstance(leaf, optax.EmptyState)
        else f"{path} {np.shape(getattr(leaf, 'codes', leaf))}"
        for path, leaf in leaves_by_path(nnx.as_pure(state), is_whole)
    ]


def check_half(params: PyTree, structure: TreeStructure, call: str) -> None:
    """Raises if other parameters are half than those that `init` saw.

    Raises:
      OtherParametersError: with the first difference; it begins with `call`.
    """
    now = TreeStructure.of(params)
    if now.matches(structure):
        return
    for path, found, seen in zip(now.paths, now.half, structure.half, strict=True):
        if found != seen and (found or not structure.promoted):
            raise OtherParametersError(
                f"{call}: the parameter at {path or 'the root'} is "
                f"{found or 'not half'} now, but init saw "
                f"{seen or 'no half-precision one'}. Call init with the parameters as "
                "they are trained."
            )


def _shown(paths: Sequence[str], limit: int = 8) -> str:
    more = f", ... ({len(paths)} leaves)" if len(paths) > limit else ""
    return f"{{{', '.join(path or '*' for path in paths[:limit])}{more}}}"
