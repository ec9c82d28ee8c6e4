"""What eight H100s send each other in a training step, by dtype.

    python examples/benchmarks/collectives.py [--width 512] [--json FILE]

A GPT is compiled for eight H100s that are only described: no GPU is needed and none is
used. Its parameters lie on them in three ways:

  data     all of them on each device (data parallel)
  rows     cut along the last dimension but one (FSDP)
  columns  cut along the last dimension (FSDP)

and each is compiled in bf16 and fp8, with gradients that are reduced as they are made
(the default) and with `Policy(reduce_dtype="float32")`.

reduced   bytes of gradients: the results of all-reduce and reduce-scatter, and of the
          all-gather that XLA puts before the gradient of a lookup
gathered  bytes of weights: the results of every other all-gather
temp      temporary bytes of the step on a device

Those of a loop are counted once. Arrays of at most 64 bytes, such as losses and the
scales of fp8, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

# Helpers of the tests are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Before JAX is imported: see `tests/h100.py`.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from examples.benchmarks.hlo_text import BYTES
from tests import h100

LAYOUTS = ("data", "rows", "columns")
POLICIES = {
    "bf16": "p=f32,c=bf16,o=f32",
    "bf16, reduced in f32": "p=f32,c=bf16,o=f32,r=f32",
    "fp8": "p=f32,c=bf16,o=f32,m=fp8",
    "fp8, reduced in f32": "p=f32,c=bf16,o=f32,m=fp8,r=f32",
}
DEVICES, SMALL = 8, 64
_SENDS = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter)(?:-start)?\((.*)")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*)\[([\d,]*)\]")


class Layer(nn.Module):
    """A layer of a transformer; rows of its input stay on their devices."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        if not jax.sharding.get_abstract_mesh().empty:
            x = jax.lax.with_sharding_constraint(x, P("devices"))
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=8)(h, h)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h), None


class GPT(nn.Module):
    """A GPT with tied embeddings, whose layers are scanned and rematerialised."""

    width: int
    layers: int = 4
    tokens: int = 1024

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(self.tokens, self.width)
        shape = (tokens.shape[1], self.width)
        place = self.param("place", nn.initializers.normal(), shape)
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = layers(self.width)(table(tokens) + place[None], None)
        return table.attend(nn.LayerNorm()(x))


class Sent(NamedTuple):
    """What the devices of a program send each other.

    Attributes:
      reduced, gathered: bytes by dtype.
      temp: temporary bytes of a device.
    """

    reduced: Mapping[str, int]
    gathered: Mapping[str, int]
    temp: int


def place_of(leaf: Any, layout: str, mesh: Mesh) -> NamedSharding:
    """Returns where a parameter lies; biases and norms lie on each device."""
    axis = leaf.ndim - (2 if layout == "rows" else 1)
    # Those of all layers are one array.
    is_matrix = leaf.ndim >= 2 and leaf.shape[axis] % DEVICES == 0
    if layout == "data" or not is_matrix:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*[None] * axis, "devices"))


def compiled(layout: str, policy: str, model: GPT, is_stored_half: bool = False) -> Any:
    """Returns a training step under a policy, compiled for eight described H100s.

    Args:
      layout: how parameters are sharded, one of `LAYOUTS`.
      policy: the text of a policy.
      model: what is trained.
      is_stored_half: whether parameters are stored in bfloat16.
    """
    differentiate = amp.grad if is_stored_half else jax.grad
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h100.H100, topology=f"1x1x{DEVICES}"
    )
    mesh = Mesh(np.array(topology.devices), ("devices",))
    rows = jax.ShapeDtypeStruct(
        (64, 32), np.int32, sharding=NamedSharding(mesh, P("devices"))
    )

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = cast(jax.Array, model.apply(params, tokens))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return losses.mean()

    def step(params: Any, tokens: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            grads = differentiate(amp.autocast(loss, policy))(params, tokens)
        return jax.tree.map(
            lambda p, g: (p.astype(g.dtype) - 0.1 * g).astype(p.dtype), params, grads
        )

    shapes = jax.eval_shape(model.init, jax.random.key(0), rows)
    if is_stored_half:
        shapes = jax.eval_shape(amp.get_policy("bf16").cast_to_param, shapes)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place_of(leaf, layout, mesh)
        ),
        shapes,
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings)
    # Without Triton a matrix product is a call of cublasLt, which the text shows.
    options: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
    return jitted.lower(placed, rows).compile(compiler_options=options)


def sent(program: Any) -> Sent:
    """Returns what the devices of a compiled program send each other."""
    found: dict[str, dict[str, int]] = {"reduced": {}, "gathered": {}}
    for results, operation, attributes in _SENDS.findall(program.as_text()):
        is_weight = operation == "all-gather" and "/scatter-add" not in attributes
        by_dtype = found["gathered" if is_weight else "reduced"]
        # Of what is started and awaited later: ((operands), results).
        results = results.partition("), ")[2] if "((" in results else results
        for dtype, sizes in _ARRAY.findall(results):
            size = BYTES[dtype] * np.prod([int(n) for n in sizes.split(",") if n])
            if size > SMALL:
                by_dtype[dtype] = by_dtype.get(dtype, 0) + int(size)
    return Sent(**found, temp=h100.temp_bytes(program))


def table_of(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Returns the figures as a table, one program in a row."""
    table = Table(title="Sent between eight H100s in a step, kB by dtype")
    for name in ("layout", "precision", "reduced", "gathered", "temp"):
        table.add_column(name, justify="right" if name == "temp" else "left")
    for layout, programs in figures.items():
        for precision, each in programs.items():
            told = (
                ", ".join(f"{d} {n / 1e3:.0f}" for d, n in sorted(each[how].items()))
                for how in ("reduced", "gathered")
            )
            table.add_row(layout, precision, *told, f"{each['temp'] / 1e3:.0f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"{__doc__}".splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="default: 512")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    model = GPT(options.width)
    figures = {
        layout: {
            name: sent(compiled(layout, policy, model))._asdict()
            for name, policy in POLICIES.items()
        }
        for layout in LAYOUTS
    }
    Console().print(table_of(figures))
    if options.json is not None:
        told = {"jax": jax.__version__, "width": options.width, "steps": figures}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
