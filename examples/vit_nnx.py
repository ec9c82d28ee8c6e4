"""Trains a vision transformer in nnx on the 1797 handwritten digits of scikit-learn.

    python examples/vit_nnx.py                         compares f32, bf16 and f16
    python examples/vit_nnx.py --steps 300             trains longer
    python examples/vit_nnx.py --policy mixed_float16  trains with one policy
    python examples/vit_nnx.py --checkpoint DIR        saves, and goes on from there

The model is f32 and knows nothing of precision. A `PolicyMap` sets the policy by
module: the head, which has ten outputs and costs little, stays f32. Autocast computes
the norms in f32 anyway.

Every run writes a checkpoint half way. After the run, a new model and a new optimizer
go on from that checkpoint and must end at the same bits.

The learning rate is warmed up linearly and falls linearly, as in Colossal-AI's tutorial
(`LinearWarmupLR`, examples/tutorial/new_api/cifar_vit).
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table
from train_digits import digits

import jmp_amp as amp

STEPS = 100
BATCH = 64
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
Batch = Mapping[str, Any]


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class ViT(nnx.Module):
    """Patches of 2 x 2, learned positions, a mean over the tokens."""

    def __init__(self, width: int = 64, depth: int = 4, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, width, (2, 2), strides=(2, 2), rngs=rngs)
        positions = jax.random.normal(rngs.params(), (16, width))
        self.positions = nnx.Param(0.02 * positions)
        self.blocks = nnx.List([Block(width, 4, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.patches(image)
        x = x.reshape(len(image), -1, x.shape[-1]) + self.positions[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def policy_for(name: str) -> amp.PolicyMap:
    return amp.PolicyMap(name, {"head": "float32"})


@functools.cache
def make_tx(policy: amp.PolicyMap, steps: int) -> optax.GradientTransformation:
    warmup = max(1, steps // 10)
    up = optax.linear_schedule(0.0, 2e-3, warmup)
    down = optax.linear_schedule(2e-3, 0.0, steps - warmup)
    learning_rate = optax.join_schedules([up, down], [warmup])
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.05)
    )
    in_f16 = policy.default.compute_dtype == jnp.float16
    # The default interval, 2000 steps, is longer than this training.
    scaling = amp.dynamic_loss_scale(growth_interval=50)
    return amp.with_loss_scale(tx, scaling if in_f16 else amp.no_loss_scale())


@functools.cache
def make_train_step(policy: amp.PolicyMap) -> Callable[..., jax.Array]:
    @amp.autocast(policy=policy)
    def loss_fn(model: ViT, batch: Batch) -> jax.Array:
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    @nnx.jit
    def train_step(model: ViT, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, grads = amp.value_and_grad(loss_fn)(model, batch, loss_scale=optimizer)
        # A step in which a gradient overflowed changes nothing.
        optimizer.update(model, grads)
        return loss

    return train_step


def batch_of(data: Batch, step: int, seed: int) -> Batch:
    """Returns the batch of a step, which does not depend on the steps before it."""
    rng = np.random.default_rng((seed, step))
    chosen = rng.choice(len(data["label"]), BATCH, replace=False)
    return {name: values[chosen] for name, values in data.items()}


def states(model: ViT, optimizer: nnx.Optimizer) -> dict[str, Any]:
    """Returns the contents of a checkpoint, with random keys as arrays of integers."""
    pure = {
        "model": nnx.to_pure_dict(nnx.state(model)),
        "optimizer": nnx.to_pure_dict(nnx.state(optimizer)),
    }
    return jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        ),
        pure,
    )


def restore(model: ViT, optimizer: nnx.Optimizer, saved: Mapping[str, Any]) -> None:
    """Writes a result of `states` into a model and its optimizer."""
    for name, module in (("model", model), ("optimizer", optimizer)):
        state = nnx.state(module)
        now = nnx.to_pure_dict(state)
        arrays = jax.tree.map(
            lambda x, y: (
                jax.random.wrap_key_data(y)
                if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                else y
            ),
            now,
            dict(saved[name]),
        )
        nnx.replace_by_pure_dict(state, arrays)
        nnx.update(module, state)


class Result(NamedTuple):
    """The outcome of a run; `losses` begin at the step that it resumed from."""

    model: ViT
    optimizer: nnx.Optimizer
    losses: np.ndarray
    accuracy: float


def train(
    policy: amp.PolicyMap,
    directory: Path,
    steps: int = STEPS,
    seed: int = 0,
    start: int | None = None,
    save_every: int | None = None,
) -> Result:
    """Returns a tested training, which goes on from a checkpoint if there is one.

    Args:
      policy: the precision of the model.
      directory: where the checkpoints are.
      steps: how many steps the training has.
      seed: decides parameters, dropout and the order of the images.
      start: the step to go on from; by default that of the latest checkpoint.
      save_every: steps between two checkpoints; by default half of all.
    """
    data, test = digits()
    model = ViT(rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, make_tx(policy, steps), wrt=nnx.Param)
    train_step, losses = make_train_step(policy), []
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=save_every or max(1, steps // 2)
    )
    with ocp.CheckpointManager(directory.absolute(), options=options) as checkpoints:
        start = checkpoints.latest_step() if start is None else start
        if start:
            like = ocp.args.StandardRestore(states(model, optimizer))
            restore(model, optimizer, checkpoints.restore(start, args=like))
        for step in range(start or 0, steps):
            loss = train_step(model, optimizer, batch_of(data, step, seed))
            losses.append(float(loss))
            if checkpoints.should_save(step + 1):
                now = ocp.args.StandardSave(states(model, optimizer))
                checkpoints.save(step + 1, args=now)
    return Result(model, optimizer, np.array(losses), accuracy(model, policy, test))


@functools.cache
def make_predict(policy: amp.PolicyMap) -> Callable[..., jax.Array]:
    return nnx.jit(amp.autocast(lambda model, image: model(image), policy))


def accuracy(model: ViT, policy: amp.PolicyMap, batch: Batch) -> float:
    model.eval()
    predicted = jnp.argmax(make_predict(policy)(model, batch["image"]), axis=-1)
    model.train()
    return float(np.mean(np.asarray(predicted) == batch["label"]))


def same_bits(a: Result, b: Result) -> bool:
    """Returns whether two runs ended at the same model and the same optimizer."""
    pairs = zip(
        jax.tree.leaves(states(a.model, a.optimizer)),
        jax.tree.leaves(states(b.model, b.optimizer)),
        strict=True,
    )
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def row_of(name: str, result: Result, resumed: Result) -> tuple[str, ...]:
    metrics = amp.metrics(result.optimizer)
    return (
        name,
        f"{result.accuracy:.2%}",
        f"{result.losses[-20:].mean():.4f}"
        if len(result.losses)
        else "trained already",
        f"{float(metrics['scale']):g}",
        str(int(metrics["skipped_total"])),
        "same bits" if same_bits(result, resumed) else "DIFFERENT",
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", help="train with this one only")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="save here, and go on from here"
    )
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: train for at least two steps")
    if options.checkpoint is not None and options.policy is None:
        parser.error("--checkpoint: say which --policy it is for")
    options.policies = [options.policy] if options.policy else list(POLICIES)
    try:
        for name in options.policies:
            policy_for(name)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return options


def main() -> None:
    options = parse()
    console = Console()
    table = Table(
        *("policy", "test accuracy", "final loss", "scale", "skips", "resumed"),
        title=f"ViT on 1797 handwritten digits, {options.steps} steps",
        caption="final loss: mean of the last 20 steps. resumed: a new model that went "
        "on from the checkpoint half way ends at",
        box=box.SIMPLE_HEAD,
    )
    report = None
    for name in options.policies:
        policy = policy_for(name)
        with tempfile.TemporaryDirectory() as temporary:
            directory = options.checkpoint or Path(temporary)
            result = train(policy, directory, options.steps, options.seed)
            half = options.steps // 2
            resumed = train(policy, directory, options.steps, options.seed, half)
        table.add_row(*row_of(name, result, resumed))
        image = jax.ShapeDtypeStruct((BATCH, 8, 8, 1), jnp.float32)
        report = amp.explain(ViT.__call__, policy)(result.model, image)
    console.print(table)
    assert report is not None
    console.print(f"{report.summary}\n", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
