"""Training steps executed on the accelerator at hand: steps/s and peak memory.

    python examples/benchmarks/train_on_gpu.py [--model gpt vit] [--dtype bfloat16]
    python examples/benchmarks/train_on_gpu.py --policy fp8

The second is another session, with options of its own: see `fp8_on_gpu.py`. In the
first, for each model, seven programs of one training step with random weights and data:

  f32_tf32     the unchanged model in f32, its products in TF32 where there is TF32
  f32_highest  the same with products in true f32
  twin         mixed precision by hand: Flax's `dtype=`, f32 parameters and softmax
  autocast     `amp.autocast` of the unchanged model
  f16_scaled   `amp.autocast` in f16 with dynamic loss scaling, whatever `--dtype` is
  saved_all    `autocast` that keeps for the backward pass all that JAX would keep,
               `amp.Policy(saved="all")`; `saved_least`: that policy

steps/s  of the median round, with the slowest and the fastest one. Programs that fit on
         the device together are timed in turns: a round of each, then the next round
         in the opposite order; their ratios are medians over the rounds. One that was
         timed with none other is marked "alone": clocks may have drifted in between
program  bytes of arguments and temporaries of the compiled step; its state is donated
peak     the most that the allocator had in use, where the backend tells. It includes
         what stands outside of the step, such as the initialisation

A program is compiled by one process and run by another, which finds it in a cache: the
memory that choosing kernels takes is in no peak, all timings are of the same binaries,
and a program that does not fit costs its own row alone. Kernels are chosen by timing
them, so twin and autocast may get different ones by chance: repeat before you believe
a percent.

The models: `simple`, Paddle's SimpleNet, for which it publishes 2.26 (O1) and 3.29 (O2)
times the speed of f32 on a V100
(https://www.paddlepaddle.org.cn/documentation/docs/en/guides/performance_improving/amp_en.html);
`gpt`, GPT-2 124M; `gpt_scan`, the same with its layers in one loop; `vit`, ViT-B/16
with a head of 10 classes; `resnet`, ResNet-50.

Results are kept in one file for each device in `--out-dir`, an entry for each model,
dtype and batch. Needs the extra `test`, where the models come from, and a JAX that
knows the accelerator: `pip install '.[test]' 'jax[cuda12]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The models are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from tests.zoo import language, vision
from tests.zoo.case import Case

SAVED = {"saved_all": "all", "saved_least": "least"}
PROGRAMS = ("f32_tf32", "f32_highest", "twin", "autocast", "f16_scaled", *SAVED)
# XLA's default is TF32 where there is TF32. JAX's "tensorfloat32" asks XLA for "high",
# at which cuBLAS multiplies in TF32 too, but kernels that XLA writes itself do not:
# f32 would look slower than it is.
PRECISIONS = dict.fromkeys(PROGRAMS, "default") | {"f32_highest": "highest"}
REFERENCES = ("f32_tf32", "twin")
ROOT = str(Path(__file__).resolve().parents[2])
RESULTS = Path(__file__).resolve().parent / "results"
TINY_HELP = "--tiny tests this script on any device and says nothing about speed"

Dtype = Any
# (params, state, batch) -> (f32[], state); `state` is what else a step writes.
Loss = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model at one size, and how it is trained.

    Attributes:
      size: in words.
      batch: samples in a step.
      sample: key -> (params, state, batch).
      loss_in: `None` for the unchanged f32 loss, a half dtype for the twin's.
      optimizer: as optax has it.
    """

    size: str
    batch: int
    sample: Callable[[jax.Array], tuple[Any, Any, Any]]
    loss_in: Callable[[Dtype], Loss]
    optimizer: optax.GradientTransformation


class SimpleNet(nn.Module):
    """Three linear layers with nothing in between, as in Paddle's guide."""

    width: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x = batch["input"]
        for _ in range(3):
            x = nn.Dense(self.width, dtype=self.dtype)(x)
        return x


class ResNet(nn.Module):
    """Bottleneck blocks as in the ImageNet example of Flax, in training mode."""

    width: int
    blocks: tuple[int, ...]
    classes: int
    dtype: Dtype = None

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, False, momentum=0.9, epsilon=1e-5, dtype=self.dtype
        )
        x = nn.relu(norm()(conv(self.width, (7, 7), (2, 2))(image)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.blocks):
            width = self.width * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                y = nn.relu(norm()(conv(width, (1, 1))(x)))
                y = nn.relu(norm()(conv(width, (3, 3), (stride, stride))(y)))
                y = conv(4 * width, (1, 1))(y)
                y = norm(scale_init=nn.initializers.zeros)(y)
                if x.shape != y.shape:
                    x = norm()(conv(4 * width, (1, 1), (stride, stride))(x))
                x = nn.relu(x + y)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean(axis=(1, 2)))


def stateless(
    size: str, batch: int, case: Case, optimizer: optax.GradientTransformation
) -> Workload:
    """Returns the workload of a case of the zoo: no state but the parameters."""

    def sample(key: jax.Array) -> tuple[Any, Any, Any]:
        params, inputs = case.sample(key)
        return params, (), inputs

    def loss_in(dtype: Dtype) -> Loss:
        loss = case.loss if dtype is None else case.twin(dtype)
        return lambda params, state, batch: (loss(params, batch), state)

    return Workload(size, batch, sample, loss_in, optimizer)


def simple(batch_scale: float, tiny: bool) -> Workload:
    width = 16 if tiny else 4096
    batch = scaled(8 if tiny else 512, batch_scale)

    def inputs(key: jax.Array) -> Any:
        for_input, for_target = jax.random.split(key)
        return {
            "input": jax.random.normal(for_input, (batch, width), jnp.float32),
            "target": jax.random.normal(for_target, (batch, width), jnp.float32),
        }

    case = language.linen_case(
        SimpleNet(width),
        inputs,
        lambda found, batch: jnp.mean((language.wide(found) - batch["target"]) ** 2),
    )
    return stateless(f"3 x Linear({width})", batch, case, optax.sgd(1e-4))


def gpt(batch_scale: float, tiny: bool, scanned: bool = False) -> Workload:
    vocabulary, width, heads, layers, context = (
        (32, 16, 2, 2, 8) if tiny else (50257, 768, 12, 12, 1024)
    )
    batch = scaled(2 if tiny else 8, batch_scale)
    shape = (batch, context)
    case = language.gpt(vocabulary, width, heads, layers, *shape, scanned=scanned)
    size = f"{layers} layers, {heads} heads, width {width}, context {context}"
    return stateless(size, batch, case, optax.adamw(1e-4))


def gpt_scan(batch_scale: float, tiny: bool) -> Workload:
    return gpt(batch_scale, tiny, scanned=True)


def vit(batch_scale: float, tiny: bool) -> Workload:
    patch, width, heads, layers, side = (
        (4, 16, 2, 2, 8) if tiny else (16, 768, 12, 12, 224)
    )
    batch = scaled(2 if tiny else 64, batch_scale)
    case = vision.vit(patch, width, heads, layers, batch, side, side, 3)
    size = f"{layers} layers, width {width}, patches of {patch}, images of {side}"
    return stateless(size, batch, case, optax.adamw(1e-4))


def resnet(batch_scale: float, tiny: bool) -> Workload:
    width, blocks, side = (4, (1, 1), 16) if tiny else (64, (3, 4, 6, 3), 224)
    batch = scaled(4 if tiny else 128, batch_scale)
    model = ResNet(width, blocks, 10 if tiny else 1000)

    def sample(key: jax.Array) -> tuple[Any, Any, Any]:
        for_params, for_batch = jax.random.split(key)
        images = vision.random_images(for_batch, batch, side, side, 3)
        variables = model.init(for_params, images["image"])
        return variables["params"], variables["batch_stats"], images

    def loss_in(dtype: Dtype) -> Loss:
        in_dtype = model.clone(dtype=dtype)

        def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
            logits, written = in_dtype.apply(
                {"params": params, "batch_stats": state},
                batch["image"],
                mutable=["batch_stats"],
            )
            return vision.cross_entropy(logits, batch["label"]), written["batch_stats"]

        return loss

    size = f"blocks {blocks}, width {width}, images of {side}"
    return Workload(size, batch, sample, loss_in, optax.sgd(1e-2, momentum=0.9))


WORKLOADS: dict[str, Callable[[float, bool], Workload]] = {
    "simple": simple,
    "gpt": gpt,
    "gpt_scan": gpt_scan,
    "vit": vit,
    "resnet": resnet,
}


def scaled(batch: int, batch_scale: float) -> int:
    return max(1, round(batch * batch_scale))


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step of one model: `step(carry, batch) -> (carry, loss)`.

    Attributes:
      init: key -> (carry, batch), where carry is (params, state, opt_state).
      step: not compiled.
      precision: of matrix products, as `jax.default_matmul_precision` takes it.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    precision: str

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        abstract = jax.eval_shape(self.init, jax.random.key(0))
        with jax.default_matmul_precision(self.precision):
            return jax.jit(self.step, donate_argnums=0).lower(*abstract).compile()


@functools.cache
def program(
    model: str, batch_scale: float, tiny: bool, name: str, dtype: str
) -> Program:
    """Returns a program; the same one each time, for it is slow to compile."""
    workload = WORKLOADS[model](batch_scale, tiny)
    optimizer = workload.optimizer
    value_and_grad: Any = jax.value_and_grad
    loss = workload.loss_in(dtype if name == "twin" else None)
    if name == "autocast" or name in SAVED:
        policy = amp.get_policy(f"mixed_{dtype}")
        saved = SAVED.get(name, policy.saved)
        loss = amp.autocast(loss, dataclasses.replace(policy, saved=saved))
    if is_scaled := name == "f16_scaled":
        loss = amp.autocast(loss, "mixed_float16")
        optimizer = amp.with_loss_scale(optimizer, amp.dynamic_loss_scale())
        value_and_grad = amp.value_and_grad
    gradient = value_and_grad(loss, has_aux=True)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params, state, batch = workload.sample(key)
        return (params, state, optimizer.init(params)), batch

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, old_state, opt_state = carry
        scale = {"loss_scale": opt_state} if is_scaled else {}
        (value, state), grads = gradient(params, old_state, batch, **scale)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        if is_scaled:
            state = amp.keep_if_finite(opt_state, state, old_state)
        return (optax.apply_updates(params, updates), state, opt_state), value

    return Program(init, step, PRECISIONS[name])


def peak_bytes() -> int | None:
    # A CPU has no such statistics.
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process does: compile a program, or run some of them in turns.

    Attributes:
      action: "device", "compile" or "run".
      programs: names of `PROGRAMS`; one where they are to be compiled.
      steps: in a round.
    """

    action: str
    model: str = ""
    dtype: str = ""
    programs: tuple[str, ...] = ()
    batch_scale: float = 1.0
    tiny: bool = False
    steps: int = 0
    rounds: int = 0
    warmup: int = 0

    def programs_by_name(self) -> dict[str, Program]:
        which = (self.model, self.batch_scale, self.tiny)
        return {name: program(*which, name, self.dtype) for name in self.programs}


def device_found() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "devices": jax.device_count(),
        "runtime": device.client.platform_version,
    }


def compile_alone(task: Task) -> dict[str, Any]:
    (found,) = task.programs_by_name().values()
    start = time.perf_counter()
    memory: Any = found.compiled.memory_analysis()
    return {
        "compile_seconds": time.perf_counter() - start,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "program_bytes": memory.temp_size_in_bytes + memory.argument_size_in_bytes,
    }


class Runner:
    """A program and its state on the device."""

    def __init__(self, found: Program) -> None:
        self.step = found.compiled
        self.carry, self.batch = jax.jit(found.init)(jax.random.key(0))
        self.losses: list[float] = []

    def seconds(self, steps: int) -> float:
        """Returns what `steps` steps took, after which the device has nothing to do."""
        start = time.perf_counter()
        loss = None
        for _ in range(steps):
            self.carry, loss = self.step(self.carry, self.batch)
        jax.block_until_ready((self.carry, loss))
        passed = time.perf_counter() - start
        if loss is not None:
            self.losses.append(float(loss))
        return passed

    def outcome(self) -> dict[str, Any]:
        # NaN costs less power to multiply than numbers do: a loss shows what was timed.
        found: dict[str, Any] = {
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
        }
        try:
            found["skipped"] = int(amp.metrics(self.carry[-1])["skipped_total"])
        except ValueError:
            pass  # no loss scale
        return found


def run_in_turns(task: Task) -> dict[str, Any]:
    """Returns by program its seconds a step in each round, and what became of it."""
    runners = {name: Runner(found) for name, found in task.programs_by_name().items()}
    for runner in runners.values():
        runner.seconds(1)
        runner.seconds(task.warmup)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    order = list(runners)
    for _ in range(task.rounds):
        for name in order:
            runners[name].seconds(1)
            seconds[name].append(runners[name].seconds(task.steps) / task.steps)
        order.reverse()
    return {
        "peak_bytes": peak_bytes(),
        "programs": {
            name: {"seconds": seconds[name], **runner.outcome()}
            for name, runner in runners.items()
        },
    }


def first_line(text: str) -> str:
    """Returns the line of an error that says what it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"Error|EXHAUSTED|out of memory", line)]
    return ((told or lines)[-1] if lines else "no message")[:300]


def work(task: Task) -> dict[str, Any]:
    """Returns the outcome of `task`, or {"failed": why}; in this process."""
    actions: dict[str, Callable[[], dict[str, Any]]] = {
        "device": device_found,
        "compile": lambda: compile_alone(task),
        "run": lambda: run_in_turns(task),
    }
    try:
        # Adam of optax and some layers of Flax mix dtypes.
        with jax.numpy_dtype_promotion("standard"):
            return actions[task.action]()
    # A program that does not fit is a row of the table, not the end of it.
    except Exception as error:
        return {"failed": first_line(f"{type(error).__name__}: {error}").rstrip(": ")}


def platforms() -> dict[str, str]:
    """Returns the JAX_PLATFORMS with which this process was started.

    `tests/h100.py` sets it to the CPU when it is imported. JAX had read it by then.
    """
    config: Any = jax.config
    return {"JAX_PLATFORMS": config.jax_platforms or ""}


def work_elsewhere(task: Task, cache: Path, limit: float) -> dict[str, Any]:
    """Returns the outcome of `task` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        try:
            done = subprocess.run(
                [*command, json.dumps(dataclasses.asdict(task)), str(outcome)],
                env=os.environ | platforms() | compiled,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {limit:g} s"}
        # It may have fallen over only when it ended: what it has written counts.
        if outcome.exists():
            return json.loads(outcome.read_text())
        return {"failed": f"exit {done.returncode}: {first_line(done.stderr)}"}


Worker = Callable[[Task], dict[str, Any]]


def measured(
    task: Task, worker: Worker, end: float = float("inf")
) -> dict[str, dict[str, Any]]:
    """Returns {program: row}, a row with "failed" where the program did not run.

    Args:
      task: its programs are what is measured, its action does not matter.
      worker: does a task.
      end: of `time.monotonic()`; a program that is not begun by then is left out.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name in task.programs:
        if time.monotonic() > end:
            rows[name] = {"failed": "not begun: --minutes were over", "timed_with": []}
            continue
        one = dataclasses.replace(task, programs=(name,))
        row = worker(dataclasses.replace(one, action="compile"))
        if "failed" not in row:
            found = worker(dataclasses.replace(one, action="run"))
            row |= found.pop("programs", {}).get(name, {}) | found
        rows[name] = row | {"timed_with": []}
    running = tuple(name for name, row in rows.items() if "failed" not in row)
    halves = tuple(name for name in running if name in ("twin", "autocast"))
    for group in dict.fromkeys((running, halves)):
        if len(group) < 2:
            continue
        found = worker(dataclasses.replace(task, programs=group, action="run"))
        if "failed" in found:
            continue
        for name in group:
            rows[name] |= found["programs"][name]
            rows[name]["timed_with"] = [other for other in group if other != name]
        break
    for row in rows.values():
        if "seconds" in row:
            row["steps_per_second"] = {
                "median": 1 / statistics.median(row["seconds"]),
                "min": 1 / max(row["seconds"]),
                "max": 1 / min(row["seconds"]),
            }
    return rows


def ratios(row: dict[str, Any], name: str, reference: dict[str, Any]) -> dict[str, Any]:
    """Returns the speed and memory of `row` over those of `reference`, called `name`.

    Example:
      >>> one = {"seconds": [1.0, 3.0, 2.0], "program_bytes": 6, "timed_with": ["two"]}
      >>> two = {"seconds": [2.0, 3.0, 6.0], "program_bytes": 8, "timed_with": ["one"]}
      >>> ratios(one, "two", two)
      {'speed': 2.0, 'program_bytes': 0.75}
      >>> ratios(one, "two", {"failed": "RESOURCE_EXHAUSTED"})
      {}
    """
    found = {}
    if "seconds" in row and "seconds" in reference:
        ours, theirs = row["seconds"], reference["seconds"]
        if name in row["timed_with"]:
            pairs = zip(theirs, ours, strict=True)
            found["speed"] = statistics.median(their / our for their, our in pairs)
        else:
            found["speed"] = statistics.median(theirs) / statistics.median(ours)
    for figure in ("program_bytes", "peak_bytes"):
        if row.get(figure) is not None and reference.get(figure):
            found[figure] = row[figure] / reference[figure]
    return found


def with_ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns `rows` with "ratios", to each program of `REFERENCES` that there is."""
    return {
        name: row
        | {
            "ratios": {
                reference: ratios(row, reference, rows[reference])
                for reference in REFERENCES
                if reference in rows and reference != name and "failed" not in row
            }
        }
        for name, row in rows.items()
    }


def table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    found = Table(title=title, title_justify="left")
    found.add_column("program")
    for column in ("steps/s", "slowest-fastest", "speed / f32_tf32", "speed / twin"):
        found.add_column(column, justify="right")
    for column in ("program MB", "/ twin", "peak MB", "peak / twin", "loss"):
        found.add_column(column, justify="right")

    def ratio(row: dict[str, Any], reference: str, figure: str) -> str:
        value = row["ratios"].get(reference, {}).get(figure)
        return "" if value is None else f"{value:.3f}"

    def megabytes(row: dict[str, Any], figure: str) -> str:
        return f"{row[figure] / 1e6:.0f}" if row.get(figure) is not None else ""

    for name, row in rows.items():
        if "failed" in row:
            found.add_row(name, "failed")
            continue
        speed = row["steps_per_second"]
        found.add_row(
            name if row["timed_with"] else f"{name} (alone)",
            f"{speed['median']:.2f}",
            f"{speed['min']:.2f}-{speed['max']:.2f}",
            ratio(row, "f32_tf32", "speed"),
            ratio(row, "twin", "speed"),
            megabytes(row, "program_bytes"),
            ratio(row, "twin", "program_bytes"),
            megabytes(row, "peak_bytes"),
            ratio(row, "twin", "peak_bytes"),
            f"{row['first_loss']:.4g} > {row['last_loss']:.4g}",
        )
    return found


def told_by(*command: str) -> str | None:
    """Returns what a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def conditions(device: dict[str, Any], task: Task, one_process: bool) -> dict[str, Any]:
    """Returns under which conditions the rows of `task` were measured."""
    workload = WORKLOADS[task.model](task.batch_scale, task.tiny)
    return {
        "device": device,
        "nvidia_smi": told_by(
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.max.sm,power.limit",
            "--format=csv,noheader",
        ),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "revision": told_by("git", "-C", ROOT, "describe", "--always", "--dirty"),
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": task.model,
        "size": workload.size,
        "batch": workload.batch,
        "half_dtype": task.dtype,
        "half_dtype_of_f16_scaled": "float16",
        "matmul_precision": {name: PRECISIONS[name] for name in task.programs},
        "tiny": task.tiny,
        "steps_in_a_round": task.steps,
        "rounds": task.rounds,
        "warmup_steps": task.warmup,
        "peak_is_of_one_program": not one_process,
        "environment": {
            name: value
            for name, value in (os.environ | platforms()).items()
            if name.startswith(("XLA_", "JAX_", "NVIDIA_TF32", "CUDA_VISIBLE"))
        },
    }


def file_name(device_kind: str) -> str:
    """Returns the name of the file with the results of a device.

    Example:
      >>> file_name("NVIDIA H100 80GB HBM3")
      'nvidia_h100_80gb_hbm3.json'
    """
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


def keep(runs: dict[str, Any], file: Path) -> None:
    """Writes `runs` to `file`, and leaves other entries of it as they are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(earlier | runs, indent=1) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], metavar="NAME",
        help=f"of {', '.join(WORKLOADS)}; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), default="bfloat16",
        help="of twin and autocast; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--program", nargs="+", choices=PROGRAMS, default=PROGRAMS, metavar="NAME",
        help=f"of {', '.join(PROGRAMS)}; default: all",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=50, help="in a round; default: 50")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--warmup", type=int, default=5, help="steps; default: 5")
    parser.add_argument(
        "--batch-scale", type=float, default=1.0, help="times the batch; default: 1"
    )
    parser.add_argument("--tiny", action="store_true", help=TINY_HELP)
    parser.add_argument(
        "--one-process", action="store_true",
        help="run everything in this process: peaks are then of all programs before",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=1800, help="seconds of a process; default: 1800"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"),
        help="what is not begun by then is left out; default: no limit",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write here too")
    parser.add_argument(
        "--out-dir", type=Path, metavar="FOLDER",
        help="where results are kept; default: results/ next to this script, and "
        "nowhere with --tiny",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("rounds", 1), ("warmup", 0)):
        number = getattr(options, name)
        if number < least:
            parser.error(f"--{name} {number}: use {least} or more")
    for name in ("batch_scale", "limit"):
        number = getattr(options, name)
        if not 0 < number < float("inf"):
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {number}: use a positive number")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes}: use a positive number")
    # In the order of the table, each once.
    options.program = tuple(name for name in PROGRAMS if name in options.program)
    options.model = list(dict.fromkeys(options.model))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a program failed, 2 if there is nothing to run."""
    which = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    which.add_argument("--policy", choices=("half", "fp8"), default="half")
    policy, others = which.parse_known_args(arguments)
    if policy.policy == "fp8":
        from examples.benchmarks import fp8_on_gpu

        return fp8_on_gpu.main(others)
    options = parse(others)
    console = Console(width=None if sys.stdout.isatty() else 150)
    with tempfile.TemporaryDirectory() as cache:
        if options.one_process:
            worker: Worker = work
        else:
            worker = functools.partial(
                work_elsewhere, cache=Path(cache), limit=options.limit
            )
        device = worker(Task("device"))
        if "failed" in device:
            print(
                f"train_on_gpu.py: error: JAX finds no device: {device['failed']}",
                file=sys.stderr,
            )
            return 2
        if device["platform"] == "cpu" and not options.tiny:
            print(
                "train_on_gpu.py: error: needs a GPU or a TPU that JAX can use, and "
                f"found only a CPU; {TINY_HELP}.",
                file=sys.stderr,
            )
            return 2
        runs: dict[str, Any] = {}
        end = time.monotonic() + 60 * options.minutes
        for model in options.model:
            task = Task(
                "run",
                model,
                options.dtype,
                options.program,
                options.batch_scale,
                options.tiny,
                options.steps,
                options.rounds,
                options.warmup,
            )
            about = conditions(device, task, options.one_process)
            rows = with_ratios(measured(task, worker, end))
            entry = f"{model} {options.dtype} batch {about['batch']}"
            runs[f"{entry} tiny" if options.tiny else entry] = {
                "conditions": about,
                "programs": rows,
            }
            title = f"{entry}: {about['size']}; {device['kind']}"
            console.print(table(title, rows))
            for name, row in rows.items():
                if "failed" in row:
                    console.print(f"  {name}: {row['failed']}", markup=False)
            # After each model: a later one may take the machine down.
            if options.json:
                options.json.write_text(json.dumps(runs, indent=1) + "\n")
            if options.out_dir or not options.tiny:
                keep(runs, (options.out_dir or RESULTS) / file_name(device["kind"]))
    failed = [row for run in runs.values() for row in run["programs"].values()]
    return int(any("failed" in row for row in failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        fields = json.loads(sys.argv[2])
        fields["programs"] = tuple(fields["programs"])
        Path(sys.argv[3]).write_text(json.dumps(work(Task(**fields))))
        sys.exit()
    sys.exit(main())
