"""Trains a vision transformer as Colossal-AI's tutorial does, with linear warm-up.

    python examples/from_colossalai.py                                compares all
    python examples/from_colossalai.py --steps 300                    trains longer
    python examples/from_colossalai.py --mixed-precision fp16_naive   trains with one
    python examples/from_colossalai.py --initial-scale 1024 --hysteresis 1

The lines of the tutorial, `examples/tutorial/new_api/cifar_vit`, and the same here:

    Colossal-AI                              here
    ---------------------------------------  -----------------------------------------
    booster = Booster(                       recipe = amp.recipe("fp16")
        mixed_precision="fp16", plugin=...)
    Booster(mixed_precision=                 amp.recipe("fp16_naive",
        FP16NaiveMixedPrecision(                 initial_scale=2**5, hysteresis=2, ...)
            initial_scale=2**5, ...))
    optimizer = HybridAdam(..., lr=rate)     tx = optax.adamw(schedule)
    lr_scheduler = LinearWarmupLR(           schedule = linear_warmup(
        optimizer, total, warmup)                rate, total, warmup)
    CosineAnnealingWarmupLR(...)             optax.warmup_cosine_decay_schedule(...)
    model, optimizer, criterion, ... =       tx = recipe.wrap(tx)
        booster.boost(model, optimizer,      model, optimizer = recipe.init(tx, model)
            criterion, ..., lr_scheduler)    loss_fn = recipe.autocast(loss_fn)
    loss = criterion(model(x), y)            gradient = amp.value_and_grad(loss_fn)
    booster.backward(loss, optimizer)        loss, grads = gradient(
                                                 model, batch, loss_scale=optimizer)
    optimizer.step()                         optimizer.update(model, grads)
    lr_scheduler.step()                      is in tx

In configurations from before the booster, `AMP_TYPE.TORCH` is "fp16", `AMP_TYPE.APEX`
is "fp16_apex", and `AMP_TYPE.NAIVE` is "fp16_naive".

`lr_scheduler.step()` counts skipped steps. Here the schedule is part of the optimizer,
which a skipped step leaves alone. The last row shows this: its scale begins far too
large, and the warm-up waits until the scale has backed off.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from train_digits import digits
from vit_nnx import ViT, batch_of

import jmp_amp as amp

NAMES = ["float32", "bf16", "fp16", "fp16_apex", "fp16_naive"]
STEPS = 150
RATE = 8e-3
TOO_LARGE = 2.0**32
# The intervals of Colossal-AI, 1000 and 2000 steps, are longer than this training.
GROWTH_INTERVAL = 50
# The parameters of Colossal-AI's scaler, which "fp16_naive" uses.
SCALER: dict[str, Callable[[str], Any]] = {
    "initial_scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "hysteresis": int,
    "min_scale": float,
    "max_scale": float,
}
Batch = Mapping[str, Any]


def recipe_for(name: str, **scaler: Any) -> amp.Recipe:
    """Returns the recipe of `mixed_precision=name`, with some of the `SCALER`."""
    if "initial_scale" in scaler:
        # "fp16" has PyTorch's scaler, which calls it `init_scale`; all accept that.
        scaler["init_scale"] = scaler.pop("initial_scale")
    return amp.recipe(name, **scaler)


def linear_warmup(rate: float, total_steps: int, warmup_steps: int) -> optax.Schedule:
    """Returns the learning rate of Colossal-AI's `LinearWarmupLR`, by step."""
    up = optax.linear_schedule(rate / (warmup_steps + 1), rate, warmup_steps)
    down = optax.linear_schedule(rate, 0.0, total_steps - warmup_steps)
    return optax.join_schedules([up, down], [warmup_steps])


def make_model(seed: int, width: int = 32, depth: int = 2) -> ViT:
    return ViT(width, depth, rngs=nnx.Rngs(seed))


def make_optimizer(recipe: amp.Recipe, steps: int, warmup: int) -> Any:
    # Its state shows the learning rate.
    adamw = optax.inject_hyperparams(optax.adamw)(
        learning_rate=linear_warmup(RATE, steps, warmup), weight_decay=0.05
    )
    return recipe.wrap(optax.chain(optax.clip_by_global_norm(1.0), adamw))


def make_train_step(recipe: amp.Recipe) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the step, a function of (model, optimizer, batch), for any recipe.

    The step returns the loss and the learning rate; a skipped step keeps the last rate.
    """

    @recipe.autocast
    def loss_fn(model: ViT, batch: Batch) -> jax.Array:
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    def train_step(model: ViT, optimizer: nnx.Optimizer, batch: Batch) -> Any:
        loss, grads = amp.value_and_grad(loss_fn)(model, batch, loss_scale=optimizer)
        # A step in which a gradient overflowed changes nothing.
        optimizer.update(model, grads)
        state = nnx.to_pure_dict(nnx.state(optimizer))
        return loss, optax.tree.get(state, "hyperparams")["learning_rate"]

    return jitted(train_step)


def jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a jitted `step` that rounds to half wherever the program says so.

    By default the CPU compiler keeps f32 from one operation to the next, and f16 would
    look better than it is. `nnx.jit` takes no compiler options.
    """

    options: dict[str, Any] = {"xla_allow_excess_precision": False}

    @functools.partial(jax.jit, static_argnums=0, compiler_options=options)
    def on_state(graph: Any, state: Any, batch: Batch) -> Any:
        objects = nnx.merge(graph, state)
        return step(*objects, batch), nnx.state(objects)

    def call(model: ViT, optimizer: nnx.Optimizer, batch: Batch) -> Any:
        graph, state = nnx.split((model, optimizer))
        result, state = on_state(graph, state, batch)
        nnx.update((model, optimizer), state)
        return result

    return call


class Result(NamedTuple):
    """The outcome of a run."""

    model: ViT
    optimizer: nnx.Optimizer
    losses: np.ndarray  # float32[steps]
    rates: np.ndarray  # float32[steps], of learning
    accuracy: float


def train(
    recipe: amp.Recipe,
    batches: Iterable[Batch],
    steps: int = STEPS,
    warmup: int | None = None,
    *,
    model: ViT,
) -> Result:
    """Returns a trained and tested copy of an f32 model.

    Args:
      recipe: how to train.
      batches: one for each step.
      steps: the length of the learning-rate schedule.
      warmup: how many of these steps warm up; by default a tenth.
      model: the first parameters.
    """
    warmup = max(1, steps // 10) if warmup is None else warmup
    tx = make_optimizer(recipe, steps, warmup)
    model, optimizer = recipe.init(tx, nnx.clone(model))
    train_step = make_train_step(recipe)
    history = [jax.device_get(train_step(model, optimizer, each)) for each in batches]
    losses, rates = np.array(history, np.float32).T
    return Result(model, optimizer, losses, rates, accuracy(recipe, model, digits()[1]))


def accuracy(recipe: amp.Recipe, model: ViT, batch: Batch) -> float:
    model.eval()
    logits = nnx.jit(recipe.autocast(lambda model, image: model(image)))(
        model, batch["image"]
    )
    model.train()
    return float(np.mean(np.argmax(np.asarray(logits), axis=-1) == batch["label"]))


def row_of(name: str, result: Result, f32: Result | None) -> list[str]:
    loss = result.losses[-20:].mean()
    metrics = jax.device_get(amp.metrics(result.optimizer))
    return [
        *(name, f"{result.accuracy:.2%}", f"{loss:.4f}"),
        "-" if f32 is None else f"{loss / f32.losses[-20:].mean():.3f}x",
        *(f"2**{math.log2(metrics['scale']):g}", f"{metrics['skipped_total']}"),
        f"{1 + np.argmax(result.rates)}",
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mixed-precision",
        action="append",
        metavar="NAME",
        help=f"may be given several times; default: {', '.join(NAMES)}",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--warmup", type=int, help="steps; default: a tenth of them")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    for name, kind in SCALER.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, help="of the scaler")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: train for at least one step")
    if options.warmup is not None and not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup {options.warmup}: fewer than {options.steps} steps")
    given = {name: getattr(options, name) for name in SCALER}
    given = {name: value for name, value in given.items() if value is not None}
    in_f16 = {"growth_interval": GROWTH_INTERVAL} | given
    # Without f16 there is a scaler only on request.
    others = given if options.mixed_precision else {}
    try:
        options.recipes = {
            name: recipe_for(name, **(in_f16 if name.startswith("fp16") else others))
            for name in options.mixed_precision or NAMES
        }
        if not options.mixed_precision:
            name, in_f16["initial_scale"] = "fp16_naive, too large", TOO_LARGE
            options.recipes[name] = recipe_for("fp16_naive", **in_f16)
    except (TypeError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return options


def main() -> None:
    options = parse()
    console, results = Console(), {}
    data, _ = digits()
    model = make_model(options.seed)
    right = "test accuracy, final loss, to f32, scale, skips, warm"
    table = Table(
        "mixed_precision",
        *(Column(name, justify="right") for name in right.split(", ")),
        title=f"ViT on 1797 handwritten digits, {options.steps} steps",
        caption="final loss: mean of the last 20 steps. warm: the step in which the "
        "learning rate was the highest. too large: the scale, in the beginning.",
        box=box.SIMPLE_HEAD,
    )
    for name, recipe in track(options.recipes.items(), "training", console=console):
        batches = (batch_of(data, step, options.seed) for step in range(options.steps))
        results[name] = train(
            recipe, batches, options.steps, options.warmup, model=model
        )
        table.add_row(*row_of(name, results[name], results.get("float32")))
    console.print(table)


if __name__ == "__main__":
    main()
