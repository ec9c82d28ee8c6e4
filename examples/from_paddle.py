"""Trains Paddle's SimpleNet at O0, O1 and O2, with and without accumulation.

    python examples/from_paddle.py                    all of them, smaller on a CPU
    python examples/from_paddle.py --half-dtype bf16  another half precision

The original is the guide "Automatic Mixed Precision Training" of PaddlePaddle: a net of
three Linear(4096, 4096), batches of 512 random numbers, 5 epochs of 50 batches. Its
lines, and the same here:

    Paddle                                    here
    ----------------------------------------  ------------------------------------------
    scaler = paddle.amp.GradScaler(           recipe = amp.recipe("O1", "float16",
        init_loss_scaling=1024)                   init_loss_scaling=1024)
    with paddle.amp.auto_cast(level="O1",     apply = recipe.autocast(net.apply)
        custom_white_list=                    nothing: biases are added in half, but
            {"elementwise_add"}):               for the last, to what the f32 loss reads
        output = model(data)
        loss = mse(output, label)             in f32: outputs come back in f32
    scaled = scaler.scale(loss)               loss, grads = amp.value_and_grad(loss_fn)(
    scaled.backward()                             params, .., loss_scale=opt_state)
    scaler.step(optimizer)                    updates, opt_state = tx.update(
    scaler.update()                               grads, opt_state, params)
    optimizer.clear_grad()                    nothing: gradients are values

    model, optimizer = paddle.amp.decorate(   recipe = amp.recipe("O2", ..)
        model, optimizer, level="O2",         params, opt_state = recipe.init(
        master_weight=True)                       recipe.wrap(tx), params)

    if (i + 1) % accumulate_batchs_num == 0:  tx = recipe.wrap(
        scaler.step(optimizer)                    optax.MultiSteps(sgd, accumulate))

The guide adds up the gradients of 10 batches. `MultiSteps` takes their mean, so the
rate is 10 times as large here. The guide's rate, 0.0001, hardly moves the loss, a mean
over 2 million numbers: here it is 1.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping
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

import jmp_amp as amp

LEVELS = ["O0", "O1", "O2"]
EPOCHS, RATE = 5, 1.0


class SimpleNet(nn.Module):
    """An f32 model that knows nothing of precision."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(self.width, name="linear1")(x))
        x = nn.relu(nn.Dense(self.width, name="linear2")(x))
        return nn.Dense(self.width, name="linear3")(x)


class Result(NamedTuple):
    """The outcome of a run."""

    params: Any  # in f32, from `export_params`
    losses: np.ndarray  # one of each step
    seconds: float  # of a step
    skips: int
    scale: float
    bytes: int  # of parameters and the state of the optimizer


def make_recipe(level: str, half_dtype: Any) -> amp.Recipe:
    """Returns a level; in f16 the scaler begins at 1024, as in the guide."""
    recipe = amp.recipe(level, half_dtype)
    if not recipe.loss_scale.dynamic:
        return recipe
    return amp.recipe(level, half_dtype, init_loss_scaling=1024.0)


def make_optimizer(
    recipe: amp.Recipe, rate: float, accumulate: int
) -> optax.GradientTransformationExtraArgs:
    """Returns SGD that moves once for the summed gradients of `accumulate` batches."""
    if accumulate == 1:
        return recipe.wrap(optax.sgd(rate))
    return recipe.wrap(optax.MultiSteps(optax.sgd(rate * accumulate), accumulate))


def make_train_step(
    apply: Callable[..., Any], tx: optax.GradientTransformationExtraArgs
) -> Callable[..., Any]:
    """Returns the step, the same for all levels, with or without accumulation."""

    def loss_fn(params: Any, data: jax.Array, label: jax.Array) -> jax.Array:
        return jnp.mean((apply({"params": params}, data) - label) ** 2)

    def train_step(
        params: Any, opt_state: Any, data: jax.Array, label: jax.Array
    ) -> Any:
        gradient = amp.value_and_grad(loss_fn)
        loss, grads = gradient(params, data, label, loss_scale=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    return jax.jit(train_step, donate_argnums=(0, 1), compiler_options=options)


def batches(steps: int, seed: int, width: int, batch: int) -> list[Any]:
    """Returns the (data, label) of each step: the same in each of the 5 epochs."""
    rng = np.random.default_rng(seed)
    each = -(-steps // EPOCHS)
    epoch = rng.standard_normal((each, 2, batch, width), np.float32)
    # On the device before the first step: only steps are timed.
    on_device = [tuple(map(jnp.asarray, pair)) for pair in epoch]
    return [on_device[number % each] for number in range(steps)]


@functools.partial(jax.jit, static_argnames="width")
def first_params(seed: int, width: int) -> Any:
    data = jnp.zeros((1, width))
    return SimpleNet(width).init(jax.random.key(seed), data)["params"]


def train(
    level: str,
    accumulate: int = 1,
    *,
    half_dtype: Any = "float16",
    steps: int,
    seed: int = 0,
    width: int,
    batch: int,
    rate: float = RATE,
) -> Result:
    """Returns a training at a level that moves once for `accumulate` batches."""
    recipe = make_recipe(level, half_dtype)
    tx = make_optimizer(recipe, rate, accumulate)
    params, opt_state = recipe.init(tx, first_params(seed, width=width))
    # Before the first step, which donates these arrays.
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state)))
    step = make_train_step(recipe.autocast(SimpleNet(width).apply), tx)
    losses, seconds = [], []
    for data, label in batches(steps, seed, width, batch):
        start = time.perf_counter()
        params, opt_state, loss = step(params, opt_state, data, label)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    metrics = jax.device_get(amp.metrics(opt_state))
    return Result(
        amp.export_params(params, opt_state),
        np.array(losses),
        # The first step compiles. Other work of the machine only adds time.
        float(np.quantile(seconds[1:] or seconds, 0.1)),
        int(metrics["skipped_total"]),
        float(metrics["scale"]),
        held,
    )


def table_of(results: Mapping[tuple[str, int], Result], title: str) -> Table:
    """Returns the results as a table, one run in a row, with ratios to O0."""
    right = "batches, time, final loss, to O0, skips, scale, held"
    table = Table(
        "level",
        *(Column(name, justify="right") for name in right.split(", ")),
        title=title,
        caption="batches: whose gradients are added up. time: of a step, relative to "
        "that of O0 in this run; a CPU emulates what is planned for a GPU, "
        "so there it says nothing about one. final loss: mean of the last epoch; to "
        "O0: its relative difference. skips: steps left out because a gradient "
        "overflowed. held: parameters and the state of the optimizer.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for (level, accumulate), result in results.items():
        base = results["O0", accumulate]
        loss, whole = final_loss(result), final_loss(base)
        table.add_row(
            *(level, f"{accumulate}", f"{result.seconds / base.seconds:.2f}x"),
            *(f"{loss:.4f}", f"{loss / whole - 1:+.0e}", f"{result.skips}"),
            *(f"2**{np.log2(result.scale):.0f}", f"{result.bytes / 1e6:.2f}MB"),
        )
    return table


def final_loss(result: Result) -> float:
    return float(result.losses[-max(1, len(result.losses) // EPOCHS) :].mean())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    small = jax.default_backend() == "cpu"
    sizes = {"width": 256, "batch": 64, "steps": 50} if small else {}
    sizes = {"width": 4096, "batch": 512, "steps": 250} | sizes
    parser = argparse.ArgumentParser(description=f"{__doc__}".splitlines()[0])
    for name, value in (sizes | {"accumulate": 10, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    parser.add_argument("--half-dtype", default="float16", help="float16 or bfloat16")
    options = parser.parse_args(arguments)
    for name in ("width", "batch", "steps", "accumulate"):
        if getattr(options, name) < 1:
            message = f"--{name} {getattr(options, name)}: use a number above zero"
            parser.exit(2, f"{parser.prog}: error: {message}\n")
    try:
        make_recipe("O2", options.half_dtype)
    except (TypeError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return options


def main() -> None:
    settings = vars(parse())
    console, results, pieces = Console(), {}, settings.pop("accumulate")
    runs = [(level, many) for many in sorted({1, pieces}) for level in LEVELS]
    for level, accumulate in track(runs, "training", console=console):
        results[level, accumulate] = train(level, accumulate, **settings)
    sizes = f"{settings['batch']} x {settings['width']}, {settings['steps']} steps"
    console.print(table_of(results, f"SimpleNet, {sizes}, {settings['half_dtype']}"))


if __name__ == "__main__":
    main()
