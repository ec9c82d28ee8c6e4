"""How wrong a loop is in some precisions, and where its products run.

Errors are those of `tests/idioms/measure.py`, the largest of all leaves, against the
loop in f32; that of f32 itself is taken against f64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp_amp as amp
from tests.idioms.measure import (
    SAMPLES,
    Program,
    Transform,
    error,
    with_gradient,
)
from tests.idioms.row import Idiom
from tests.loops.halves import products_in_half
from tests.measures import EXACTLY_AS_WRITTEN

# Nothing is made again: XLA would fuse it in other ways, and an ill-conditioned program
# shows the last bits.
POLICY = amp.get_policy("p=f32,c=bf16,o=f32,s=all")

# A recursion whose products alone are wrong by more than this needs them in f32.
MOST_IN_HALF = 0.012
# What the library may lose over its own plan with all products in f32.
FACTOR, ROUNDING = 3.0, 1e-6

# "half" has every product in half, "OD" those that the library's recipe has in half,
# "full" is the policy with all products in f32.
TRANSFORMS: dict[str, Transform] = {
    "f32": lambda fn: fn,
    "half": products_in_half,
    "OD": amp.recipe("OD", half_dtype="bfloat16").autocast,
    "library": lambda fn: amp.autocast(fn, POLICY),
    "full": lambda fn: amp.autocast(fn, POLICY.with_full("dot_general")),
}


class Errors(NamedTuple):
    """The largest error of any leaf, of the values and of the gradients."""

    value: float
    gradient: float

    @property
    def worst(self) -> float:
        return max(self)


class Products(NamedTuple):
    """How many products of a plan stand in loops and elsewhere, by their precision."""

    half_in_loops: int
    full_in_loops: int
    half: int
    full: int


def samples(idiom: Idiom) -> tuple[Any, Any]:
    """Returns the arguments of all samples, stacked."""
    rng = np.random.default_rng(0)
    drawn = [(idiom.params(rng), idiom.inputs(rng)) for _ in range(SAMPLES)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)


def in_f64(fn: Program) -> Program:
    """Returns `fn` computed in f64 between arguments and results in f32."""

    def cast(tree: Any, source: Any, target: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(target) if x.dtype == source else x, tree
        )

    def program(params: Any, inputs: Any) -> Any:
        args = cast((params, inputs), jnp.float32, jnp.float64)
        return cast(fn(*args), jnp.float64, jnp.float32)

    return program


def outputs(idiom: Idiom, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns values and gradients of all samples, by the names of `TRANSFORMS`."""
    runs = {
        name: with_gradient(TRANSFORMS[name](idiom.fn), idiom.grad) for name in names
    }

    def everything(args: tuple[Any, Any]) -> dict[str, Any]:
        return {name: run(args, jnp.float32(1.0)) for name, run in runs.items()}

    compiled = jax.jit(jax.vmap(everything), compiler_options=EXACTLY_AS_WRITTEN)
    return compiled(samples(idiom))


def reference(idiom: Idiom) -> Any:
    """Returns values and gradients of all samples, computed in f64."""
    run = with_gradient(in_f64(idiom.fn), idiom.grad)
    with jax.enable_x64(True):
        compiled = jax.jit(jax.vmap(lambda args: run(args, jnp.float32(1.0))))
        return jax.tree.map(np.asarray, compiled(samples(idiom)))


def compared(found: Any, expected: Any) -> Errors:
    """Returns the errors of (values, gradients) against others."""

    def worst(found: Any, expected: Any) -> float:
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        return max((error(a, b) for a, b in pairs), default=0.0)

    return Errors(*map(worst, found, expected))


def errors(idiom: Idiom, *names: str) -> dict[str, Errors]:
    """Returns the errors of some of `TRANSFORMS` against f32, of "f32" against f64."""
    found = outputs(idiom, ("f32", *(name for name in names if name != "f32")))
    expected = reference(idiom) if "f32" in names else None
    return {
        name: compared(found[name], expected if name == "f32" else found["f32"])
        for name in names
    }


def is_kept(library: Errors, full: Errors) -> bool:
    """Whether the library is about as right as with all products in f32."""
    return library.worst <= FACTOR * full.worst + ROUNDING


def products(idiom: Idiom) -> Products:
    """Returns where the products of the library's plan run; nothing is compiled."""
    rng = np.random.default_rng(0)
    args = jax.tree.map(jnp.asarray, (idiom.params(rng), idiom.inputs(rng)))
    rows = amp.explain(idiom.fn, POLICY)(*args).equations
    loops = {e.identity for e in rows if e.operation in ("scan", "while")}
    counts = {(inside, half): 0 for inside in (True, False) for half in (True, False)}
    for row in rows:
        inside = any(row.identity.startswith(f"{loop}.") for loop in loops)
        counts[inside, True] += row.matmuls_in_half
        counts[inside, False] += row.matmuls - row.matmuls_in_half
    return Products(
        *(counts[True, half] for half in (True, False)),
        *(counts[False, half] for half in (True, False)),
    )
