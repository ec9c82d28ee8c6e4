"""Gradient errors against the share of matmul FLOP in half precision, on a zoo.

    python examples/benchmarks/tuned_precision.py [--model gpt moe] [--json FILE]

For each of six small models of `tests/zoo`, in f16 without a loss scale:

  all half       `amp.autocast(loss, "mixed_float16")`
  products only  the same, with all elementwise arithmetic in f32
  tuned          `amp.tune` with three bounds: parts of the error of "all half"
  f32            the model as it is

error  `|g - g32| / |g32|` over the whole gradient, from the compiled program, excess
       precision off; of a tuned map it is measured here again, not as `tune` tells it
FLOP   the share of the gradient program's matmul FLOP in half precision
maps   the entries of the tuned map, and the names that its default runs in f32
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The models are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["JAX_PLATFORMS"] = "cpu"
# What is compiled here runs a few times: it is not worth optimising.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from tests import zoo

MODELS = ("mlp", "lstm", "gpt_scan", "llama", "transformer", "gpt")
HALF = "mixed_float16"
# Parts of the error of "all half".
BOUNDS = (0.7, 0.4, 0.1)
ARITHMETIC = (
    "add sub mul div rem integer_pow square sqrt cbrt tanh logistic sin cos erf atan "
    "erfc sign floor ceil round add_any"
).split()


def gradient(loss: Callable[..., Any], *args: Any) -> np.ndarray:
    """Returns the gradient of a loss as one vector, from its compiled program."""
    program = jax.jit(jax.grad(loss)).lower(*args)
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    leaves = jax.tree.leaves(program.compile(compiler_options=options)(*args))
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])


def figures_of(model: str) -> dict[str, Any]:
    """Returns the figures of one model: a row for each precision."""
    case = zoo.CASES[model, "small"]
    params, batch = jax.jit(case.sample)(jax.random.key(0))
    reference = gradient(case.loss, params, batch)
    rows: list[dict[str, Any]] = []

    def add(name: str, policy: Any, **more: Any) -> float:
        found = gradient(amp.autocast(case.loss, policy), params, batch)
        error = float(np.linalg.norm(found - reference) / np.linalg.norm(reference))
        rows.append({"precision": name, "error": error, **more})
        return error

    products = amp.get_policy(HALF).with_full(*ARITHMETIC)
    before = add("all half", HALF)
    add("products only", products)
    for part in BOUNDS:
        started = time.perf_counter()
        tuned = amp.tune(case.loss, HALF, max_grad_error=part * before)(params, batch)
        seconds = time.perf_counter() - started
        add(
            f"tuned to {part:g}",
            tuned.policy,
            share=tuned.cost,
            bound=tuned.max_grad_error,
            map=str(tuned.policy),
            entries=len(tuned.policy.entries),
            names=len(tuned.policy.default.full),
            compilations=tuned.compilations,
            is_minimal=tuned.is_minimal,
            seconds=round(seconds, 1),
        )
        jax.clear_caches()
        # Their products are the same.
        rows[0]["share"] = rows[1]["share"] = tuned.cost_before
    add("f32", "float32", share=0.0)
    return {"model": model, "rows": rows}


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """Returns a row for each model and precision."""
    table = Table("model", "precision", title="Gradient error and FLOP in half, f16")
    for name in ("error", "bound", "FLOP in half", "maps", "compilations", "seconds"):
        table.add_column(name, justify="right")
    for each in found:
        for row in each["rows"]:
            is_tuned = "bound" in row
            table.add_row(
                each["model"],
                row["precision"],
                f"{row['error']:.2e}",
                f"{row['bound']:.2e}" if is_tuned else "",
                f"{100 * row['share']:.0f} %",
                f"{row['entries']} + {row['names']}" if is_tuned else "",
                str(row["compilations"]) if is_tuned else "",
                f"{row['seconds']:.0f}" if is_tuned else "",
            )
        table.add_section()
    return table


def failures(found: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what does not hold, in words."""
    said = []
    for each in found:
        for row in each["rows"]:
            where = f"{each['model']}, {row['precision']}"
            if row["error"] > row.get("bound", np.inf):
                said.append(f"{where}: the bound is broken")
            if not row.get("is_minimal", True):
                said.append(f"{where}: an entry may not be needed")
            if row.get("compilations", 0) > 40:
                said.append(f"{where}: more than 40 compilations")
    return said


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws one line for each model; matplotlib is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, 3, squeeze=False).ravel()
    for axes, each in zip(panels, found, strict=False):
        for row in each["rows"]:
            color = "#d9a441" if "bound" in row else "#2a6f97"
            # An error of zero has no place on the axis.
            error = max(row["error"], 1e-8)
            axes.scatter([100 * row["share"]], [error], color=color)
            axes.annotate(row["precision"], (100 * row["share"], error), fontsize=7)
        axes.set(title=each["model"], yscale="log", xlim=(-5, 130))
    figure.supxlabel("matmul FLOP in half precision, %")
    figure.supylabel("gradient error")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", nargs="+", default=list(MODELS), choices=zoo.MODELS)
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--plot", type=Path, metavar="FILE", help="draw them (extra `plots`)")
    options = parser.parse_args(arguments)
    # A file has room for the table.
    console = Console(width=None if sys.stdout.isatty() else 110)
    found = []
    for model in options.model:
        console.print(model)
        found.append(figures_of(model))
        if options.json:
            figures = {"jax": jax.__version__, "policy": HALF, "models": found}
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(table_of(found))
    for each in failures(found) or ["Everything holds."]:
        console.print(each)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
