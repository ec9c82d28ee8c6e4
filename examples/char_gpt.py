"""Trains a character-level GPT on the text of Python's manual, in several precisions.

    python examples/char_gpt.py                          compares f32, bf16 and f16
    python examples/char_gpt.py --steps 1000             trains longer
    python examples/char_gpt.py --policy mixed_float16   trains with one policy
    python examples/char_gpt.py --policy mixed_bfloat16 --policy fp8

One f32 model learns from the same batches in f32, under bf16 autocast, and under f16
autocast with dynamic loss scaling. Its layers are one `scan`, which computes each layer
again in the backward pass. At the end every run writes a text.

With "fp8" the products of all layers but the head are of 8-bit floats. A device without
them computes the same numbers, slower.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich import box, get_console
from rich.progress import track
from rich.table import Column, Table

import jmp_amp as amp

POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]
STEPS = 250
BATCH = 8
PROMPT = "The "


def text() -> str:
    """Returns the manual that `help()` shows: almost half a million characters."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


@functools.cache
def vocabulary() -> str:
    """Returns the characters of the text; a token is an index into them."""
    return "".join(sorted(set(text())))


@functools.cache
def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Returns the text to train on and the held-out last tenth: int32[n] each."""
    every = np.array([vocabulary().index(each) for each in text()], np.int32)
    return every[: -len(every) // 10], every[-len(every) // 10 :]


class Block(nn.Module):
    """A layer; `nn.scan` demands the second argument and result."""

    heads: int
    dropout: float
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        dropout = nn.Dropout(self.dropout, deterministic=not self.train)
        mask = nn.make_causal_mask(x[..., 0], dtype=jnp.bool_)
        h = nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        x = x + dropout(h)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + dropout(nn.Dense(x.shape[-1])(h)), None


class Model(nn.Module):
    """An f32 GPT that knows nothing of precision."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    dropout: float = 0.05

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        characters = len(vocabulary())
        x = nn.Embed(characters, self.width, name="embedding")(tokens)
        positions = jnp.arange(tokens.shape[1])[None]
        x = x + nn.Embed(self.context, self.width, name="position")(positions)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),  # not needed in a scan
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        x, _ = layers(self.heads, self.dropout, train, name="layers")(x, None)
        return nn.Dense(characters, name="head")(nn.LayerNorm()(x))


MODEL = Model()


class Result(NamedTuple):
    """The outcome of a run."""

    params: Any
    opt_state: Any
    losses: np.ndarray  # float32[steps], without the loss scale
    validation_loss: float  # of the held-out text, after the last step
    skips: int  # steps skipped because a gradient overflowed
    scale: float  # the last loss scale
    matmuls: tuple[int, int]  # of a gradient: those in half precision, and all
    saved: tuple[int, int]  # bytes for the backward pass: kept, and without autocast


def policy_for(name: str) -> amp.PolicyMap | str:
    """Returns the policy of a run from the name that the command line gave it.

    The head stays in bf16 under fp8: it is where 8 bits cost most accuracy.
    """
    if amp.get_policy(name).matmul is None:
        return name
    return amp.PolicyMap(name, {"**/head": "mixed_bfloat16"})


def make_loss(apply: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns the loss: a function of (params, tokens, dropout key or none at all)."""

    def loss_fn(params: Any, batch: Any, dropout_key: Any = None) -> jax.Array:
        train = dropout_key is not None
        rngs = {"dropout": dropout_key} if train else None
        logits = apply({"params": params}, batch[:, :-1], train=train, rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()

    return loss_fn


def make_optimizer(steps: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0, 2e-3, max(1, steps // 10), steps + 1)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_train_step(loss_fn: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    """Returns the step: a function of (params, opt_state, batch, dropout key)."""

    def train_step(params: Any, opt_state: Any, batch: Any, dropout_key: Any) -> Any:
        gradient = amp.value_and_grad(loss_fn)
        loss, grads = gradient(params, batch, dropout_key, loss_scale=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    return jax.jit(train_step, donate_argnums=(0, 1), compiler_options=options)


def batch_of(step: int, seed: int, context: int) -> np.ndarray:
    """Returns the batch of a step: int32[BATCH, context + 1]."""
    train, _ = tokens()
    random = np.random.default_rng((seed, step))
    starts = random.integers(len(train) - context, size=(BATCH, 1))
    return train[starts + np.arange(context + 1)]


@functools.partial(jax.jit, static_argnums=0)
def initialise(model: Model, key: jax.Array, tokens: jax.Array) -> Any:
    return model.init(key, tokens)["params"]


def train(
    policy: str,
    steps: int = STEPS,
    seed: int = 0,
    *,
    model: Model = MODEL,
    tx: optax.GradientTransformationExtraArgs | None = None,
    params: Any = None,
    progress: bool = False,
) -> Result:
    """Returns a trained and validated model.

    `policy` is a name for `policy_for`. `tx` is an optimizer in `amp.with_loss_scale`,
    by default AdamW. `params` are the first parameters, by default random ones.
    """
    key, first = jax.random.key(seed), batch_of(0, seed, model.context)
    if params is None:
        params = initialise(model, key, first[:, :-1])
        params = amp.get_policy(policy).cast_to_param(params)
    if tx is None:
        f16 = amp.get_policy(policy).compute_dtype == jnp.float16
        loss_scale = amp.dynamic_loss_scale() if f16 else amp.no_loss_scale()
        tx = amp.with_loss_scale(make_optimizer(steps), loss_scale)
    loss_fn = make_loss(amp.autocast(model.apply, policy_for(policy)))
    # With "float32" nothing is added to what the functions do themselves.
    matmuls, saved, without = (
        amp.explain(fn, "float32")(params, first, key).total
        for fn in (jax.grad(loss_fn), loss_fn, make_loss(model.apply))
    )
    # The step donates its arguments, and `params` may be the caller's.
    params, opt_state = jax.tree.map(jnp.copy, params), tx.init(params)
    train_step, losses = make_train_step(loss_fn, tx), []
    for step in track(range(steps), f"{policy:15}", disable=not progress):
        batch = batch_of(step, seed, model.context)
        dropout_key = jax.random.fold_in(key, step)
        params, opt_state, loss = train_step(params, opt_state, batch, dropout_key)
        losses.append(float(loss))
    _, held_out = tokens()
    starts = np.arange(0, len(held_out) - model.context, model.context)[:, None]
    windows = held_out[starts + np.arange(model.context + 1)]
    metrics = amp.metrics(opt_state)
    return Result(
        params,
        opt_state,
        np.array(losses, np.float32),
        float(jax.jit(loss_fn)(params, windows)),
        int(metrics["skipped_total"]),
        float(metrics["scale"]),
        (matmuls.matmuls_in_half, matmuls.matmuls),
        (saved.saved, without.saved),
    )


def sample(
    params: Any,
    policy: str,
    length: int = 200,
    temperature: float = 0.6,
    seed: int = 0,
    *,
    model: Model = MODEL,
) -> str:
    """Returns the text after the prompt; at temperature 0, the likeliest characters."""
    apply: Callable[..., Any] = amp.autocast(model.apply, policy_for(policy))
    begun, end = len(PROMPT), len(PROMPT) + length
    # Longer than the text, which may be shorter than a window.
    written = np.zeros(end + model.context, np.int32)
    written[:begun] = [vocabulary().index(character) for character in PROMPT]

    @jax.jit
    def write(params: Any, written: jax.Array, key: jax.Array) -> jax.Array:
        def write_next(number: jax.Array, written: jax.Array) -> jax.Array:
            # The first windows hold characters that are not written yet, which causal
            # attention does not read.
            start = jnp.maximum(number - model.context, 0)
            window = jax.lax.dynamic_slice(written, (start,), (model.context,))
            logits = apply({"params": params}, window[None])[0, number - start - 1]
            noise = jax.random.gumbel(jax.random.fold_in(key, number), logits.shape)
            chosen = jnp.argmax(logits + temperature * noise)
            return written.at[number].set(chosen.astype(jnp.int32))

        return jax.lax.fori_loop(begun, end, write_next, written)

    every = jax.device_get(write(params, written, jax.random.key(seed)))
    return "".join(vocabulary()[token] for token in every[begun:end])


def table_of(results: Mapping[str, Result]) -> Table:
    """Returns the results as a table, one run in a row."""
    right = "train loss, validation loss, to f32, skips, scale, half, saved, ratio"
    table = Table(
        Column("run", overflow="fold", min_width=14),
        *(Column(name, justify="right") for name in right.split(", ")),
        title="A character-level GPT on Python's manual",
        caption="train loss: of the last 20 steps. half: matmuls of a gradient in half "
        "precision. saved: for the backward pass, and the ratio to without autocast.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for name, result in results.items():
        loss, f32 = result.validation_loss, results.get("float32")
        half, (saved, without) = "{}/{}".format(*result.matmuls), result.saved
        table.add_row(
            *(name, f"{result.losses[-20:].mean():.4f}", f"{loss:.4f}"),
            f"{loss / f32.validation_loss:.4f}x" if f32 else "",
            *(f"{result.skips}", f"{result.scale:g}", half),
            *(f"{saved / 1e6:.2f}MB", f"{saved / without:.2f}x"),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=f"{__doc__}".splitlines()[0])
    parser.add_argument("--policy", action="append", help=f"default: {POLICIES}")
    defaults = {"steps": STEPS, "seed": 0, "length": 200, "temperature": 0.6}
    defaults |= {"layers": MODEL.layers, "width": MODEL.width}
    for name, value in defaults.items():
        text = f"default: {value}"
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    options = parser.parse_args()
    options.policy = options.policy or POLICIES
    try:
        for name in options.policy:
            amp.autocast(MODEL.apply, policy_for(name))
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    model, console = Model(options.layers, options.width), get_console()
    results = {
        name: train(name, options.steps, options.seed, model=model, progress=True)
        for name in options.policy
    }
    console.print(table_of(results))
    how = (options.length, options.temperature, options.seed)
    for name, result in results.items():
        console.rule(name)
        written = sample(result.params, name, *how, model=model)
        console.print(PROMPT + written, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
