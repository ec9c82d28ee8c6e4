"""fp8 against bf16 and against the fp8 layers of Flax, on a zoo of models.

    python examples/benchmarks/compare_precision.py --policy fp8 [--model gpt moe]

For each model of `tests/zoo`, and for some in a wider size, up to three programs of one
training step:

  bf16   `amp.autocast` of the unchanged model with "mixed_bfloat16"; ratios are to it
  fp8    the same with "fp8", and heads that are modules in bf16
  flax   written by hand: `dtype=bfloat16` and `dot_general_cls` of Flax's
         `Fp8DirectDotGeneralOp` on every dense layer but the head. Its delayed scales
         are state, which the step brings up to date

f8, gemms
         calls of cublasLt with operands of 8 bits, and all matrix products, in the step
         as an H100 would run it with XLA's default flags, compiled for one here without
         a GPU; loop bodies once
temp     temporary bytes of that step, parameters donated
kernels, moved
         its kernels, and the bytes that they read and write; not those in loops
saved    bytes of activations that autodiff keeps for the backward pass
error    relative gradient error against f64 on the small model, median over the seeds,
         excess precision off; and how many of its products are in 8 bits. The scales of
         Flax have settled first, on the same batch
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The models are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Before JAX is imported: see `tests/h100.py`.
os.environ["JAX_PLATFORMS"] = "cpu"
# What is compiled for the CPU runs a few times: it is not worth optimising.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import flax
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from tests import h100, measures, zoo
from tests.zoo.case import Case, LossOfScales

PROGRAMS = ("bf16", "fp8", "flax")
F8_CALL = "__cublas$lt$matmul$f8"
LEARNING_RATE = 0.1
# Each step brings the scales of one more layer into range, from the last to the first.
SETTLING = 16
# What fp8 costs most accuracy in, and gains least.
HEADS = {
    "transformer": "Dense_4",
    "gpt": "Embed_0.attend",
    "gpt_scan": "Embed_0.attend",
    "encoder_decoder": "Dense_0",
    "moe": "Dense_0",
}
# The first runs as it was traced; the others are convolutions, with at most two dense
# layers of multiples of 16.
LEFT_OUT = ("custom_rules_unmarked", "cnn", "resnet", "unet", "vae")
WIDE = ("mlp", "gpt_scan", "llama", "encoder_decoder", "vit")
# fp8 pays for large products alone: the zoo's own sizes are smaller than those.
SIZES = tuple(
    (model, size)
    for size, models in (("large", zoo.MODELS), ("wide", WIDE))
    for model in models
    if model not in LEFT_OUT
)
MODELS = tuple(dict.fromkeys(model for model, _ in SIZES))


def attends(info: amp.ModuleInfo) -> bool:
    """Whether an embedding is the head here, and not where it looks up tokens."""
    return info.method == "attend"


def policy_for(model: str, program: str) -> amp.PolicyMap | str:
    """Returns the policy of "bf16" or "fp8"."""
    if program == "bf16" or model not in HEADS:
        return {"bf16": "mixed_bfloat16", "fp8": "fp8"}[program]
    head = HEADS[model]
    pattern = attends if head.endswith(".attend") else head
    return amp.PolicyMap("fp8", {pattern: "mixed_bfloat16"})


def loss_of(case: Case, model: str, program: str) -> LossOfScales | None:
    """Returns the loss of a program, whose scales are () but for "flax".

    None if nobody has written it.
    """
    if program == "flax":
        return case.fp8.loss if case.fp8 else None
    loss = amp.autocast(case.loss, policy_for(model, program))
    return lambda params, scales, batch: loss(params, batch)


def sample(case: Case, program: str, key: jax.Array) -> tuple[Any, Any]:
    """Returns ((params, scales), batch)."""
    params, batch = case.sample(key)
    if program == "flax":
        assert case.fp8 is not None
        return (params, case.fp8.scales(batch)), batch
    return (params, ()), batch


def training_step(loss: LossOfScales) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """Returns a step of gradient descent; the gradients of scales are new scales."""

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        gradient = jax.value_and_grad(loss, argnums=(0, 1))
        value, (grads, scales) = gradient(*carry, batch)
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, carry[0], grads)
        return (params, scales), value

    return step


def compiled_figures(compiled: Any) -> dict[str, Any]:
    """Returns the figures of a step that was compiled for an H100."""
    gemms = h100.gemms(compiled)
    traffic = h100.traffic(compiled)
    return {
        "f8_calls": sum(gemm.target.startswith(F8_CALL) for gemm in gemms),
        "gemms": len(gemms),
        "temp": h100.temp_bytes(compiled),
        "kernels": traffic.kernels,
        "bytes_moved": traffic.bytes_moved,
    }


def large_figures(model: str, size: str, program: str, gpu: bool) -> dict[str, Any]:
    """Returns what is read from the program of a large model, which does not run."""
    case = zoo.CASES[model, size] if size == "large" else zoo.SHAPES[model, size]
    loss = loss_of(case, model, program)
    assert loss is not None
    carry, batch = jax.eval_shape(
        functools.partial(sample, case, program), jax.random.key(0)
    )
    found = measures.traced(
        lambda carry, batch: (loss(carry[0], carry[1], batch), ()), carry, batch
    )
    row: dict[str, Any] = {"saved": found.saved_bytes}
    if gpu:
        step = training_step(loss)
        row |= compiled_figures(
            h100.compile_for_gpu(
                step, carry, batch, donate_argnums=0, default_flags=True
            )
        )
    return row


@functools.lru_cache(maxsize=1)
def references(model: str, seeds: int) -> list[Any]:
    """Returns the gradients of the small f32 model in f64, one for each seed."""
    case = zoo.CASES[model, "small"]
    samples = [jax.jit(case.sample)(jax.random.key(seed)) for seed in range(seeds)]
    return measures.float64_gradients(
        lambda params, batch: (case.loss(params, batch), ()), samples
    )


def gradient_errors(model: str, program: str, seeds: int) -> list[float]:
    """Returns the relative gradient error of each seed against f64."""
    case = zoo.CASES[model, "small"]
    loss = loss_of(case, model, program)
    assert loss is not None
    both = jax.jit(
        jax.grad(loss, argnums=(0, 1)), compiler_options=measures.EXACTLY_AS_WRITTEN
    )
    sampled = jax.jit(functools.partial(sample, case, program))
    errors = []
    for seed, reference in enumerate(references(model, seeds)):
        (params, scales), batch = sampled(jax.random.key(seed))
        for _ in range(SETTLING if jax.tree.leaves(scales) else 0):
            _, scales = both(params, scales, batch)
        grads, _ = both(params, scales, batch)
        errors.append(measures.relative_error(grads, reference))
    return errors


def small_products(model: str) -> int:
    """Returns how many products of the small model's loss are in 8 bits under fp8."""
    case = zoo.CASES[model, "small"]
    report = amp.explain(case.loss, policy_for(model, "fp8"))(*case.abstract())
    return report.total.fp8_matmuls


def figures_of(model: str, size: str, gpu: bool, seeds: int) -> dict[str, Any]:
    """Returns the figures of one model in one size: a row for each program."""
    case = zoo.CASES[model, "small"]
    rows: dict[str, Any] = {}
    for program in PROGRAMS:
        if loss_of(case, model, program) is not None:
            rows[program] = large_figures(model, size, program, gpu)
            # The small model is the same for all sizes.
            if seeds and size == "large":
                rows[program]["errors"] = gradient_errors(model, program, seeds)
    found = {"model": model, "size": size, "head": HEADS.get(model), "programs": rows}
    return found | {"small_fp8_products": small_products(model)}


def ratio(row: dict[str, Any], program: str, figure: str) -> float | None:
    """Returns a figure of a program over that of bf16; None where it has none.

    Example:
      >>> row = {"programs": {"bf16": {"temp": 8}, "fp8": {"temp": 6}}}
      >>> ratio(row, "fp8", "temp"), ratio(row, "flax", "temp")
      (0.75, None)
    """
    programs = row["programs"]
    if figure not in programs.get(program, {}) or not programs["bf16"][figure]:
        return None
    return programs[program][figure] / programs["bf16"][figure]


COLUMNS = (
    "program", "f8", "gemms", "temp", "kernels", "moved", "saved", "error"
)  # fmt: skip


def table(row: dict[str, Any]) -> Table:
    title = f"{row['model']} {row['size']}"
    found = Table(title=title, title_justify="left")
    for column in COLUMNS:
        found.add_column(column, justify="left" if column == "program" else "right")

    def megabytes(program: str, figure: str) -> str:
        value = row["programs"][program].get(figure)
        over = ratio(row, program, figure)
        if value is None:
            return ""
        return f"{value / 1e6:.1f}MB" + (f" {over:.3f}x" if over is not None else "")

    for program, figures in row["programs"].items():
        errors = figures.get("errors")
        found.add_row(
            program,
            *(str(figures.get(name, "")) for name in ("f8_calls", "gemms")),
            megabytes(program, "temp"),
            str(figures.get("kernels", "")),
            megabytes(program, "bytes_moved"),
            megabytes(program, "saved"),
            f"{statistics.median(errors):.4f}" if errors else "",
        )
    return found


def conditions(gpu: bool, seeds: int) -> dict[str, Any]:
    """Returns under which conditions the figures were measured."""
    return {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "compiled_for": "described H100 80GB HBM3, default flags" if gpu else None,
        "step": "value_and_grad and SGD in f32, parameters donated",
        "seeds": seeds,
        "error": "XLA excess precision off, against f64",
        "policy": str(amp.get_policy("fp8")),
        "settling": f"{SETTLING} gradients before the one of Flax that is measured",
    }


def run(
    models: Sequence[str], gpu: bool, seeds: int, json_file: Path | None
) -> list[dict[str, Any]]:
    """Prints a table for each model in each size, and returns all figures."""
    # A file has room for the table.
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = []
    for model, size in SIZES:
        if model in models:
            rows.append(figures_of(model, size, gpu, seeds))
            console.print(table(rows[-1]))
            jax.clear_caches()
            if json_file:
                report = {"conditions": conditions(gpu, seeds), "models": rows}
                json_file.write_text(json.dumps(report, indent=1) + "\n")
    fewer = [ratio(row, "fp8", "temp") for row in rows]
    found = [each for each in fewer if each is not None]
    if found:
        console.print(f"temp: median of the ratios {np.median(found):.3f}")
    return rows
