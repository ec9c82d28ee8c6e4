"""A trial of mixed precision on this machine: a small model, trained beside f32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_amp.policies.dtypes import F16, F32, PyTree, short_name
from jmp_amp.recipes import Recipe, recipe
from jmp_amp.reports.explaining import explain
from jmp_amp.training.gradients import value_and_grad
from jmp_amp.training.loss_scale_state import loss_scale_of

_STEPS = 20


class Check(NamedTuple):
    """One trial on a small training run.

    Attributes:
      dtype: the short name of the half dtype.
      what: the sentence that should be true.
      holds: whether it is.
      measured: the figure that decided.
    """

    dtype: str
    what: str
    holds: bool
    measured: str


def check(tried: Recipe, half: np.dtype) -> list[Check]:
    """Returns the checks of a recipe on the device that JAX uses.

    A network of two layers with a norm between them is trained by the recipe and by
    "O0", and once on a batch with an infinite number.

    Args:
      tried: a recipe that leaves parameters in f32, such as "O1".
      half: its half dtype.
    """
    ours, plain, batch = _Run(tried), _Run(recipe("O0")), _batch()
    total = explain(jax.grad(ours.loss_fn), "float32")(ours.params, batch).total
    grads = ours.gradient(batch)
    error = _relative_error(grads, plain, batch) / float(jnp.finfo(half).eps)
    losses, true_losses = (
        [run.step(batch) for _ in range(_STEPS)] for run in (ours, plain)
    )
    ratio = losses[-1] / true_losses[-1]
    before, scale = ours.params, ours.scale()
    ours.step(batch | {"x": batch["x"].at[0, 0].set(jnp.inf)})
    skipped, backed_off = _equal(before, ours.params), ours.scale() / scale
    ours.step(batch)
    goes_on = not _equal(before, ours.params) and bool(jnp.isfinite(ours.step(batch)))
    sentences = [
        (
            "every product of a gradient is in half precision",
            0 < total.matmuls == total.matmuls_in_half,
            f"{total.matmuls_in_half} of {total.matmuls}",
        ),
        (
            "gradients are f32, and right to 2 units of the last place",
            error <= 2 and all(each.dtype == F32 for each in jax.tree.leaves(grads)),
            f"{error:.2f} units",
        ),
        (
            f"after {_STEPS} steps the loss has halved, and is f32's to 10 %",
            abs(ratio - 1) <= 0.1 and losses[-1] <= losses[0] / 2,
            f"{losses[0]:.3f} to {losses[-1]:.3f}, {ratio:.3f}x",
        ),
        (
            "a step that overflows changes no parameter, and a scale backs off",
            skipped and backed_off == (0.5 if half == F16 else 1),
            f"scale {scale:g} to {ours.scale():g}",
        ),
        (
            "the next step goes on, and all of them were compiled once",
            goes_on and ours.traces == 1,
            f"traced {ours.traces}x",
        ),
    ]
    return [Check(short_name(half), *sentence) for sentence in sentences]


class _Run:
    """A model that is trained by a recipe, as the README does it."""

    def __init__(self, recipe: Recipe) -> None:
        self.traces = 0
        self.loss_fn = recipe.autocast(_loss)
        tx = recipe.wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3)))
        self.params, self.state = recipe.init(tx, _params())

        @jax.jit
        def train_step(params: PyTree, state: PyTree, batch: PyTree) -> PyTree:
            self.traces += 1
            gradient = value_and_grad(self.loss_fn)
            loss, grads = gradient(params, batch, loss_scale=state)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self._train_step = train_step

    def gradient(self, batch: PyTree) -> PyTree:
        gradient = value_and_grad(self.loss_fn)
        return gradient(self.params, batch, loss_scale=self.state)[1]

    def step(self, batch: PyTree) -> float:
        """Makes a step and returns its loss."""
        trained = self._train_step(self.params, self.state, batch)
        self.params, self.state, loss = trained
        return float(loss)

    def scale(self) -> float:
        return float(loss_scale_of(self.state).value)


def _relative_error(grads: PyTree, plain: _Run, batch: PyTree) -> float:
    # Else TPUs multiply f32 in bf16, and new GPUs in 10 bits.
    with jax.default_matmul_precision("highest"):
        true_grads = plain.gradient(batch)
    difference = optax.tree.norm(optax.tree.sub(grads, true_grads))
    return float(difference / optax.tree.norm(true_grads))


def _params() -> PyTree:
    keys = jax.random.split(jax.random.key(0))
    up, down = (jax.random.normal(key, (32, 32), F32) / 32**0.5 for key in keys)
    return {"up": up, "scale": jnp.ones(32, F32), "down": down}


def _batch() -> PyTree:
    for_x, for_mixing = jax.random.split(jax.random.key(1))
    x = jax.random.normal(for_x, (128, 32), F32)
    mixing = jax.random.normal(for_mixing, (32, 32), F32) / 32**0.5
    return {"x": x, "y": jnp.tanh(x @ mixing)}


def _loss(params: PyTree, batch: PyTree) -> jax.Array:
    x = batch["x"] @ params["up"]
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(variance + 1e-6) * params["scale"][None]
    return jnp.mean(jnp.square(jnp.tanh(x) @ params["down"] - batch["y"]))


def _equal(a: PyTree, b: PyTree) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))
