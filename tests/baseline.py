"""The figures that a change of the library must not make worse, in one table.

    python -m tests.baseline            measure all of it, and write `baseline.json`
    python -m tests.baseline --compare  measure all of it, and print what got worse
    python -m tests.baseline --compare --only lstm "vit wide" "idioms sums" tracing

Of each model of the zoo, and of its other shapes, under `mixed_bfloat16`:

  temp        temporary bytes of the training step that is compiled for an H100
  modelled    microseconds that `examples/benchmarks/roofline.py` models for that step
  half, full  its matrix products and convolutions in half precision, and in others
  kept        bytes of activations that autodiff keeps for the backward pass
  gradient    error of the gradient against f64 as a ratio to mixed precision by hand,
              the median of 15 seeds; of the small model alone

Of each field of `tests/idioms` and of each file of `tests/loops`, in both half dtypes:

  programs    how many there are, each dtype for itself
  wrong       those whose error is more than 3 times that of products alone in half
              (the recipe "OD"), and more than 3 eps of the half dtype
  median      of the ratios of both errors, of the worst leaf each

And the CPU seconds of tracing under autocast, as ratios to plain tracing. They are
compared with wide tolerances, and in no test: other jobs of the machine change them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  # JAX as in the tests, before it is imported

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jmp_amp as amp
from examples.benchmarks import compare_precision, roofline
from tests import h100, measures, zoo
from tests.fp8.models import Gpt
from tests.idioms import measure
from tests.idioms.row import Idiom
from tests.idioms.table import IDIOMS
from tests.loops.table import LOOPS
from tests.zoo.case import Case

FILE = Path(__file__).with_suffix(".json")
SEEDS = 15
WRONG_RATIO, WRONG_EPS = 3, 3
# By how much a figure may rise: of what is compiled or traced, of errors, of times.
TOLERANCE = {"temp": 1.01, "modelled": 1.01, "kept": 1.01, "gradient": 1.05}
TOLERANCE |= {"median": 1.1, "seconds": 1.2}

Row = dict[str, Any]


# Training steps


def case_of(name: str) -> Case:
    """Returns the case of a row: "vit large", or "vit" and the name of a shape."""
    model, _, size = name.partition(" ")
    return zoo.CASES[model, size] if size == "large" else zoo.SHAPES[model, size]


def step(name: str) -> Row:
    """Returns the figures of a training step that is compiled for an H100."""
    case = case_of(name)
    loss = compare_precision.program_loss(case, "bfloat16", "autocast")
    program = h100.compile_for_gpu(
        compare_precision.training_step(loss), *case.abstract(), donate_argnums=0
    )
    text = program.as_text()
    products = compare_precision.compiled_products(text)
    half = sum(product.in_half for product in products)
    modelled = roofline.totals(roofline.schedule(text).kernels)["ms"]
    return {
        "temp": h100.temp_bytes(program),
        "modelled": round(1000 * modelled, 1),
        "half": half,
        "full": len(products) - half,
        **kept(name),
    }


def kept(name: str) -> Row:
    """Returns the bytes that a training step keeps for its backward pass."""
    case = case_of(name)
    loss = compare_precision.program_loss(case, "bfloat16", "autocast")
    return {"kept": compare_precision.traced(loss, case).saved_bytes}


def gradient(model: str) -> Row:
    """Returns the error of a gradient as a ratio to that of the twin by hand."""
    case = zoo.CASES[model, "small"]
    ours, by_hand = (
        compare_precision.gradient_errors(
            compare_precision.gradients(case, "bfloat16", program, SEEDS)
        )
        for program in ("autocast", "twin")
    )
    return {"gradient": round(measures.compare(ours, by_hand).ratio, 3)}


# Numerical programs


def programs_of(group: str) -> list[Idiom]:
    """Returns the programs of a field of the idioms, or of a file of the loops."""
    folder, _, field = group.partition(" ")
    rows = (loop.idiom for loop in LOOPS.values())
    rows = IDIOMS.values() if folder == "idioms" else rows
    return [row for row in rows if row.field == field]


def numerical(group: str) -> Row:
    """Returns how many programs of a group are wrong, and the median ratio."""
    wrong, ratios = [], []
    for idiom in programs_of(group):
        for dtype in measures.HALF:
            leaves = measure.leaves(idiom, dtype, _policy(group, dtype))
            if any(is_wrong(leaf, dtype) for leaf in leaves):
                wrong.append(f"{idiom.name} {dtype}")
            errors = [leaf for leaf in leaves if leaf.kind != "kept"]
            if alone := max((leaf.products for leaf in errors), default=0.0):
                ratios.append(max(leaf.policy for leaf in errors) / alone)
    count = len(measures.HALF) * len(programs_of(group))
    median = round(float(np.median(ratios)), 3)
    return {"programs": count, "wrong": sorted(wrong), "median": median}


def _policy(group: str, dtype: str) -> measure.Transform | None:
    if group.startswith("idioms "):
        return None
    # Recomputation is fused in other ways, and ill-conditioned loops show the last bit.
    policy = amp.get_policy(f"p=f32,c={dtype},o=f32,s=all")
    return lambda fn: amp.autocast(fn, policy)


def is_wrong(leaf: measure.Leaf, dtype: str) -> bool:
    """Whether a leaf has more errors than its products in half explain."""
    if leaf.kind == "kept":
        return leaf.policy > leaf.bound
    eps = float(jnp.finfo(dtype).eps)
    most = max(WRONG_RATIO * leaf.products, WRONG_EPS * eps)
    return not leaf.policy <= most


# Tracing


def chain(x: jax.Array) -> jax.Array:
    for _ in range(1500):
        x = jnp.sin(x) * 0.5
    return x


def carries(x: jax.Array) -> Any:
    def iteration(carry: list[jax.Array], _: None) -> tuple[list[jax.Array], None]:
        return [each * 0.5 + x for each in carry], None

    return jax.lax.scan(iteration, [x] * 800, None, length=3)[0]


def residual(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        normed = (x - x.mean(-1, keepdims=True)) / (1e-3 + x.std(-1, keepdims=True))
        x = x + jax.nn.relu(normed @ w)
    return jnp.mean(x)


def traced() -> dict[str, tuple[Callable[..., Any], Any, str, bool]]:
    """Returns by name: function, arguments, policy, whether its gradient is traced."""
    vector, matrix = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8,), (64, 64)))
    gpt, fp8, mixed = zoo.CASES["gpt", "large"], Gpt(), "mixed_bfloat16"
    return {
        "gpt": (gpt.loss, gpt.abstract(), mixed, False),
        "gpt gradient": (gpt.loss, gpt.abstract(), mixed, True),
        "gpt fp8": (fp8.loss, fp8.shapes(), "fp8", False),
        "chain of 3,000": (chain, (vector,), mixed, False),
        "800 carries": (carries, (vector,), mixed, False),
        "200 layers gradient": (residual, ([matrix] * 200, matrix), mixed, True),
    }


def tracing(name: str, rounds: int = 2) -> Row:
    """Returns the CPU seconds of a trace under autocast as a ratio to a plain one."""
    fn, args, policy, differentiated = traced()[name]
    programs = [amp.autocast(fn, policy), fn]
    if differentiated:
        programs = [jax.grad(each) for each in programs]
    best = [math.inf] * 2
    for _ in range(rounds):
        for number, program in enumerate(programs):
            jax.clear_caches()
            gc.collect()
            begin = time.process_time()
            jax.jit(program).trace(*args)
            best[number] = min(best[number], time.process_time() - begin)
    return {"seconds": round(best[0] / best[1], 2)}


# The table

STEPS = [f"{model} large" for model in zoo.MODELS]
STEPS += sorted(f"{model} {shape}" for model, shape in zoo.SHAPES)
GROUPS = sorted(
    {f"idioms {each.field}" for each in IDIOMS.values()}
    | {f"loops {each.idiom.field}" for each in LOOPS.values()}
)
PARTS: dict[str, tuple[Callable[[str], Row], Sequence[str]]] = {
    "steps": (step, STEPS),
    "gradients": (gradient, zoo.MODELS),
    "numerical": (numerical, GROUPS),
    "tracing": (tracing, [*traced()]),
}
# These are measured alone: other processes would slow them down.
TIMED = ("tracing",)


@functools.cache
def committed() -> dict[str, Any]:
    """Returns the table that is committed."""
    return json.loads(FILE.read_text())


def worse(found: Row, before: Row) -> list[str]:
    """Returns what a row has worse than before, beyond the tolerances.

    Example:
      >>> worse({"temp": 120, "half": 7}, {"temp": 100, "half": 8})
      ['temp 120 > 1.01 x 100', 'half 7 < 8']
      >>> worse({"wrong": ["a"], "full": 1}, {"wrong": [], "full": 1})
      ['wrong: a']
    """
    said = [
        f"{name} {found[name]} > {most} x {before[name]}"
        for name, most in TOLERANCE.items()
        if name in found and not found[name] <= most * before[name]
    ]
    if "half" in found and found["half"] < before["half"]:
        said.append(f"half {found['half']} < {before['half']}")
    if "full" in found and found["full"] > before["full"]:
        said.append(f"full {found['full']} > {before['full']}")
    new = sorted({*found.get("wrong", ())} - {*before.get("wrong", ())})
    return said + [f"wrong: {', '.join(new)}"] * bool(new)


def measured(only: Sequence[str]) -> dict[str, dict[str, Row]]:
    """Returns the rows of the table, all or those of some names, parts and models."""
    found: dict[str, dict[str, Row]] = {part: {} for part in PARTS}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as pool:
        rows = [
            (part, name, pool.submit(PARTS[part][0], name))
            for part, name in chosen(only)
            if part not in TIMED
        ]
        for part, name, row in track(rows, "measuring"):
            found[part][name] = row.result()
    for part, name in chosen(only):
        if part in TIMED:
            found[part][name] = PARTS[part][0](name)
    return {part: rows for part, rows in found.items() if rows}


def chosen(only: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields part and name of the rows that `only` names; all where it is empty.

    Example:
      >>> [name for _, name in chosen(["vit", "idioms sums"])]
      ['vit large', 'vit small batch', 'vit wide', 'vit', 'idioms sums']
    """
    for part, (_, names) in PARTS.items():
        for name in names:
            if not only or {part, name, name.partition(" ")[0]} & {*only}:
                yield part, name


def write(found: dict[str, dict[str, Row]]) -> None:
    """Writes the table, a line for each row."""
    if _git("status", "--porcelain", "jmp_amp"):
        sys.exit("tests.baseline: jmp_amp has changes that are in no commit")
    parts = []
    for part in sorted(found):
        rows = sorted(found[part].items())
        lines = ",\n".join(
            f"  {json.dumps(n)}: {json.dumps(r, sort_keys=True)}" for n, r in rows
        )
        parts.append(f'"{part}": {{\n{lines}\n }}')
    head = {"commit": _git("rev-parse", "--short", "HEAD"), "jax": jax.__version__}
    lines = [f'"{name}": {json.dumps(value)}' for name, value in head.items()]
    FILE.write_text("{" + ",\n ".join((*lines, *parts)) + "}\n")


def _git(*arguments: str) -> str:
    top = FILE.parents[1]
    done = subprocess.run(
        ["git", *arguments], cwd=top, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def table(found: dict[str, dict[str, Row]], before: dict[str, Any]) -> Table:
    """Returns the table of rows as ratios to before, and what is worse."""
    shown = Table("", *TOLERANCE, "half/full", "worse", box=None)
    for part, rows in found.items():
        for name, row in rows.items():
            old = before[part][name]
            ratios = [
                f"{row[figure] / old[figure]:.3f}" if row.get(figure) else ""
                for figure in TOLERANCE
            ]
            products = f"{row['half']}/{row['full']}" if "half" in row else ""
            shown.add_row(name, *ratios, products, "; ".join(worse(row, old)))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and writes or compares; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compare", action="store_true", help="write nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args(arguments)
    if options.only and not options.compare:
        parser.error("--only goes with --compare: the table is written as a whole")
    if unknown := [each for each in options.only if not [*chosen([each])]]:
        parser.error(f"--only {unknown[0]!r}: no part, model or row has this name")
    if reason := h100.why_no_compiler():
        print(f"tests.baseline: {reason}", file=sys.stderr)
        return 2
    found = measured(options.only)
    if not options.compare:
        write(found)
        return 0
    Console(width=160).print(table(found, committed()))
    rows = [(part, name) for part in found for name in found[part]]
    return int(any(worse(found[p][n], committed()[p][n]) for p, n in rows))


if __name__ == "__main__":
    sys.exit(main())
