"""Trains on batches in pieces, in f32 and in f16 with loss scaling.

    python examples/accumulate.py                         compares f32 and f16
    python examples/accumulate.py --policy mixed_float16  trains with one policy

A batch that does not fit in memory is cut into `pieces` micro-batches, and the
optimizer moves once for all of them. Paddle's recipe, and the same here:

    Paddle                               here
    -----------------------------------  --------------------------------------------
    scaler = paddle.amp.GradScaler()     tx = amp.with_loss_scale(
                                           optax.MultiSteps(tx, pieces), loss_scale)
    with paddle.amp.auto_cast():         apply = amp.autocast(model.apply, policy)
        loss = loss_fn(model(x), y)
    loss = loss / pieces                 MultiSteps takes the mean of the gradients
    scaler.scale(loss).backward()        gradient = amp.value_and_grad(loss_fn)
                                         gradient(params, batch, loss_scale=state)
    if (number + 1) % pieces == 0:       MultiSteps counts
        scaler.step(optimizer)           updates, state = tx.update(grads, state, ..)
        scaler.update()                  is in tx.update, after every micro-batch
        optimizer.clear_grad()           MultiSteps clears its sum

The two steps below differ when the gradients of a micro-batch are not finite:

* `make_micro_step`, as above, leaves out that micro-batch alone. MultiSteps neither
  adds nor counts it, so the window ends one micro-batch later. The scale is adjusted
  after every micro-batch: `growth_interval` counts micro-batches.
* `make_window_step`, by hand, adds up the unscaled f32 gradients of a window in a scan,
  and calls `tx.update` once, with their mean. An inf or a NaN in any of them stays, so
  the whole window is dropped, as by the scalers of Paddle and PyTorch. One scale serves
  the whole window, and `growth_interval` counts windows.

Both are compared with training on the whole batch, and then train again with one
infinite pixel among the same images. The model has no BatchNorm, because its statistics
would be those of a micro-batch.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from train_digits import digits

import jmp_amp as amp

POLICIES = ["float32", "mixed_float16"]
WAYS = ["whole batch", "MultiSteps", "by hand"]
STEPS = 100
BATCH = 256
PIECES = 8
RATE, MOMENTUM = 0.02, 0.9
Batch = Mapping[str, Any]


class MLP(nn.Module):
    """An f32 model that knows nothing of precision, and no image of its neighbours."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for width in (128, 128):
            x = nn.relu(nn.LayerNorm()(nn.Dense(width)(x)))
        return nn.Dense(10)(x)


MODEL = MLP()
# Jitted once, for all the runs.
initialise = jax.jit(MODEL.init)


class Result(NamedTuple):
    """The outcome of a run."""

    params: Any
    loss: float  # of all training images, in f32, after the last step
    updates: int  # how often the optimizer moved
    skips: int  # steps left out: micro-batches of MultiSteps, else whole batches
    lost: int  # images in those
    scale: float  # what the loss is multiplied by in the end


def make_loss(policy: amp.Policy | str) -> Callable[[Any, Batch], jax.Array]:
    """Returns the mean loss over a batch, or over a piece of one."""
    apply = amp.autocast(MODEL.apply, policy)

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        logits: Any = apply({"params": params}, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    return loss_fn


loss_in_f32 = jax.jit(make_loss("float32"))


def make_micro_step(
    loss_fn: Callable[..., Any], tx: optax.GradientTransformationExtraArgs
) -> Callable[..., Any]:
    """Returns the step: a function of (params, opt_state, micro-batch).

    Accumulation is in `tx`, which holds a MultiSteps; without one, the micro-batch is
    the whole batch.
    """

    def micro_step(params: Any, opt_state: Any, batch: Batch) -> Any:
        gradient = amp.value_and_grad(loss_fn)
        loss, grads = gradient(params, batch, loss_scale=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jitted(micro_step)


def make_window_step(
    loss_fn: Callable[..., Any], tx: optax.GradientTransformationExtraArgs
) -> Callable[..., Any]:
    """Returns the step: a function of (params, opt_state, window of micro-batches).

    The first axis of a window's arrays counts its micro-batches.
    """

    def window_step(params: Any, opt_state: Any, window: Batch) -> Any:
        gradient = amp.value_and_grad(loss_fn)

        def add(total: Any, batch: Batch) -> Any:
            # The scale of the window, which is adjusted below, after the last piece.
            each = gradient(params, batch, loss_scale=opt_state)
            return jax.tree.map(jnp.add, total, each), None

        nothing = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, nothing, window)
        pieces = len(window["label"])
        loss, grads = jax.tree.map(lambda leaf: leaf / pieces, total)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jitted(window_step)


def jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=options)


def windows(steps: int, seed: int, pieces: int, poisoned: bool) -> Iterator[Batch]:
    """Yields batches of BATCH images: arrays of [pieces, micro-batch, ...]."""
    data, _ = digits()
    rng = np.random.default_rng(seed)
    for number in range(steps):
        chosen = rng.choice(len(data["label"]), BATCH, replace=False)
        window = {
            name: values[chosen].reshape(pieces, BATCH // pieces, *values.shape[1:])
            for name, values in data.items()
        }
        if poisoned and number == steps // 2:
            window["image"][pieces // 2, 0, 4, 4, 0] = np.inf
        yield window


@functools.cache
def compiled(
    policy: amp.Policy, way: str, pieces: int
) -> tuple[Callable[..., Any], optax.GradientTransformationExtraArgs]:
    """Returns the step of a way, which is jitted once, and its optimizer."""
    loss_scale = amp.no_loss_scale()
    if policy.compute_dtype == jnp.float16:
        # 50 windows, each of `pieces` steps of MultiSteps. The default, 2000, is longer
        # than this training.
        interval = 50 * (pieces if way == "MultiSteps" else 1)
        loss_scale = amp.dynamic_loss_scale(growth_interval=interval)
    inner: Any = optax.sgd(RATE, MOMENTUM)
    if way == "MultiSteps":
        inner = optax.MultiSteps(inner, every_k_schedule=pieces)
    tx = amp.with_loss_scale(inner, loss_scale)
    make_step = make_window_step if way == "by hand" else make_micro_step
    return make_step(make_loss(policy), tx), tx


def train(
    policy: str,
    way: str,
    steps: int = STEPS,
    seed: int = 0,
    *,
    pieces: int = PIECES,
    poisoned: bool = False,
) -> Result:
    """Returns a training in one of the WAYS."""
    step, tx = compiled(amp.get_policy(policy), way, pieces)
    train_data, _ = digits()
    params: Any = initialise(jax.random.key(seed), train_data["image"])["params"]
    opt_state = tx.init(params)
    for window in windows(steps, seed, pieces, poisoned):
        for batch in given(window, way):
            params, opt_state, _ = step(params, opt_state, batch)
    metrics = jax.device_get(amp.metrics(opt_state))
    finite, skips = int(metrics["applied"]), int(metrics["skipped_total"])
    in_a_window = pieces if way == "MultiSteps" else 1
    return Result(
        params,
        float(loss_in_f32(params, train_data)),
        # A window that is not full yet has moved nothing.
        finite // in_a_window,
        skips,
        skips * BATCH // in_a_window,
        float(metrics["scale"]),
    )


def given(window: Batch, way: str) -> Sequence[Batch]:
    """Returns the arguments of the steps of a window, one after the other."""
    if way == "by hand":
        return [window]
    if way == "whole batch":
        return [{k: v.reshape(-1, *v.shape[2:]) for k, v in window.items()}]
    pieces = len(window["label"])
    return [{k: v[piece] for k, v in window.items()} for piece in range(pieces)]


def table_of(results: Mapping[tuple[str, str, bool], Result]) -> Table:
    """Returns the results as a table, one run in a row."""
    right = "loss, to whole, updates, skips, lost, scale"
    table = Table(
        Column("policy", min_width=13, overflow="fold"),
        Column("gradients", min_width=11),
        Column("inf"),
        *(Column(name, justify="right") for name in right.split(", ")),
        title="An MLP on 1797 handwritten digits, its batches read in pieces",
        caption="inf: whether one pixel is. loss: of all training images, in f32, in "
        "the end. to whole: its difference to that of the whole batch, relative. "
        "skips: steps left out, of MultiSteps a micro-batch each, else a whole batch. "
        "lost: the images in them.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for (policy, way, poisoned), result in results.items():
        whole = results[policy, WAYS[0], False].loss
        table.add_row(
            *(policy, way, "yes" if poisoned else "no", f"{result.loss:.5f}"),
            f"{result.loss / whole - 1:+.0e}",
            *(f"{result.updates}", f"{result.skips}", f"{result.lost}"),
            f"2**{np.log2(result.scale):.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=f"{__doc__}".splitlines()[0])
    parser.add_argument("--policy", action="append", help=f"default: {POLICIES}")
    for name, value in {"steps": STEPS, "seed": 0, "pieces": PIECES}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: train for at least one step")
    if options.pieces < 1 or BATCH % options.pieces:
        parser.error(f"--pieces {options.pieces}: use a number that divides {BATCH}")
    try:
        for name in options.policy or POLICIES:
            make_loss(name)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    runs = [
        (policy, way, poisoned)
        for policy in options.policy or POLICIES
        for poisoned in (False, True)
        for way in (WAYS[1:] if poisoned else WAYS)
    ]
    results, console = {}, Console()
    for policy, way, poisoned in track(runs, "training", console=console):
        results[policy, way, poisoned] = train(
            *(policy, way, options.steps, options.seed),
            pieces=options.pieces,
            poisoned=poisoned,
        )
    console.print(table_of(results))


if __name__ == "__main__":
    main()
