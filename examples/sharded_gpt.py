"""Trains a GPT in half precision on several devices, in every way to cut it up.

    python examples/sharded_gpt.py                       compares five layouts in f16
    python examples/sharded_gpt.py --full                compares all eleven
    python examples/sharded_gpt.py --layout fsdp         compares one
    python examples/sharded_gpt.py --precision bf16_weights --layout zero1
    python examples/sharded_gpt.py --precision bf16 --reduce float32
    python examples/sharded_gpt.py --poison 3            an inf on one device
    python examples/sharded_gpt.py --layout fsdp --checkpoint DIR
    python examples/sharded_gpt.py --layout tensor --resume DIR
    python examples/sharded_gpt.py --processes 2 --process 0 --coordinator HOST:PORT

The model is that of char_gpt.py, the layouts are in layouts.py, and the training step
below is one for all of them and for all precisions. Colossal-AI, and the same here:

    Colossal-AI                               here
    ----------------------------------------  ---------------------------------------
    HybridParallelPlugin(tp_size=2, ..)       Layout({"data": 0, "tensor": 2}, TENSOR)
      pp_size=4, num_microbatches=8           Layout({"stage": 4, ..}, STAGES)
      zero_stage=1                            Layout(.., state=.. | FSDP)
    GeminiPlugin(placement_policy="static")   Layout({"data": 0}, FSDP)
      precision="fp16", initial_scale=2**16   recipe = amp.recipe("fp16")
      (reduces in the precision)              amp.recipe(.., reduce_dtype="float32")
    booster.boost(model, optimizer, ..)       recipe.autocast(loss), recipe.wrap(tx)
    booster.execute_pipeline(..)              the loss of a layout with stages
    booster.backward(loss, optimizer)         amp.value_and_grad(loss_fn)
    optimizer.step()                          tx.update
    booster.save_optimizer(.., shard=True)    checkpointer.save(.., (params, opt_state))

Every layout is compared with one device. In Colossal-AI fp16 excludes ZeRO, and Apex
excludes tensor parallelism. Here precision and layout are independent: gradients are
checked under `jit`, which sees whole arrays, so all devices skip the same steps and
have one loss scale.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import char_gpt
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import (
    AXES,
    LAYOUTS,
    ONE_DEVICE,
    layout_of,
    make_loss,
    mesh_of,
    named,
    placed,
    refuse_uneven,
    specs_of,
    state_specs,
)
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

import jmp_amp as amp

PRECISIONS = {
    "float32": ("O0", None),
    "bf16": ("bf16", None),
    "f16": ("fp16", None),
    # Weights are stored in half precision too.
    "bf16_weights": ("O2", "bfloat16"),
    "f16_weights": ("fp16_naive", None),
}
# Each of the five ways to cut a model, and one that combines three of them.
DEFAULT = ["zero1", "fsdp", "tensor", "pipeline", "pipeline_data_tensor"]
STEPS = 10
BATCH = 16
PIECES = 8
MODEL = char_gpt.Model(layers=8, width=64, heads=8, context=32, dropout=0.0)


class Trainer(NamedTuple):
    """The training of a layout.

    Attributes:
      mesh: the devices of the layout.
      begin: takes a seed; returns (params, opt_state), which never lie on one device.
      step: takes (params, opt_state, batch); returns (params, opt_state, loss).
      like: the shapes, dtypes and shardings of (params, opt_state).
      rows: the sharding of a batch.
    """

    mesh: Mesh
    begin: Callable[[int], tuple[Any, Any]]
    step: Any
    like: Any
    rows: NamedSharding


class Result(NamedTuple):
    """The outcome of a run."""

    mesh: Mapping[str, int]
    params: Any
    opt_state: Any
    losses: list[float]
    skips: int
    scale: float
    bytes_held: int  # by one device: parameters and the state of the optimizer


def recipe_of(precision: str, reduce_dtype: str | None = None) -> amp.Recipe:
    """Returns the recipe of a name in PRECISIONS.

    `reduce_dtype` is the dtype in which gradients are summed over devices; None is that
    of the operation that makes them.
    """
    name, half_dtype = named("--precision", precision, PRECISIONS)
    return amp.recipe(name, half_dtype, reduce_dtype=reduce_dtype)


def make_optimizer() -> optax.GradientTransformation:
    rate = optax.warmup_constant_schedule(2e-4, 2e-3, 10)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_trainer(
    layout: str,
    precision: str,
    *,
    model: char_gpt.Model = MODEL,
    devices: Sequence[Any] | None = None,
    pieces: int = PIECES,
    reduce_dtype: str | None = None,
) -> Trainer:
    """Returns the training of a model in a layout and a precision.

    `devices` may belong to a machine that is only described. See `recipe_of` for
    `reduce_dtype`.
    """
    if devices is None:
        # In several processes each trains the comparison for itself.
        devices = jax.local_devices() if layout == ONE_DEVICE else jax.devices()
    mesh, table, recipe = (
        mesh_of(layout, devices),
        layout_of(layout),
        recipe_of(precision, reduce_dtype),
    )
    tx = recipe.wrap(make_optimizer())
    loss_fn = recipe.autocast(make_loss(model, layout, mesh, pieces))

    def begin(seed: jax.Array) -> tuple[Any, Any]:
        tokens = np.zeros((1, model.context), np.int32)
        params = model.init(jax.random.key(seed), tokens)["params"]
        return recipe.init(tx, params)

    like = jax.eval_shape(begin, 0)
    params = specs_of(like[0], table.parameters)
    refuse_uneven(layout, like[0], params, mesh)
    states = params if table.state is None else specs_of(like[0], table.state)
    specs = (params, state_specs(like[1], states))
    shardings = placed(specs, mesh)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            gradient = amp.value_and_grad(loss_fn)
            loss, grads = gradient(params, batch, loss_scale=opt_state)
        # Each device gets the gradients that it updates: ZeRO's first stage scatters.
        grads = jax.lax.with_sharding_constraint(grads, placed(states, mesh))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    step = jax.jit(
        train_step,
        donate_argnums=(0, 1),
        out_shardings=(*shardings, NamedSharding(mesh, P())),
        compiler_options=options,
    )
    return Trainer(
        mesh,
        jax.jit(begin, out_shardings=shardings),
        step,
        jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            like,
            shardings,
        ),
        NamedSharding(mesh, P("data")),
    )


def batch_of(
    step: int, seed: int = 0, rows: int = BATCH, context: int = MODEL.context
) -> dict[str, np.ndarray]:
    """Returns the batch of a step: int32[rows, context + 1] and float32[rows]."""
    train, _ = char_gpt.tokens()
    random = np.random.default_rng((seed, step))
    starts = random.integers(len(train) - context, size=(rows, 1))
    tokens = train[starts + np.arange(context + 1)]
    return {"tokens": tokens, "weight": np.ones(rows, np.float32)}


def poisoned(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the batch with an infinite weight on its last text.

    That text lies on the last device along the data axis.
    """
    weight = batch["weight"].copy()
    weight[-1] = np.inf
    return {**batch, "weight": weight}


def put(batch: Mapping[str, np.ndarray], rows: NamedSharding) -> dict[str, jax.Array]:
    """Returns global arrays; each process provides the parts of its devices."""
    return {
        name: jax.make_array_from_callback(
            array.shape, rows, lambda at, array=array: array[at]
        )
        for name, array in batch.items()
    }


def restore(trainer: Trainer, directory: Path) -> tuple[int, tuple[Any, Any]]:
    """Returns the next step and (params, opt_state), laid out for this trainer."""
    like = {"step": 0, "state": trainer.like}
    with ocp.StandardCheckpointer() as checkpointer:
        kept = checkpointer.restore(directory.absolute(), like)
    return int(kept["step"]), tuple(kept["state"])


def save(directory: Path, step: int, state: tuple[Any, Any]) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute(), {"step": step, "state": state})


def train(
    trainer: Trainer,
    steps: int = STEPS,
    seed: int = 0,
    *,
    rows: int = BATCH,
    context: int = MODEL.context,
    poison: int | None = None,
    resume: Path | None = None,
    checkpoint: Path | None = None,
) -> Result:
    """Returns a training of some steps, from the beginning or from a checkpoint."""
    first, (params, opt_state) = 0, (None, None)
    if resume is None:
        params, opt_state = trainer.begin(seed)
    else:
        first, (params, opt_state) = restore(trainer, resume)
    losses = []
    for step in range(first, first + steps):
        batch = batch_of(step, seed, rows, context)
        batch = poisoned(batch) if step == poison else batch
        batch = put(batch, trainer.rows)
        params, opt_state, loss = trainer.step(params, opt_state, batch)
        losses.append(float(loss))
    if checkpoint is not None:
        save(checkpoint, first + steps, (params, opt_state))
    metrics = amp.metrics(opt_state)
    return Result(
        dict(trainer.mesh.shape),
        params,
        opt_state,
        losses,
        int(metrics["skipped_total"]),
        float(metrics["scale"]),
        sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in jax.tree.leaves((params, opt_state))
        ),
    )


def to_one_device(result: Result, alone: Result) -> float:
    """Returns the largest relative difference of two runs' losses that are finite."""
    pairs = np.array([result.losses, alone.losses])
    pairs = pairs[:, np.isfinite(pairs).all(axis=0)]
    return float(np.max(np.abs(pairs[0] / pairs[1] - 1), initial=0.0))


def table_of(results: Mapping[str, Result], precision: str) -> Table:
    """Returns the results as a table, one run in a row."""
    right = "first, last, to one, skips, scale, bytes"
    table = Table(
        Column("layout", no_wrap=True),
        Column("mesh", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in right.split(", ")),
        title=f"A GPT on Python's manual, in {precision}",
        caption=f"mesh: devices along {', '.join(AXES)}. first, last: losses. to one: "
        "the largest relative difference of a loss to that of one device. bytes: of "
        "parameters and optimizer state, on one device.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for name, result in results.items():
        table.add_row(
            *(name, "x".join(str(result.mesh[axis]) for axis in AXES)),
            *(f"{result.losses[0]:.4f}", f"{result.losses[-1]:.4f}"),
            f"{to_one_device(result, results[ONE_DEVICE]):.1e}",
            *(f"{result.skips}", f"2**{np.log2(result.scale):.0f}"),
            f"{result.bytes_held / 1e6:.2f}MB",
        )
    return table


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"{__doc__}".splitlines()[0])
    parser.add_argument("--layout", action="append", help=", ".join(LAYOUTS))
    parser.add_argument("--full", action="store_true", help="compares all layouts")
    parser.add_argument("--precision", default="f16", help=", ".join(PRECISIONS))
    dtypes = "float32: gradients are summed over devices in f32"
    parser.add_argument("--reduce", choices=["float32"], help=dtypes)
    numbers = {"steps": STEPS, "batch": BATCH, "pieces": PIECES, "devices": 8}
    for name, value in (numbers | {"processes": 1}).items():
        help_text = f"default: {value}"
        parser.add_argument(f"--{name}", type=int, default=value, help=help_text)
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--poison", type=int, metavar="STEP", help="gets an inf")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from here")
    parser.add_argument("--process", type=int, default=0, help="number of this one")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    return parser


def check(options: argparse.Namespace) -> None:
    """Raises a ValueError if the options contradict each other."""
    for name in ("steps", "batch", "pieces", "devices", "processes"):
        if (value := getattr(options, name)) < 1:
            raise ValueError(f"--{name} {value}: use a number of at least 1")
    for name in options.layout:
        layout_of(name)
    named("--precision", options.precision, PRECISIONS)
    if options.checkpoint is not None:
        if len(options.layout) > 2:
            raise ValueError("--checkpoint: say which --layout it is for, and name one")
        if options.checkpoint.exists():
            raise ValueError(
                f"--checkpoint {options.checkpoint}: exists already. Name a new folder."
            )
    if options.resume is not None and not options.resume.is_dir():
        raise ValueError(
            f"--resume {options.resume}: there is no checkpoint. Write one with "
            "--checkpoint."
        )
    if options.devices % options.processes:
        raise ValueError(
            f"--devices {options.devices}: {options.processes} processes cannot have "
            "the same number of them. Use a multiple."
        )
    if not 0 <= options.process < options.processes:
        raise ValueError(
            f"--process {options.process}: with --processes {options.processes} they "
            f"are numbered from 0 to {options.processes - 1}."
        )
    if options.processes > 1 and options.coordinator is None:
        raise ValueError(
            f"--processes {options.processes}: they have to find each other. Give all "
            "of them one --coordinator HOST:PORT."
        )


def find_devices(options: argparse.Namespace) -> None:
    """Starts the devices, virtual ones on a CPU.

    Raises:
      ValueError: if there are too few.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        each = options.devices // options.processes
        jax.config.update("jax_num_cpu_devices", each)
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process
        )
    if (found := jax.device_count()) < options.devices:
        raise ValueError(
            f"--devices {options.devices}: there are {found}. Use --devices {found}, "
            "or JAX_PLATFORMS=cpu for virtual ones."
        )


def make_trainers(options: argparse.Namespace) -> dict[str, Trainer]:
    """Returns the chosen trainings.

    Raises:
      ValueError: if a layout does not fit the devices or the batch.
    """
    trainers = {}
    for name in options.layout:
        every = jax.local_devices() if name == ONE_DEVICE else jax.devices()
        trainer = make_trainer(
            *(name, options.precision),
            devices=every[: options.devices],
            pieces=options.pieces,
            reduce_dtype=options.reduce,
        )
        parts = trainer.mesh.shape["data"]
        if trainer.mesh.shape["stage"] > 1:
            parts *= options.pieces
        if options.batch % parts:
            raise ValueError(
                f"--batch {options.batch}: the layout {name} cuts a batch into {parts} "
                f"parts. Use a multiple of {parts}."
            )
        trainers[name] = trainer
    return trainers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    chosen = options.layout or (LAYOUTS if options.full else DEFAULT)
    options.layout = list(dict.fromkeys([ONE_DEVICE, *chosen]))
    try:
        check(options)
        find_devices(options)
        trainers = make_trainers(options)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    console = Console(quiet=options.process > 0)
    results = {}
    for name, trainer in track(trainers.items(), "training", console=console):
        results[name] = train(
            *(trainer, options.steps, options.seed),
            rows=options.batch,
            poison=options.poison,
            resume=options.resume,
            checkpoint=None if name == ONE_DEVICE else options.checkpoint,
        )
    console.print(table_of(results, options.precision))
    if options.processes > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
