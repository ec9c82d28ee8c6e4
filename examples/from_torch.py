"""Trains as PyTorch's recipe for mixed precision does, checkpoints included.

    python examples/from_torch.py                 default precision and mixed precision
    python examples/from_torch.py --max-norm 10   clips less

The original is the recipe "Automatic Mixed Precision" of PyTorch, on the handwritten
digits of scikit-learn in place of random numbers. Its lines, and the same here:

    PyTorch                                   here
    ----------------------------------------  ------------------------------------------
    scaler = torch.amp.GradScaler(            recipe = amp.recipe("fp16",
        enabled=use_amp)                          enabled=use_amp)
    opt = torch.optim.SGD(parameters, lr)     tx = recipe.wrap(optax.chain(
                                                  optax.clip_by_global_norm(max_norm),
                                                  optax.sgd(lr)))
    with torch.autocast("cuda",               apply = recipe.autocast(net.apply)
            enabled=use_amp):
        output = net(input)
        loss = loss_fn(output, target)        in f32: outputs come back in f32
    scaler.scale(loss).backward()             loss, grads = amp.value_and_grad(loss_fn)(
                                                  params, .., loss_scale=opt_state)
    scaler.unscale_(opt)                      nothing: they are the true gradients
    clip_grad_norm_(parameters, max_norm)     in `tx`, inside of what `wrap` puts around
    scaler.step(opt)                          updates, opt_state = tx.update(
    scaler.update()                               grads, opt_state, params)
    opt.zero_grad()                           nothing: gradients are values

    {"model": net.state_dict(),               serialization.to_bytes(
     "optimizer": opt.state_dict(),               (params, opt_state))
     "scaler": scaler.state_dict()}
    a checkpoint of a run without amp:        amp.import_opt_state(tx.init(params),
        a fresh scaler                            amp.export_opt_state(saved))
    scaler.load_state_dict(state_dict)        opt_state._replace(loss_scale=
                                                  amp.loss_scale_from_torch(state_dict))

A resumed run goes on at the same bits, as in PyTorch.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import serialization
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from train_digits import batches, digits

import jmp_amp as amp

STEPS, RATE, MAX_NORM = 200, 1.0, 0.1
# The saved state of a GradScaler that is about to grow.
SCALER = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 1990,
}
RUNS = ["default", "mixed", "mixed, resumed", "default, then mixed", "torch's scaler"]
Batch = Mapping[str, Any]


def make_model(in_size: int, out_size: int, num_layers: int) -> nn.Module:
    layers = []
    for _ in range(num_layers - 1):
        layers += [nn.Dense(in_size), nn.relu]
    return nn.Sequential([*layers, nn.Dense(out_size)])


NET = make_model(64, 10, 3)


@functools.cache
def make_training(
    use_amp: bool, max_norm: float
) -> tuple[optax.GradientTransformationExtraArgs, Callable[..., Any]]:
    """Returns the optimizer, and the step: a function of (params, opt_state, batch)."""
    recipe = amp.recipe("fp16", enabled=use_amp)
    apply = recipe.autocast(NET.apply)
    opt = optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(RATE))
    tx = recipe.wrap(opt)

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        logits: Any = apply({"params": params}, flat(batch["image"]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    def train_step(params: Any, opt_state: Any, batch: Batch) -> Any:
        loss, grads = amp.value_and_grad(loss_fn)(params, batch, loss_scale=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    return tx, jax.jit(train_step, compiler_options=options)


def flat(image: Any) -> Any:
    return image.reshape(image.shape[0], -1)


@jax.jit
def first_params(seed: int) -> Any:
    return NET.init(jax.random.key(seed), jnp.zeros((1, 64)))["params"]


def resumed(checkpoint: bytes, tx: Any, *, switched: bool = False) -> Any:
    """Returns `(params, opt_state)` of a checkpoint.

    The scaler comes from the checkpoint, or from `tx` if the precision is `switched`.
    """
    params = first_params(0)
    opt_state = tx.init(params)
    params, saved = serialization.from_bytes((params, opt_state), checkpoint)
    if not switched:
        return params, saved
    return params, amp.import_opt_state(opt_state, amp.export_opt_state(saved))


class Result(NamedTuple):
    """The outcome of a run: `loss` is of all training images, `seconds` of a step."""

    params: Any
    loss: float
    accuracy: float
    skips: int
    scale: float
    seconds: float


@jax.jit
def evaluated(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    logits: Any = NET.apply({"params": params}, flat(batch["image"]))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])


def train(
    name: str,
    steps: int = STEPS,
    seed: int = 0,
    max_norm: float = MAX_NORM,
    scaler: Any = SCALER,
) -> Result:
    """Returns one of the RUNS, trained."""
    train_data, test_data = digits()
    tx, step = make_training(not name.startswith("default"), max_norm)
    params = first_params(seed)
    opt_state: Any = tx.init(params)
    if name == "torch's scaler":
        opt_state = opt_state._replace(loss_scale=amp.loss_scale_from_torch(scaler))
    seconds = []
    for number, batch in enumerate(batches(train_data, steps, seed)):
        if number == steps // 2 and name in ("mixed, resumed", "default, then mixed"):
            checkpoint = serialization.to_bytes((params, opt_state))
            tx, step = make_training(True, max_norm)
            switched = name == "default, then mixed"
            params, opt_state = resumed(checkpoint, tx, switched=switched)
        start = time.perf_counter()
        params, opt_state, loss = step(params, opt_state, batch)
        loss.block_until_ready()
        seconds.append(time.perf_counter() - start)
    metrics = jax.device_get(amp.metrics(opt_state))
    return Result(
        params,
        float(evaluated(params, train_data)[0]),
        float(evaluated(params, test_data)[1]),
        int(metrics["skipped_total"]),
        float(metrics["scale"]),
        float(np.quantile(seconds, 0.1)),
    )


def table_of(results: Mapping[str, Result]) -> Table:
    """Returns the results as a table, one run in a row."""
    right = "loss, accuracy, skips, scale, time"
    table = Table(
        "run",
        *(Column(name, justify="right") for name in right.split(", ")),
        "bits",
        title="PyTorch's recipe on 1797 handwritten digits",
        caption="loss: of the training images, in f32, in the end; accuracy: of the "
        "test images. skips: steps left out. time: of a step, relative to default "
        "precision in this run; a CPU emulates what is planned for a GPU, "
        "so there it says nothing about one. bits: whether the weights are those of "
        "the mixed run.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    mixed = results["mixed"].params
    for name, result in results.items():
        same = jax.tree.leaves(jax.tree.map(np.array_equal, result.params, mixed))
        table.add_row(
            *(name, f"{result.loss:.4f}", f"{result.accuracy:.2%}", f"{result.skips}"),
            f"2**{np.log2(result.scale):.4g}",
            f"{result.seconds / results['default'].seconds:.2f}x",
            "same" if all(same) else "not",
        )
    return table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{__doc__}".splitlines()[0])
    for name, value in {"steps": STEPS, "seed": 0, "max_norm": MAX_NORM}.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help=f"{value}")
    parser.add_argument("--scaler", metavar="JSON", help="a GradScaler's state_dict()")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        message = f"--steps {options.steps}: two at least, to resume half way"
        parser.exit(2, f"{parser.prog}: error: {message}\n")
    if not options.max_norm > 0:
        message = f"--max-norm {options.max_norm}: use a positive number"
        parser.exit(2, f"{parser.prog}: error: {message}\n")
    try:
        options.scaler = json.loads(options.scaler) if options.scaler else SCALER
        amp.loss_scale_from_torch(options.scaler)
    except (TypeError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: --scaler: {error}\n")
    return options


def main() -> None:
    settings = vars(parse())
    console = Console()
    results = {
        n: train(n, **settings) for n in track(RUNS, "training", console=console)
    }
    console.print(table_of(results))


if __name__ == "__main__":
    main()
