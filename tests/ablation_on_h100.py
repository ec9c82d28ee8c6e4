"""What a trade-off of the plan buys: rules switched off, and training steps compiled.

    python -m tests.ablation_on_h100 [--model NAME ...] [--only RULE ...] [--write]

A trade-off computes in half what may be f32, or in f32 what may be half. For each large
model of the zoo the training step is compiled for a described H100, in bf16, with all
rules and without each of them. The table has, of the models whose program changes,

  temp      temporary bytes without the rule, as a ratio to those with it: the least,
            the median and the largest. Above 1 the rule saves memory
  modelled  the same of the milliseconds that `examples/benchmarks/roofline.py` models
  kernels   the same of how many kernels are launched

`ablation_on_h100.json` has the figures of each model; `--write` writes those that were
asked for. No GPU is needed and none is used. All of it takes more than an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# isort: split
from tests.ablation import switched_off

# isort: split
import jax
from rich.console import Console
from rich.table import Table

from examples.benchmarks import compare_precision, roofline
from tests import h100, zoo
from tests.zoo.case import Case

FILE = Path(__file__).with_name("ablation_on_h100.json")
TRADE_OFFS = (
    *("falls", "gates_a_sum", "looked_up", "misfit", "takes_half"),
    *("saved_by_loops", "saved_in_f32", "stored_in_half"),
    *("adds_parameters", "moves_parameters", "moves_stream"),
    *("epilogue", "one_operation", "half_moves", "bias", "across", "pair", "kept"),
)
FIGURES = ("temp", "modelled", "kernels")


def figures_of(case: Case, compiled: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of the training step of a case, as plans are made now.

    compiled: figures by the hash of the program, which is compiled once.
    """
    jax.clear_caches()
    loss = compare_precision.program_loss(case, "bfloat16", "autocast")
    step, args = compare_precision.training_step(loss), case.abstract()
    pinned = jax.tree.map(h100.pin, args)
    text = str(jax.jit(step, donate_argnums=0).trace(*pinned).jaxpr)
    digest = hashlib.sha256(re.sub("0x[0-9a-f]+", "", text).encode()).hexdigest()[:16]
    if digest not in compiled:
        program = h100.compile_for_gpu(step, *args, donate_argnums=0)
        kernels = roofline.schedule(program.as_text(), roofline.H100).kernels
        totals = roofline.totals(kernels, roofline.H100)
        compiled[digest] = {
            "program": digest,
            "temp": h100.temp_bytes(program),
            "modelled": totals["ms"],
            "kernels": totals["kernels"],
        }
    return compiled[digest]


def measured(model: str, rules: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the figures of a model: with all rules, "", and without each."""
    case, compiled = zoo.CASES[model, "large"], {}
    found = {"": figures_of(case, compiled)}
    for rule in rules:
        with switched_off(rule):
            found[rule] = figures_of(case, compiled)
    return found


def table_of(models: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Returns the table: a row for each rule."""
    table = Table("without", "models", *FIGURES, box=None)
    rules = sorted({rule for rows in models.values() for rule in rows if rule})
    for rule in rules:
        changed = [
            (rows[""], rows[rule])
            for rows in models.values()
            if rule in rows and rows[rule]["program"] != rows[""]["program"]
        ]
        cells = []
        for figure in FIGURES if changed else ():
            ratios = [after[figure] / before[figure] for before, after in changed]
            three = min(ratios), statistics.median(ratios), max(ratios)
            cells.append("  ".join(f"{ratio:.3f}" for ratio in three))
        table.add_row(rule, str(len(changed)), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=zoo.MODELS, metavar="MODEL")
    parser.add_argument("--only", nargs="+", choices=TRADE_OFFS, metavar="RULE")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if reason := h100.why_no_compiler():
        sys.exit(f"ablation_on_h100: {reason}")
    found: dict[str, Any] = {}
    for model in options.model or zoo.MODELS:
        found[model] = measured(model, options.only or TRADE_OFFS)
        print(model, file=sys.stderr)
    if options.write:
        _write(found)
    Console(width=100).print(table_of(found))


def versions() -> dict[str, str]:
    """Returns what a compiled program depends on besides its jaxpr."""
    names = ("jax", "jaxlib", "jax-cuda12-pjrt")
    return {name: importlib.metadata.version(name) for name in names}


def _write(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Writes figures beside those of other models and rules; all are of one version."""
    with contextlib.suppress(FileNotFoundError):
        before = json.loads(FILE.read_text())
        if before["versions"] == versions():
            for model, rows in before["models"].items():
                found[model] = rows | found.get(model, {})
    lines = [f"{json.dumps(m)}: {json.dumps(found[m])}" for m in sorted(found)]
    text = ",\n".join(lines)
    FILE.write_text(
        f'{{"versions": {json.dumps(versions())}, "models": {{\n{text}\n}}}}\n'
    )


if __name__ == "__main__":
    main()
