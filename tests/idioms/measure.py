"""How wrong an idiom is under a policy, and with its products alone in half precision.

The reference is the idiom itself in f32. An error is a relative l2 norm, of each leaf
of the values and of the gradients. All samples of a leaf count as one array: where one
sample is near zero, its relative error says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp_amp as amp
from tests.idioms.row import Idiom
from tests.measures import EXACTLY_AS_WRITTEN, LOSS_SCALE, OPTIMISED

SAMPLES = 4
# What a program may lose beside its products: some roundings, one after the other.
ALLOWED_EPS = 4
# A rounding to half moves a value by up to eps / 2, by eps / 4 or so in the mean
# square. Below a sixteenth of eps nothing was rounded.
F32_EPS = 1 / 16
# f16 is measured as it is trained: a scale that overflows the backward pass of the
# products alone is lowered.
LOWER_SCALES = (1.0, 2.0**-5, 2.0**-10, 2.0**-15)

# Products alone that are wrong by more than this are wrong too, and excuse nothing.
MOST_EXCUSED = 1 / 4

Program = Callable[[Any, Any], Any]
Transform = Callable[[Program], Program]


class Leaf(NamedTuple):
    """The errors of one leaf, of values or of gradients.

    Attributes:
      kind: "value", "gradient" or "kept".
      path: where the leaf is.
      policy: its error under the policy; inf where it is not finite. Of "kept" the
        share of elements that lost their bits.
      products: its error with products alone in half.
      bound: the largest error that is right.
    """

    kind: str
    path: str
    policy: float
    products: float
    bound: float

    @property
    def is_right(self) -> bool:
        return self.policy <= self.bound


def error(found: Any, reference: Any) -> float:
    """Returns |found - reference| / |reference|; inf if one that was finite is not.

    Where the reference is not finite, `found` must be the same.
    """
    found, reference = (np.asarray(x, np.float64) for x in (found, reference))
    finite = np.isfinite(reference)
    same = np.array_equal(found[~finite], reference[~finite], equal_nan=True)
    if not same or not np.isfinite(found[finite]).all():
        return math.inf
    off = np.linalg.norm(found[finite] - reference[finite])
    return float(off) / float(np.linalg.norm(reference[finite]) or 1.0)


def bound(idiom: Idiom, products: float, dtype: str) -> float:
    """Returns the largest error that is right, given that of products alone."""
    eps = float(jnp.finfo(dtype).eps)
    if idiom.f32:
        return F32_EPS * eps
    return 2 * (products if products <= MOST_EXCUSED else 0.0) + ALLOWED_EPS * eps


def in_turns(step: Program, turns: int) -> Program:
    """Returns the program that calls a step, which is already transformed, in turn."""

    def program(params: Any, inputs: Any) -> Any:
        def turn(inputs: Any, _: None) -> tuple[Any, Any]:
            return step(params, inputs)

        inputs, outputs = jax.lax.scan(turn, inputs, None, length=turns)
        return inputs, jax.tree.map(lambda leaf: leaf[-1], outputs)

    return program


def with_gradient(program: Program, grad: tuple[int, ...]) -> Callable[..., Any]:
    """Returns (args, scale) -> values and gradient of a mean with random signs."""

    def floats(tree: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(tree)
        return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    def run(args: tuple[Any, Any], scale: jax.Array) -> tuple[Any, Any]:
        if not grad:
            return program(*args), ()

        def of(*chosen: Any) -> tuple[list[jax.Array], Any]:
            given = list(args)
            for number, value in zip(grad, chosen, strict=True):
                given[number] = value
            outputs = program(*given)
            return floats(outputs), outputs

        values, backward, outputs = jax.vjp(of, *(args[g] for g in grad), has_aux=True)
        rng = np.random.default_rng(7)
        signs = [
            jnp.float32(rng.choice((-1, 1), v.shape)) * (scale / v.size) for v in values
        ]
        return outputs, jax.tree.map(lambda g: g / scale, backward(signs))

    return run


def run(
    idiom: Idiom,
    dtype: str,
    policy: Transform | None,
) -> tuple[Any, dict[str, Any]]:
    """Returns the inputs and, by program, the values and gradients, of all samples."""
    transforms: dict[str, Transform] = {
        "f32": lambda fn: fn,
        "policy": policy or (lambda fn: amp.autocast(fn, f"mixed_{dtype}")),
        "products": amp.recipe("OD", half_dtype=dtype).autocast,
    }
    runs = {}
    for name, transform in transforms.items():
        program = transform(idiom.fn)
        if idiom.turns:
            program = in_turns(program, idiom.turns)
        runs[name] = with_gradient(program, idiom.grad)

    def everything(args: tuple[Any, Any], scale: jax.Array) -> dict[str, Any]:
        return {name: both(args, scale) for name, both in runs.items()}

    options = EXACTLY_AS_WRITTEN | (OPTIMISED if idiom.optimised else {})
    compiled = jax.jit(
        jax.vmap(everything, in_axes=(0, None)), compiler_options=options
    )
    rng = np.random.default_rng(0)
    samples = [(idiom.params(rng), idiom.inputs(rng)) for _ in range(SAMPLES)]
    args = jax.tree.map(lambda *leaves: np.stack(leaves), *samples)
    for lower in LOWER_SCALES:
        found = compiled(args, jnp.float32(LOSS_SCALE[dtype] * lower))
        backward = jax.tree.leaves(found["products"][1])
        if LOSS_SCALE[dtype] == 1 or all(np.isfinite(g).all() for g in backward):
            break
    return args[1], found


def leaves(idiom: Idiom, dtype: str, policy: Transform | None = None) -> list[Leaf]:
    """Returns the errors of each leaf of an idiom in one half precision dtype.

    Args:
      idiom: the idiom.
      dtype: the name of the half precision dtype.
      policy: the transformation of its function that is measured; None is `autocast`.
    """
    return compared(idiom, dtype, *run(idiom, dtype, policy))


def compared(
    idiom: Idiom, dtype: str, inputs: Any, found: dict[str, Any]
) -> list[Leaf]:
    """Returns the errors of what `run` returns."""
    rows = []
    for number, kind in enumerate(("value", "gradient")):
        trees = {name: both[number] for name, both in found.items()}
        paths, _ = jax.tree_util.tree_flatten_with_path(trees["f32"])
        policy, products = (jax.tree.leaves(trees[n]) for n in ("policy", "products"))
        for (path, f32), a, b in zip(paths, policy, products, strict=True):
            assert a.dtype == f32.dtype and a.shape == f32.shape
            of_products = error(b, f32)
            most = bound(idiom, of_products, dtype)
            name = jax.tree_util.keystr(path)
            rows.append(Leaf(kind, name, error(a, f32), of_products, most))
    if idiom.kept is not None:
        share = {
            name: float(np.mean(np.not_equal(*jax.vmap(idiom.kept)(inputs, values))))
            for name, (values, _) in found.items()
        }
        rows.append(Leaf("kept", "", share["policy"], share["products"], 0.0))
    return rows
