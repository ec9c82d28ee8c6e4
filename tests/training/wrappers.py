"""The transformations that wrap an optimizer, and what their tests have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_amp as amp

BF16, F16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")
HALF = (BF16, F16)
KEY = jax.random.key(7)

# Optax adds f32 updates to half parameters, and Adam raises a float to a step count.
standard = functools.partial(jax.numpy_dtype_promotion, "standard")


def dynamic(scale: float = 2.0**10, **settings: Any) -> amp.LossScale:
    return amp.dynamic_loss_scale(scale, **settings)


Wrapper = Callable[[Any], Any]


# They keep the digits that half parameters lose.
STORING: dict[str, Wrapper] = {
    "masters": amp.with_master_weights,
    "kahan": amp.with_kahan,
    "stochastic": lambda inner: amp.with_stochastic_rounding(inner, KEY),
}
# Moments in 16 or 8 bits.
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "bfloat16 at random": {"key": KEY},
    "float8": {"dtype": "float8"},
}
CODING: dict[str, Wrapper] = {
    # Of arrays of any size.
    name: functools.partial(amp.with_low_precision_state, **way, min_size=1)
    for name, way in WAYS.items()
}
SCALING: dict[str, Wrapper] = {
    "loss scale": lambda inner: amp.with_loss_scale(inner, dynamic())
}
WRAPPERS = SCALING | STORING | CODING


def outside_and_inside(wrappers: dict[str, Wrapper]) -> dict[str, Wrapper]:
    """Each of them in a loss scale, and around one."""
    found: dict[str, Wrapper] = {}
    (scale,) = SCALING.values()
    for name, wrapper in wrappers.items():
        found[f"{name}, scale outside"] = lambda tx, w=wrapper: scale(w(tx))
        found[f"{name}, scale inside"] = lambda tx, w=wrapper: w(scale(tx))
    return found


def parameters(dtype: Any = F32) -> dict[str, jax.Array]:
    """A few weights that every half dtype holds."""
    return {
        "w": jnp.array([[1.0, -2.0], [0.5, 4.0]], dtype),
        "b": jnp.array([0.25, -1.0], dtype),
    }


def many_parameters(dtype: Any) -> dict[str, jax.Array]:
    """Half-precision weights over many magnitudes, and an f32 bias."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(4096) * 2.0 ** -rng.integers(0, 12, 4096)
    return {"w": jnp.asarray(w, F32).astype(dtype), "b": jnp.ones(3, F32)}


def gradients_at(step: int, like: Any) -> Any:
    rng = np.random.default_rng(1000 + step)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.standard_normal(p.shape), F32).astype(p.dtype), like
    )


def stepper(tx: Any, **options: Any) -> Any:
    """A compiled step: parameters, state and gradients -> parameters and state.

    `options` are those of the compiler, such as `OPTIMISED`.
    """

    @functools.partial(jax.jit, compiler_options=options)
    def step(params: Any, state: Any, gradients: Any) -> Any:
        with standard():
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    return step


def kinds(tree: Any) -> Any:
    """The structure of a tree, and the type of each leaf."""
    return jax.tree.structure(tree), [
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", None))
        for leaf in jax.tree.leaves(tree)
    ]
