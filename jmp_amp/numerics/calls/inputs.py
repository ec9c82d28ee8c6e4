"""Arguments that are not finite: which they are, and where it begins in them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_amp.policies.dtypes import AnyFn, PyTree
from jmp_amp.reports.tables import count
from jmp_amp.training.collectives import all_finite
from jmp_amp.training.structures import is_inexact
from jmp_amp.transform.nnx_modules import is_node


def nonfinite_inputs(
    fn: AnyFn, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> list[str]:
    """Returns in words which arrays of the arguments hold infinities or NaN.

    Each is named as the function names it, with the key path in the argument; the
    first such value by its indices, which tell the example of a batch.
    """
    return [
        f"{name} holds {told}"
        for name, leaf in _leaves(fn, args, kwargs)
        if is_inexact(leaf) and (told := _told(jnp.asarray(leaf)))
    ]


def _leaves(
    fn: AnyFn, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> Iterator[tuple[str, PyTree]]:
    for argument, tree in _named(fn, args, kwargs).items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node):
            is_object = is_node(leaf) and not isinstance(leaf, nnx.GraphDef)
            inside = nnx.state(leaf) if is_object else leaf
            for rest, value in jax.tree_util.tree_leaves_with_path(inside):
                yield argument + jax.tree_util.keystr((*path, *rest)), value


def _named(
    fn: AnyFn, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> Mapping[str, PyTree]:
    try:
        return inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # some callables tell no signature
        return {"args": args, "kwargs": dict(kwargs)}


def _told(array: jax.Array) -> str:
    """Returns how many values are not finite, and the first of them; "" if none is."""
    if bool(all_finite(array)):
        return ""
    if not array.is_fully_addressable:
        return "infinite values or NaN"  # some of them in another process
    # On the host, where no sharding says how to look for the first.
    values = np.asarray(array)
    nan = np.isnan(values)
    infinite = ~np.isfinite(values) & ~nan
    counts = {"NaN": int(nan.sum()), "infinite": int(infinite.sum())}
    found = [f"{count(many)} {kind}" for kind, many in counts.items() if many]
    told = f"{' and '.join(found)} of {count(array.size)} values"
    if not array.ndim:
        return told
    which = nan if counts["NaN"] else infinite
    place = np.unravel_index(int(np.argmax(which)), array.shape)
    return f"{told}, the first at [{', '.join(map(str, place))}]"
