"""`python -m tests.table`: autocast, hand-written half precision and f32 in figures.

One block for each model and half dtype, one line for each program:

  f32      the unchanged model
  twin     its hand-written half precision twin, what all ratios are to
  flax     the twin with its softmax in half precision too: Flax's `dtype=` alone
  loss     autocast around the whole loss of the unchanged model
  forward  autocast around the unchanged model, the loss outside

matmuls: in half precision of those in the jaxpr, forward and backward. gemms, convs: in
half of those in the training step compiled for an H100. saved: bytes that autodiff
keeps for the backward pass. temp: temporary bytes of the compiled step. casts: kernels
that only cast/the elements they convert. small, smooth: relative gradient error against
f64 of models with and without ReLU and max pooling: median, median ratio, and how many
seeds were worse (+) and better (-) than the twin's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before JAX is imported: see `tests/h100.py`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import jax
import numpy as np

from tests import h100, measures, twins

HALF_NAMES = {"bf16", "f16", *measures.HALF}


def _in_half(pairs: Sequence[tuple[str, ...]]) -> str:
    half = sum(set(pair) <= HALF_NAMES for pair in pairs)
    return f"{half}/{len(pairs)}"


def figures(model: str, dtype: str, program: str, gpu: bool, seeds: int) -> dict:
    """Returns the figures of one program; "saved", "temp" and errors are numbers."""
    large = twins.CASES[model, "large"]
    loss = twins.program_loss(large, dtype, program)
    start = time.perf_counter()
    matmuls, saved = twins.traced(large, loss)
    row: dict = {"trace s": f"{time.perf_counter() - start:.1f}"}
    row |= {"matmuls": _in_half([m.operands for m in matmuls]), "saved": saved}
    if gpu:
        start = time.perf_counter()
        step = twins.compiled(large, loss)
        row |= {
            "compile s": f"{time.perf_counter() - start:.1f}",
            "gemms": _in_half([g.operands for g in step.gemms]),
            "convs": _in_half([c.operands for c in step.convolutions]),
            "temp": step.temp_bytes,
            "casts": f"{len(step.pure_casts)}/"
            f"{sum(c.elements for c in step.pure_casts) / 1e6:.1f}M",
        }
    for size in ("small", "smooth"):
        if seeds and (model, size) in twins.CASES:
            loss = twins.program_loss(twins.CASES[model, size], dtype, program)
            row[size] = twins.gradient_errors(loss, dtype, model, size, seeds)
    return row


_COLUMNS = {
    "matmuls": 8, "gemms": 6, "convs": 6, "saved": 14, "temp": 14, "casts": 9,
    "small": 22, "smooth": 22, "trace s": 8, "compile s": 9,
}  # fmt: skip


def _row(model: str, dtype: str, program: str, gpu: bool, seeds: int) -> dict:
    if program in twins.AUTOCAST:
        return figures(model, dtype, program, gpu, seeds)
    return _remembered(
        model, "float32" if program == "f32" else dtype, program, gpu, seeds
    )


def _remembered(*arguments: Any) -> dict:
    """Returns `figures(*arguments)`, from a file if it has been computed before.

    For programs that `jmp_amp` has no part in: they change with what is hashed here.
    """
    files = (h100.__file__, measures.__file__, twins.__file__, __file__)
    sources = [Path(file).read_text() for file in files]
    key = json.dumps([*sources, jax.__version__, flax.__version__, arguments])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"jmp_amp-table-{digest}.json"
    if not path.exists():
        path.write_text(json.dumps(figures(*arguments)))
    return json.loads(path.read_text())


def _cells(row: dict, twin: dict) -> dict[str, str]:
    cells = {column: str(row.get(column, "")) for column in _COLUMNS}
    for column in ("saved", "temp"):
        if column in row:
            ratio = row[column] / twin[column]
            cells[column] = f"{row[column] / 1e6:.1f}MB {ratio:.3f}"
    for column in ("small", "smooth"):
        if column in row:
            error = measures.compare(row[column], twin[column])
            cells[column] = (
                f"{np.median(row[column]):.2e} {error.ratio:.3f} "
                f"+{error.worse}-{error.better}"
            )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", nargs="*", choices=twins.MODELS, default=twins.MODELS
    )
    parser.add_argument(
        "--dtype", nargs="*", choices=measures.HALF, default=measures.HALF
    )
    parser.add_argument(
        "--program", nargs="*", choices=twins.PROGRAMS, default=twins.PROGRAMS
    )
    parser.add_argument(
        "--no-gpu", action="store_true", help="compile nothing for a GPU"
    )
    parser.add_argument("--seeds", type=int, default=15, help="0: no gradient errors")
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")

    gpu = not options.no_gpu and h100.why_no_compiler() is None
    header = "".join(f"{name:>{width + 1}}" for name, width in _COLUMNS.items())
    for model in options.model:
        for dtype in options.dtype:
            print(f"\n{model + ' ' + dtype:20}{header}")
            twin = _row(model, dtype, "twin", gpu, options.seeds)
            for program in options.program:
                if program == "flax" and model != "transformer":
                    continue
                cells = _cells(_row(model, dtype, program, gpu, options.seeds), twin)
                line = "".join(f"{cells[c]:>{w + 1}}" for c, w in _COLUMNS.items())
                print(f"{program:20}{line}", flush=True)


if __name__ == "__main__":
    main()
