"""Trains with weights that are stored in bfloat16, in several ways to update them.

    python examples/half_weights.py                 the character-level GPT
    python examples/half_weights.py --task digits   the CNN
    python examples/half_weights.py --full          both, 1000 and 300 steps

The GPT of `char_gpt.py` and the CNN of `train_digits.py` learn from the same batches,
with the optimizer and the schedule of their examples, from the same first weights:

    f32         f32 weights, f32 everywhere
    autocast    f32 weights under bf16 autocast
    naive       bf16 weights, updated by plain `optax.apply_updates`
    masters     bf16 weights in `with_master_weights`
    stochastic  bf16 weights in `with_stochastic_rounding`
    kahan       bf16 weights in `with_kahan`

The losses of the digits are small. Rounding the first weights of an f32 run to bf16
changes them by some percent, so compare means over `--seeds`.

The learning rate falls to zero. Late updates are less than half the distance between
two bf16 numbers, and the naive weights stand still.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import char_gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_digits
from rich import box, get_console
from rich.progress import track
from rich.table import Column, Table

import jmp_amp as amp

F32 = amp.get_policy("float32")
AUTOCAST = amp.get_policy("mixed_bfloat16")
BF16_WEIGHTS = amp.get_policy("p=bf16,c=bf16,o=f32")
# Of the optimizer, the weights before rounding (masters begin there), and a random key.
Wrap = Callable[[optax.GradientTransformationExtraArgs, Any, jax.Array], Any]


class Run(NamedTuple):
    """The policy that stores the weights, and the wrapper that updates them."""

    policy: amp.Policy
    wrap: Wrap = lambda tx, first, key: tx


RUNS = {
    "f32": Run(F32),
    "autocast": Run(AUTOCAST),
    "naive": Run(BF16_WEIGHTS),
    "masters": Run(
        BF16_WEIGHTS,
        lambda tx, first, key: amp.with_master_weights(tx, init_from=first),
    ),
    "stochastic": Run(
        BF16_WEIGHTS, lambda tx, first, key: amp.with_stochastic_rounding(tx, key)
    ),
    "kahan": Run(BF16_WEIGHTS, lambda tx, first, key: amp.with_kahan(tx)),
}


class Task(NamedTuple):
    """The training of another example.

    Attributes:
      title: the title of the table.
      steps: the default number of steps.
      full_steps: the number of steps of `--full`.
      init: takes a seed; returns first parameters and batch statistics.
      batches: takes a number of steps and a seed.
      make_loss: takes a policy; returns a function of (parameters, batch statistics,
        batch, dropout key) to the loss and new batch statistics.
      make_optimizer: takes a number of steps.
      validate: takes (policy, parameters, batch statistics); returns loss and accuracy.
    """

    title: str
    steps: int
    full_steps: int
    init: Callable[[int], tuple[Any, Any]]
    batches: Callable[[int, int], Iterator[Any]]
    make_loss: Callable[[amp.Policy], Callable[..., Any]]
    make_optimizer: Callable[[int], optax.GradientTransformationExtraArgs]
    validate: Callable[[amp.Policy, Any, Any], tuple[jax.Array, jax.Array]]


def loss_and_accuracy(logits: jax.Array, labels: Any) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = jnp.argmax(logits, axis=-1) == labels
    return losses.mean(), jnp.mean(right.astype(jnp.float32))


def digits_task() -> Task:
    train_data, test = train_digits.digits()

    @functools.cache
    def init(seed: int) -> tuple[Any, Any]:
        image = np.zeros((1, 8, 8, 1), np.float32)
        variables = train_digits.CNN().init(jax.random.key(seed), image, train=False)
        return variables["params"], variables["batch_stats"]

    @functools.partial(jax.jit, static_argnums=0)
    def validate(policy: amp.Policy, params: Any, batch_stats: Any) -> Any:
        apply: Callable[..., Any] = amp.autocast(train_digits.CNN().apply, policy)
        variables = {"params": params, "batch_stats": batch_stats}
        return loss_and_accuracy(
            apply(variables, test["image"], train=False), test["label"]
        )

    return Task(
        "CNN on 1797 handwritten digits",
        *(100, 300),
        init,
        functools.partial(train_digits.batches, train_data),
        train_digits.make_loss,
        functools.partial(train_digits.make_optimizer, amp.no_loss_scale()),
        validate,
    )


def gpt_task(model: char_gpt.Model = char_gpt.MODEL) -> Task:
    @functools.cache
    def init(seed: int) -> tuple[Any, Any]:
        tokens = char_gpt.batch_of(0, seed, model.context)[:, :-1]
        return char_gpt.initialise(model, jax.random.key(seed), tokens), None

    def batches(steps: int, seed: int) -> Iterator[Any]:
        return (char_gpt.batch_of(step, seed, model.context) for step in range(steps))

    def make_loss(policy: amp.Policy) -> Callable[..., Any]:
        loss_fn = char_gpt.make_loss(amp.autocast(model.apply, policy))
        return lambda params, stats, batch, key: (loss_fn(params, batch, key), stats)

    @functools.partial(jax.jit, static_argnums=0)
    def validate(policy: amp.Policy, params: Any, _: Any) -> Any:
        _, held_out = char_gpt.tokens()
        starts = np.arange(0, len(held_out) - model.context, model.context)[:, None]
        windows = held_out[starts + np.arange(model.context + 1)]
        apply: Callable[..., Any] = amp.autocast(model.apply, policy)
        logits = apply({"params": params}, windows[:, :-1])
        return loss_and_accuracy(logits, windows[:, 1:])

    return Task(
        "A character-level GPT on Python's manual",
        *(150, 1000),
        init,
        batches,
        make_loss,
        lambda steps: amp.with_loss_scale(
            char_gpt.make_optimizer(steps), amp.no_loss_scale()
        ),
        validate,
    )


TASKS = {"gpt": gpt_task, "digits": digits_task}


class State(NamedTuple):
    """All that a training step writes."""

    params: Any
    batch_stats: Any
    opt_state: Any


class Result(NamedTuple):
    """The outcome of a run."""

    state: State
    validation_loss: float  # with the weights as they are stored
    accuracy: float
    exported_loss: float  # with the f32 weights of `export_params`
    bytes_per_parameter: float  # of weights and optimizer state
    losses: np.ndarray  # float32[steps], of training
    still: np.ndarray  # float32[steps], shares of the entries: see `movement`
    lost: np.ndarray
    arrived: np.ndarray


def movement(wanted: Any, before: State, after: State) -> dict[str, jax.Array]:
    """Returns which share of the wanted updates the weights made.

    Args:
      wanted: the float32 updates of the optimizer within all wrappers.
      before: the state before the step.
      after: the state after it.

    Returns:
      `still`: the share of stored weights that did not change although their update was
      not zero. `lost`: the same share, counting the digits that the optimizer keeps.
      `arrived`: how far these weights moved in the wanted direction, as a share of the
      wanted distance. Stochastic rounding leaves some weights where they are and takes
      others too far: only `arrived` shows whether that evens out.
    """

    def numbers(tree: Any) -> jax.Array:
        return jnp.concatenate(
            [leaf.astype(jnp.float32).ravel() for leaf in jax.tree.leaves(tree)]
        )

    def exact(state: State) -> jax.Array:
        return numbers(amp.export_params(state.params, state.opt_state))

    update, moved = numbers(wanted), exact(after) - exact(before)
    is_still = numbers(before.params) == numbers(after.params)
    all_wanted = jnp.abs(update).sum()
    arrived = (moved * jnp.sign(update)).sum()
    return {
        "still": jnp.mean((is_still & (update != 0)).astype(jnp.float32)),
        "lost": jnp.mean(((moved == 0) & (update != 0)).astype(jnp.float32)),
        # While the learning rate is zero there is nothing to miss.
        "arrived": jnp.where(all_wanted > 0, arrived / all_wanted, 1.0),
    }


@functools.cache
def make_train_step(
    task: Task, name: str, steps: int
) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
    """Returns the step: a function of (state, batch, dropout key)."""
    run, inner = RUNS[name], task.make_optimizer(steps)
    # Only `init` reads the first weights and the key, so all seeds share the step.
    tx, loss_fn = run.wrap(inner, None, jax.random.key(0)), task.make_loss(run.policy)

    def train_step(state: State, batch: Any, dropout_key: jax.Array) -> Any:
        params, batch_stats, opt_state = state
        (loss, batch_stats), grads = amp.value_and_grad(loss_fn, has_aux=True)(
            params, batch_stats, batch, dropout_key, loss_scale=opt_state
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        after = State(params, batch_stats, opt_state)
        # For the table only: the update of these gradients in f32.
        inner_state = state.opt_state if tx is inner else state.opt_state.inner_state
        exact = amp.export_params(state.params, state.opt_state)
        wanted, _ = inner.update(grads, inner_state, exact)
        return after, {"loss": loss, **movement(wanted, state, after)}

    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and bf16 would look better than it is.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    return jax.jit(train_step, donate_argnums=0, compiler_options=options)


def train(
    task: Task, name: str, steps: int, seed: int = 0, progress: bool = False
) -> Result:
    """Returns a validated training; `name` is one of `RUNS`."""
    run, key = RUNS[name], jax.random.key(seed)
    first, batch_stats = task.init(seed)
    # The step donates its arguments, and all runs share the first weights.
    params, batch_stats = jax.tree.map(
        jnp.copy, (amp.cast_params(first, run.policy), batch_stats)
    )
    tx = run.wrap(task.make_optimizer(steps), first, jax.random.fold_in(key, steps))
    state = State(params, batch_stats, tx.init(params))
    train_step, history = make_train_step(task, name, steps), []
    batches = enumerate(task.batches(steps, seed))
    for step, batch in track(batches, f"{name:10}", steps, disable=not progress):
        dropout_key = jax.random.fold_in(key, step)
        state, figures = train_step(state, batch, dropout_key)
        history.append(jax.device_get(figures))
    params, batch_stats, opt_state = state
    exported = jax.jit(amp.export_params)(params, opt_state)
    loss, accuracy = task.validate(run.policy, params, batch_stats)
    exported_loss, _ = task.validate(F32, exported, batch_stats)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state)))
    series = (
        np.array([figures[each] for figures in history])
        for each in ("loss", "still", "lost", "arrived")
    )
    return Result(
        state,
        float(loss),
        float(accuracy),
        float(exported_loss),
        stored / sum(leaf.size for leaf in jax.tree.leaves(params)),
        *series,
    )


def table_of(title: str, results: Mapping[str, Sequence[Result]]) -> Table:
    """Returns a table with a row for each run: the means over its seeds."""
    right = "train, validation, to f32, exported, to f32, accuracy, bytes, "
    right += "still, lost, arrived"
    table = Table(
        Column("run", min_width=10),
        *(Column(name, justify="right") for name in right.split(", ")),
        title=title,
        caption="train: loss of the last 20 steps. validation: loss with the stored "
        "weights. exported: with those of `export_params`, in f32. bytes: a parameter "
        "and its optimizer state. still: stored weights that did not change though "
        "their update was not zero. lost: the same, counting masters and compensation. "
        "arrived: how far weights moved, of what was wanted. All three: the mean over "
        "the last fifth of the steps.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )

    def mean(name: str, of: Callable[[Result], Any]) -> float:
        return float(np.mean([of(result) for result in results[name]]))

    for name in results:
        loss = mean(name, lambda result: result.validation_loss)
        exported = mean(name, lambda result: result.exported_loss)
        table.add_row(
            name,
            f"{mean(name, lambda result: result.losses[-20:].mean()):.4f}",
            f"{loss:.4f}",
            f"{loss / mean('f32', lambda result: result.validation_loss):.4f}x",
            f"{exported:.4f}",
            f"{exported / mean('f32', lambda result: result.exported_loss):.4f}x",
            f"{mean(name, lambda result: result.accuracy):.2%}",
            f"{mean(name, lambda result: result.bytes_per_parameter):.2f}",
            f"{mean(name, lambda result: late(result.still)):.1%}",
            f"{mean(name, lambda result: late(result.lost)):.1%}",
            f"{mean(name, lambda result: late(result.arrived)):.1%}",
        )
    return table


def late(series: np.ndarray) -> float:
    """Returns the mean over the last fifth of the steps."""
    return float(series[4 * len(series) // 5 :].mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, help="default: gpt; --full: both")
    parser.add_argument("--full", action="store_true", help="trains longer")
    parser.add_argument("--steps", type=int, help="default: depends on the task")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--seeds", type=int, default=1, help="so many, from --seed on; default: 1"
    )
    options = parser.parse_args()
    for name in ("steps", "seeds"):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"--{name} {number}: use a positive number")
    seeds = range(options.seed, options.seed + options.seeds)
    chosen = [options.task] if options.task else TASKS if options.full else ["gpt"]
    for each in chosen:
        task = TASKS[each]()
        steps = options.steps or (task.full_steps if options.full else task.steps)
        results = {
            name: [train(task, name, steps, seed, progress=True) for seed in seeds]
            for name in RUNS
        }
        title = f"{task.title}, {steps} steps, seeds {', '.join(map(str, seeds))}"
        get_console().print(table_of(title, results))


if __name__ == "__main__":
    main()
