"""What loss scaling and half-precision weights cost on a CPU, measured by running them.

    python examples/benchmarks/weights_on_cpu.py [--quick] [--json FILE]

Two tables. First a training step without and with a loss scale, and with what others
offer: multilayer perceptrons and a transformer, AdamW or SGD, all in float32, their
parameters and optimizer state donated. Then the update alone of AdamW, 4.2 M parameters
stored in several ways; `masters by hand` is a cast of float32 parameters after the
update, all that masters need where no `optax.apply_updates` has to land on them.

Times are CPU seconds of this process, all threads, so that other jobs do not count as
much. Candidates run by turns; the ratio of two is that of their least times, with the
median of the ratios of all rounds beside it. `again` is the first candidate a second
time: what it differs by is noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from rich.console import Console
from rich.table import Table

import jmp_amp as amp

Step = Callable[..., Any]
HALF = jnp.bfloat16


class Work(NamedTuple):
    """A function to measure: it returns the arguments of its next call."""

    step: Step
    state: tuple[Any, ...]
    constants: tuple[Any, ...]


class Model(NamedTuple):
    """A model: its float32 parameters, a batch and a loss of both."""

    params: Any
    batch: tuple[jax.Array, jax.Array]
    loss: Callable[..., jax.Array]


def perceptron(sizes: tuple[int, ...], batch: int) -> Model:
    """Returns a classifier of dense layers."""
    key = jax.random.key(0)
    params = [
        {"w": jax.random.normal(key, (m, n)) / m**0.5, "b": jnp.zeros(n)}
        for m, n in itertools.pairwise(sizes)
    ]

    def loss(params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            inputs = jax.nn.relu(inputs @ layer["w"] + layer["b"])
        logits = inputs @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    inputs = jax.random.normal(key, (batch, sizes[0]))
    return Model(params, (inputs, jax.random.randint(key, (batch,), 0, 10)), loss)


def transformer(layers: int, width: int, length: int, batch: int) -> Model:
    """Returns a causal language model of 512 words, normalised before each part."""
    key, heads = jax.random.key(0), width // 64

    def weight(index: int, *shape: int) -> jax.Array:
        return (
            jax.random.normal(jax.random.fold_in(key, index), shape) / shape[0] ** 0.5
        )

    params = {
        "words": weight(99, 512, width),
        "layers": [
            {
                "qkv": weight(4 * index, width, 3 * width),
                "out": weight(4 * index + 1, width, width),
                "up": weight(4 * index + 2, width, 4 * width),
                "down": weight(4 * index + 3, 4 * width, width),
            }
            for index in range(layers)
        ],
    }

    def loss(params: Any, words: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["words"][words]
        for layer in params["layers"]:
            qkv = jax.nn.standardize(x) @ layer["qkv"]
            q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, 64), 2, 0)
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.reshape(x.shape) @ layer["out"]
            hidden = jax.nn.gelu(jax.nn.standardize(x) @ layer["up"])
            x = x + hidden @ layer["down"]
        logits = x @ params["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    words = jax.random.randint(key, (batch, length), 0, 512)
    return Model(params, (words, jnp.roll(words, -1, axis=1)), loss)


def training_steps(model: Model, tx: optax.GradientTransformation) -> dict[str, Work]:
    """Returns one training step without a loss scale, and with several."""

    def work(tx: Any, gradient: Callable[..., Any], *more: Any) -> Work:
        def step(params: Any, opt_state: Any, *rest: Any) -> Any:
            *more, inputs, labels = rest
            grads, *more = gradient(params, opt_state, inputs, labels, *more)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, *more

        params = jax.tree.map(jnp.copy, model.params)
        return Work(step, (params, tx.init(params), *more), model.batch)

    def plain(params: Any, _: Any, *batch: Any) -> Any:
        return (jax.value_and_grad(model.loss)(params, *batch)[1],)

    def true(params: Any, _: Any, *batch: Any) -> Any:
        return (amp.value_and_grad(model.loss)(params, *batch)[1],)

    def scaled(params: Any, opt_state: Any, *batch: Any) -> Any:
        both = amp.value_and_grad(model.loss)(params, *batch, loss_scale=opt_state)
        return (both[1],)

    def with_scale(loss_scale: amp.LossScale) -> Work:
        return work(amp.with_loss_scale(tx, loss_scale), scaled)

    def flax_step(params: Any, opt_state: Any, scale: Any, *batch: Any) -> Any:
        value_and_grad = scale.value_and_grad(model.loss)
        scale, finite, _, grads = value_and_grad(params, *batch)
        updates, new = tx.update(grads, opt_state, params)
        keep = lambda a, b: jax.tree.map(lambda x, y: jnp.where(finite, x, y), a, b)  # noqa: E731
        return (
            keep(optax.apply_updates(params, updates), params),
            keep(new, opt_state),
            scale,
        )

    first = work(tx, plain)
    scale = DynamicScale(scale=jnp.float32(2.0**16))
    return {
        "plain": first,
        "again": first._replace(state=jax.tree.map(jnp.copy, first.state)),
        "value_and_grad": work(tx, true),
        "none": with_scale(amp.no_loss_scale()),
        "static": with_scale(amp.static_loss_scale(2.0**10)),
        "dynamic": with_scale(amp.dynamic_loss_scale()),
        "flax DynamicScale": Work(
            flax_step, (*work(tx, plain).state, scale), model.batch
        ),
        "optax.apply_if_finite": work(optax.apply_if_finite(tx, 5), plain),
    }


def updates(shapes: list[tuple[int, ...]]) -> dict[str, Work]:
    """Returns the update of weights that are stored in several ways."""
    key = jax.random.key(0)
    params = [
        jax.random.normal(jax.random.fold_in(key, index), shape) / 20
        for index, shape in enumerate(shapes)
    ]
    grads = jax.tree.map(lambda leaf: jnp.sin(1e4 * leaf), params)

    def cast(dtype: Any) -> Any:
        return [jnp.array(leaf, dtype, copy=True) for leaf in params]

    def work(tx: Any, dtype: Any = HALF) -> Work:
        def step(params: Any, opt_state: Any, grads: Any) -> Any:
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        stored = cast(dtype)
        # The moments of weights that are merely rounded turn float32 in the first step.
        begun = tx.init(cast(jnp.float32) if tx is adam else stored)
        return Work(step, (stored, begun), (grads,))

    def by_hand(dtype: Any) -> Work:
        def step(_: Any, masters: Any, opt_state: Any, grads: Any) -> Any:
            updates, opt_state = adam.update(grads, opt_state, masters)
            masters = optax.apply_updates(masters, updates)
            return [leaf.astype(dtype) for leaf in masters], masters, opt_state

        masters = cast(jnp.float32)
        return Work(step, (cast(dtype), masters, adam.init(masters)), (grads,))

    adam, scale = optax.adamw(1e-3), amp.dynamic_loss_scale()
    f16 = jnp.float16
    random_bits = {
        name: jax.random.key(0, impl=name) for name in ("threefry2x32", "rbg")
    }
    return {
        "bf16, masters by hand": by_hand(HALF),
        "again": by_hand(HALF),
        "f32": work(adam, jnp.float32),
        "bf16, rounded": work(adam),
        "bf16, masters": work(amp.with_master_weights(adam)),
        "bf16, masters, loss scale": work(
            amp.with_loss_scale(amp.with_master_weights(adam), scale)
        ),
        "bf16, Kahan": work(amp.with_kahan(adam)),
        "bf16, stochastic": work(
            amp.with_stochastic_rounding(adam, random_bits["threefry2x32"])
        ),
        "bf16, stochastic, rbg key": work(
            amp.with_stochastic_rounding(adam, random_bits["rbg"])
        ),
        "f16, masters by hand": by_hand(f16),
        "f16, masters": work(amp.with_master_weights(adam), f16),
        "f16, Kahan": work(amp.with_kahan(adam), f16),
        "f16, stochastic": work(
            amp.with_stochastic_rounding(adam, random_bits["threefry2x32"]), f16
        ),
    }


def measured(
    works: dict[str, Work], rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Returns what each of some works costs, the first of them being the measure.

    Args:
      works: what to measure, by turns.
      rounds: how often all of them have their turn.
      seconds: how long a turn takes, about.
    """
    runs = {}
    for name, work in works.items():
        donated = tuple(range(len(work.state)))
        arguments = (*work.state, *work.constants)
        # Optax's moments of half parameters and step counts mix dtypes.
        with jax.numpy_dtype_promotion("standard"):
            lowered = jax.jit(work.step, donate_argnums=donated).lower(*arguments)
        program = lowered.compile()
        runs[name] = run = _Run(program, work)
        for _ in range(2):
            run()
        start = time.process_time()
        run()
        run.calls = max(1, round(seconds / max(time.process_time() - start, 1e-5)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            for _ in range(run.calls):
                run()
            times[name].append((time.process_time() - start) / run.calls)
    first = next(iter(times.values()))
    return {
        name: {
            "ms": 1e3 * min(each),
            "ratio": min(each) / min(first),
            "median_ratio": statistics.median(
                a / b for a, b in zip(each, first, strict=True)
            ),
            "temporary_mb": runs[name].temporary / 2**20,
        }
        for name, each in times.items()
    }


class _Run:
    """Calls a program with what its last call returned."""

    def __init__(self, program: Any, work: Work) -> None:
        self.program, self.state, self.constants = program, work.state, work.constants
        self.calls = 1
        self.temporary = program.memory_analysis().temp_size_in_bytes

    def __call__(self) -> None:
        self.state = tuple(self.program(*self.state, *self.constants))
        jax.block_until_ready(self.state)


def cpu_name() -> str:
    """Returns the name of this CPU, as far as Linux tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0]}, {os.cpu_count()} threads" if names else "unknown"


def figures(quick: bool, rounds: int) -> dict[str, Any]:
    """Returns all figures of both tables."""
    adam, sgd = optax.adamw(1e-3), optax.sgd(1e-3)
    if quick:
        cases = {"MLP 64-64, AdamW": (perceptron((64, 64), 8), adam)}
        shapes, seconds = [(64, 64)], 0.0
    else:
        wide = perceptron((512, 2048, 512), 256)
        clipping = optax.chain(optax.clip_by_global_norm(1.0), adam)
        cases = {
            "MLP 512-2048-512, batch 256, AdamW": (wide, adam),
            "the same, SGD": (wide, sgd),
            "the same, clipping and AdamW": (wide, clipping),
            "MLP 3 x 256, batch 128, AdamW": (perceptron((256,) * 4, 128), adam),
            "transformer 2 x 256, AdamW": (transformer(2, 256, 128, 8), adam),
        }
        shapes, seconds = [(512, 2048), (2048, 512), (512,), (2048,)] * 2, 0.1
    load = os.getloadavg()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        steps = {
            name: measured(training_steps(model, tx), rounds, seconds)
            for name, (model, tx) in cases.items()
        }
        updated = measured(updates(shapes), rounds, seconds)
    return {
        "cpu": cpu_name(),
        "jax": jax.__version__,
        "load_average": [load, os.getloadavg()],
        "rounds": rounds,
        "steps": steps,
        "updates": updated,
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Returns the two tables, to print."""
    where = f"{found['cpu']}, jax {found['jax']}"
    steps = Table(title=f"A training step, CPU time over the plain one ({where})")
    steps.add_column("step")
    for name in found["steps"]:
        steps.add_column(name, justify="right")
    columns = list(found["steps"].values())
    for name in columns[0]:
        cells = [
            f"{column[name]['ms']:.2f} ms"
            if name == "plain"
            else f"{column[name]['ratio']:.2f} ({column[name]['median_ratio']:.2f})"
            for column in columns
        ]
        steps.add_row(name, *cells)
    update = Table(title=f"AdamW's update alone ({where})")
    for column in ("weights", "CPU ms", "over the first", "", "temporary MB"):
        update.add_column(column, justify="left" if column == "weights" else "right")
    for name, row in found["updates"].items():
        update.add_row(
            name,
            f"{row['ms']:.2f}",
            f"{row['ratio']:.2f}",
            f"({row['median_ratio']:.2f})",
            f"{row['temporary_mb']:.1f}",
        )
    return [steps, update]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    found = figures(options.quick, 2 if options.quick else options.rounds)
    console = Console()
    for table in tables(found):
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
