"""What an AdamW update of low-precision moments moves and takes, beside f32 moments.

    python examples/benchmarks/low_precision_update.py [--train] [--json FILE]
    python examples/benchmarks/low_precision_update.py --run [--json FILE]

For a tree of parameters as of a GPT, an update of `optax.adamw` and the same in

  mu bf16        optax's own `mu_dtype=jnp.bfloat16`: the first moment alone
  bfloat16       `amp.with_low_precision_state(..., "bfloat16")`, rounded to nearest
  bfloat16, key  the same, rounded at random
  float8         `amp.with_low_precision_state(..., "float8")`

state    bytes of the state
temp     temporary bytes of the update that is compiled for an H100, with --run for the
         GPU at hand; parameters and state are donated
moved    operands and results of all kernels of that program; not with --run
kernels  how many there are; not with --run
seconds  of an update on the GPU at hand, the median of all rounds; with --run alone

With --train the GPT of `char_gpt.py` is trained on this machine, in f32, with each of
them:

loss      of the held-out text, after the last of 400 steps
distance  of its weights from those of the run with f32 moments, as a share of the way
          that these have gone

Ratios are to f32 moments. Without --run no GPU is needed and none is used.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Helpers of the tests are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if "--run" not in sys.argv:
    # Before JAX is imported: see `tests/h100.py`.
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from examples import char_gpt
from examples.benchmarks import roofline, train_on_gpu
from tests import h100

KEY = jax.random.key(0)
STEPS = 400
ADAMW = functools.partial(optax.adamw, 1e-3)


def optimizers(
    adamw: Callable[..., optax.GradientTransformation] = ADAMW,
) -> dict[str, optax.GradientTransformation]:
    """Returns AdamW with moments in each dtype, by name."""
    low = amp.with_low_precision_state
    return {
        "f32": adamw(),
        "mu bf16": adamw(mu_dtype=jnp.bfloat16),
        "bfloat16": low(adamw()),
        "bfloat16, key": low(adamw(), key=KEY),
        "float8": low(adamw(), "float8"),
    }


def parameters(width: int, layers: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes of the weights of a GPT of `layers` layers, f32."""
    found: dict[str, Any] = {"embedding": (32768, width)}
    for layer in range(layers):
        found[f"qkv {layer}"] = (width, 3 * width)
        found[f"out {layer}"] = (width, width)
        found[f"up {layer}"] = (width, 4 * width)
        found[f"down {layer}"] = (4 * width, width)
        found[f"norm {layer}"] = (width,)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in found.items()
    }


def update_of(tx: optax.GradientTransformation) -> Any:
    """Returns (params, state, grads) -> (params, state)."""

    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def compiled(tx: optax.GradientTransformation, shapes: Any, run: bool) -> Any:
    """Returns the update compiled for the GPU at hand (`run`), or for an H100."""
    args = (shapes, jax.eval_shape(tx.init, shapes), shapes)
    if run:
        return jax.jit(update_of(tx), donate_argnums=(0, 1)).lower(*args).compile()
    args = jax.tree.map(h100.pin, args)
    return h100.compile_for_gpu(update_of(tx), *args, donate_argnums=(0, 1))


def figures(
    tx: optax.GradientTransformation, program: Any, shapes: Any, run: bool
) -> dict[str, Any]:
    """Returns what the compiled update needs, and, but with `run`, moves."""
    state: Any = jax.eval_shape(tx.init, shapes)
    found = {
        "state": sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        ),
        "temp": h100.temp_bytes(program),
    }
    if run:
        return found
    work = roofline.totals(roofline.schedule(program.as_text()).kernels)
    return found | {"moved": work["bytes_moved"], "kernels": work["kernels"]}


def seconds(programs: dict[str, Any], shapes: Any, rounds: int) -> dict[str, Any]:
    """Returns what an update takes, by name: of each round."""
    keys = jax.random.split(KEY, len(shapes))
    grads = {
        name: jax.random.normal(key, leaf.shape, jnp.float32)
        for key, (name, leaf) in zip(keys, shapes.items(), strict=True)
    }
    found: dict[str, list[float]] = {name: [] for name in programs}
    for name, tx in optimizers().items():
        params = jax.tree.map(lambda leaf: leaf + 1, grads)
        state, run = tx.init(params), programs[name]
        for _ in range(rounds + 2):
            jax.block_until_ready((params, state))
            start = time.perf_counter()
            for _ in range(10):
                params, state = run(params, state, grads)
            jax.block_until_ready((params, state))
            found[name].append((time.perf_counter() - start) / 10)
        found[name] = found[name][2:]
    return found


def training(steps: int) -> dict[str, dict[str, float]]:
    """Returns the held-out loss and the distance of a training with each optimizer."""
    rate = optax.warmup_cosine_decay_schedule(0, 2e-3, steps // 10, steps + 1)
    adamw = functools.partial(optax.adamw, rate, b2=0.99, weight_decay=0.1)
    tokens = char_gpt.batch_of(0, 0, char_gpt.MODEL.context)[:, :-1]
    first = char_gpt.initialise(char_gpt.MODEL, KEY, tokens)
    ends, losses = dict[str, Any](), dict[str, float]()
    for name, low in optimizers(adamw).items():
        tx = optax.chain(optax.clip_by_global_norm(1.0), low)
        tx = amp.with_loss_scale(tx, amp.no_loss_scale())
        result = char_gpt.train("float32", steps, tx=tx, params=first)
        ends[name], losses[name] = result.params, result.validation_loss

    def distance(one: Any, other: Any) -> float:
        return float(optax.tree.norm(optax.tree.sub(one, other)))

    way = distance(ends["f32"], first)
    return {
        name: {"loss": losses[name], "distance": distance(end, ends["f32"]) / way}
        for name, end in ends.items()
    }


def table(rows: dict[str, dict[str, Any]], title: str) -> Table:
    """Returns the figures, ratios to the first row behind them."""
    found = Table("", title=title, title_justify="left")
    columns = [column for column in next(iter(rows.values()))]
    for column in columns:
        found.add_column(column, justify="right")
    first = next(iter(rows.values()))

    def cell(row: dict[str, Any], column: str) -> str:
        value, base = row[column], first[column]
        if column == "seconds":
            value, base = statistics.median(value), statistics.median(base)
            return f"{1e3 * value:.2f} ms ({value / base:.2f}x)"
        if column in ("loss", "distance"):
            return f"{value:.4f}"
        if column == "kernels":
            return f"{value:.0f}"
        # Next to no bytes are no base for a ratio.
        ratio = f" ({value / base:.2f}x)" if base > 1e6 else ""
        return f"{value / 1e6:.0f} MB{ratio}"

    for name, row in rows.items():
        found.add_row(name, *(cell(row, column) for column in columns))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024, help="default: 1024")
    parser.add_argument("--layers", type=int, default=12, help="default: 12")
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("--run", action="store_true", help="on the GPU at hand")
    parser.add_argument("--train", action="store_true", help="a small GPT, 400 steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write here")
    options = parser.parse_args(arguments)
    shapes = parameters(options.width, options.layers)
    # Adam of optax mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        run = options.run
        programs = {
            name: compiled(tx, shapes, run) for name, tx in optimizers().items()
        }
        rows = {
            name: figures(tx, programs[name], shapes, run)
            for name, tx in optimizers().items()
        }
        if run:
            for name, found in seconds(programs, shapes, options.rounds).items():
                rows[name]["seconds"] = found
        if options.train:
            for name, found in training(STEPS).items():
                rows[name] |= found
    device = train_on_gpu.device_found()
    Console(width=120).print(table(rows, f"AdamW; {device['kind']}"))
    if options.json:
        about = {"device": device, "jax": jax.__version__, "optax": optax.__version__}
        size = {"width": options.width, "layers": options.layers}
        found = {"conditions": about | size, "optimizers": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
