"""fp8 on the GPU at hand: which kernels run, how fast, and with what gradients.

    python examples/benchmarks/train_on_gpu.py --policy fp8 [--minutes 10]

What a program compiled without a GPU cannot tell, in one session:

kernels    small programs compiled with XLA's default flags, which let it choose kernels
           by timing them: how many matrix products are calls of cublasLt in 8 bits, in
           16 or 32 bits, and Triton kernels that multiply 8 bits, that restore 8 bits
           to bf16 first, or that see none. And how many values have 8 bits at all: by
           default XLA may keep digits that the program rounds away
gradients  of a small GPT, on this device and on the CPU, against f32 on the CPU:
           the two should be wrong alike, if XLA rounds where the program does
steps      a training step of three dense layers, of 4096 and of 16384 rows and without
           its update, and of a GPT, at each width: bf16 (`mixed_bfloat16`) and fp8 with
           the default flags; fp8 in three other forms, see `FORMS`; both without
           Triton. They are timed in turns as in `train_on_gpu.py`; ratios are to bf16,
           medians over the rounds

What does not begin before `--minutes` are over is left out and said to be. Results are
kept in one file for each device in `--out-dir`. Needs what `train_on_gpu.py` needs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The models are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import optax
from jax.lax import DotAlgorithmPreset
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from examples.benchmarks import train_on_gpu
from jmp_amp.plan.rewrites import fp8 as rewrite
from tests import h100
from tests.measures import relative_error
from tests.zoo import language
from tests.zoo.case import Case

NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
NO_EXCESS = {"xla_allow_excess_precision": False}
FAST = DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
# What is another than in `jmp_amp.plan.rewrites.fp8` while a program is traced.
FORMS: dict[str, dict[str, Any]] = {
    "": {},
    # As for a GPU without units: a product of restored operands.
    "restored": {"compute_capability": lambda: (8, 0)},
    # A product of 8-bit arrays that does not say how to add up.
    "direct": {"_HAS_ALGORITHMS": False},
    # Backward too.
    "fast everywhere": {
        "DotAlgorithmPreset": {"ANY_F8_ANY_F8_F32": FAST, FAST.name: FAST}
    },
}


class Program(NamedTuple):
    """A policy, the compiler options, and a form of `FORMS`."""

    policy: str
    options: dict[str, Any]
    form: str = ""


PROGRAMS = {
    "bf16": Program("mixed_bfloat16", {}),
    "fp8": Program("fp8", {}),
    "fp8_restored": Program("fp8", {}, "restored"),
    "fp8_direct": Program("fp8", {}, "direct"),
    "fp8_fast_everywhere": Program("fp8", {}, "fast everywhere"),
    "bf16_no_triton": Program("mixed_bfloat16", NO_TRITON),
    "fp8_no_triton": Program("fp8", NO_TRITON),
}
WIDTHS = (2048, 4096, 1024)
EXACT = str(amp.Policy(matmul=amp.Fp8(fast_accumulation=False)))
# Policy, and compiler options on the device; on the CPU it is rounded as written.
GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "f32": ("float32", {}),
    "bf16": ("mixed_bfloat16", NO_EXCESS),
    "fp8": ("fp8", NO_EXCESS),
    "fp8, default flags": ("fp8", {}),
    "fp8, no Triton": ("fp8", NO_TRITON),
    # Against the one before: what adding up in fewer bits costs.
    "fp8, no Triton, no fast accumulation": (EXACT, NO_TRITON),
}


def tied_head(info: amp.ModuleInfo) -> bool:
    """Whether the embedding of the GPT is its head here."""
    return info.method == "attend"


Head = Callable[[amp.ModuleInfo], bool] | None


def policy_of(name: str, head: Head) -> amp.PolicyMap | str:
    """Returns a policy by name, under fp8 with the module `head` in bf16."""
    if amp.get_policy(name).matmul is None or head is None:
        return name
    return amp.PolicyMap(name, {head: "mixed_bfloat16"})


def _kind(gemm: h100.Gemm, reads_8_bits: bool) -> str:
    in_8_bits = all(operand.startswith("f8") for operand in gemm.operands)
    if gemm.target != "dot":
        return "cublas_f8" if in_8_bits else "cublas"
    if in_8_bits:
        return "triton_f8"
    return "triton_restored" if reads_8_bits else "triton"


_8_BITS = re.compile(r"^ .* = \(?f8", re.M)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%\S+ \(.*\{$", re.M)


def kernels(compiled: Any) -> dict[str, int]:
    """Returns how many matrix products there are of each kind, loop bodies once.

    And how many operations have results of 8 bits. A product that is no call of a
    library is counted as Triton's; on a CPU all are.
    """
    found: Counter[str] = Counter()
    for body in _COMPUTATION.split(compiled.as_text())[1:]:
        reads = re.search(r"= f8\S* parameter\(", body)
        for gemm in h100.gemms(_Text(body)):
            found[_kind(gemm, reads is not None)] += 1
    return dict(found) | {"values_of_8_bits": len(_8_BITS.findall(compiled.as_text()))}


@dataclasses.dataclass(frozen=True)
class _Text:
    text: str

    def as_text(self) -> str:
        return self.text


def first_derivative(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns the gradient of the squares of what `fn` returns, in all arguments."""

    def gradient(*args: Any) -> Any:
        def loss(args: Any) -> jax.Array:
            return jnp.mean(jnp.square(amp.autocast(fn, "fp8")(*args)))

        return jax.grad(loss)(args)

    return gradient


def forms(tiny: bool) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns the small programs and the shapes of their arguments, by name."""
    m, k, n = (32, 64, 16) if tiny else (1024, 2048, 512)

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def gelu(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ w + b[None])

    def kept_gelu(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x @ w
        return jax.nn.gelu(h), h

    def loop(x: jax.Array, ws: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    def direct(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w, preferred_element_type=jnp.bfloat16)

    x, w, e4m3 = array(m, k), array(k, n), jnp.float8_e4m3fn
    return {
        "8-bit arrays multiplied": (
            direct,
            (array(m, k, dtype=e4m3), array(k, n, dtype=e4m3)),
        ),
        "dense": (amp.autocast(dense, "fp8"), (x, w)),
        "dense, gradient": (first_derivative(dense), (x, w)),
        "dense, bias, gelu, gradient": (first_derivative(gelu), (x, w, array(n))),
        "gelu and its input": (amp.autocast(kept_gelu, "fp8"), (x, w)),
        "scan, gradient": (first_derivative(loop), (array(m, k), array(4, k, k))),
    }


def kernels_of_forms(tiny: bool) -> dict[str, Any]:
    """Returns the kernels of each small program, or why it does not compile."""
    found: dict[str, Any] = {}
    for name, (fn, args) in forms(tiny).items():
        try:
            found[name] = kernels(jax.jit(fn).lower(*args).compile())
        # A program that does not compile is a line of the table, not the end of it.
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    return found


def small_gpt(tiny: bool) -> Case:
    vocabulary, width, heads, layers, batch, context = (
        (32, 16, 2, 1, 2, 8) if tiny else (256, 256, 4, 4, 8, 128)
    )
    return language.gpt(vocabulary, width, heads, layers, batch, context, scanned=False)


def compared_gradients(tiny: bool) -> dict[str, Any]:
    """Returns by policy how far gradients are from f32 on the CPU, here and there.

    And how far they are from each other: roundings of other sums in another order
    become other 8-bit numbers.
    """
    case = small_gpt(tiny)
    cpu, here = jax.devices("cpu")[0], jax.devices()[0]
    with jax.default_device(cpu):
        sample = jax.device_get(jax.jit(case.sample)(jax.random.key(0)))

    def gradient(policy: str, device: Any, options: dict[str, Any]) -> Any:
        loss = amp.autocast(case.loss, policy_of(policy, tied_head))
        with jax.default_matmul_precision("highest" if policy == "float32" else None):
            compiled = jax.jit(jax.grad(loss), compiler_options=options)
            return jax.device_get(compiled(*jax.device_put(sample, device)))

    reference = gradient("float32", cpu, NO_EXCESS)
    found = {}
    for name, (policy, options) in GRADIENTS.items():
        on_cpu = gradient(policy, cpu, NO_EXCESS)
        # The CPU has none of the options of a GPU.
        on_device = gradient(policy, here, NO_EXCESS if here == cpu else options)
        found[name] = {
            "error_on_cpu": relative_error(on_cpu, reference),
            "error_on_device": relative_error(on_device, reference),
            "device_to_cpu": relative_error(on_device, on_cpu),
        }
    return found


def mlp(width: int, tiny: bool, rows: int = 4096) -> Case:
    """Three dense layers without biases, silu between them."""
    batch = 16 if tiny else rows

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["input"]
        for i, w in enumerate(params):
            x = x @ w if i == 0 else jax.nn.silu(x) @ w
        return jnp.mean(jnp.square(language.wide(x) - batch["target"]))

    def sample(key: jax.Array) -> tuple[Any, Any]:
        *keys, for_input, for_target = jax.random.split(key, 5)
        params = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys]
        data = [
            jax.random.normal(k, (batch, width), jnp.float32)
            for k in (for_input, for_target)
        ]
        return params, dict(zip(("input", "target"), data, strict=True))

    return Case(sample, loss, lambda dtype: loss)


def gpt(width: int, tiny: bool) -> Case:
    vocabulary, heads, layers, batch, context = (
        (32, 2, 1, 2, 8) if tiny else (32768, width // 128, 4, 8, 1024)
    )
    return language.gpt(vocabulary, width, heads, layers, batch, context, scanned=False)


class Model(NamedTuple):
    """A model by its width, its head, and whether its step updates the parameters."""

    case: Callable[[int, bool], Case]
    head: Head
    updates: bool = True


MODELS = {
    "mlp": Model(mlp, None),
    "mlp of 16384 rows": Model(functools.partial(mlp, rows=16384), None),
    "mlp, gradients": Model(mlp, None, updates=False),
    "gpt": Model(gpt, tied_head),
}


@contextlib.contextmanager
def traced_in(form: str) -> Iterator[None]:
    """A context in which products of 8 bits are traced in a form of `FORMS`."""
    before = {name: getattr(rewrite, name) for name in FORMS[form]}
    try:
        for name, value in FORMS[form].items():
            setattr(rewrite, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(rewrite, name, value)


class Step:
    """A compiled training step, for `train_on_gpu.Runner`: SGD in f32."""

    def __init__(self, case: Case, model: Model, program: str) -> None:
        policy, options, form = PROGRAMS[program]
        loss = amp.autocast(case.loss, policy_of(policy, model.head))
        optimizer = optax.sgd(1e-3)

        def init(key: jax.Array) -> tuple[Any, Any]:
            params, batch = case.sample(key)
            if not model.updates:
                return (params, jax.tree.map(jnp.zeros_like, params)), batch
            return (params, optimizer.init(params)), batch

        def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, batch)
            if not model.updates:
                return (params, grads), value
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        on_cpu = jax.default_backend() == "cpu"  # it has no such options
        shapes = jax.eval_shape(init, jax.random.key(0))
        with traced_in(form):
            lowered = jax.jit(step, donate_argnums=0).lower(*shapes)
        self.init = init
        self.compiled = lowered.compile({} if on_cpu else options)

    def figures(self) -> dict[str, Any]:
        memory: Any = self.compiled.memory_analysis()
        return {"kernels": kernels(self.compiled), "temp": memory.temp_size_in_bytes}


def timed(
    case: Case, model: Model, steps: int, rounds: int, warmup: int
) -> dict[str, Any]:
    """Returns a row for each program: timed in turns, all that run together."""
    rows: dict[str, dict[str, Any]] = {}
    runners: dict[str, train_on_gpu.Runner] = {}
    for name in PROGRAMS:
        try:
            step: Any = Step(case, model, name)
            runner = train_on_gpu.Runner(step)
            runner.seconds(1)
            runner.seconds(warmup)
        # One that does not fit, or does not compile, is a row of the table.
        except Exception as error:
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        rows[name] = {**step.figures(), "seconds": []}
        runners[name] = runner
    order = list(runners)
    for _ in range(rounds):
        for name in order:
            runners[name].seconds(1)
            rows[name]["seconds"].append(runners[name].seconds(steps) / steps)
        order.reverse()
    for name, runner in runners.items():
        rows[name] |= runner.outcome() | {"speed": speed(rows[name], rows["bf16"])}
    return rows


def speed(row: dict[str, Any], bf16: dict[str, Any]) -> float | None:
    """Returns how many times as fast as bf16 a program is.

    Example:
      >>> speed({"seconds": [1.0, 2.0, 1.0]}, {"seconds": [2.0, 3.0, 1.0]})
      1.5
    """
    if "failed" in bf16:
        return None
    pairs = zip(bf16["seconds"], row["seconds"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def table_of(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    """Returns rows of figures as a table; seconds as the median in ms."""
    columns = dict.fromkeys(key for row in rows.values() for key in row)
    columns.pop("failed", None)
    table = Table("", title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(_cell(row.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{1e3 * statistics.median(value):.2f} ms"
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def session(
    options: argparse.Namespace, report: Callable[[str, dict[str, Any]], None]
) -> list[str]:
    """Does everything there is time for, and returns the names of what there was not.

    Args:
      options: of the command line.
      report: takes the name and the rows of a part, as soon as they are known.
    """
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "kernels": lambda: kernels_of_forms(options.tiny),
        "gradients": lambda: compared_gradients(options.tiny),
    }
    times = (options.steps, options.rounds, options.warmup)
    for width in options.width:
        for name, model in MODELS.items():
            parts[f"{name} {width}"] = lambda width=width, model=model: timed(
                model.case(width, options.tiny), model, *times
            )
    end, left_out = time.monotonic() + 60 * options.minutes, []
    for name, part in parts.items():
        if time.monotonic() > end:
            left_out.append(name)
            continue
        try:
            report(name, part())
        except Exception as error:
            report(name, {"": {"failed": f"{type(error).__name__}: {error}"[:300]}})
    return left_out


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--width", type=int, nargs="+", default=None, help=f"default: {WIDTHS}")
    add("--minutes", type=float, default=9, help="default: 9")
    add("--steps", type=int, default=10, help="in a round; default: 10")
    add("--rounds", type=int, default=5, help="default: 5")
    add("--warmup", type=int, default=3, help="steps; default: 3")
    add("--tiny", action="store_true", help=train_on_gpu.TINY_HELP)
    add("--json", type=Path, metavar="FILE", help="write here too")
    add("--out-dir", type=Path, metavar="FOLDER", help="default: results/")
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("rounds", 1), ("warmup", 0), ("minutes", 0)):
        if not getattr(options, name) >= least:
            parser.error(f"--{name} {getattr(options, name)}: use {least} or more")
    options.width = options.width or ((16,) if options.tiny else WIDTHS)
    for width in options.width:
        if width < 16 or width % (16 if options.tiny else 128):
            parser.error(f"--width {width}: use a multiple of 128")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a program failed, 2 if there is no device."""
    options = parse(arguments)
    device = train_on_gpu.device_found()
    if device["platform"] == "cpu" and not options.tiny:
        print(
            "fp8_on_gpu.py: error: needs a GPU that JAX can use, and found only a CPU; "
            f"{train_on_gpu.TINY_HELP}.",
            file=sys.stderr,
        )
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    run = {"conditions": conditions(device, options), "parts": {}, "left_out": []}
    entry = "fp8 tiny" if options.tiny else "fp8"

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps({entry: run}, indent=1) + "\n")
        if options.out_dir or not options.tiny:
            folder = options.out_dir or train_on_gpu.RESULTS
            file = folder / train_on_gpu.file_name(device["kind"])
            train_on_gpu.keep({entry: run}, file)

    def report(name: str, rows: dict[str, Any]) -> None:
        run["parts"][name] = rows
        console.print(table_of(f"{name}; {device['kind']}", rows))
        for program, row in rows.items():
            if "failed" in row:
                console.print(f"  {program}: {row['failed']}", markup=False)
        keep()  # a later part may take the machine down

    # Adam of optax and some layers of Flax mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
        run["left_out"] = session(options, report)
    keep()
    for name in run["left_out"]:
        console.print(f"no time for {name}")
    rows = [row for part in run["parts"].values() for row in part.values()]
    return int(any("failed" in row for row in rows))


def conditions(device: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Returns under which conditions the parts were measured."""
    task = train_on_gpu.Task("run", "simple", "bfloat16", (), tiny=options.tiny)
    about = train_on_gpu.conditions(device, task, one_process=True)
    for name in ("model", "size", "batch", "half_dtype", "half_dtype_of_f16_scaled"):
        del about[name]
    times = {name: getattr(options, name) for name in ("steps", "rounds", "warmup")}
    # 8-bit products begin at 8.9.
    capability = getattr(jax.devices()[0], "compute_capability", None)
    about |= {"compute_capability": capability, "policy": str(amp.get_policy("fp8"))}
    return about | times


if __name__ == "__main__":
    sys.exit(main())
