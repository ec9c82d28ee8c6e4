"""Finds out why float16 skips training steps, and mends it.

    python examples/diagnose_nan.py
    python examples/diagnose_nan.py --steps 200 --plot numbers.png

A network reads the handwritten digits of scikit-learn as counts of a camera. Exposures
differ by a factor of 256, and a layer norm after the first layer takes that out again;
one image in 200 was exposed much longer still. In f32 nothing happens. In f16 the first
layer's products of such an image are infinite, and the whole step is skipped.

A skipped step changes nothing: the parameters that overflowed and the batch are still
at hand. `amp.diagnose` runs them again, says where the first infinity was made, and
returns a policy that has f32 where it is needed, and nowhere else:

    mixed_float16: 7 of 60 steps skipped, loss 0.40, loss scale 2**9
    ... first made by dot_general in Net/stem (diagnose_nan.py:51), forward, f16 ...
    p=f32,c=f16,o=f32; stem: p=f32,c=f32,o=f32: 0 of 60 steps skipped, loss 0.32, ...

Then `amp.tune` looks for the layers whose rounding is most of the gradient's error.

`diagnosed` has the lines to copy.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import jmp_amp as amp

STEPS = 60
BATCH = 64
Batch = Mapping[str, Any]


class Net(nn.Module):
    """An f32 model that knows nothing of precision."""

    @nn.compact
    def __call__(self, counts: jax.Array) -> jax.Array:
        # Features are as large as the counts; the norm takes the exposure out.
        features = nn.Dense(64, use_bias=False, name="stem")(counts)
        features = nn.relu(nn.LayerNorm(name="norm")(features))
        features = nn.relu(nn.Dense(64, name="hidden")(features))
        return nn.Dense(10, name="head")(features)


def loss_fn(params: Any, batch: Batch) -> jax.Array:
    logits: Any = Net().apply({"params": params}, batch["counts"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean()


def photographs() -> Batch:
    """Returns the digits as counts of a camera, some of them exposed too long."""
    data: Any = load_digits()
    random = np.random.default_rng(0)
    exposure = 2.0 ** random.uniform(0, 8, len(data.target))
    exposure[random.random(len(exposure)) < 1 / 200] = 4000.0
    counts = data.images.reshape(len(exposure), -1) * exposure[:, None]
    return {
        "counts": counts.astype(np.float32),
        "label": data.target.astype(np.int32),
    }


def batches(data: Batch, steps: int, seed: int) -> Iterator[Batch]:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = random.choice(len(data["label"]), BATCH, replace=False)
        yield {name: values[chosen] for name, values in data.items()}


class Trained(NamedTuple):
    """What a training left.

    Attributes:
      params: the parameters.
      losses: of the steps that were not skipped.
      skipped: the batches of skipped steps.
      scale: the loss scale at the end.
    """

    params: Any
    losses: list[float]
    skipped: list[Batch]
    scale: float

    def told(self, steps: int) -> str:
        mean = np.mean(self.losses[-10:]) if self.losses else np.nan
        return (
            f"{len(self.skipped)} of {steps} steps skipped, loss {mean:.2f}, "
            f"loss scale 2**{np.log2(self.scale):.0f}"
        )


def train(policy: amp.PolicyMap | str, steps: int, seed: int) -> Trained:
    """Trains for some steps from new parameters; keeps the batches that overflowed."""
    data = photographs()
    tx = amp.with_loss_scale(optax.adam(2e-3), amp.dynamic_loss_scale(2.0**16))
    params = Net().init(jax.random.key(seed), data["counts"][:1])["params"]
    value_and_grad = amp.value_and_grad(amp.autocast(loss_fn, policy))

    # Round to half wherever the program says so, as a GPU does.
    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def train_step(params: Any, opt_state: Any, batch: Batch) -> Any:
        loss, grads = value_and_grad(params, batch, loss_scale=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses, skipped = tx.init(params), [], []
    for batch in batches(data, steps, seed):
        params, opt_state, loss = train_step(params, opt_state, batch)
        if amp.last_step_finite(opt_state):
            losses.append(float(loss))
        else:
            skipped.append(batch)
    scale = float(amp.loss_scale_of(opt_state).value)
    return Trained(params, losses, skipped, scale)


def diagnosed(params: Any, batch: Batch, policy: amp.PolicyMap | str) -> amp.Diagnosis:
    """Returns what the numbers of a skipped step did: its parameters are unchanged."""
    return amp.diagnose(loss_fn, policy)(params, batch)


def tuned(params: Any, batch: Batch, policy: amp.PolicyMap) -> amp.Tuning:
    """Returns the policy that halves the error of the gradient, and what it costs."""
    first = amp.tune(loss_fn, policy, max_grad_error=1.0)(params, batch)
    bound = first.error_before / 2
    return amp.tune(loss_fn, policy, max_grad_error=bound)(params, batch)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a .png, .svg, ...")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: train for at least one step")
    return options


def main() -> None:
    options = parse()
    before = train("mixed_float16", options.steps, options.seed)
    print(f"mixed_float16: {before.told(options.steps)}")
    if not before.skipped:
        print("No step was skipped: train for more steps.")
        return
    batch = before.skipped[-1]
    diagnosis = diagnosed(before.params, batch, "mixed_float16")
    print(f"\n{diagnosis}\n")
    if options.plot is not None:
        amp.plots.diagnose(diagnosis).savefig(options.plot)
    after = train(diagnosis.policy, options.steps, options.seed)
    print(f"{diagnosis.policy}: {after.told(options.steps)}")
    print(f"\n{tuned(after.params, batch, diagnosis.policy)}")


if __name__ == "__main__":
    main()
