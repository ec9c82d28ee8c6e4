"""Trains a CNN at the opt levels of NVIDIA Apex, and fine-tunes it in eval mode.

    python examples/from_apex.py                          compares O0, O1, O2 and O3
    python examples/from_apex.py --steps 300              trains longer
    python examples/from_apex.py --opt-level O2 --keep-batchnorm-fp32 False
    python examples/from_apex.py --opt-level O1 --loss-scale 128.0
    python examples/from_apex.py --h100                   with the memory on an H100

The lines of Apex's ImageNet example, examples/imagenet/main_amp.py, and the same here:

    Apex                                    here
    --------------------------------------  ------------------------------------------
    model, optimizer = amp.initialize(      recipe = amp.recipe(
        model, optimizer,
        opt_level=level,                        level, half_dtype="float16",
        keep_batchnorm_fp32=keep,               keep_batchnorm_fp32=keep,
        loss_scale=loss_scale)                  loss_scale=loss_scale)
                                            loss_fn = recipe.autocast(loss_fn)
                                            tx = recipe.wrap(tx)
                                            params, opt_state = recipe.init(tx, params)
    loss = criterion(model(input), target)  gradient = amp.value_and_grad(loss_fn)
    with amp.scale_loss(                    loss, grads = gradient(
            loss, optimizer) as scaled:         params, batch, loss_scale=opt_state)
        scaled.backward()
    clip_grad_norm_(                        tx = optax.chain(
        amp.master_params(optimizer), 1.0)      optax.clip_by_global_norm(1.0), ...)
    optimizer.step()                        updates, state = tx.update(grads, state, ..)
    amp.state_dict()                        is in opt_state, see amp.loss_scale_of
    model.state_dict()                      recipe.export_params(params, opt_state)

The options are those of main_amp.py, with the same combinations refused as by
`amp.initialize`. Differences: the optimizer sees unscaled f32 gradients, so clipping
needs no masters. Sums, norms and losses are f32 at every level. A skipped step takes
back its batch statistics too. A static scale skips as a dynamic one does.

The second table shows fine-tuning at O2 with BatchNorm in eval mode, which Apex cannot
do. The digits now lie on their sides. The statistics of the first training are used and
never written, and gradients pass through them.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from train_digits import CNN, State, accuracy, batches, digits

import jmp_amp as amp

LEVELS = ["O0", "O1", "O2", "O3"]
FINE_TUNED = ["O0", "O2"]
STEPS = 120
FINE_TUNE_STEPS = 60
# Memory is that of a step on this many images. With fewer, workspaces hide activations;
# with more, activations hide parameters.
MEMORY_BATCH = 512
Batch = Mapping[str, Any]


def recipe_for(level: str, **overrides: Any) -> amp.Recipe:
    """Returns the recipe of an opt level; overrides may be text, as in Apex."""
    recipe = amp.recipe(level, half_dtype="float16", **overrides)
    if not recipe.loss_scale.dynamic:
        return recipe
    # The interval of Apex, 2000 steps, is longer than this training.
    return amp.recipe(level, half_dtype="float16", scale_window=50, **overrides)


def loss_of(params: Any, batch_stats: Any, batch: Batch, dropout_key: Any) -> Any:
    """Returns the loss and new batch statistics; without a dropout key, in eval mode.

    In eval mode BatchNorm uses its running statistics and returns them unchanged.
    """
    logits, updated = CNN().apply(
        {"params": params, "batch_stats": batch_stats},
        batch["image"],
        train=dropout_key is not None,
        rngs={} if dropout_key is None else {"dropout": dropout_key},
        mutable=["batch_stats"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), updated["batch_stats"]


def make_optimizer(recipe: amp.Recipe, steps: int) -> Any:
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-4, max(1, steps // 10), steps + 1)
    # Clipping sees unscaled f32 gradients, however the parameters are stored.
    clip, adamw = optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1)
    return recipe.wrap(optax.chain(clip, adamw))


def make_step(recipe: amp.Recipe, tx: Any) -> Callable[..., tuple[State, jax.Array]]:
    """Returns the step, the same at all levels: a function of (state, batch, key)."""
    loss_fn = recipe.autocast(loss_of)

    def step(state: State, batch: Batch, dropout_key: Any) -> tuple[State, jax.Array]:
        params, old_stats, opt_state = state
        gradient = amp.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = gradient(
            params, old_stats, batch, dropout_key, loss_scale=opt_state
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        batch_stats = amp.keep_if_finite(opt_state, batch_stats, old_stats)
        return State(optax.apply_updates(params, updates), batch_stats, opt_state), loss

    return step


def jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    return jax.jit(step, compiler_options=options)


@functools.partial(jax.jit, static_argnums=0)
def first_variables(seed: int) -> Any:
    return CNN().init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), train=False)


class Result(NamedTuple):
    """The outcome of a training."""

    state: State
    losses: np.ndarray  # float32[steps]
    accuracy: float


def tested(recipe: amp.Recipe, state: State, losses: list, data: Batch) -> Result:
    policy: Any = recipe.policy
    correct = accuracy(policy, state, data)
    return Result(state, np.array(losses, np.float32), correct)


def train(recipe: amp.Recipe, steps: int = STEPS, seed: int = 0) -> Result:
    """Returns a tested training from the first parameters of a seed."""
    data, test_data = digits()
    variables, tx = first_variables(seed), make_optimizer(recipe, steps)
    params, opt_state = recipe.init(tx, variables["params"])
    state = State(params, variables["batch_stats"], opt_state)
    step, losses, key = jitted(make_step(recipe, tx)), [], jax.random.key(seed)
    for number, batch in enumerate(batches(data, steps, seed)):
        state, loss = step(state, batch, jax.random.fold_in(key, number))
        losses.append(float(loss))
    return tested(recipe, state, losses, test_data)


@functools.cache
def fine_tuner(recipe: amp.Recipe, head_alone: bool) -> tuple[Any, Callable[..., Any]]:
    """Returns the optimizer, of all parameters or the last layer's, and its step."""

    def labels(params: Any) -> Any:
        return {name: name == "Dense_1" or not head_alone for name in params}

    parts: dict[Any, Any] = {True: optax.adam(2e-3), False: optax.set_to_zero()}
    tx = recipe.wrap(optax.partition(parts, labels))
    return tx, jitted(make_step(recipe, tx))


def fine_tune(
    recipe: amp.Recipe,
    params: Any,
    batch_stats: Any,
    *,
    head_alone: bool = False,
    steps: int = FINE_TUNE_STEPS,
    seed: int = 0,
) -> Result:
    """Returns a further training, in eval mode, of f32 or half-precision `params`."""
    tx, step = fine_tuner(recipe, head_alone)
    params, opt_state = recipe.init(tx, params)
    state, losses = State(params, batch_stats, opt_state), []
    data, test_data = map(on_their_sides, digits())
    for batch in batches(data, steps, seed):
        state, loss = step(state, batch, None)
        losses.append(float(loss))
    return tested(recipe, state, losses, test_data)


def on_their_sides(data: Batch) -> Batch:
    return {**data, "image": np.swapaxes(data["image"], 1, 2)}


class Memory(NamedTuple):
    """The bytes that a training step on `MEMORY_BATCH` images holds.

    Attributes:
      stored: the parameters and the state of the optimizer.
      saved: the residuals of the backward pass.
      temporary: memory of the step compiled for an H100, besides its arguments and
        results; None if it was not compiled.
    """

    stored: int
    saved: int
    temporary: int | None


def memory_of(recipe: amp.Recipe, compile_for_gpu: Any = None) -> Memory:
    """Returns the memory of a recipe's step, without executing it."""
    tx = make_optimizer(recipe, STEPS)

    def begin() -> tuple[State, Batch, jax.Array]:
        variables, key = first_variables(0), jax.random.key(0)
        params, opt_state = recipe.init(tx, variables["params"])
        image = jnp.zeros((MEMORY_BATCH, 8, 8, 1))
        batch = {"image": image, "label": jnp.zeros(MEMORY_BATCH, jnp.int32)}
        return State(params, variables["batch_stats"], opt_state), batch, key

    state, batch, key = jax.eval_shape(begin)
    report = amp.explain(loss_of, recipe.policy)(*state[:2], batch, key)
    held = jax.tree.leaves((state.params, state.opt_state))
    temporary = None
    if compile_for_gpu is not None:
        step = make_step(recipe, tx)
        program = compile_for_gpu(step, state, batch, key, donate_argnums=0)
        temporary = program.memory_analysis().temp_size_in_bytes
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in held)
    return Memory(stored, report.total.saved, temporary)


def gpu_compiler() -> tuple[Any, str]:
    """Returns a function that compiles for a described H100, or None and why not.

    Call this before JAX looks for devices: it leaves only the CPU.
    """
    # The compiler is a module of the tests, which are not installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    try:
        from tests import h100
    except ModuleNotFoundError as error:
        return None, f"there is no module {error.name}, which the tests need"
    jax.config.update("jax_platforms", "cpu")
    reason = h100.why_no_compiler()
    return (None, reason) if reason else (h100.compile_for_gpu, "")


def row_of(name: str, result: Result, memory: Memory) -> list[str]:
    metrics = jax.device_get(amp.metrics(result.state.opt_state))
    in_bytes = ("-" if each is None else f"{each / 1e6:.2f}MB" for each in memory)
    return [
        *(name, f"{result.accuracy:.2%}", f"{result.losses[-20:].mean():.4f}"),
        *(f"{metrics['scale']:g}", f"{metrics['skipped_total']}", *in_bytes),
    ]


def table_of(left: str, right: str, title: str, caption: str) -> Table:
    """Returns a table without rows."""
    columns = [Column(name, justify="right") for name in right.split(", ")]
    table = Table(*left.split(", "), *columns, box=box.SIMPLE_HEAD)
    table.title, table.caption = title, caption
    return table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--opt-level", help=f"default: {', '.join(LEVELS)}")
    # Text that the library parses, as in Apex's example.
    parser.add_argument("--keep-batchnorm-fp32", help="True or False")
    parser.add_argument("--loss-scale", help='"dynamic", or a number')
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--h100", action="store_true", help="needs no GPU, uses none")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: train for at least one step")
    not_asked = None, "ask for it with --h100"
    options.gpu = gpu_compiler() if options.h100 else not_asked
    names = ("keep_batchnorm_fp32", "loss_scale")
    overrides = {name: getattr(options, name) for name in names}
    levels = [options.opt_level] if options.opt_level else LEVELS
    try:
        options.recipes = {level: recipe_for(level, **overrides) for level in levels}
    except (TypeError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return options


def compare_levels(options: argparse.Namespace) -> tuple[dict[str, Result], Table]:
    """Returns the trainings of the first table, and the table."""
    (compile_for_gpu, why_not), results = options.gpu, {}
    table = table_of(
        "level",
        "test accuracy, final loss, scale, skips, stored, saved, H100",
        f"Apex's opt levels: CNN on 1797 handwritten digits, {options.steps} steps",
        "final loss: mean of the last 20 steps. stored: parameters and state of the "
        f"optimizer. saved: kept for the backward pass of {MEMORY_BATCH} images. "
        "H100: temporary memory of the step compiled for one, with so many images"
        + (f"; not compiled: {why_not}." if why_not else "."),
    )
    for level, recipe in track(options.recipes.items(), "training"):
        results[level] = train(recipe, options.steps, options.seed)
        memory = memory_of(recipe, compile_for_gpu)
        table.add_row(*row_of(level, results[level], memory))
    return results, table


def fine_tune_levels(options: argparse.Namespace, results: dict[str, Result]) -> Table:
    """Returns the second table, which goes on from runs of the first."""
    table = table_of(
        "level, begins with, trains",
        "loss before, after, test accuracy, statistics",
        "Fine-tuned in eval mode, on digits on their sides, "
        f"{min(FINE_TUNE_STEPS, options.steps)} steps",
        "f32: what export_params returned. f16: parameters as they are stored. after: "
        "mean of the last 10 steps. statistics: those of BatchNorm, in the end.",
    )
    levels = [level for level in results if level in FINE_TUNED] or list(results)
    for level in track(levels, "fine-tuning"):
        recipe, (params, stats, opt_state) = (
            options.recipes[level],
            results[level].state,
        )
        exported = recipe.export_params(params, opt_state)
        runs = [("f32", exported, "all"), ("f32", exported, "the head")]
        if recipe.cast_model_type == jnp.float16:
            runs.insert(1, ("f16", params, "all"))
        for begins, first, trains in runs:
            head_alone, seed = trains == "the head", options.seed
            steps = min(FINE_TUNE_STEPS, options.steps)
            how: Any = {"head_alone": head_alone, "steps": steps, "seed": seed}
            tuned = fine_tune(recipe, first, stats, **how)
            same = jax.tree.map(np.array_equal, tuned.state.batch_stats, stats)
            table.add_row(
                *(level, begins, trains, f"{tuned.losses[0]:.3f}"),
                *(f"{tuned.losses[-10:].mean():.3f}", f"{tuned.accuracy:.2%}"),
                "as they were" if all(jax.tree.leaves(same)) else "CHANGED",
            )
    return table


def main() -> None:
    options = parse()
    console = Console()
    results, table = compare_levels(options)
    console.print(table, fine_tune_levels(options, results))


if __name__ == "__main__":
    main()
