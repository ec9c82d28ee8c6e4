"""The time that an H100 needs at least, modelled from the compiled program.

    python examples/benchmarks/compare_precision.py --roofline [--model gpt vit]

For each model of `tests/zoo`, up to five programs of one training step, bf16:

  f32 highest  the unchanged model, its products in true f32
  f32 TF32     the same in TF32, which is XLA's default
  by hand      the twin, written by hand in mixed precision; ratios are to it
  autocast     `amp.autocast` of the unchanged model
  fp8          the same with "fp8", and heads that are modules in bf16

modelled  milliseconds of the step: see `roofline.py` for how, and what it leaves out
busy      the same without the launches of kernels
products  the part of the modelled time that matrix products and convolutions take
moved     bytes that the kernels read and write
kernels   how many are launched, those in loops as often as they run

The programs are compiled without Triton products, with a GPU that is only described: a
real one chooses among kernels by timing them. Where autocast is modelled slower than by
hand, the kernels that only one of the two has follow, and their microseconds.

Compiled texts are kept in the temporary directory.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from examples.benchmarks import compare_precision, fp8_precision, roofline
from tests import h100, zoo
from tests.zoo.case import Case, Loss

DTYPE = "bfloat16"
PROGRAMS = ("f32 highest", "f32 TF32", "by hand", "autocast", "fp8")
# The Bound of `compare_precision`: ratios as they are written, with two decimals.
BOUND = compare_precision.Bound(
    "ms", 1.00, "modelled time, ratio to by hand", is_ratio=True
)
LISTED = 6


def loss_of(case: Case, model: str, program: str) -> Loss | None:
    """Returns the loss of a program; None where it says nothing about the model."""
    if program == "fp8":
        if model in fp8_precision.LEFT_OUT:
            return None
        return amp.autocast(case.loss, fp8_precision.policy_for(model, "fp8"))
    names = {"by hand": "twin", "autocast": "autocast"}
    return compare_precision.program_loss(case, DTYPE, names.get(program, "f32"))


def compiled_text(step: Callable[..., Any], *args: Any) -> str:
    """Returns the text of `step`, compiled for an H100 unless it has been before."""
    lowered = jax.jit(step, donate_argnums=0).lower(*jax.tree.map(h100.pin, args))
    key = f"{jax.__version__} {h100.H100} {lowered.as_text()}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"jmp_amp-roofline-{digest}.txt.gz"
    if not path.exists():
        # As `h100.compile_for_gpu` does.
        program = lowered.compile({"xla_gpu_enable_triton_gemm": False})
        path.write_bytes(gzip.compress((program.as_text() or "").encode()))
    return gzip.decompress(path.read_bytes()).decode()


def text_of(model: str, program: str) -> str | None:
    """Returns the compiled text of a training step of the large model."""
    case = zoo.CASES[model, "large"]
    loss = loss_of(case, model, program)
    if loss is None:
        return None
    precision = "highest" if program == "f32 highest" else "default"
    with jax.default_matmul_precision(precision):
        step = compare_precision.training_step(loss)
        return compiled_text(step, *case.abstract())


def figures_of(model: str, device: roofline.Device = roofline.H100) -> dict[str, Any]:
    """Returns the figures of one model: a row for each program."""
    found = {
        program: roofline.schedule(text, device)
        for program in PROGRAMS
        if (text := text_of(model, program))
    }
    rows: dict[str, dict[str, Any]] = {
        program: roofline.totals(each.kernels, device)
        | ({"unknown": each.unknown} if each.unknown else {})
        for program, each in found.items()
    }
    ours, theirs = rows["autocast"], rows["by hand"]
    figures: dict[str, Any] = {
        "model": model,
        "ratio": ours["ms"] / theirs["ms"],
        "ratio_busy": busy(ours) / busy(theirs),
        "programs": rows,
    }
    if not BOUND.holds(figures["ratio"]) or not BOUND.holds(figures["ratio_busy"]):
        only = roofline.differences(
            found["autocast"].kernels, found["by hand"].kernels, device
        )
        figures["only_autocast"], figures["only_by_hand"] = (
            [_told(kernel, device) for kernel in kernels[:LISTED]] for kernels in only
        )
    return figures


def busy(row: dict[str, Any]) -> float:
    return row["ms"] - row["ms_launches"]


def _told(kernel: roofline.Kernel, device: roofline.Device) -> str:
    return (
        f"{kernel.seconds(device) * 1e6:.1f} us, {kernel.times} x "
        f"{kernel.bytes / 1e6:.2f} MB: {kernel.kind} {kernel.name} ({kernel.source})"
    )


def violations(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns one sentence for each model that autocast is modelled slower for."""
    return [
        f"{row['model']}: {BOUND.text}: {row['ratio']:.3f}, not <= {BOUND.limit}"
        for row in rows
        if row["model"] not in compare_precision.AS_TRACED
        and not BOUND.holds(row["ratio"])
    ]


COLUMNS = (
    "program", "modelled", "x hand", "busy", "x hand", "products", "moved", "kernels"
)  # fmt: skip


def table(row: dict[str, Any]) -> Table:
    found = Table(title=row["model"], title_justify="left")
    for position, column in enumerate(COLUMNS):
        found.add_column(column, justify="right" if position else "left")
    theirs = row["programs"]["by hand"]
    for program, figures in row["programs"].items():
        found.add_row(
            program,
            f"{figures['ms']:.3f}ms",
            f"{figures['ms'] / theirs['ms']:.3f}x",
            f"{busy(figures):.3f}ms",
            f"{busy(figures) / busy(theirs):.3f}x",
            f"{figures['products']:.0%}",
            f"{figures['bytes_moved'] / 1e6:.1f}MB",
            str(figures["kernels"]),
        )
    return found


def conditions(device: roofline.Device) -> dict[str, Any]:
    """Returns what the figures were modelled from."""
    return {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "dtype": DTYPE,
        "compiled_for": "described H100 80GB HBM3, Triton gemms off; nothing was run",
        "step": "value_and_grad and SGD in f32, parameters donated",
        "device": dataclasses.asdict(
            dataclasses.replace(device, rates=dict(device.rates))
        ),
    }


def run(models: Sequence[str], json_file: Path | None) -> list[str]:
    """Prints a table for each model; returns `violations`."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    say = functools.partial(
        console.print, markup=False, highlight=False, soft_wrap=True
    )
    device = roofline.H100
    say(f"Modelled, not measured. {device.assumptions()}")
    rows = []
    for model in models:
        rows.append(row := figures_of(model, device))
        console.print(table(row))
        for program, figures in row["programs"].items():
            for sentence in figures.get("unknown", ()):
                say(f"  {program}: {sentence}")
        for name in ("only_autocast", "only_by_hand"):
            for sentence in row.get(name, ()):
                say(f"  {name.replace('_', ' ')}: {sentence}")
        jax.clear_caches()
    broken = violations(rows)
    for name in ("ratio", "ratio_busy"):
        median = np.median([row[name] for row in rows])
        say(f"autocast / by hand, {name}: median of {len(rows)} models {median:.3f}")
    say(f"{len(broken)} violated bounds" + ":" * bool(broken))
    for sentence in broken:
        say(f"  {sentence}")
    if json_file:
        report = {
            "conditions": conditions(device), "models": rows, "violations": broken
        }  # fmt: skip
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    return broken
