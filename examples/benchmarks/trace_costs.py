"""What tracing costs: CPU seconds before XLA begins.

    python examples/benchmarks/trace_costs.py [--layers 200 400 800] [--only KIND ...]
        [--json FILE]

  gradient  `jax.grad` of pre-norm residual MLP layers, width 64: in f32, and under
            autocast with `saved="all"` and as it is by default. A row has what each
            costs per layer, in units of the first row: 1 where tracing is linear.
  model     a GPT of 12 layers and its gradient: in f32, by hand (Flax's `dtype=` on
            every layer) and under autocast; `explain` of its gradient
  update    `update` of AdamW over 500 leaves: alone, with a loss scale, with masters
            in f32 of half weights, with moments in 8 bits

Each is traced twice, caches cleared, and the minimum counts. The machine may have other
jobs: compare CPU seconds within a run, and nothing else.
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

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from rich.console import Console
from rich.table import Table

import jmp_amp as amp

LAYERS = (200, 400, 800)
WIDTH, HEADS, LENGTH, VOCABULARY = 64, 4, 16, 64
LEAVES = 500
# The name of a program -> what traces it.
Programs = dict[str, Callable[[], object]]


def residual(layers: int) -> Programs:
    """Returns the gradient of residual layers, in f32 and under two policies."""
    params = [(jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH)))] * layers
    x = jnp.ones((8, WIDTH))

    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for up, down in params:
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ up) @ down
        return jnp.mean(x**2)

    found = {
        "f32": loss,
        "all": amp.autocast(loss, amp.Policy(saved="all")),
        "auto": amp.autocast(loss),
    }
    return {
        name: functools.partial(traced, jax.grad(fn), params, x)
        for name, fn in found.items()
    }


class GPT(nn.Module):
    layers: int = 12
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype)
            x = x + attention(norm()(x), mask=mask)
            x = x + dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(norm()(x))))
        return dense(VOCABULARY)(norm()(x))


def model(layers: int) -> Programs:
    """Returns a GPT and its gradient, and `explain` of that."""
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    params = jax.eval_shape(GPT(layers).init, jax.random.key(0), tokens)

    def loss(dtype: Any, params: Any, tokens: jax.Array) -> jax.Array:
        logits = jnp.asarray(GPT(layers, dtype).apply(params, tokens), jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return losses.mean()

    plain = functools.partial(loss, None)
    found = {
        "f32": plain,
        "by hand": functools.partial(loss, jnp.bfloat16),
        "autocast": amp.autocast(plain),
    }
    programs: Programs = {}
    for name, fn in found.items():
        programs[name] = functools.partial(traced, fn, params, tokens)
        backward = jax.value_and_grad(fn)
        programs[f"{name}, gradient"] = functools.partial(
            traced, backward, params, tokens
        )
    programs["explain"] = functools.partial(amp.explain(plain), params, tokens)
    return programs


def update(leaves: int) -> Programs:
    """Returns updates of AdamW, alone and inside of each wrapper."""
    f32 = {f"leaf {i}": jnp.ones((8, 8)) for i in range(leaves)}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), f32)
    adamw = optax.adamw(1e-3)
    float8 = amp.with_low_precision_state(adamw, "float8", min_size=1)
    found = {
        "adamw": (adamw, f32),
        "loss scale": (amp.with_loss_scale(adamw, amp.dynamic_loss_scale()), f32),
        "masters": (amp.with_master_weights(adamw), half),
        "moments in 8 bits": (float8, f32),
    }
    return {
        name: functools.partial(traced, tx.update, f32, tx.init(params), params)
        for name, (tx, params) in found.items()
    }


def traced(fn: Callable[..., Any], *args: Any) -> object:
    return jax.jit(fn).trace(*args)


def seconds(programs: Programs) -> dict[str, float]:
    """Returns the CPU seconds that each program takes to trace, cold."""
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(2):
        for name, trace in programs.items():
            jax.clear_caches()
            gc.collect()
            begin = time.process_time()
            trace()
            best[name] = min(best[name], time.process_time() - begin)
    return best


def table(rows: dict[str, dict[str, float]], layers: Sequence[int]) -> Table:
    """Returns the seconds, and ratios: per layer to the fewest, else to the first."""
    made = Table("program", "", "CPU s", "ratio")
    for row, times in rows.items():
        kind, _, count = row.partition(" ")
        first = rows[f"{kind} {layers[0]}"] if kind == "gradient" else None
        for name, each in times.items():
            before = next(iter(times.values()))
            if first is not None:
                before = first[name] * int(count) / layers[0]
            is_first = name == next(iter(times))
            made.add_row(
                row if is_first else "", name, f"{each:.2f}", f"{each / before:.2f}x"
            )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("gradient", "model", "update")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, metavar="N")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    if min(options.layers) < 1:
        parser.error("--layers begin at 1")
    layers, before = sorted(options.layers), os.getloadavg()
    cases = {f"gradient {each}": functools.partial(residual, each) for each in layers}
    cases |= {"model 12": functools.partial(model, 12)}
    cases |= {f"update {LEAVES}": functools.partial(update, LEAVES)}
    rows = {
        name: seconds(programs())
        for name, programs in cases.items()
        if name.split()[0] in options.only
    }
    conditions = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "load": [before, os.getloadavg()],
    }
    console = Console(width=max(80, Console().width))
    console.print(f"CPU seconds to trace, jax {jax.__version__}, load {before[0]:.1f}")
    console.print(table(rows, layers))
    if options.json is not None:
        found = {"conditions": conditions, "seconds": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
