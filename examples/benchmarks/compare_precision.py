"""Autocast, mixed precision written by hand, and f32, compared on a zoo of models.

    python examples/benchmarks/compare_precision.py [--model gpt moe] [--no-gpu]
    python examples/benchmarks/compare_precision.py --policy fp8
    python examples/benchmarks/compare_precision.py --roofline

The second compares fp8 with bf16: see `fp8_precision.py`. The third models the time of
an H100: see `roofline_precision.py`. For the first,

for each model of `tests/zoo` and each half dtype, three programs of one training step:

  f32       the unchanged model
  twin      the same model written by hand in mixed precision; ratios are to it
  autocast  `amp.autocast` of the unchanged model

gemms, convs
          matrix products and convolutions in half precision, of all: in the step as an
          H100 would run it (compiled for one here, without a GPU), or as traced where
          nothing is compiled
temp      temporary bytes of that step, parameters donated
casts     its kernels that only cast, and the elements that they convert
saved     bytes of activations that autodiff keeps for the backward pass
error     relative gradient error against f64 on the small model, excess precision off
          and f16 with a loss scale: median over the seeds, median ratio, and how many
          seeds were worse (+) and better (-), with the sign test's chance that equal
          programs were so often worse
trace, compile
          CPU seconds, caches emptied before each, twin and autocast in turns, the
          minimum; for the first dtype alone, they do not depend on it

At the end: which bounds do not hold, the products that the twin has in half precision
and autocast has not, and the median of the memory ratios. The products of two programs
are matched by how many elements their operands and results have, because XLA transposes
and reshapes them as it likes; loop bodies count once.

Figures of f32 and twin are kept in the temporary directory until a source changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import hashlib
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The models are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Before JAX is imported: see `tests/h100.py`.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import flax
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from tests import h100, measures, zoo
from tests.programs import equations
from tests.zoo.case import Case, Loss

PROGRAMS = ("f32", "twin", "autocast")
HALF_NAMES = {"bf16", "f16", *measures.HALF}
LEARNING_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Bound:
    """What has to hold for `figure` of a comparison: at most (or at least) `limit`.

    Ratios are compared as they are written, with two decimals: a program whose memory
    is laid out otherwise differs in the third.
    """

    figure: str
    limit: float
    text: str
    at_least: bool = False
    is_ratio: bool = False

    def holds(self, value: float) -> bool:
        value = round(value, 2) if self.is_ratio else value
        return value >= self.limit if self.at_least else value <= self.limit


BOUNDS = (
    Bound("missing", 0, "products in half precision by hand but not under autocast"),
    Bound("temp", 1.00, "temporary memory, ratio", is_ratio=True),
    Bound("casts", 2, "kernels that only cast, more than by hand"),
    Bound("cast_elements", 0, "elements that they convert, more than by hand"),
    Bound("saved", 1.00, "saved for the backward pass, ratio", is_ratio=True),
    Bound("error_p", 0.01, "gradient error, p of the sign test", at_least=True),
    Bound("trace", 1.5, "trace time, ratio", is_ratio=True),
    Bound("compile", 1.05, "compile time, ratio", is_ratio=True),
)
# What runs as it was traced, because the contract of autocast says so, saves, casts and
# needs what it does in f32: a `custom_vjp` that nobody marked with `amp.cast_inputs`.
AS_TRACED = ("custom_rules_unmarked",)
NOT_WHERE_AS_TRACED = ("temp", "casts", "cast_elements", "saved")
MEDIAN_BOUND = Bound(
    "temp", 0.95, "median of the temporary memory ratios", is_ratio=True
)


def program_loss(case: Case, dtype: str, program: str) -> Loss:
    """Returns the loss of a program; "forward" is autocast around the model alone."""
    if program == "f32":
        return case.loss
    if program == "twin":
        return case.twin(dtype)
    if program == "forward":
        assert case.wrapped, "the model does not tell its forward pass from its loss"
        return case.wrapped(lambda forward: amp.autocast(forward, f"mixed_{dtype}"))
    return amp.autocast(case.loss, f"mixed_{dtype}")


def with_state(loss: Loss) -> measures.Loss:
    """Returns `loss` as `tests/measures.py` wants it: with a state, which is empty."""
    return lambda params, batch: (loss(params, batch), ())


def training_step(loss: Loss) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """Returns a step of gradient descent: no optimizer state to hide memory behind."""

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
        return params, value

    return step


class Product(NamedTuple):
    """A matrix product or a convolution.

    Attributes:
      kind: `gemm`, `conv Forward`, `conv BackwardInput`, ...
      operands: their dtypes.
      elements: of the smaller operand, the larger operand and the result.
      source: where it comes from, as JAX names it.
    """

    kind: str
    operands: tuple[str, ...]
    elements: tuple[int, ...]
    source: str

    @property
    def in_half(self) -> bool:
        return set(self.operands) <= HALF_NAMES

    def __str__(self) -> str:
        lhs, rhs, result = self.elements
        operands = " x ".join(self.operands)
        return f"{self.kind} {operands} ({lhs} x {rhs} -> {result}): {self.source}"


def _elements(lhs: Any, rhs: Any, result: Any) -> tuple[int, ...]:
    smaller, larger = sorted((math.prod(lhs), math.prod(rhs)))
    return smaller, larger, math.prod(result)


_TRACED = {
    "dot_general": "gemm",
    "ragged_dot_general": "gemm",
    "conv_general_dilated": "conv",
}


def traced(loss: Loss, case: Case) -> measures.Traced:
    """Returns value and gradient of a case's program, as traced."""
    return measures.traced(with_state(loss), *case.abstract())


def traced_products(closed: Any) -> list[Product]:
    """Returns the products of a closed jaxpr."""
    found = []
    for eqn in equations(closed):
        if eqn.primitive.name in _TRACED:
            avals = [v.aval for v in (*eqn.invars[:2], eqn.outvars[0])]
            found.append(
                Product(
                    _TRACED[eqn.primitive.name],
                    tuple(aval.dtype.name for aval in avals[:2]),
                    _elements(*(aval.shape for aval in avals)),
                    str(eqn.source_info.name_stack),
                )
            )
    return found


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = \(?(\w+)\[([\d,]*)\]")
_CALL = re.compile(
    r" (?P<opcode>dot|convolution|custom-call)\((?P<operands>[^)]*)\)"
    r"(?:.*custom_call_target=\"__(?P<library>cublas|cudnn)"
    r"\$(?P<kind>lt\$matmul|gemm|conv\w+))?"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def compiled_products(text: str) -> list[Product]:
    """Returns the products of a compiled program's text, loop bodies once.

    Example:
      >>> lines = (
      ...     "  %a = f32[4,2]{1,0} parameter(0)",
      ...     "  %b = f32[2,8]{1,0} parameter(1)",
      ...     '  ROOT %c = f32[4,8]{1,0} dot(%a, %b), metadata={op_name="layer/dot"}',
      ... )
      >>> str(*compiled_products(chr(10).join(lines)))
      'gemm f32 x f32 (8 x 16 -> 32): layer/dot'
    """
    shapes: dict[str, tuple[str, list[int]]] = {}
    found = []
    for line in text.splitlines():
        if not (instruction := _INSTRUCTION.match(line)):
            continue
        name, dtype, sizes = instruction.groups()
        shapes[name] = (dtype, [int(size) for size in sizes.split(",") if size])
        call = _CALL.search(line)
        if not call or (call["opcode"] == "custom-call" and not call["library"]):
            continue
        lhs, rhs = re.findall(r"%([^\s,)]+)", call["operands"])[:2]
        kind = "gemm"
        if call["opcode"] == "convolution" or call["library"] == "cudnn":
            kind = f"conv {(call['kind'] or '').removeprefix('conv')}".strip()
        source = _OP_NAME.search(line)
        found.append(
            Product(
                kind,
                (shapes[lhs][0], shapes[rhs][0]),
                _elements(shapes[lhs][1], shapes[rhs][1], shapes[name][1]),
                source[1] if source else "",
            )
        )
    return found


def compiled_figures(compiled: Any) -> dict[str, Any]:
    """Returns the figures of a step that was compiled for an H100."""
    casts = h100.pure_casts(compiled)
    return {
        "products": compiled_products(compiled.as_text()),
        "temp": h100.temp_bytes(compiled),
        "casts": len(casts),
        "cast_elements": sum(cast.elements for cast in casts),
    }


def missing_products(
    ours: Sequence[Product], theirs: Sequence[Product]
) -> list[Product]:
    """Returns those of `ours` that are not in half precision, but are in `theirs`.

    One that `ours` has in no dtype has been merged with another or simplified away: it
    is not missing.

    Example:
      >>> wide = Product("gemm", ("f32", "f32"), (8, 8, 4), "layer/dot")
      >>> half = wide._replace(operands=("bf16", "bf16"))
      >>> missing_products([wide, half], [half, half]) == [wide]
      True
      >>> missing_products([wide], [wide, half]) or missing_products([], [half])
      []
    """
    in_half = Counter((p.kind, p.elements) for p in theirs if p.in_half)
    allowed = Counter((p.kind, p.elements) for p in theirs if not p.in_half)
    missing = []
    for product in ours:
        size = (product.kind, product.elements)
        if product.in_half:
            continue
        if allowed[size]:
            allowed[size] -= 1
        elif in_half[size]:
            in_half[size] -= 1
            missing.append(product)
    return missing


@functools.lru_cache(maxsize=1)
def references(case: Case, seeds: int) -> tuple[list[Any], list[Any]]:
    """Returns [(params, batch), ...] and their gradients in f64, one for each seed."""
    sample = jax.jit(case.sample)
    samples = [sample(jax.random.key(seed)) for seed in range(seeds)]
    return samples, measures.float64_gradients(with_state(case.loss), samples)


def gradients(case: Case, dtype: str, program: str, seeds: int) -> list[tuple]:
    """Returns the gradient of each seed, and what it is in f64."""
    loss = program_loss(case, dtype, program)
    gradient = measures.gradient(with_state(loss), dtype)
    return [
        (gradient(*sample), reference)
        for sample, reference in zip(*references(case, seeds), strict=True)
    ]


def gradient_errors(gradients: Iterable[tuple]) -> list[float]:
    """Returns the relative errors of gradients, each beside what it is in f64."""
    return [measures.relative_error(*both) for both in gradients]


def figures(model: str, dtype: str, program: str, gpu: bool, seeds: int) -> dict:
    """Returns the figures of one program, or {"failed": why} where it does not run."""
    large, small = zoo.CASES[model, "large"], zoo.CASES[model, "small"]
    try:
        loss = program_loss(large, dtype, program)
        found = traced(loss, large)
        row: dict[str, Any] = {
            "products": traced_products(found.jaxpr),
            "saved": found.saved_bytes,
        }
        if gpu:
            compiled = h100.compile_for_gpu(
                training_step(loss), *large.abstract(), donate_argnums=0
            )
            row |= compiled_figures(compiled)
        if seeds:
            row["errors"] = gradient_errors(gradients(small, dtype, program, seeds))
    # A program that does not run is a line of the table, not the end of it.
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return row


def remembered(*arguments: Any) -> dict:
    """Returns `figures(*arguments)`, from a file if it has been computed before.

    For programs that `jmp_amp` has no part in: they change with what is hashed here.
    """
    files = [Path(h100.__file__), Path(measures.__file__)]
    files += [Path(__file__), *sorted(Path(zoo.__path__[0]).glob("*.py"))]
    sources = [file.read_text() for file in files]
    key = json.dumps([*sources, jax.__version__, flax.__version__, arguments])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"jmp_amp-compare-{digest}.json"
    if not path.exists():
        row = figures(*arguments)
        if "failed" in row:
            return row
        path.write_text(json.dumps(row))
    row = json.loads(path.read_text())
    row["products"] = [
        Product(kind, tuple(operands), tuple(elements), source)
        for kind, operands, elements, source in row["products"]
    ]
    return row


def timings(model: str, dtype: str, gpu: bool, repeats: int) -> dict[str, dict]:
    """Returns {program: {"trace": CPU seconds, "compile": CPU seconds}}."""
    case = zoo.CASES[model, "large"]
    arguments = case.abstract()
    if gpu:
        arguments = jax.tree.map(h100.pin, arguments)
    seconds: dict[str, dict[str, list[float]]] = {
        program: {"trace": [], "compile": []} for program in ("twin", "autocast")
    }
    for _ in range(repeats):
        for program, times in seconds.items():
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            step = training_step(program_loss(case, dtype, program))
            traced = jax.jit(step, donate_argnums=0).trace(*arguments)
            times["trace"].append(time.process_time() - start)
            if gpu:
                start = time.process_time()
                # As `h100.compile_for_gpu` does.
                traced.lower().compile({"xla_gpu_enable_triton_gemm": False})
                times["compile"].append(time.process_time() - start)
    return {
        program: {what: min(found) for what, found in times.items() if found}
        for program, times in seconds.items()
    }


def compared(ours: dict, theirs: dict) -> dict[str, float]:
    """Returns autocast's figures against the twin's: ratios, differences, p."""
    if "failed" in ours or "failed" in theirs:
        return {}
    found: dict[str, float] = {
        "missing": len(missing_products(ours["products"], theirs["products"]))
    }
    for figure in ("temp", "saved", "trace", "compile"):
        if figure in ours and figure in theirs:
            found[figure] = ours[figure] / theirs[figure] if theirs[figure] else 1.0
    for figure in ("casts", "cast_elements"):
        if figure in ours:
            found[figure] = ours[figure] - theirs[figure]
    if "errors" in ours:
        errors = measures.compare(ours["errors"], theirs["errors"])
        found |= {"error": errors.ratio, "error_p": errors.p_worse}
        found |= {"error_worse": errors.worse, "error_better": errors.better}
    return found


def violations(results: dict[str, dict[str, Any]]) -> list[str]:
    """Returns one sentence for each bound that does not hold."""
    found = []
    for model, by_dtype in results.items():
        for dtype, rows in by_dtype.items():
            where = f"{model} {dtype}"
            for program in PROGRAMS:
                if "failed" in rows[program]:
                    found.append(
                        f"{where}: {program} failed: {rows[program]['failed']}"
                    )
            for bound in BOUNDS:
                if model in AS_TRACED and bound.figure in NOT_WHERE_AS_TRACED:
                    continue
                value = rows["compared"].get(bound.figure)
                if value is not None and not bound.holds(value):
                    sign = ">=" if bound.at_least else "<="
                    found.append(
                        f"{where}: {bound.text}: {value:.8g}, not {sign} {bound.limit}"
                    )
            found += [f"{where}: not in half: {name}" for name in rows["missing"]]
    for dtype, median in memory_medians(results).items():
        if not MEDIAN_BOUND.holds(median):
            found.append(
                f"{dtype}: {MEDIAN_BOUND.text}: {median:.3f}, "
                f"not <= {MEDIAN_BOUND.limit}"
            )
    return found


def memory_medians(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Returns {dtype: the median over the models of autocast's memory ratio}."""
    ratios: dict[str, list[float]] = {}
    for model, by_dtype in results.items():
        for dtype, rows in by_dtype.items():
            if "temp" in rows["compared"] and model not in AS_TRACED:
                ratios.setdefault(dtype, []).append(rows["compared"]["temp"])
    return {dtype: float(np.median(found)) for dtype, found in ratios.items()}


def _in_half(products: Sequence[Product], kind: str) -> str:
    of_kind = [p.in_half for p in products if p.kind.startswith(kind)]
    return f"{sum(of_kind)}/{len(of_kind)}" if of_kind else ""


def _cells(program: str, row: dict, rows: dict[str, Any]) -> list[str]:
    """Returns the cells of one line; ratios stand in the line of autocast alone."""
    if "failed" in row:
        return [program, row["failed"]]
    ratios = rows["compared"] if program == "autocast" else {}

    def ratio(figure: str) -> str:
        return f" {ratios[figure]:.3f}x" if figure in ratios else ""

    def megabytes(figure: str) -> str:
        return f"{row[figure] / 1e6:.1f}MB{ratio(figure)}" if figure in row else ""

    def seconds(figure: str) -> str:
        return f"{row[figure]:.2f}s{ratio(figure)}" if figure in row else ""

    casts = error = ""
    if "casts" in row:
        casts = f"{row['casts']}/{row['cast_elements'] / 1e6:.1f}M"
    if "errors" in row:
        error = f"{np.median(row['errors']):.2e}{ratio('error')}"
    if "error" in ratios:
        error += (
            f" +{ratios['error_worse']}-{ratios['error_better']}"
            f" p={ratios['error_p']:.2g}"
        )
    return [
        program,
        _in_half(row["products"], "gemm"),
        _in_half(row["products"], "conv"),
        megabytes("temp"),
        casts,
        megabytes("saved"),
        error,
        seconds("trace"),
        seconds("compile"),
    ]


COLUMNS = (
    "program", "gemms", "convs", "temp", "casts", "saved", "error", "trace", "compile"
)  # fmt: skip


def _counted(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns `rows` for the JSON file: how many products, not which."""
    return {
        key: {
            "gemms": _in_half(row["products"], "gemm"),
            "convs": _in_half(row["products"], "conv"),
            **{figure: value for figure, value in row.items() if figure != "products"},
        }
        if "products" in row
        else row
        for key, row in rows.items()
    }


def table(model: str, dtype: str, rows: dict[str, Any]) -> Table:
    found = Table(title=f"{model} {dtype}", title_justify="left")
    for column in COLUMNS:
        found.add_column(column, justify="left" if column == "program" else "right")
    for program in PROGRAMS:
        found.add_row(*_cells(program, rows[program], rows))
    return found


def conditions(gpu: bool, seeds: int, repeats: int) -> dict[str, Any]:
    """Returns under which conditions the figures were measured."""
    return {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "compiled_for": "described H100 80GB HBM3, Triton gemms off" if gpu else None,
        "step": "value_and_grad and SGD in f32, parameters donated",
        "seeds": seeds,
        "error": "XLA excess precision off, against f64",
        "loss_scale": measures.LOSS_SCALE,
        "timings": f"CPU seconds, minimum of {repeats}, caches cleared, in turns",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", choices=zoo.MODELS, default=zoo.MODELS, metavar="NAME",
        help=f"of {', '.join(zoo.MODELS)}",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=("half", "fp8"), default="half",
        help="fp8: 8-bit products against bf16; no times and no --dtype",
    )  # fmt: skip
    parser.add_argument(
        "--roofline", action="store_true",
        help="the time of an H100, modelled; bf16 alone, no other figures",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", nargs="+", choices=measures.HALF, default=measures.HALF
    )
    parser.add_argument("--seeds", type=int, default=15, help="0: no gradient errors")
    parser.add_argument("--timings", type=int, default=3, help="0: no times")
    parser.add_argument(
        "--no-gpu", action="store_true", help="compile nothing for a GPU"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if a bound does not hold"
    )
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    console = Console(width=None if sys.stdout.isatty() else 150)

    gpu = not options.no_gpu
    if gpu and (reason := h100.why_no_compiler()):
        console.print(f"Nothing is compiled for a GPU: {reason}")
        gpu = False
    if options.roofline:
        if not gpu:
            parser.error("--roofline reads programs that are compiled for a GPU")
        from examples.benchmarks import roofline_precision

        broken = roofline_precision.run(options.model, options.json)
        return int(options.check and bool(broken))
    if options.policy == "fp8":
        from examples.benchmarks import fp8_precision

        fp8_precision.run(options.model, gpu, options.seeds, options.json)
        return 0
    results: dict[str, dict[str, Any]] = {}
    for model in options.model:
        for dtype in options.dtype:
            rows: dict[str, Any] = {
                "f32": remembered(model, "float32", "f32", gpu, options.seeds),
                "twin": remembered(model, dtype, "twin", gpu, options.seeds),
                "autocast": figures(model, dtype, "autocast", gpu, options.seeds),
            }
            ours, theirs = rows["autocast"], rows["twin"]
            runs = "failed" not in ours and "failed" not in theirs
            if runs and options.timings and dtype == options.dtype[0]:
                found = timings(model, dtype, gpu, options.timings)
                for program, seconds in found.items():
                    rows[program] |= seconds
            rows["compared"] = compared(ours, theirs)
            rows["missing"] = [
                str(product)
                for product in missing_products(
                    ours.get("products", []), theirs.get("products", [])
                )
            ]
            results.setdefault(model, {})[dtype] = rows
            console.print(table(model, dtype, rows))
    broken = violations(results)
    medians = memory_medians(results)
    for dtype, median in medians.items():
        console.print(
            f"{dtype}: median of the memory ratios of all models {median:.3f}"
        )
    console.print(f"{len(broken)} violated bounds" + ":" * bool(broken))
    for sentence in broken:
        console.print(f"  {sentence}", markup=False, highlight=False, soft_wrap=True)
    if options.json:
        report = {
            "conditions": conditions(gpu, options.seeds, options.timings),
            "models": {
                model: {dtype: _counted(rows) for dtype, rows in by_dtype.items()}
                for model, by_dtype in results.items()
            },
            "median_temp": medians,
            "violations": broken,
        }
        options.json.write_text(json.dumps(report, indent=1))
    return int(options.check and bool(broken))


if __name__ == "__main__":
    sys.exit(main())
