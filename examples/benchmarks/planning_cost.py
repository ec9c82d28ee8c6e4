"""What tracing and planning cost: CPU seconds before XLA begins.

    python examples/benchmarks/planning_cost.py [--layers 12 24 48 96] [--json FILE]

`autocast` traces a function, plans it and traces it again with other dtypes. Three
programs of each model are traced, caches emptied before:

  f32       the unchanged model
  by hand   the same model with Flax's `dtype=jnp.bfloat16` on every layer
  autocast  `amp.autocast` of the unchanged model

in turns, of which the minimum counts: alone (forward) and with its gradient. Ratios are
to the model by hand. The models:

  unrolled  a GPT whose layers are traced one by one, of several depths: the ratio of
            one depth and half of it is what doubling costs, 2 if it is linear
  jitted    12 layers that are one jitted function
  decode    one token of the unrolled GPT of 12 layers, with a key-value cache

The machine may have other jobs: compare CPU seconds within a run, and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from rich.console import Console
from rich.table import Table

import jmp_amp as amp

PROGRAMS = ("f32", "by hand", "autocast")
LAYERS = (12, 24, 48, 96)
WIDTH, HEADS, LENGTH, VOCABULARY = 64, 4, 16, 64
Dtype = Any


class Block(nn.Module):
    dtype: Dtype = None
    decode: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        attention = nn.MultiHeadDotProductAttention(
            HEADS, dtype=self.dtype, decode=self.decode
        )
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        x = x + attention(norm()(x), mask=mask)
        return x + dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(norm()(x))))


class GPT(nn.Module):
    layers: int
    dtype: Dtype = None
    decode: bool = False
    jitted: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        block = nn.jit(Block) if self.jitted else Block
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = block(self.dtype, self.decode)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, dtype=self.dtype)(x)


def training(model: GPT) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """Returns the loss of a model, and abstract arguments."""
    tokens = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(variables: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(variables, tokens)
        scores = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(scores, tokens[..., None], -1).mean()

    return loss, (variables, tokens)


def decoding(model: GPT) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a step of decoding, and abstract arguments."""
    tokens = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def step(variables: Any, token: jax.Array) -> Any:
        return model.apply(variables, token, mutable=["cache"])

    return step, (variables, jax.ShapeDtypeStruct((2, 1), jnp.int32))


def programs(
    case: Callable[[GPT], tuple[Callable[..., Any], tuple[Any, ...]]], **told: Any
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns the three programs of a model."""
    plain, args = case(GPT(**told))
    found = {"f32": (plain, args), "by hand": case(GPT(dtype=jnp.bfloat16, **told))}
    return found | {"autocast": (amp.autocast(plain), args)}


def seconds(
    traced: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], rounds: int
) -> dict[str, float]:
    """Returns the CPU seconds that each program takes to trace, cold."""
    best = dict.fromkeys(traced, float("inf"))
    for _ in range(rounds):
        for name, (fn, args) in traced.items():
            jax.clear_caches()
            gc.collect()
            begin = time.process_time()
            jax.jit(fn).trace(*args)
            best[name] = min(best[name], time.process_time() - begin)
    return best


def measured(layers: Sequence[int], rounds: int) -> dict[str, dict[str, Any]]:
    """Returns the seconds of each model, forward and with its gradient."""
    cases = {
        f"unrolled {each}": programs(training, layers=each) for each in sorted(layers)
    }
    cases["jitted 12"] = programs(training, layers=12, jitted=True)
    found: dict[str, dict[str, Any]] = {}
    for name, forward in cases.items():
        backward = {
            program: (jax.value_and_grad(fn), args)
            for program, (fn, args) in forward.items()
        }
        found[name] = {
            "equations": len(
                jax.make_jaxpr(forward["f32"][0])(*forward["f32"][1]).eqns
            ),
            "forward": seconds(forward, rounds),
            "gradient": seconds(backward, rounds),
        }
    steps = programs(decoding, layers=12, decode=True)
    step, args = steps["f32"]
    count = len(jax.make_jaxpr(step)(*args).eqns)
    found["decode 12"] = {"equations": count, "forward": seconds(steps, rounds)}
    return found


def growth(
    models: dict[str, dict[str, Any]], name: str, phase: str, program: str
) -> float | None:
    """Returns what a program costs more than at half the depth; None if unknown."""
    kind, depth = name.split()
    half = models.get(f"{kind} {int(depth) // 2}")
    if half is None:
        return None
    return models[name][phase][program] / half[phase][program]


def table(models: dict[str, dict[str, Any]]) -> Table:
    made = Table("model", "equations", "", *PROGRAMS, "/ by hand", "growth")
    for name, row in models.items():
        for phase in ("forward", "gradient"):
            if phase not in row:
                continue
            times = row[phase]
            grown = growth(models, name, phase, "autocast")
            made.add_row(
                name if phase == "forward" else "",
                str(row["equations"]) if phase == "forward" else "",
                phase,
                *(f"{times[program]:.2f} s" for program in PROGRAMS),
                f"{times['autocast'] / times['by hand']:.2f}x",
                "" if grown is None else f"{grown:.2f}x",
            )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or min(options.layers) < 1:
        parser.error("--layers and --rounds begin at 1")
    before = os.getloadavg()
    models = measured(options.layers, options.rounds)
    conditions = {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
        "rounds": options.rounds,
        "load_before": before,
        "load_after": os.getloadavg(),
    }
    console = Console(width=max(100, Console().width))
    console.print(f"CPU seconds to trace, jax {jax.__version__}, load {before[0]:.1f}")
    console.print(table(models))
    if options.json is not None:
        told = {"conditions": conditions, "models": models}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
