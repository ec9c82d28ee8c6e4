"""Training steps and inference executed on this CPU, and whether bf16 gains there.

    python examples/benchmarks/train_on_cpu.py [--model mlp-256 lstm] [--check]
    python examples/benchmarks/train_on_cpu.py --products

For each model, four programs with the same f32 parameters and random data:

  f32        the unchanged model
  by hand    Flax's `dtype=jnp.bfloat16`, as it is usually written
  autocast   `amp.autocast` of the unchanged model, planned for a GPU
  for a CPU  the same with `target="cpu"`

of which each trains (SGD, its parameters donated) and predicts. Programs of a model
are timed in turns, a round of each, then the next round in the opposite order.

speed  times that of f32: CPU seconds of the process, all threads, in the fastest round
       of each; then of the medians of all rounds; then both in wall clock time. CPU
       seconds are what to believe while others use the machine: the load average is
       printed before and after
goal   what the speed in CPU seconds of the fastest rounds should be; `--check` exits 1
       where one is missed. Where XLA compiles the program of f32, as it does for models
       that are too small to gain, the speed is 1 but for noise: `as f32` follows
error  |gradient - that of f64| / |that of f64|, all parameters as one vector
kept   megabytes that the backward pass keeps, before XLA recomputes any of it

`--products` times single products instead, forward and with both derivatives, in f32
and in bf16 as autocast emits it for a CPU, whatever it would choose: how the sizes
below which it stays in f32 were found. Needs the extra `test`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# What measures gradients is in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Before JAX is imported: on a machine with a GPU too, this is about its CPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from jmp_amp.plan.program.cpu_target import this_cpu
from jmp_amp.plan.program.dimensions import Dimensions
from jmp_amp.plan.rewrites.cpu import CpuProduct, gains, half_product
from tests import measures
from tests.zoo.language import wide

PROGRAMS = ("f32", "by hand", "autocast", "for a CPU")
PHASES = ("training", "inference")
RATE = 1e-3
ROOT = str(Path(__file__).resolve().parents[2])

Dtype = Any


class MLP(nn.Module):
    widths: tuple[int, ...]
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths[:-1]:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(self.widths[-1], dtype=self.dtype)(x)


class Transformer(nn.Module):
    layers: int
    heads: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        for _ in range(self.layers):
            y = norm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, y)
            y = nn.gelu(dense(4 * x.shape[-1])(norm()(x)))
            x = x + dense(x.shape[-1])(y)
        return norm()(x)


class LSTM(nn.Module):
    hidden: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The carry of Flax's cell begins in the dtype of the parameters.
        cell = nn.OptimizedLSTMCell(self.hidden, dtype=self.dtype, param_dtype=x.dtype)
        found: Any = nn.RNN(cell)(x)
        return found


class CNN(nn.Module):
    channels: tuple[int, ...]
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in self.channels:
            x = nn.relu(nn.Conv(channels, (3, 3), dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10, dtype=self.dtype)(x.reshape(x.shape[0], -1))


class Bottlenecks(nn.Module):
    """Two blocks as ResNet-50 has them, most of whose products are over channels."""

    channels: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        for _ in range(2):
            y = nn.relu(conv(self.channels, (1, 1))(x))
            y = nn.relu(conv(self.channels, (3, 3))(y))
            x = nn.relu(x + conv(x.shape[-1], (1, 1))(y))
        return nn.Dense(10, dtype=self.dtype)(x.mean(axis=(1, 2)))


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, the shape of its input, and a small one of the same kind.

    Attributes:
      module: has a field `dtype`: None for f32.
      shape: of the input, its batch first.
      quick: module and shape of `--quick`.
      goals: phase -> the speed of `for a CPU` to reach.
    """

    module: nn.Module
    shape: tuple[int, ...]
    quick: tuple[nn.Module, tuple[int, ...]]
    goals: Mapping[str, float] = dataclasses.field(default_factory=dict)


_SMALL_MLP = MLP((64, 64)), (128, 64)
MODELS = {
    "mlp-256": Model(
        MLP((2048, 512)), (256, 512), _SMALL_MLP, {"training": 1.8, "inference": 1.6}
    ),
    "mlp-1024": Model(
        MLP((2048, 512)), (1024, 512), _SMALL_MLP, {"training": 1.95, "inference": 1.6}
    ),
    "mlp-3x1536": Model(
        MLP((1536,) * 3), (1024, 1536), _SMALL_MLP, {"training": 1.9, "inference": 1.6}
    ),
    "mlp-3x256": Model(MLP((256,) * 3), (128, 256), _SMALL_MLP, {"training": 1.6}),
    "mlp-3x64": Model(MLP((64,) * 3), (64, 64), _SMALL_MLP, {"training": 0.98}),
    "transformer": Model(
        Transformer(2, 4),
        (8, 128, 256),
        (Transformer(1, 2), (2, 64, 64)),
        {"training": 1.7, "inference": 1.6},
    ),
    "lstm": Model(
        LSTM(512),
        (64, 32, 512),
        (LSTM(64), (32, 4, 64)),
        {"training": 1.3, "inference": 1.6},
    ),
    "cnn": Model(
        CNN((32, 64, 128)),
        (32, 32, 32, 3),
        (CNN((8, 16)), (4, 8, 8, 3)),
        {"training": 1.0},
    ),
    "bottlenecks": Model(
        Bottlenecks(64), (32, 14, 14, 256), (Bottlenecks(32), (8, 8, 8, 64))
    ),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A model in one precision.

    Attributes:
      predict: (params, x) -> the output, f32.
      loss: (params, (x, y)) -> (f32[], ()).
    """

    predict: Callable[[Any, Any], jax.Array]
    loss: measures.Loss

    def step(self, params: Any, batch: Any) -> Any:
        """Returns the parameters after a step of SGD."""
        grads = jax.grad(self.loss, has_aux=True)(params, batch)[0]
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads)


def program(module: nn.Module, name: str) -> Program:
    """Returns the program of a model that is called `name` in `PROGRAMS`."""
    model: Any = module.clone(dtype=jnp.bfloat16) if name == "by hand" else module

    def predict(params: Any, x: Any) -> jax.Array:
        # Layers of Flax mix dtypes.
        with jax.numpy_dtype_promotion("standard"):
            found = model.apply(params, x)
        return wide(found)

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        return jnp.mean((predict(params, batch[0]) - batch[1]) ** 2), ()

    if name in ("autocast", "for a CPU"):
        target = "cpu" if name == "for a CPU" else None
        return Program(
            amp.autocast(predict, target=target), amp.autocast(loss, target=target)
        )
    return Program(predict, loss)


def sample(module: nn.Module, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns random (params, (x, y))."""

    def made(key: jax.Array) -> tuple[Any, Any]:
        for_params, for_x, for_y = jax.random.split(key, 3)
        x = jax.random.normal(for_x, shape, jnp.float32)
        with jax.numpy_dtype_promotion("standard"):
            found, params = module.init_with_output(for_params, x)
        return params, (x, jax.random.normal(for_y, found.shape, jnp.float32))

    return jax.jit(made)(jax.random.key(0))


# A function to time: it does its work once, and returns what is to be waited for.
Work = Callable[[], Any]


def training(found: Program, params: Any, batch: Any) -> Work:
    """Returns a training step, which goes on from where the one before ended."""
    step = jax.jit(found.step, donate_argnums=0)
    state = [jax.tree.map(jnp.copy, params)]

    def work() -> Any:
        state[0] = step(state[0], batch)
        return state[0]

    return work


def inference(found: Program, params: Any, batch: Any) -> Work:
    predict = jax.jit(found.predict)
    return lambda: predict(params, batch[0])


def timed(
    works: Mapping[str, Work], rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Returns by name the CPU and wall clock seconds of a call in each round.

    Args:
      works: by name; the first one says how many calls are a round.
      rounds: how many.
      seconds: of CPU time that a round of the first one takes, about.
    """

    def spent(work: Work, calls: int) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        found = None
        for _ in range(calls):
            found = work()
        jax.block_until_ready(found)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return cpu / calls, wall / calls

    for work in works.values():
        # The first one compiles.
        spent(work, 1)
        spent(work, 2)
    once = max(spent(next(iter(works.values())), 3)[0], 1e-6)
    calls = max(1, round(seconds / once))
    found = {name: {"cpu": [], "wall": []} for name in works}
    order = list(works)
    for _ in range(rounds):
        for name in order:
            cpu, wall = spent(works[name], calls)
            found[name]["cpu"].append(cpu)
            found[name]["wall"].append(wall)
        order.reverse()
    return found


def speeds(
    row: Mapping[str, list[float]], reference: Mapping[str, list[float]]
) -> dict[str, dict[str, float]]:
    """Returns the speed of a program over that of another one.

    Example:
      >>> one, two = {"cpu": [1.0, 3.0, 2.0]}, {"cpu": [2.0, 3.0, 6.0]}
      >>> speeds(one, two)
      {'cpu': {'min': 2.0, 'median': 1.5}}
    """
    return {
        clock: {
            "min": min(reference[clock]) / min(row[clock]),
            "median": statistics.median(reference[clock])
            / statistics.median(row[clock]),
        }
        for clock in row
    }


def compiled_operations(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """Returns the types and operations that XLA makes of a function for this CPU."""
    text = jax.jit(fn).lower(*args).compile().as_text() or ""
    return Counter(re.findall(r" = (\S+ [\w-]+)\(", text))


def measured(name: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Returns the figures of a model: {"training": ..., "programs": ...}."""
    model = MODELS[name]
    module, shape = model.quick if quick else (model.module, model.shape)
    params, batch = sample(module, shape)
    programs = {each: program(module, each) for each in PROGRAMS}
    (reference,) = measures.float64_gradients(programs["f32"].loss, [(params, batch)])
    rows: dict[str, dict[str, Any]] = {}
    for each, found in programs.items():
        gradient, _ = jax.jit(jax.grad(found.loss, has_aux=True))(params, batch)
        rows[each] = {
            "error": measures.relative_error(gradient, reference),
            "kept_bytes": measures.traced(found.loss, params, batch).saved_bytes,
        }
    for phase, work in zip(PHASES, (training, inference), strict=True):
        works = {each: work(found, params, batch) for each, found in programs.items()}
        seconds = timed(works, rounds, 0.002 if quick else 0.15)
        run: dict[str, Any] = {
            each: (found.step, params, batch)
            if phase == "training"
            else (found.predict, params, batch[0])
            for each, found in programs.items()
        }
        plain = compiled_operations(*run["f32"])
        for each, row in rows.items():
            row[phase] = {
                "seconds": seconds[each],
                "speed": speeds(seconds[each], seconds["f32"]),
                "as_f32": compiled_operations(*run[each]) == plain,
            }
    # Those of the model at its full size.
    goals = {} if quick else dict(model.goals)
    return {"module": str(module), "shape": shape, "goals": goals, "programs": rows}


def missed(models: Mapping[str, Any]) -> list[str]:
    """Returns the goals that are missed, in words."""
    found = []
    for name, model in models.items():
        for phase, goal in model["goals"].items():
            row = model["programs"]["for a CPU"][phase]
            speed = 1.0 if row["as_f32"] else row["speed"]["cpu"]["min"]
            if speed < goal:
                found.append(f"{name}, {phase}: {speed:.2f}, goal {goal:g}")
    return found


def table(phase: str, models: Mapping[str, Any]) -> Table:
    """Returns the table of a phase, to print."""
    found = Table(title=f"{phase.capitalize()}, speed over f32", title_justify="left")
    found.add_column("model")
    found.add_column("program")
    for column in ("ms", "CPU min", "median", "wall min", "median", "goal"):
        found.add_column(column, justify="right")
    if phase == "training":
        found.add_column("error", justify="right")
        found.add_column("kept MB", justify="right")
    for name, model in models.items():
        for each, row in model["programs"].items():
            speed, cpu = row[phase]["speed"], row[phase]["seconds"]["cpu"]
            goal = model["goals"].get(phase, "") if each == "for a CPU" else ""
            as_f32 = "as f32" if each == "for a CPU" and row[phase]["as_f32"] else ""
            more = f"{row['error']:.1e}", f"{row['kept_bytes'] / 1e6:.2f}"
            found.add_row(
                name if each == "f32" else "",
                each,
                f"{min(cpu) * 1e3:.3g}",
                *(f"{speed[c][f]:.2f}" for c in speed for f in speed[c]),
                f"{goal} {as_f32}".strip(),
                *(more if phase == "training" else ()),
                end_section=each == PROGRAMS[-1],
            )
    return found


# Single products


# Batches, rows, columns and terms of a product: [b, m, k] x [b, k, n].
SIZES = [
    *((1, side, side, side) for side in (32, 48, 64, 80, 96, 128, 256, 512)),
    *((1, m, 512, 512) for m in (1, 4, 8, 16, 32, 64)),
    *((1, 512, n, 512) for n in (1, 8, 16, 32, 64)),
    *((1, 512, 512, k) for k in (8, 16, 32, 64)),
    *((1, m, 64, 64) for m in (32, 128, 256, 1024)),
    *((1, 1024, 32, 32), (1, 2048, 32, 32), (1, 32, 128, 128), (1, 32, 1024, 32)),
    *((1, 64, 2048, 512), (1, 256, 2048, 512)),
    # Of attention: scores and what is mixed by them.
    *((32, 64, 64, 32), (32, 64, 32, 64), (32, 128, 128, 32), (32, 128, 32, 128)),
    *((32, 128, 128, 64), (32, 128, 64, 128), (32, 256, 256, 64), (32, 256, 64, 256)),
]
QUICK_SIZES = [(1, 32, 32, 32), (1, 64, 128, 64), (2, 32, 32, 64)]


def product_of(name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the product of two f32 arrays, each a batch of matrices."""
    dimensions = ((2,), (1,)), ((0,), (0,))
    if name == "f32":
        return jax.lax.dot_general(x, y, dimensions)
    product = CpuProduct(Dimensions.among(*dimensions, (3, 3)))
    return half_product(product, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))


def measured_product(
    size: tuple[int, int, int, int], rounds: int, quick: bool
) -> dict[str, Any]:
    """Returns the seconds of a product and its speed in bf16."""
    batches, rows, columns, terms = size
    # Several in a call, which has a cost of its own.
    count = 2 if quick else max(1, min(16, 2**25 // (batches * rows * columns * terms)))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (batches, rows, terms), (batches, terms, columns), (batches, rows, columns)
    x, y, cotangent = (
        [*jax.random.normal(key, (count, *shape), jnp.float32)]
        for key, shape in zip(keys, shapes, strict=True)
    )

    def forward(name: str, x: Any, y: Any) -> Any:
        pairs = zip(x, y, strict=True)
        return [product_of(name, left, right) for left, right in pairs]

    def both(name: str, x: Any, y: Any, cotangent: Any) -> Any:
        found, backward = jax.vjp(functools.partial(forward, name), x, y)
        return found, backward(cotangent)

    figures: dict[str, Any] = {
        "size": size,
        "products": count,
        "planned": "bf16" if gains(size[1:]) else "f32",
    }
    for phase, fn, args in (
        ("forward", forward, (x, y)),
        ("with backward", both, (x, y, cotangent)),
    ):
        works = {
            name: functools.partial(jax.jit(functools.partial(fn, name)), *args)
            for name in ("f32", "bf16")
        }
        seconds = timed(works, rounds, 0.002 if quick else 0.03)
        speed = speeds(seconds["bf16"], seconds["f32"])
        figures[phase] = {"seconds": seconds, "speed": speed}
    return figures


def table_of_products(products: Sequence[Mapping[str, Any]]) -> Table:
    found = Table(
        title="b products of m x k and k x n, speed of bf16 over f32, CPU min",
        title_justify="left",
    )
    for column in ("b", "m", "n", "k", "m n k", "forward", "with backward", "planned"):
        found.add_column(column, justify="right")
    for row in products:
        found.add_row(
            *map(str, row["size"]),
            f"2^{math.log2(math.prod(row['size'][1:])):.3g}",
            *(
                f"{row[phase]['speed']['cpu']['min']:.2f}"
                for phase in ("forward", "with backward")
            ),
            row["planned"],
        )
    return found


# The machine


def cpu_found() -> dict[str, Any]:
    """Returns the name of this CPU, its instructions for bf16, and its cores."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        told = ""
    name = re.search(r"^model name\s*:\s*(.*)$", told, re.MULTILINE)
    flags = set(re.findall(r"\b(?:avx512_bf16|amx_bf16|bf16)\b", told))
    return {
        "name": name[1] if name else platform.processor() or platform.machine(),
        "bf16_instructions": sorted(flags),
        "native": this_cpu().native,
        "cores": os.cpu_count(),
    }


def load() -> list[float]:
    """Returns the load averages of 1, 5 and 15 minutes."""
    return [round(each, 2) for each in os.getloadavg()]


def conditions(rounds: int, quick: bool) -> dict[str, Any]:
    """Returns under which conditions figures were measured."""
    done = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
    )
    return {
        "cpu": cpu_found(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "revision": done.stdout.strip() or None,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rounds": rounds,
        "quick": quick,
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }


def heading(about: Mapping[str, Any]) -> str:
    """Returns the conditions in words."""
    cpu = about["cpu"]
    instructions = ", ".join(cpu["bf16_instructions"]) or "none of bf16"
    return (
        f"{cpu['name']}, {cpu['cores']} cores, instructions: {instructions}\n"
        f"jax {about['jax']}; for a CPU: {this_cpu()}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME",
        help=f"of {', '.join(MODELS)}; default: all",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument(
        "--quick", action="store_true",
        help="tiny sizes, which test this script and say nothing about speed",
    )  # fmt: skip
    parser.add_argument(
        "--products", action="store_true", help="single products instead of models"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 where a goal is missed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: use 1 or more")
    if options.check and (options.quick or options.products):
        parser.error("--check: the goals are those of models at their full size")
    if options.check and not this_cpu().native:
        parser.error(f"--check: the goals are no CPU's like this one: {this_cpu()}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a goal is missed that is to be checked."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 110)
    found: dict[str, Any] = {"conditions": conditions(options.rounds, options.quick)}
    found["load_before"] = load()
    console.print(heading(found["conditions"]))
    console.print(f"load average {found['load_before']}")
    if options.products:
        sizes = QUICK_SIZES if options.quick else SIZES
        found["products"] = [
            measured_product(size, options.rounds, options.quick) for size in sizes
        ]
        tables = [table_of_products(found["products"])]
    else:
        found["models"] = {
            name: measured(name, options.rounds, options.quick)
            for name in dict.fromkeys(options.model)
        }
        tables = [table(phase, found["models"]) for phase in PHASES]
    found["load_after"] = load()
    console.print(*tables, sep="\n")
    console.print(f"load average {found['load_after']}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    goals = missed(found.get("models", {}))
    for each in goals:
        console.print(f"goal missed: {each}")
    return int(options.check and bool(goals))


if __name__ == "__main__":
    sys.exit(main())
