"""Trains networks on the 1797 handwritten digits of scikit-learn in several precisions.

    python examples/train_digits.py                         compares f32, bf16 and f16
    python examples/train_digits.py --policy mixed_float16  trains with one policy
    python examples/train_digits.py --plot curves.png       draws losses and loss scales

The comparison trains one CNN four times: in f32, under bf16 autocast, under f16
autocast with dynamic loss scaling, and under f16 autocast without. The loss is a mean
over 64 images, and its gradients are just large enough for f16. The gradients of a mean
over more numbers are not: f32 and f16 train again with the loss times 2**-20, as small
as one pixel's part in a mean over a million pixels.

It prints, among other columns (half: products of a training step in half precision;
saved: megabytes of activations kept for the backward pass):

    run            loss x  accuracy  final loss  zero grads  scale  skips   half  saved
    f32                 1    98.16%      0.0206        6.1%      1      0   0/17   7.00
    bf16                1    98.32%      0.0209        6.4%      1      0  17/17   1.94
    f16 + scaling       1    98.32%      0.0205        6.0%  2**18      3  17/17   1.94
    f16 alone           1    98.49%      0.0203        6.4%      1      0  17/17   1.94
    f32            2**-20    97.15%      0.1584        6.4%      1      0   0/17   7.00
    f16 + scaling  2**-20    97.15%      0.1576        6.5%  2**22      0  17/17   1.94
    f16 alone      2**-20    10.05%      2.9507      100.0%      1      0  17/17   1.94

The gradients of the small loss are zero in f16, but for those of the last bias, which
only the f32 logits read: nothing is learned. With dynamic scaling f16 follows f32. (f32
itself ends at a higher loss there: Adam's epsilon is no longer small against such
gradients.) A CPU emulates what is planned for a GPU, so the times of steps that it
prints say nothing about a GPU or a TPU.

Then it trains a wide MLP twice: in f32, and in bf16 with a plan for the device at hand
(`target="auto"`). On a CPU with instructions for bf16 products, here a Xeon with AMX,
a step is faster; on another CPU both runs are f32:

    run                  accuracy  final loss  saved   step
    f32                    97.15%      0.0011   7.16  1.00x
    bf16, target="auto"    97.15%      0.0012  15.54  0.42x

`make_loss` and `make_train_step` are the parts to copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import digits_report
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits

import jmp_amp as amp

STEPS = 300
BATCH = 64
TEST_IMAGES = 597
SMALL_LOSS = 2.0**-20
Batch = Mapping[str, Any]


class CNN(nn.Module):
    """An f32 model that knows nothing of precision."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for width in (32, 64):
            for _ in range(2):
                x = nn.Conv(width, (3, 3), use_bias=False)(x)
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
                x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(10)(x)


class MLP(nn.Module):
    """Another one, of large matrix products and little else."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for _ in range(3):
            x = nn.relu(nn.Dense(1024)(x))
        return nn.Dense(10)(x)


class State(NamedTuple):
    """All that a training step writes."""

    params: Any
    batch_stats: Any
    opt_state: Any


CNN_MODEL, MLP_MODEL = CNN(), MLP()
BY_DEVICE = (
    'target="auto": planned for the device that JAX uses. A CPU with instructions for '
    "bf16 products multiplies bf16 and computes all else in f32; another CPU computes "
    "all in f32. saved MB: activations kept for the backward pass, and bf16 copies of "
    "weights."
)


def make_loss(
    policy: amp.Policy,
    loss_mult: float = 1.0,
    model: nn.Module = CNN_MODEL,
    target: str | None = None,
) -> Callable[..., Any]:
    """Returns the loss of a model under `policy`, and its new batch statistics."""
    apply = amp.autocast(model.apply, policy, target=target)

    def loss_fn(params: Any, batch_stats: Any, batch: Batch, dropout_key: Any) -> Any:
        logits, updated = apply(
            {"params": params, "batch_stats": batch_stats},
            batch["image"],
            train=True,
            rngs={"dropout": dropout_key},
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss_mult * losses.mean(), updated.get("batch_stats", {})

    return loss_fn


def make_optimizer(
    loss_scale: amp.LossScale, steps: int
) -> optax.GradientTransformationExtraArgs:
    warmup = max(1, steps // 10)
    learning_rate = optax.warmup_cosine_decay_schedule(0.0, 5e-4, warmup, steps + 1)
    adamw = optax.adamw(learning_rate, weight_decay=0.1)
    return amp.with_loss_scale(
        optax.chain(optax.clip_by_global_norm(1.0), adamw), loss_scale
    )


def make_train_step(
    loss_fn: Callable[..., Any], tx: optax.GradientTransformationExtraArgs
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """Returns the training step, a function of (state, batch, dropout key)."""

    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    @functools.partial(
        jax.jit,
        donate_argnums=0,
        compiler_options={"xla_allow_excess_precision": False},
    )
    def train_step(state: State, batch: Batch, dropout_key: jax.Array) -> Any:
        value_and_grad = amp.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = value_and_grad(
            state.params,
            state.batch_stats,
            batch,
            dropout_key,
            loss_scale=state.opt_state,
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # A step whose gradients overflowed takes back its batch statistics too.
        batch_stats = amp.keep_if_finite(opt_state, batch_stats, state.batch_stats)
        metrics = amp.metrics(opt_state)
        metrics |= {"loss": loss, "zero gradients": digits_report.share_of_zeros(grads)}
        return State(params, batch_stats, opt_state), metrics

    return train_step


def accuracy(
    policy: amp.Policy,
    state: State,
    batch: Batch,
    model: nn.Module = CNN_MODEL,
    target: str | None = None,
) -> float:
    @jax.jit
    @functools.partial(amp.autocast, policy=policy, target=target)
    def predict(params: Any, batch_stats: Any, image: Any) -> jax.Array:
        variables = {"params": params, "batch_stats": batch_stats}
        logits: Any = model.apply(variables, image, train=False)
        return jnp.argmax(logits, axis=-1)

    predicted = predict(state.params, state.batch_stats, batch["image"])
    return float(np.mean(np.asarray(predicted) == batch["label"]))


def digits() -> tuple[Batch, Batch]:
    """Returns the training and the test images, the same split for every seed."""
    data: Any = load_digits()
    image = np.asarray(data.images[..., None] / 16.0, np.float32)
    label = np.asarray(data.target, np.int32)
    order = np.random.default_rng(0).permutation(len(label))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (
        {"image": image[train], "label": label[train]},
        {"image": image[test], "label": label[test]},
    )


def batches(data: Batch, steps: int, seed: int, size: int = BATCH) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.choice(len(data["label"]), size, replace=False)
        yield {name: values[chosen] for name, values in data.items()}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What to train; the loss is multiplied by `loss_mult`."""

    name: str
    policy: amp.Policy
    loss_scale: amp.LossScale
    loss_mult: float = 1.0
    model: nn.Module = CNN_MODEL
    batch: int = BATCH
    target: str | None = None


def loss_scale_for(policy: amp.Policy) -> amp.LossScale:
    if policy.compute_dtype != jnp.float16:
        return amp.no_loss_scale()
    # The default interval, 2000 steps, is longer than this training.
    return amp.dynamic_loss_scale(growth_interval=50)


def comparison(loss_mult: float | None = None) -> list[Experiment]:
    """Returns the runs of the comparison: with a `loss_mult`, all of them at that."""
    f32, bf16, f16 = map(amp.get_policy, ("float32", "mixed_bfloat16", "mixed_float16"))
    unscaled = amp.no_loss_scale()
    runs = [
        Experiment("f32", f32, unscaled),
        Experiment("bf16", bf16, unscaled),
        Experiment("f16 + scaling", f16, loss_scale_for(f16)),
        Experiment("f16 alone", f16, unscaled),
    ]
    if loss_mult is not None:
        return [dataclasses.replace(run, loss_mult=loss_mult) for run in runs]
    again = (runs[0], runs[2], runs[3])
    return runs + [dataclasses.replace(run, loss_mult=SMALL_LOSS) for run in again]


def on_this_device() -> list[Experiment]:
    """Returns the runs of the MLP: in f32, and in bf16 as the device computes best."""
    f32, bf16 = map(amp.get_policy, ("float32", "mixed_bfloat16"))
    mlp = Experiment("f32", f32, amp.no_loss_scale(), model=MLP_MODEL, batch=256)
    auto = {"name": 'bf16, target="auto"', "policy": bf16, "target": "auto"}
    return [mlp, dataclasses.replace(mlp, **auto)]


def train(
    experiment: Experiment,
    steps: int = STEPS,
    seed: int = 0,
    on_step: Callable[[float], None] = lambda loss: None,
) -> digits_report.Result:
    """Trains and tests; `on_step` is told the loss of every step."""
    train_data, test_data = digits()
    model, size = experiment.model, experiment.batch
    key, first = jax.random.key(seed), next(batches(train_data, 1, seed, size))
    loss_fn = make_loss(
        experiment.policy, experiment.loss_mult, model, experiment.target
    )
    tx = make_optimizer(experiment.loss_scale, steps)
    train_step = make_train_step(loss_fn, tx)

    variables = model.init(key, first["image"], train=False)
    params = experiment.policy.cast_to_param(variables["params"])
    state = State(params, variables.get("batch_stats", {}), tx.init(params))
    matmuls = digits_report.matmuls_in_half(train_step, state, first, key)
    saved = digits_report.saved_for_backward(loss_fn, *state[:2], first, key)

    history, seconds = [], []
    for number, batch in enumerate(batches(train_data, steps, seed, size)):
        dropout_key = jax.random.fold_in(key, number)
        start = time.perf_counter()
        state, metrics = train_step(state, batch, dropout_key)
        metrics = jax.device_get(metrics)
        seconds.append(time.perf_counter() - start)
        history.append(metrics | {"loss": metrics["loss"] / experiment.loss_mult})
        on_step(float(history[-1]["loss"]))
    return digits_report.Result(
        type(model).__name__,
        experiment.name,
        experiment.loss_mult,
        accuracy(experiment.policy, state, test_data, model, experiment.target),
        {name: np.stack([m[name] for m in history]) for name in history[0]},
        matmuls,
        saved,
        # The first step compiles. What else the machine does only adds time, so the
        # fastest tenth says most about the program.
        float(np.quantile(seconds[1:] or seconds, 0.1)),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--policy",
        help='train with this one only: "mixed_float16", "p=f32,c=bf16,o=f32", ... '
        "Whatever computes in f16 has dynamic loss scaling",
    )
    parser.add_argument(
        "--loss-mult",
        type=float,
        help="multiply the loss by this in every run; default: 1, and then 2**-20",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a .png, .svg, ...")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: train for at least one step")
    if options.loss_mult is not None and not options.loss_mult > 0:
        parser.error(f"--loss-mult {options.loss_mult}: use a positive number")
    if options.policy is None:
        options.experiments = comparison(options.loss_mult)
        if options.loss_mult is None:
            options.experiments += on_this_device()
        return options
    try:
        policy = amp.get_policy(options.policy)
        make_loss(policy)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    mult = 1.0 if options.loss_mult is None else options.loss_mult
    options.experiments = [
        Experiment(str(policy), policy, loss_scale_for(policy), mult)
    ]
    return options


def main() -> None:
    options = parse()
    console = Console()
    results = []
    with Progress(*digits_report.PROGRESS, console=console) as progress:
        for experiment in options.experiments:
            name = digits_report.label(experiment.name, experiment.loss_mult)
            name = f"{type(experiment.model).__name__}, {name}"
            task = progress.add_task(name, total=options.steps, loss="")

            def on_step(loss: float, task: Any = task) -> None:
                progress.update(task, advance=1, loss=f"loss {loss:.4f}")

            results.append(train(experiment, options.steps, options.seed, on_step))
    cnn = [each for each in results if each.model == "CNN"]
    console.print(digits_report.table_of(cnn))
    if len(cnn) < len(results):
        columns = "test accuracy", "final loss", "saved MB", "step"
        mlp = results[len(cnn) :]
        console.print(digits_report.table_of(mlp, BY_DEVICE, columns))
    if options.plot is not None:
        digits_report.plot(cnn, options.plot)


if __name__ == "__main__":
    main()
