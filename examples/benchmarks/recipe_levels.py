"""What Apex's levels hold in memory, and how they train, on a zoo of models.

    python examples/benchmarks/recipe_levels.py [--model gpt moe] [--no-gpu]

For each model of `tests/zoo` and each of the recipes O0 to O3, with f16 and AdamW:

  memory    of a training step of the large model as an H100 would run it: temporary
            bytes, parameters and optimizer state, the last two donated. Compiled for
            one here, which needs no GPU (extra `gpu-check`)
  fall      how far the loss of the small model falls in some steps on one batch, as a
            part of how far it falls with O0, and the loss in the end; excess precision
            off, so that the CPU rounds where a GPU does
  skips     steps that overflowed, and that a dynamic scale left out

At the end: the models on which memory does not fall in the order O0 > O1 >= O2 >= O3
(a buffer of 256 bytes more is none), and those on which O1 or O2 trains by more than
1 % otherwise than O0, skipped steps aside.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The models are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Before JAX is imported: see `tests/h100.py`.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import optax
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from tests import h100, zoo

LEVELS = ("O0", "O1", "O2", "O3")
DONATED = (0, 1)
STEPS = 40
RATE = 1e-3
# XLA begins every buffer at a multiple of so many bytes: less than that is no
# difference, such as the copy of a bias in another dtype.
BUFFER = 256


def training_step(level: str, loss_fn: Callable[..., Any]) -> tuple[amp.Recipe, Any]:
    """Returns a recipe and its step: a function of (params, opt_state, batch)."""
    # A growth interval that these few steps reach.
    growth = {"growth_interval": 10} if level in ("O1", "O2") else {}
    recipe = amp.recipe(level, "float16", **growth)
    tx = recipe.wrap(optax.adamw(RATE))
    loss_fn = recipe.autocast(loss_fn)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        gradient = amp.value_and_grad(loss_fn)
        loss, grads = gradient(params, batch, loss_scale=opt_state)
        # Adam of optax raises a float to its integer step count.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state, loss

    return recipe, (step, tx)


def bytes_of(tree: Any) -> int:
    """Returns the bytes of the arrays of a tree, or of arrays of such shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def step_program(model: str, level: str) -> tuple[Any, ...]:
    """Returns a step of the large model, and the shapes of its arguments."""
    case = zoo.CASES[model, "large"]
    recipe, (step, tx) = training_step(level, case.loss)
    params, batch = case.abstract()
    params = jax.eval_shape(recipe.cast_params, params)
    return step, params, jax.eval_shape(tx.init, params), batch


def memory(
    step: Any, params: Any, opt_state: Any, batch: Any, temporary: int | None = None
) -> dict[str, int]:
    """Returns the bytes that a step holds on an H100; compiled if not told."""
    if temporary is None:
        program = h100.compile_for_gpu(
            step, params, opt_state, batch, donate_argnums=DONATED
        )
        temporary = h100.temp_bytes(program)
    found = {
        "temporary": temporary,
        "parameters": bytes_of(params),
        "state": bytes_of(opt_state),
    }
    return found | {"all": sum(found.values())}


def trained(model: str, level: str, steps: int = STEPS) -> dict[str, float]:
    """Returns the first and last loss of the small model, and the skipped steps."""
    case = zoo.CASES[model, "small"]
    recipe, (step, tx) = training_step(level, case.loss)
    params, batch = jax.jit(case.sample)(jax.random.key(0))
    params, opt_state = recipe.init(tx, params)
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    step = jax.jit(step, compiler_options=options)
    losses = []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    skips = int(amp.metrics(opt_state)["skipped_total"])
    return {"first": losses[0], "last": losses[-1], "skips": skips}


def figures(
    models: Sequence[str], compiled: bool, said: Callable[[str], None] = print
) -> dict[str, Any]:
    """Returns all figures: of each model, of each level."""
    rows = []
    for model in models:
        said(model)
        levels = {}
        for level in LEVELS:
            levels[level] = {"trained": trained(model, level)}
            if compiled:
                levels[level]["memory"] = memory(*step_program(model, level))
            jax.clear_caches()
            gc.collect()
        rows.append({"model": model, "levels": levels})
    return {"device": "H100, compiled for", "jax": jax.__version__, "models": rows}


def fall(row: dict[str, Any], level: str) -> float:
    """Returns how far a loss falls, as a part of how far it falls with O0."""
    runs = [row["levels"][each]["trained"] for each in (level, "O0")]
    ours, f32 = (run["first"] - run["last"] for run in runs)
    return ours / f32


def is_ordered(row: dict[str, Any]) -> bool:
    """Returns whether memory falls from level to level."""
    o0, o1, o2, o3 = (row["levels"][level]["memory"]["all"] for level in LEVELS)
    return o0 > o1 and o1 + BUFFER >= o2 and o2 + BUFFER >= o3


def table_of(found: dict[str, Any]) -> Table:
    """Returns one row for each model."""
    table = Table(
        "model",
        title="Apex's levels, f16 and AdamW",
        caption="MB: of a step on an H100. fall: of the loss, as a part of O0's.",
    )
    columns = ("O0 MB", "O1", "O2", "O3", "fall O1", "O2", "O3", "loss O0", "O3")
    for name in (*columns, "skips O1, O2"):
        table.add_column(name, justify="right")
    for row in found["models"]:
        levels = row["levels"]
        sizes = [levels[each].get("memory", {}).get("all") for each in LEVELS]
        first = sizes[0]
        trained = [levels[each]["trained"] for each in LEVELS]
        table.add_row(
            row["model"],
            f"{first / 1e6:.0f}" if first else "-",
            *(f"{size / first:.3f}x" if first else "-" for size in sizes[1:]),
            *(f"{fall(row, level):.3f}x" for level in LEVELS[1:]),
            *(f"{trained[level]['last']:.3g}" for level in (0, 3)),
            f"{trained[1]['skips']}, {trained[2]['skips']}",
        )
    return table


def failures(found: dict[str, Any]) -> list[str]:
    """Returns what does not hold, in words."""
    said = []
    for row in found["models"]:
        model = row["model"]
        if "memory" in row["levels"]["O0"] and not is_ordered(row):
            sizes = [row["levels"][level]["memory"]["all"] for level in LEVELS]
            said.append(f"{model}: memory does not fall: {sizes}")
        for level in ("O1", "O2"):
            # A run with a skipped step has made one step less.
            skipped = row["levels"][level]["trained"]["skips"] / STEPS
            if abs(fall(row, level) - 1) > 0.01 + skipped:
                said.append(f"{model}: the loss of {level} falls otherwise than O0's")
    return said


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", nargs="+", default=list(zoo.MODELS), choices=zoo.MODELS)
    add("--no-gpu", action="store_true", help="compile nothing: no memory")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    if not options.no_gpu and (reason := h100.why_no_compiler()):
        parser.error(f"{reason}, or give --no-gpu")
    # A file has room for the table.
    console = Console(width=None if sys.stdout.isatty() else 110)
    found = figures(options.model, not options.no_gpu, console.print)
    console.print(table_of(found))
    for each in failures(found) or ["Everything holds."]:
        console.print(each)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
