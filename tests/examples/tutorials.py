"""The tutorials `from_*`: each as a step, and what its training is by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import from_apex
import from_mindspore
import from_torch
import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from train_digits import State, digits

Tree = Any


class Tutorial(NamedTuple):
    """One of them, in one precision.

    Attributes:
      start: its first state.
      step: `step(state, batch) -> (state, loss)`.
      batches: five, none of them bad.
      params: state -> parameters.
      written: state -> all that a skipped step leaves as it was.
      scale: of the first state.
      resumed: bytes of a state -> the state; None if it shows no checkpoints.
    """

    start: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: Callable[[], list[Any]]
    params: Callable[[Any], Tree]
    written: Callable[[Any], Tree]
    scale: float
    resumed: Callable[[bytes], Any] | None = None


def bad(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with an infinite pixel."""
    image = np.array(batch["image"])
    image.reshape(-1)[27] = np.inf
    return {**batch, "image": image}


def torch(use_amp: bool) -> Tutorial:
    tx, step = from_torch.make_training(use_amp, from_torch.MAX_NORM)

    def start() -> Any:
        params = from_torch.first_params(0)
        return params, tx.init(params)

    def one(state: Any, batch: Any) -> Any:
        *state, loss = step(*state, batch)
        return tuple(state), loss

    def resumed(checkpoint: bytes) -> Any:
        make = from_torch.make_training.__wrapped__
        return from_torch.resumed(checkpoint, make(use_amp, from_torch.MAX_NORM)[0])

    return Tutorial(
        *(start, one, lambda: list(from_torch.batches(digits()[0], 5, 0))),
        *(lambda state: state[0], lambda state: (state[0], state[1].inner_state)),
        *(2.0**16 if use_amp else 1, resumed),
    )


def mindspore(by_hand: bool, precision: str = "f16") -> Tutorial:
    def start() -> Any:
        return from_mindspore.first_state(precision, by_hand, 0)

    def one(state: Any, batch: Any) -> Any:
        step = from_mindspore.compiled(precision, by_hand)
        state, loss, is_finite = step(state, batch)
        assert is_finite == np.isfinite(batch["image"]).all()
        return state, loss

    def written(state: Any) -> Any:
        inner = state.opt_state if by_hand else state.opt_state.inner_state
        return state.params, inner

    return Tutorial(
        *(start, one, lambda: list(from_mindspore.batches(5, 0))),
        *(lambda state: state.params, written, 1024 if precision == "f16" else 1),
        lambda checkpoint: serialization.from_bytes(start(), checkpoint),
    )


@functools.cache
def cnn_variables() -> tuple[Tree, Tree]:
    """First parameters, and statistics as a training might have left them."""
    rng = np.random.default_rng(0)
    params, stats = map(from_apex.first_variables(0).get, ("params", "batch_stats"))
    drawn = {
        "mean": lambda s: rng.normal(0, 0.1, s),
        "var": lambda s: rng.uniform(1, 2, s),
    }
    return params, {
        module: {k: np.float32(drawn[k](v.shape)) for k, v in leaves.items()}
        for module, leaves in stats.items()
    }


def cnn_batch(number: int, data: Any = None) -> dict[str, Any]:
    chosen = slice(64 * number, 64 * (number + 1))
    data = digits()[0] if data is None else data
    return {name: values[chosen] for name, values in data.items()}


@functools.cache
def apex(level: str) -> Tutorial:
    recipe = from_apex.recipe_for(level)
    tx = from_apex.make_optimizer(recipe, 10)
    step = from_apex.jitted(from_apex.make_step(recipe, tx))

    def start() -> Any:
        params, stats = cnn_variables()
        params, opt_state = recipe.init(tx, params)
        return State(params, stats, opt_state)

    return Tutorial(
        start,
        lambda state, batch: step(state, batch, jax.random.key(0)),
        lambda: [cnn_batch(number) for number in range(5)],
        lambda state: state.params,
        lambda state: (*state[:2], state.opt_state.inner_state),
        2.0**16,
        lambda checkpoint: serialization.from_bytes(start(), checkpoint),
    )


def run(tutorial: Tutorial, batches: list[Any], state: Any = None) -> tuple[Any, list]:
    state, losses = tutorial.start() if state is None else state, []
    for batch in batches:
        state, loss = tutorial.step(state, batch)
        losses.append(float(loss))
    return state, losses


# By hand


def as_f64(tree: Tree) -> Tree:
    return jax.tree.map(np.float64, jax.device_get(tree))


def norm(tree: Tree) -> float:
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


def movement_error(params: Tree, expected: Tree, first: Tree) -> float:
    """How far off from what training changes, relative to that."""
    params, expected, first = map(as_f64, (params, expected, first))
    wrong = jax.tree.map(np.subtract, params, expected)
    return norm(wrong) / norm(jax.tree.map(np.subtract, expected, first))


def gradients(
    params: Tree, x: np.ndarray, loss: Callable[[np.ndarray], tuple[float, np.ndarray]]
) -> tuple[float, Tree]:
    """The loss of a perceptron with ReLUs between its layers, and its gradients.

    `loss` maps the outputs to the loss and its cotangent.
    """
    names, inputs = sorted(params), [np.float64(x)]
    for name in names:
        h = inputs[-1] @ params[name]["kernel"] + params[name]["bias"]
        inputs.append(h if name == names[-1] else np.maximum(h, 0.0))
    value, cotangent = loss(inputs.pop())
    grads = {}
    for name in reversed(names):
        x = inputs.pop()
        grads[name] = {"kernel": x.T @ cotangent, "bias": cotangent.sum(axis=0)}
        cotangent = (cotangent @ params[name]["kernel"].T) * (x > 0)
    return value, grads


def cross_entropy(label: np.ndarray) -> Callable[[np.ndarray], Any]:
    def loss(logits: np.ndarray) -> tuple[float, np.ndarray]:
        rows = np.arange(len(label))
        logits = logits - logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        cotangent = np.exp(log_p)
        cotangent[rows, label] -= 1
        return -log_p[rows, label].mean(), cotangent / len(rows)

    return loss


def gradients_of_torch(params: Tree, batch: Any) -> tuple[float, Tree]:
    x = batch["image"].reshape(len(batch["label"]), -1)
    return gradients(params, x, cross_entropy(batch["label"]))


@functools.cache
def torch_by_hand() -> tuple[Tree, list[float]]:
    """Weights and losses of SGD on gradients that are clipped as torch clips them."""
    params, losses = as_f64(from_torch.first_params(0)), []
    for batch in torch(True).batches():
        loss, grads = gradients_of_torch(params, batch)
        losses.append(loss)
        rate = from_torch.RATE * min(1.0, from_torch.MAX_NORM / norm(grads))
        params = jax.tree.map(lambda p, g, rate=rate: p - rate * g, params, grads)
    return params, losses


@functools.cache
def mindspore_by_hand() -> tuple[Tree, list[float]]:
    """Weights and losses of SGD with momentum in plain f32 JAX."""

    def plain_loss(params: Tree, batch: Any) -> jax.Array:
        logits = from_mindspore.Network().apply({"params": params}, batch["image"])
        label = batch["label"][:, None]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), label, axis=-1)
        return -chosen.mean()

    params = from_mindspore.first_params(0)
    velocity = jax.tree.map(jnp.zeros_like, params)
    gradient, losses = jax.jit(jax.value_and_grad(plain_loss)), []
    for batch in mindspore(True).batches():
        loss, grads = gradient(params, batch)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v: p - 0.05 * v, params, velocity)
        losses.append(float(loss))
    return params, losses
