"""What a diagnosis costs: seconds, next to those of the gradient that it diagnoses.

    python examples/benchmarks/diagnosis_cost.py [--model gpt moe] [--json FILE]

Three programs of each model of `tests/zoo`, in bf16, each once and cold:

  f32       `jax.value_and_grad` of the unchanged model
  autocast  the same under `amp.autocast`
  diagnose  one call of `amp.diagnose`, which compiles four programs: under the policy
            and as it is, with their gradients and with what counts their values; both
            forward side by side; and one that compares the gradients

compile  seconds in XLA's compiler, as JAX tells them to `jax.monitoring`; diagnose
         compiles three of its programs side by side, and their seconds are added up
whole    seconds of the call: to trace, to compile, to run once, and in Python
cpu      the CPU seconds of all its threads

Ratios are to f32. Run it on an idle machine: other jobs make seconds longer.
"""

from __future__ import annotations

import argparse
import gc
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
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from tests import zoo

MODELS = ("mlp", "transformer", "gpt", "gpt_scan", "resnet")
PROGRAMS = ("f32", "autocast", "diagnose")
PARTS = ("compile", "whole", "cpu")
POLICY = "mixed_bfloat16"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compiling:
    """Adds up the seconds in the compiler.

    Attributes:
      seconds: since it was made, or set to zero.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._told)

    def _told(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self.seconds += duration_secs


def measured(run: Callable[[], object], compiling: Compiling) -> dict[str, float]:
    """Returns the seconds of a call, cold, by part."""
    jax.clear_caches()
    gc.collect()
    compiling.seconds = 0.0
    begin, busy = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    whole, cpu = time.perf_counter() - begin, time.process_time() - busy
    return dict(zip(PARTS, (compiling.seconds, whole, cpu), strict=True))


def costs_of(model: str, size: str, compiling: Compiling) -> dict[str, dict[str, Any]]:
    """Returns the seconds of each program of a model."""
    case = zoo.CASES[model, size]
    args = jax.jit(case.sample)(jax.random.key(0))

    def gradient(loss: Callable[..., Any]) -> Callable[[], object]:
        return lambda: jax.jit(jax.value_and_grad(loss))(*args)

    programs = {
        "f32": gradient(case.loss),
        "autocast": gradient(amp.autocast(case.loss, POLICY)),
        "diagnose": lambda: amp.diagnose(case.loss, POLICY)(*args).value,
    }
    return {name: measured(run, compiling) for name, run in programs.items()}


def table_of(found: dict[str, dict[str, Any]]) -> Table:
    """Returns one row for each model and program."""
    table = Table("model", "program")
    for part in PARTS:
        for name in (part, "/ f32"):
            table.add_column(name, justify="right")
    for model, programs in found.items():
        for program, seconds in programs.items():
            cells = [
                cell
                for part in PARTS
                for cell in (
                    f"{seconds[part]:.2f} s",
                    f"{seconds[part] / programs['f32'][part]:.1f}x",
                )
            ]
            table.add_row(model if program == "f32" else "", program, *cells)
        table.add_section()
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", default=MODELS, choices=zoo.MODELS, metavar="NAME"
    )
    parser.add_argument("--size", default="small", choices=("small", "large"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    before = os.getloadavg()
    compiling = Compiling()
    found = {each: costs_of(each, options.size, compiling) for each in options.model}
    console = Console(width=max(88, Console().width))
    console.print(f"Seconds, cold, jax {jax.__version__}, load {before[0]:.1f}")
    console.print(table_of(found))
    if options.json is not None:
        told = {
            "jax": jax.__version__,
            "size": options.size,
            "policy": POLICY,
            "load_before": before,
            "load_after": os.getloadavg(),
            "models": found,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
