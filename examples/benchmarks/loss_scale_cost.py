"""What loss scaling and the storage of half-precision weights cost a training step.

    python examples/benchmarks/loss_scale_cost.py            reads programs for an H100
    python examples/benchmarks/loss_scale_cost.py --run      and runs them on this GPU

Two tables. First the training steps of three hand-written f16 models, parameters and
optimizer state donated, with a loss scale and without: temporary memory, kernels, bytes
that kernels read and write. Then an optimizer alone, AdamW after clipping, on weights
stored in five ways: bytes per parameter that its update moves, and that stay.

Programs are compiled for a described H100, which needs no GPU (extra `gpu-check`).
`--run` times the first table's steps on a real one, with and without a loss scale by
turns, and says nothing where there is none.

No update may be written before every gradient is known to be finite, so gradients that
would be consumed one by one wait for the last: memory, where the optimizer keeps little
itself. A step that clips by the global norm waits anyway.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# The models are those of the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from tests import h100
from tests.zoo import hand_written
from tests.zoo.hand_written import CLASSIFIERS, Classifier

# The parameters, their gradients and moments are nearly all that this step holds.
FEW_TOKENS = dataclasses.replace(
    CLASSIFIERS["transformer", "large"], inputs=hand_written.random_tokens(4096, 1, 64)
)
CASES: dict[str, tuple[Classifier, optax.GradientTransformation]] = {
    "mlp": (CLASSIFIERS["mlp", "large"], optax.adamw(1e-3)),
    "cnn": (CLASSIFIERS["cnn", "large"], optax.sgd(0.1, momentum=0.9)),
    "transformer": (CLASSIFIERS["transformer", "large"], optax.adamw(1e-3)),
    "few tokens": (FEW_TOKENS, optax.adamw(1e-3)),
}
DONATED = (0, 1)
SHAPES = [(1024, 4096), (4096, 1024), (1024,), (4096,)] * 4

STORAGE: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "f32": (jnp.float32, lambda tx: tx),
    "bf16, rounded": (jnp.bfloat16, lambda tx: tx),
    "bf16, masters": (jnp.bfloat16, amp.with_master_weights),
    "bf16, Kahan": (jnp.bfloat16, amp.with_kahan),
    "bf16, stochastic": (
        jnp.bfloat16,
        lambda tx: amp.with_stochastic_rounding(tx, jax.random.key(0)),
    ),
}


class Cost(NamedTuple):
    """What a compiled step needs: bytes, and kernels."""

    temp_bytes: int
    donated_bytes: int
    kernels: int
    bytes_moved: int


def training_step(
    name: str, clipped: bool, scaled: bool
) -> tuple[Callable[..., Any], Classifier, Any]:
    """Returns a step of (params, opt_state, batch), its model and its optimizer."""
    classifier, tx = CASES[name]
    if clipped:
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    if scaled:
        tx = amp.with_loss_scale(tx, amp.dynamic_loss_scale())
    loss = hand_written.mean_cross_entropy(classifier.half_forward("float16"))

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        gradient: Any = amp.value_and_grad if scaled else jax.value_and_grad
        scale = {"loss_scale": opt_state} if scaled else {}
        (value, state), grads = gradient(loss, has_aux=True)(params, batch, **scale)
        # Adam of optax raises a float to its integer step count.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, value

    return step, classifier, tx


def step_program(name: str, clipped: bool, scaled: bool) -> tuple[Any, ...]:
    """Returns a training step, and the shapes of its arguments."""
    step, classifier, tx = training_step(name, clipped, scaled)
    params, batch = jax.eval_shape(classifier.sample, jax.random.key(0))
    return step, params, jax.eval_shape(tx.init, params), batch


def update_program(storage: str, scaled: bool) -> tuple[Any, ...]:
    """Returns an update of weights stored in some way, and its arguments' shapes."""
    dtype, wrapper = STORAGE[storage]
    tx = wrapper(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    if scaled:
        tx = amp.with_loss_scale(tx, amp.dynamic_loss_scale())

    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

    params = [jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES]
    grads = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    # Moments of weights that are merely rounded begin in half, as optax has it.
    return update, params, jax.eval_shape(tx.init, params), grads


def parameters() -> int:
    """Returns how many parameters `update_program` is about."""
    return sum(jax.ShapeDtypeStruct(shape, jnp.float32).size for shape in SHAPES)


def cost_of(program: Any) -> Cost:
    """Returns what a compiled step or update costs."""
    donated = program.memory_analysis().alias_size_in_bytes
    return Cost(h100.temp_bytes(program), donated, *h100.traffic(program))


def _compiled(fn: Callable[..., Any], *args: Any) -> Cost:
    return cost_of(h100.compile_for_gpu(fn, *args, donate_argnums=DONATED))


def seconds_per_step(name: str, clipped: bool, rounds: int = 7) -> dict[bool, float]:
    """Returns the median seconds of a step with (True) and without a loss scale."""
    runs = {}
    for scaled in (False, True):
        step, classifier, tx = training_step(name, clipped, scaled)
        params, batch = jax.jit(classifier.sample)(jax.random.key(0))
        program = jax.jit(step, donate_argnums=(0, 1))
        runs[scaled] = [program, (params, tx.init(params)), batch]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for scaled, run in runs.items():
            program, carry, batch = run
            start = time.perf_counter()
            for _ in range(20):
                params, opt_state, *_ = program(*carry, batch)
                carry = params, opt_state
            jax.block_until_ready(carry)
            run[1] = carry
            # The first round compiles.
            if number:
                seconds[scaled].append((time.perf_counter() - start) / 20)
    return {scaled: statistics.median(times) for scaled, times in seconds.items()}


def figures(run: bool) -> dict[str, Any]:
    """Returns all figures of both tables."""
    steps, updates = [], []
    for name in CASES:
        for clipped in (False, True):
            plain, scaled = (
                _compiled(*step_program(name, clipped, each)) for each in (False, True)
            )
            row: dict[str, Any] = {"model": name, "clipped": clipped}
            row |= {"plain": plain._asdict(), "scaled": scaled._asdict()}
            if run:
                seconds = seconds_per_step(name, clipped)
                row["steps_per_second"] = seconds[False] / seconds[True]
            steps.append(row)
    for name in STORAGE:
        plain, scaled = (
            _compiled(*update_program(name, each)) for each in (False, True)
        )
        updates.append(
            {"storage": name, "plain": plain._asdict(), "scaled": scaled._asdict()}
        )
    return {
        "device": jax.devices()[0].device_kind if run else "H100, compiled for",
        "jax": jax.__version__,
        "steps": steps,
        "updates": updates,
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Returns the two tables, to print."""
    steps = Table(title=f"A training step with a loss scale ({found['device']})")
    for column in ("model", "clips", "temporary MB", "", "kernels", "bytes moved"):
        steps.add_column(column, justify="left" if column == "model" else "right")
    timed = "steps_per_second" in found["steps"][0]
    if timed:
        steps.add_column("steps/s", justify="right")
    for row in found["steps"]:
        plain, scaled = row["plain"], row["scaled"]
        cells = [
            row["model"],
            "yes" if row["clipped"] else "no",
            f"{plain['temp_bytes'] / 1e6:.2f} -> {scaled['temp_bytes'] / 1e6:.2f}",
            f"{scaled['temp_bytes'] / plain['temp_bytes']:.3f}x",
            f"{scaled['kernels'] - plain['kernels']:+d} of {plain['kernels']}",
            f"{scaled['bytes_moved'] / plain['bytes_moved']:.3f}x",
        ]
        steps.add_row(*cells, *([f"{row['steps_per_second']:.3f}x"] if timed else []))
    updates = Table(title="Clipping and AdamW alone, bytes per parameter")
    for column in ("weights", "kept", "moved", "moved, with a loss scale", "temporary"):
        updates.add_column(column, justify="left" if column == "weights" else "right")
    for row in found["updates"]:
        plain, scaled = row["plain"], row["scaled"]
        updates.add_row(
            row["storage"],
            *(
                f"{cost[figure] / parameters():.1f}"
                for cost, figure in [
                    (plain, "donated_bytes"),
                    (plain, "bytes_moved"),
                    (scaled, "bytes_moved"),
                    (scaled, "temp_bytes"),
                ]
            ),
        )
    return [steps, updates]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", action="store_true", help="time it on this GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    if options.run and jax.default_backend() != "gpu":
        parser.error(f"--run: there is no GPU here, only {jax.devices()[0]}")
    found = figures(options.run)
    console = Console()
    for table in tables(found):
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
