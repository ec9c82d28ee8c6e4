"""What the gradient of a call is taken of, as `amp.value_and_grad` takes it.

It is `nnx.value_and_grad` if an argument to differentiate holds an `nnx.Module`: of an
object those variables are differentiated that a filter chooses, and one that stands in
several places has one gradient. Else it is `jax.value_and_grad`: variables, states and
other objects of nnx are trees, and every array in them has a gradient of its own.
Neither differentiates what the function closes over.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import KeyPath, SequenceKey, keystr, tree_leaves_with_path

from jmp_amp.policies.dtypes import PyTree
from jmp_amp.training.gradients import Argnums, module_positions
from jmp_amp.transform.calls import is_array
from jmp_amp.transform.nnx_modules import is_node

# An argument to differentiate: its position, and which variables of modules in it.
_Wanted = tuple[int, nnx.filterlib.Filter]


def check_distinct(argnums: Argnums, call: str, count: int = 0) -> None:
    """Raises a ValueError if `argnums` name one of `count` arguments twice.

    `count` is 0 if it is not known yet.
    """
    named = [number for number, _ in _wanted(argnums, count)]
    for number in named:
        if named.count(number) > 1:
            raise ValueError(
                f"{call}: argnums={argnums!r} name the argument {number} twice, but it "
                "has one gradient. Name each argument once."
            )


def as_differentiated(
    args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], argnums: Argnums
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Returns the arguments as `amp.value_and_grad` gives them to a function.

    Numbers to differentiate are arrays. Objects of nnx are copies, which share their
    arrays: what is given twice as trees is two objects then, and no copy is what the
    function closes over.
    """
    wanted = {number for number, _ in _wanted(argnums, len(args))}
    given = dict(kwargs)
    is_leaf = None
    if module_positions(argnums, args) is not None:
        args, given = _cloned((args, given))
        is_leaf = is_node
    return tuple(
        jax.tree.map(_as_array, arg, is_leaf=is_leaf) if i in wanted else arg
        for i, arg in enumerate(args)
    ), given


def differentiated(
    args: tuple[PyTree, ...], argnums: Argnums, call: str
) -> dict[int, str]:
    """Returns the numbers of the arrays to differentiate, and their keys.

    The keys are key paths in the gradient that `amp.value_and_grad` returns. `args` are
    numbered: see `TracedCall`. It raises a ValueError if `argnums` name none of them.
    """
    wanted = _wanted(argnums, len(args))
    if not all(0 <= number < len(args) for number, _ in wanted):
        raise ValueError(
            f"{call}: argnums={argnums!r}, but the function was called with "
            f"{len(args)} positional arguments. Give the parameters by position."
        )
    has_modules = module_positions(argnums, args) is not None
    found: dict[int, dict[int, KeyPath]] = {}
    seen: set[int] = set()
    # A variable belongs to the first argument that holds it.
    for number, which in sorted(wanted, key=lambda each: each[0]):
        leaves = _chosen(args[number], which) if has_modules else args[number]
        paths = leaves if has_modules else tree_leaves_with_path(leaves)
        found[number] = {
            int(x): path for path, x in paths if is_array(x) and int(x) not in seen
        }
        seen.update(found[number])
    several = isinstance(argnums, Sequence)
    return {
        position: keystr((SequenceKey(i), *path) if several else path)
        for i, (number, _) in enumerate(wanted)
        for position, path in found[number].items()
    }


def _wanted(argnums: Argnums, count: int) -> list[_Wanted]:
    """Returns the arguments that are named; positions count from the front."""
    found = []
    for each in argnums if isinstance(argnums, Sequence) else (argnums,):
        is_state = isinstance(each, nnx.DiffState)
        number = int(each.argnum if is_state else each)
        position = number + count if number < 0 else number
        found.append((position, each.filter if is_state else nnx.Param))
    return found


def _chosen(
    arg: PyTree, which: nnx.filterlib.Filter
) -> Iterator[tuple[KeyPath, PyTree]]:
    """Yields the leaves of an argument that `nnx.value_and_grad` differentiates."""
    for path, leaf in tree_leaves_with_path(arg, is_leaf=_is_object):
        # A variable that is no part of an object is differentiated whatever it is.
        inside = nnx.state(leaf, which) if isinstance(leaf, nnx.Pytree) else leaf
        for rest, x in tree_leaves_with_path(inside):
            yield (*path, *rest), x


def _is_object(value: object) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _cloned(tree: PyTree) -> PyTree:
    """Returns a tree with copies of its nnx objects, which share what they shared."""
    objects = [*filter(_is_object, jax.tree.leaves(tree, is_leaf=_is_object))]
    clones = iter(nnx.clone(objects))
    return jax.tree.map(
        lambda x: next(clones) if _is_object(x) else x, tree, is_leaf=_is_object
    )


def _as_array(leaf: PyTree) -> PyTree:
    """Returns a number of Python or numpy as an array, as `jax.grad` does."""
    is_whole = isinstance(leaf, numbers.Integral | np.bool_)
    is_number = isinstance(leaf, numbers.Real) and not is_whole
    return jnp.asarray(leaf) if is_number else leaf
