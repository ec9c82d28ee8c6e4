"""What `train_digits.py` measures, and how it shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

PROGRESS = (
    TextColumn("{task.description:32}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("{task.fields[loss]}"),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run yielded.

    Attributes:
      model: the class of the network.
      name: how it was trained.
      loss_mult: what the loss was multiplied by; not in the losses below.
      accuracy: on the test images.
      metrics: an array of one value for each step, by name.
      matmuls: how many run in half precision in a training step, and of how many.
      saved_bytes: of activations that the backward pass keeps.
      step_seconds: the time of a step, at the 10th percentile.
    """

    model: str
    name: str
    loss_mult: float
    accuracy: float
    metrics: Mapping[str, np.ndarray]
    matmuls: tuple[int, int]
    saved_bytes: int
    step_seconds: float

    @property
    def final_loss(self) -> float:
        return float(np.mean(self.metrics["loss"][-20:]))


def share_of_zeros(grads: Any) -> jax.Array:
    """Returns which part of the gradients' entries is exactly zero: float32[]."""
    leaves = jax.tree.leaves(grads)
    zeros = [jnp.sum(leaf == 0, dtype=jnp.float32) for leaf in leaves]
    return sum(zeros, jnp.float32(0)) / sum(leaf.size for leaf in leaves)


def matmuls_in_half(jitted: Any, *args: Any) -> tuple[int, int]:
    """Returns how many dots and convolutions multiply half by half, and of how many."""
    operands = [
        [v.aval.dtype for v in eqn.invars]
        for eqn in _equations(jitted.trace(*args).jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    return sum(all(d.itemsize == 2 for d in row) for row in operands), len(operands)


def saved_for_backward(loss_fn: Callable[..., Any], params: Any, *args: Any) -> int:
    """Returns the bytes of activations that the backward pass of a loss keeps.

    What autodiff saves, before XLA recomputes any of it; nothing is executed.
    """

    def residuals(params: Any, *args: Any) -> list[Any]:
        return jax.tree.leaves(jax.vjp(lambda p: loss_fn(p, *args)[0], params)[1])

    closed: Any = jax.make_jaxpr(residuals)(params, *args)
    jaxpr = getattr(closed, "jaxpr", closed)
    # What is not made here lives anyway: parameters, the batch, constants.
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    kept = {v for v in jaxpr.outvars if not hasattr(v, "val")} & made
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


CAPTION = (
    "loss x: what the loss is multiplied by. final loss: without that, mean of the "
    "last 20 steps. zero grads: gradient entries that are exactly zero, mean of all "
    "steps. half: matmuls and convolutions of a training step that run in half "
    "precision. saved MB: activations kept for the backward pass. "
    "step: time of a step; a CPU emulates what is planned for a GPU, so this says "
    "nothing about a GPU or a TPU."
)
COLUMNS = (
    "loss x",
    "test accuracy",
    "final loss",
    "zero grads",
    "scale",
    "skips",
    "half",
    "saved MB",
    "step",
)


def table_of(
    results: Sequence[Result],
    caption: str = CAPTION,
    columns: Sequence[str] = COLUMNS,
) -> Table:
    """Returns the results of a model as a table; ratios are to the first one."""
    first = results[0]
    steps = len(first.metrics["loss"])
    table = Table(
        title=f"{first.model} on 1797 handwritten digits, {steps} steps",
        caption=f"\n{caption}",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,  # cells of a comparison stand side by side in 80 columns
    )
    widest = max(len(each.name) for each in results)
    # A longer name, of a policy with many parts, is folded.
    table.add_column("run", min_width=min(widest, 18), overflow="fold")
    for column in columns:
        table.add_column(column.replace(" ", "\n"), justify="right")
    for result in results:
        step = f"{1e3 * result.step_seconds:.1f}ms"
        if len(results) > 1:
            step = f"{result.step_seconds / first.step_seconds:.2f}x"
        told = {
            "loss x": _factor(result.loss_mult),
            "test accuracy": f"{result.accuracy:.2%}",
            "final loss": f"{result.final_loss:.4f}",
            "zero grads": f"{result.metrics['zero gradients'].mean():.1%}",
            "scale": _factor(result.metrics["scale"][-1]),
            "skips": str(result.metrics["skipped_total"][-1]),
            "half": "{}/{}".format(*result.matmuls),
            "saved MB": f"{result.saved_bytes / 1e6:.2f}",
            "step": step,
        }
        table.add_row(result.name, *(told[column] for column in columns))
    return table


def label(name: str, loss_mult: float) -> str:
    return name if loss_mult == 1 else f"{name}, loss x {_factor(loss_mult)}"


def _factor(value: float) -> str:
    exponent = np.log2(value)
    power_of_two = exponent == round(exponent) and exponent
    return f"2**{exponent:.0f}" if power_of_two else f"{value:g}"


def plot(results: Sequence[Result], path: Path) -> None:
    """Writes the curves of loss and loss scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, scales) = pyplot.subplots(
        2, 1, figsize=(8, 7), sharex=True, layout="constrained"
    )
    for result in results:
        name = label(result.name, result.loss_mult)
        (line,) = losses.plot(result.metrics["loss"], label=name, linewidth=1)
        scale = result.metrics["scale"]
        if (scale != 1).any():
            scales.step(range(len(scale)), scale, color=line.get_color())
    losses.set(yscale="log", ylabel="training loss")
    losses.legend(fontsize="small")
    scales.set(xlabel="step", ylabel="loss scale")
    scales.set_yscale("log", base=2)
    figure.savefig(path)
    pyplot.close(figure)
