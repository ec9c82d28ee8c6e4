"""Trains with the `train_step` of MindSpore's tutorial, by hand and in one line.

    python examples/from_mindspore.py    both, and f32; with and without an overflow

The original is the tutorial "Mixed Precision" of MindSpore. By hand it scales the loss,
looks for overflows and skips steps. Its lines, and the same here:

    MindSpore                                 here
    ----------------------------------------  ------------------------------------------
    loss_scaler = amp.DynamicLossScaler(      loss_scaler = amp.loss_scale_preset(
        scale_value=1024, scale_factor=2,         "mindspore", scale_value=1024,
        scale_window=1000)                        scale_factor=2, scale_window=1000)
    model = amp.auto_mixed_precision(         recipe = amp.recipe("auto", "float16")
        net, amp_level="auto",                model = recipe.autocast(net.apply)
        dtype=mindspore.float16)
    def forward_fn(data, label):              the parameters and the scaler are values,
        logits = model(data)                    so they are arguments; else the same
        loss = loss_fn(logits, label)
        loss = loss_scaler.scale(loss)
        return loss, logits
    grad_fn = mindspore.value_and_grad(       grad_fn = jax.value_and_grad(
        forward_fn, None, weights,                forward_fn, has_aux=True)
        has_aux=True)
    (loss, _), grads = grad_fn(data, label)   the same
    loss = loss_scaler.unscale(loss)          the same
    is_finite = amp.all_finite(grads)         the same
    if is_finite:                             amp.select_tree(is_finite, new, old): a
        grads = loss_scaler.unscale(grads)      compiled program does not wait for the
        optimizer(grads)                        flag, it computes both and chooses
    loss_scaler.adjust(is_finite)             loss_scaler.adjust(is_finite) is the next

`make_train_step` follows it line by line. Prefer `make_short_train_step`, in which
`amp.with_loss_scale(optimizer, loss_scaler)`, or `recipe.wrap(optimizer)`, holds the
scaler and does all of this. The two end at the same bits.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from train_digits import digits

import jmp_amp as amp

STEPS, BATCH = 200, 64
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
SCALER = {"scale_value": 1024, "scale_factor": 2, "scale_window": 1000}
RECIPES = {
    "f32": amp.recipe("float32"),
    "f16": amp.recipe("auto", "float16", **SCALER),
}
Batch = Mapping[str, Any]


class Network(nn.Module):
    """The net of MindSpore's tutorials: it knows nothing of precision."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(512)(x))
        x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(10)(x)


class State(NamedTuple):
    """All that a training step writes."""

    params: Any
    opt_state: Any
    loss_scaler: amp.LossScale | None = None  # in short, it is in the opt_state


def loss_fn(logits: jax.Array, label: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def make_train_step(
    model: Callable[..., Any], optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """Returns the step of the tutorial: of (state, batch) to (state, loss, finite)."""

    def forward_fn(params: Any, loss_scaler: Any, data: Any, label: Any) -> Any:
        logits = model({"params": params}, data)
        loss = loss_fn(logits, label)
        return loss_scaler.scale(loss), logits

    grad_fn = jax.value_and_grad(forward_fn, has_aux=True)

    def train_step(state: State, batch: Batch) -> Any:
        params, opt_state, loss_scaler = state
        assert loss_scaler is not None
        data, label = batch["image"], batch["label"]
        (loss, _), grads = grad_fn(params, loss_scaler, data, label)
        loss = loss_scaler.unscale(loss)
        is_finite = amp.all_finite(grads)
        grads = loss_scaler.unscale(grads)
        new = optimizer.update(grads, opt_state, params)
        # `select_tree` chooses updates, not parameters: a compiler may round parameters
        # plus rate times momentum once or twice, and the last bits would differ.
        old = optax.tree.zeros_like(params), opt_state
        updates, opt_state = amp.select_tree(is_finite, new, old)
        params = optax.apply_updates(params, updates)
        loss_scaler = loss_scaler.adjust(is_finite)
        return State(params, opt_state, loss_scaler), loss, is_finite

    return jitted(train_step)


def make_short_train_step(
    model: Callable[..., Any], tx: optax.GradientTransformationExtraArgs
) -> Callable[..., Any]:
    """Returns the same step, with an optimizer that holds the scaler."""

    def forward_fn(params: Any, batch: Batch) -> jax.Array:
        return loss_fn(model({"params": params}, batch["image"]), batch["label"])

    def train_step(state: State, batch: Batch) -> Any:
        params, opt_state, _ = state
        grad_fn = amp.value_and_grad(forward_fn)
        loss, grads = grad_fn(params, batch, loss_scale=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return State(params, opt_state), loss, amp.last_step_finite(opt_state)

    return jitted(train_step)


def jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    return jax.jit(step, compiler_options=options)


@functools.cache
def compiled(precision: str, by_hand: bool) -> Callable[..., Any]:
    """Returns the step of a run, jitted once."""
    recipe = RECIPES[precision]
    model = recipe.autocast(Network().apply)
    if by_hand:
        return make_train_step(model, OPTIMIZER)
    return make_short_train_step(model, recipe.wrap(OPTIMIZER))


@jax.jit
def first_params(seed: int) -> Any:
    return Network().init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)))["params"]


def first_state(precision: str, by_hand: bool, seed: int) -> State:
    recipe, params = RECIPES[precision], first_params(seed)
    if by_hand:
        return State(params, OPTIMIZER.init(params), recipe.loss_scale)
    return State(params, recipe.wrap(OPTIMIZER).init(params))


def batches(steps: int, seed: int, overflow: bool = False) -> Iterator[Batch]:
    """Yields batches of digits; infinite pixels are in one in the middle."""
    data, _ = digits()
    rng = np.random.default_rng(seed)
    for number in range(steps):
        chosen = rng.choice(len(data["label"]), BATCH, replace=False)
        batch = {name: values[chosen] for name, values in data.items()}
        if overflow and number == steps // 2:
            batch["image"][0] = np.inf
        yield batch


class Result(NamedTuple):
    """The outcome of a run."""

    params: Any
    loss: float  # of all training images, in f32
    skips: int
    scale: float


@jax.jit
def loss_in_f32(params: Any, batch: Batch) -> jax.Array:
    logits: Any = Network().apply({"params": params}, batch["image"])
    return loss_fn(logits, batch["label"])


def train(
    precision: str,
    by_hand: bool,
    steps: int = STEPS,
    seed: int = 0,
    *,
    overflow: bool = False,
) -> Result:
    """Returns a training with one form of the step."""
    step, state = compiled(precision, by_hand), first_state(precision, by_hand, seed)
    skips = 0
    for batch in batches(steps, seed, overflow):
        state, _, is_finite = step(state, batch)
        skips += not is_finite
    loss = float(loss_in_f32(state.params, digits()[0]))
    scale = float(amp.loss_scale_of(state).value)
    return Result(state.params, loss, skips, scale)


def table_of(results: Mapping[tuple[str, bool, bool], Result]) -> Table:
    """Returns the results as a table, one run in a row."""
    table = Table(
        *("precision", "train_step", "inf"),
        *(Column(name, justify="right") for name in ("loss", "skips", "scale")),
        "bits",
        title="MindSpore's train_step on 1797 handwritten digits",
        caption="inf: whether some pixels are. loss: of the training images, in f32, "
        "in the end. skips: steps left out. bits: whether the weights are those of the "
        "step by hand.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for (precision, by_hand, overflow), result in results.items():
        other = results.get((precision, True, overflow), result)
        same = jax.tree.map(np.array_equal, result.params, other.params)
        table.add_row(
            *(
                precision,
                "by hand" if by_hand else "short",
                "yes" if overflow else "no",
            ),
            *(f"{result.loss:.4f}", f"{result.skips}", f"{result.scale:g}"),
            "-" if other is result else "same" if all(jax.tree.leaves(same)) else "not",
        )
    return table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{__doc__}".splitlines()[0])
    for name, value in {"steps": STEPS, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        message = f"--steps {options.steps}: train for at least one step"
        parser.exit(2, f"{parser.prog}: error: {message}\n")
    return options


def main() -> None:
    options, console, results = parse(), Console(), {}
    runs = [("f16", by_hand, inf) for inf in (False, True) for by_hand in (True, False)]
    for run in track([("f32", False, False), *runs], "training", console=console):
        precision, by_hand, inf = run
        results[run] = train(
            *(precision, by_hand, options.steps, options.seed), overflow=inf
        )
    console.print(table_of(results))


if __name__ == "__main__":
    main()
