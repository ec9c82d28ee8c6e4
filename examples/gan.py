"""Trains a GAN on handwritten digits: two losses, two optimizers, two loss scales.

    python examples/gan.py                          compares f32, bf16 and f16
    python examples/gan.py --steps 1500             trains longer: better digits
    python examples/gan.py --policy mixed_float16   trains with one policy
    python examples/gan.py --plot samples.png       draws what each of them generates

The gradients of a generator and of a discriminator differ in size. So each loss has a
separate scale, in the state of its optimizer. When the gradients of one loss overflow,
only that update is skipped and only that scale backs off. Apex does the same
(`amp.initialize(.., num_losses=2)`), and so does PyTorch with two scalers; here it is
one compiled step.

The discriminator's loss has a penalty: the squared gradient of its logits with respect
to the real images (R1 of Mescheder et al. 2018, arXiv:1801.04406). This gradient is
taken inside autocast, and the optimizer's gradient goes through it.

A classifier of scikit-learn, trained on the real digits, judges the generated ones.
`make_losses` and `make_train_step` are the parts to copy.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
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
from sklearn.linear_model import LogisticRegression
from train_digits import digits

import jmp_amp as amp

POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]
STEPS = 600
BATCH = 64
NOISE = 32
PENALTY = 0.5
SAMPLES = 2000


class Generator(nn.Module):
    """Noise to images. It knows nothing of precision, and nor does the other one."""

    @nn.compact
    def __call__(self, noise: jax.Array, train: bool = True) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        x = nn.Dense(2 * 2 * 64, use_bias=False)(noise)
        x = nn.relu(norm()(x)).reshape(-1, 2, 2, 64)
        x = nn.ConvTranspose(32, (4, 4), (2, 2), use_bias=False)(x)
        x = nn.relu(norm()(x))
        return nn.tanh(nn.ConvTranspose(1, (4, 4), (2, 2))(x))


class Discriminator(nn.Module):
    """Images to logits, large for real ones. The penalty wants no BatchNorm in it."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.leaky_relu(nn.Conv(32, (4, 4), (2, 2))(image), 0.2)
        x = nn.leaky_relu(nn.Conv(64, (4, 4), (2, 2))(x), 0.2)
        return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]


class State(NamedTuple):
    """All that a training step writes."""

    generator: Any
    batch_stats: Any
    generator_opt: Any
    discriminator: Any
    discriminator_opt: Any


class Result(NamedTuple):
    """The outcome of a run; pairs are of the discriminator and the generator."""

    state: State
    losses: np.ndarray  # float32[steps, 2], without the loss scales
    images: np.ndarray  # float32[SAMPLES, 8, 8, 1]
    skips: tuple[int, int]  # steps that skipped the update of one of them
    scales: tuple[float, float]  # the last loss scales
    matmuls: tuple[str, str]  # of a gradient: those in half precision, and all


class Quality(NamedTuple):
    """The judgement of images by a classifier that was trained on real digits."""

    confidence: float  # mean probability of the digit that an image is taken for
    digits: int  # how many of the ten are at least 2 % of the images
    spread: float  # exp of the entropy of their shares: 10 if all are as many
    distance: float  # Frechet distance of the pixels to those of held-out digits


def make_losses(
    policy: amp.Policy | str, penalty: float = PENALTY
) -> tuple[Callable[..., jax.Array], Callable[..., Any]]:
    """Returns the losses of the discriminator and of the generator.

    Each is a function of the parameters to learn first; the generator's returns its new
    batch statistics too.
    """

    def generate(params: Any, batch_stats: Any, noise: Any) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        return Generator().apply(variables, noise, mutable=["batch_stats"])

    def logits_of(params: Any, image: Any) -> Any:
        return Discriminator().apply({"params": params}, image)

    # Autocast has the whole loss, not only the models, so that the gradient inside the
    # penalty has its matrix products in half precision too.
    @functools.partial(amp.autocast, policy=policy)
    def discriminator_loss(
        params: Any, generator: Any, batch_stats: Any, real: Any, noise: Any
    ) -> jax.Array:
        fake, _ = generate(generator, batch_stats, noise)
        logits = logits_of(params, real)
        loss = nn.softplus(-logits).mean() + nn.softplus(logits_of(params, fake)).mean()
        if not penalty:
            return loss
        # Of a sum: the cotangent of each image is 1, so this gradient needs no scale.
        slopes = jax.grad(lambda image: logits_of(params, image).sum())(real)
        return loss + penalty * jnp.square(slopes).sum(axis=(1, 2, 3)).mean()

    @functools.partial(amp.autocast, policy=policy)
    def generator_loss(
        params: Any, batch_stats: Any, discriminator: Any, noise: Any
    ) -> Any:
        fake, updated = generate(params, batch_stats, noise)
        loss = nn.softplus(-logits_of(discriminator, fake)).mean()
        return loss, updated["batch_stats"]

    return discriminator_loss, generator_loss


def make_optimizer(loss_scale: amp.LossScale) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with a loss scale. Each loss has a separate state of it."""
    return amp.with_loss_scale(optax.adam(1e-3, b1=0.5), loss_scale)


def make_train_step(
    losses: tuple[Callable[..., Any], Callable[..., Any]],
    tx: optax.GradientTransformationExtraArgs,
) -> Callable[..., tuple[State, jax.Array]]:
    """Returns the step, a function of (state, real images, a pair of noises).

    One transformation serves both losses, since loss scales are in the states.
    """
    discriminator_loss, generator_loss = losses

    # Round to half wherever the program says so. By default the CPU compiler keeps f32
    # from one operation to the next, and f16 would look better than it is.
    @functools.partial(
        jax.jit,
        donate_argnums=0,
        compiler_options={"xla_allow_excess_precision": False},
    )
    def train_step(state: State, real: Any, noises: Any) -> Any:
        generator, batch_stats, generator_opt, discriminator, discriminator_opt = state

        d_loss, grads = amp.value_and_grad(discriminator_loss)(
            discriminator,
            generator,
            batch_stats,
            real,
            noises[0],
            loss_scale=discriminator_opt,
        )
        updates, discriminator_opt = tx.update(grads, discriminator_opt, discriminator)
        discriminator = optax.apply_updates(discriminator, updates)

        (g_loss, new_stats), grads = amp.value_and_grad(generator_loss, has_aux=True)(
            generator, batch_stats, discriminator, noises[1], loss_scale=generator_opt
        )
        updates, generator_opt = tx.update(grads, generator_opt, generator)
        generator = optax.apply_updates(generator, updates)
        # Batch statistics are the generator's: they are taken back with its step alone.
        batch_stats = amp.keep_if_finite(generator_opt, new_stats, batch_stats)

        state = State(
            generator, batch_stats, generator_opt, discriminator, discriminator_opt
        )
        return state, jnp.stack([d_loss, g_loss])

    return train_step


def new_state(
    policy: amp.Policy, tx: optax.GradientTransformationExtraArgs, seed: int
) -> State:
    keys = jax.random.split(jax.random.key(seed))
    noise = np.zeros((1, NOISE), np.float32)
    variables: Any = jax.jit(Generator().init)(keys[0], noise)
    image = np.zeros((1, 8, 8, 1), np.float32)
    discriminator: Any = jax.jit(Discriminator().init)(keys[1], image)["params"]
    params = policy.cast_to_param((variables["params"], discriminator))
    generator_opt, discriminator_opt = map(tx.init, params)
    batch_stats = variables["batch_stats"]
    return State(params[0], batch_stats, generator_opt, params[1], discriminator_opt)


@functools.cache
def real_images() -> tuple[np.ndarray, np.ndarray]:
    """Returns the digits to learn and those held out, from -1 to 1 as tanh is."""
    train, test = digits()
    return 2 * train["image"] - 1, 2 * test["image"] - 1


def batch_of(step: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the real images and the two noises of a step, whatever ran before."""
    images, _ = real_images()
    random = np.random.default_rng((seed, step))
    chosen = random.choice(len(images), BATCH, replace=False)
    noises = random.standard_normal((2, BATCH, NOISE), np.float32)
    return images[chosen], noises


def train(
    policy: str,
    steps: int = STEPS,
    seed: int = 0,
    *,
    penalty: float = PENALTY,
    tx: optax.GradientTransformationExtraArgs | None = None,
    progress: bool = False,
) -> Result:
    """Returns both trained; `tx` is Adam by default, in `amp.with_loss_scale`."""
    parsed = amp.get_policy(policy)
    if tx is None:
        f16 = parsed.compute_dtype == jnp.float16
        # The default interval, 2000 steps, is longer than this training. With 50 steps
        # each scale grows until it finds its limit.
        scale = amp.dynamic_loss_scale(growth_interval=50) if f16 else None
        tx = make_optimizer(scale or amp.no_loss_scale())
    losses, state = make_losses(parsed, penalty), new_state(parsed, tx, seed)
    matmuls = matmuls_in_half(losses, state, batch_of(0, seed))
    train_step, history = make_train_step(losses, tx), []
    for step in track(range(steps), f"{policy:15}", disable=not progress):
        state, both = train_step(state, *batch_of(step, seed))
        history.append(np.asarray(both))
    metrics = [amp.metrics(s) for s in (state.discriminator_opt, state.generator_opt)]
    d_metrics, g_metrics = jax.device_get(metrics)
    return Result(
        state,
        np.stack(history),
        sample(policy, state, SAMPLES, seed),
        (int(d_metrics["skipped_total"]), int(g_metrics["skipped_total"])),
        (float(d_metrics["scale"]), float(g_metrics["scale"])),
        matmuls,
    )


def matmuls_in_half(losses: Any, state: State, batch: Any) -> tuple[str, str]:
    """Returns how many matmuls and convolutions of each gradient are in half."""
    (discriminator_loss, generator_loss), (real, noises) = losses, batch
    # With "float32" nothing is added to what the functions do themselves.
    totals = [
        amp.explain(jax.grad(discriminator_loss), "float32")(
            state.discriminator, state.generator, state.batch_stats, real, noises[0]
        ).total,
        amp.explain(jax.grad(generator_loss, has_aux=True), "float32")(
            state.generator, state.batch_stats, state.discriminator, noises[1]
        ).total,
    ]
    d, g = (f"{total.matmuls_in_half}/{total.matmuls}" for total in totals)
    return d, g


def sample(policy: str, state: State, number: int, seed: int = 0) -> np.ndarray:
    """Returns images of the generator: float32[number, 8, 8, 1]."""
    apply = amp.autocast(Generator().apply, policy)
    variables = {"params": state.generator, "batch_stats": state.batch_stats}
    noise = np.random.default_rng(seed).standard_normal((number, NOISE), np.float32)
    images: Any = jax.jit(functools.partial(apply, train=False))(variables, noise)
    return np.asarray(images)


@functools.cache
def classifier() -> LogisticRegression:
    """Returns a classifier of the real digits, independent of the GAN."""
    train, _ = digits()
    flat = real_images()[0].reshape(len(train["label"]), -1)
    return LogisticRegression(max_iter=1000).fit(flat, train["label"])


def quality(images: np.ndarray) -> Quality:
    """Returns how much the images are like real digits."""
    flat, held_out = (
        each.reshape(len(each), -1).astype(np.float64)
        for each in (images, real_images()[1])
    )
    probabilities = classifier().predict_proba(flat)
    shares = np.bincount(probabilities.argmax(axis=1), minlength=10) / len(flat)
    some = shares[shares > 0]
    return Quality(
        float(probabilities.max(axis=1).mean()),
        int((shares >= 0.02).sum()),
        float(np.exp(-(some * np.log(some)).sum())),
        distance(flat, held_out),
    )


def distance(some: np.ndarray, others: np.ndarray) -> float:
    """Returns the squared Frechet distance of two normal distributions of rows."""
    covariances = np.cov(some.T), np.cov(others.T)
    # The trace of the square root of the product, which has no negative eigenvalue.
    eigenvalues = np.linalg.eigvals(covariances[0] @ covariances[1]).real
    common = np.sqrt(np.maximum(eigenvalues, 0)).sum()
    means = np.square(some.mean(axis=0) - others.mean(axis=0)).sum()
    return float(means + sum(map(np.trace, covariances)) - 2 * common)


def table_of(results: Mapping[str, Result]) -> Table:
    """Returns the results as a table: two rows a run, and the real digits below."""
    right = "loss, skips, scale, half, sure, digits, spread, distance"
    table = Table(
        Column("run", min_width=14, overflow="fold"),
        Column("net", min_width=3),
        *(Column(name, justify="right") for name in right.split(", ")),
        title="A GAN on 1797 handwritten digits",
        caption="D: discriminator, G: generator. loss: mean of the last 100 steps. "
        "half: matmuls and convolutions of a gradient in half precision. sure: mean "
        "probability of the digit that a logistic regression on real digits takes an "
        f"image for. digits: those that are 2 % or more of {SAMPLES} images. spread: "
        "how many digits, by entropy. distance: of Frechet, squared, to the pixels of "
        "held-out digits.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for name, result in results.items():
        rows = [
            (f"{loss:.3f}", f"{skips}", f"2**{np.log2(scale):.0f}", half)
            for loss, skips, scale, half in zip(
                result.losses[-100:].mean(axis=0), *result[3:], strict=True
            )
        ]
        table.add_row(name, "D", *rows[0])
        table.add_row("", "G", *rows[1], *row_of(quality(result.images)))
    for name, images in zip(("real", "held out"), real_images(), strict=True):
        table.add_row(name, *[""] * 5, *row_of(quality(images)))
    return table


def row_of(quality: Quality) -> tuple[str, ...]:
    sure, spread = f"{quality.confidence:.1%}", f"{quality.spread:.2f}"
    return sure, f"{quality.digits}", spread, f"{abs(quality.distance):.2f}"


def as_text(images: np.ndarray) -> str:
    """Returns images side by side, two characters to a pixel."""
    shades = np.array([character * 2 for character in " .:*#"])
    levels = np.clip((images[..., 0] + 1) / 2 * len(shades), 0, len(shades) - 1)
    rows = shades[levels.astype(int)].transpose(1, 0, 2)
    return "\n".join("  ".join(map("".join, row)).rstrip() for row in rows)


def plot(results: Mapping[str, Result], path: Path) -> None:
    """Writes a sheet of 8 x 8 samples of every run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(4 * len(results), 4.3), squeeze=False
    )
    for panel, (name, result) in zip(panels[0], results.items(), strict=True):
        # A margin of white around each.
        edge = (0, 0), (1, 1), (1, 1)
        each = np.pad(result.images[:64, ..., 0], edge, constant_values=-1)
        sheet = each.reshape(8, 8, 10, 10).transpose(0, 2, 1, 3).reshape(80, 80)
        panel.imshow(sheet, cmap="gray_r", vmin=-1, vmax=1)
        panel.set(title=name, xticks=[], yticks=[])
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=f"{__doc__}".splitlines()[0])
    parser.add_argument("--policy", action="append", help=f"default: {POLICIES}")
    for name, value in {"steps": STEPS, "seed": 0, "penalty": PENALTY}.items():
        text = f"default: {value}"
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a .png, .svg, ...")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: train for at least one step")
    options.policy = options.policy or POLICIES
    try:
        for name in options.policy:
            make_losses(name)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    how, console = (options.steps, options.seed), Console()
    results = {
        name: train(name, *how, penalty=options.penalty, progress=True)
        for name in options.policy
    }
    console.print(table_of(results))
    for name, result in results.items():
        console.rule(name)
        text = as_text(result.images[:5])
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if options.plot is not None:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
