"""What the words of `amp.Policy(saved=...)` save in a training step, and cost.

    python examples/benchmarks/kept_for_backward.py [--model NAME ...] [--json FILE]

For each model up to five programs of one training step, in bf16 with f32 parameters:

  all         `amp.autocast` that keeps what the derivatives ask for; ratios are to it
  auto        the same with the least bytes in loops, elsewhere chains made again
  least       the same with the least bytes everywhere
  by hand     mixed precision written by hand: parameters and batch cast to bf16 before
              all else, norms, softmax and loss in f32; for a model of the zoo its twin
  checkpoint  the same, its activation in `jax.checkpoint`; not for the zoo

temp      temporary bytes of the step compiled for an H100, parameters donated; 4 MiB of
          them are scratch memory of cublasLt
kept      bytes that `jax.vjp` keeps for the backward pass, before XLA recomputes any:
          activations and bf16 copies of parameters, no arguments
modelled  milliseconds of the step on an H100: see `roofline.py` for how
kernels   how many are launched, those in loops as often as they run
trace     CPU seconds to trace the gradient, caches emptied before, all programs in
          turns; the least of all rounds
error     of the gradient against that in f32, |difference| / |gradient|, on the small
          model on this CPU, operation by operation: what XLA fuses it rounds otherwise

Models: a GPT, a Llama and a multilayer perceptron in plain JAX, their layers in one
loop (`_scanned`) or one by one (`_unrolled`), and models of `tests/zoo`, one by one.

No GPU is needed and none is used: the programs are compiled for one that is described.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

# The models of the zoo are in `tests/`, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Before JAX is imported: see `tests/h100.py`.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from rich.console import Console
from rich.table import Table

import jmp_amp as amp
from examples.benchmarks import compare_precision, roofline
from jmp_amp.plan.program import jaxprs
from tests import h100, measures, zoo
from tests.zoo.case import Loss

DTYPE = "bfloat16"
WORDS = ("all", "auto", "least")
PROGRAMS = (*WORDS, "by hand", "checkpoint")
OF_ZOO = ("vit", "resnet", "unet", "mamba", "moe")
HEADS = 16

Activation = Callable[[jax.Array], jax.Array]
# (parameters of a layer, x) -> x
Layer = Callable[[Any, jax.Array], jax.Array]
# key -> (params, batch)
Sample = Callable[[jax.Array], tuple[Any, Any]]


class Size(NamedTuple):
    """A model of one size.

    Attributes:
      sample: key -> (params, batch).
      loss: the unchanged f32 program.
      by_hand: {program: the same loss written by hand in mixed precision}.
    """

    sample: Sample
    loss: Loss
    by_hand: dict[str, Loss]

    def abstract(self) -> tuple[Any, Any]:
        """Returns the shapes of (params, batch): nothing is allocated."""
        return jax.eval_shape(self.sample, jax.random.key(0))

    def programs(self) -> dict[str, Loss]:
        """Returns the loss of each program, autocast anew."""
        words = {
            word: amp.autocast(self.loss, f"p=f32,c=bf16,o=f32,s={word}")
            for word in WORDS
        }
        return words | self.by_hand


class Model(NamedTuple):
    """A model: `large` is traced and compiled, `small` is run."""

    large: Size
    small: Size


def layer_norm(x: jax.Array, gain: jax.Array | None = None) -> jax.Array:
    """Returns `x`, of mean 0 and variance 1 in its last axis; in f32 inside."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return _scaled(wide, gain).astype(x.dtype)


def rms_norm(x: jax.Array, gain: jax.Array | None = None) -> jax.Array:
    """Returns `x` of mean square 1 in its last axis; in f32 inside."""
    return _scaled(x.astype(jnp.float32), gain).astype(x.dtype)


def _scaled(x: jax.Array, gain: jax.Array | None) -> jax.Array:
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x if gain is None else x * gain.astype(jnp.float32)


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array
) -> jax.Array:
    """Returns causal attention of [batch, length, HEADS, size]; its softmax in f32."""
    length, size = query.shape[1], query.shape[-1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(value.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return mixed.reshape(*mixed.shape[:2], -1) @ out


def in_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    return (x @ weight).reshape(*x.shape[:2], HEADS, -1)


def rotated(x: jax.Array) -> jax.Array:
    """Returns `x`, [batch, length, HEADS, size], turned by its positions; in f32."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), frequencies)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return jnp.concatenate(turned, -1).astype(x.dtype)


def gpt_layer(layer: Any, x: jax.Array, activation: Activation) -> jax.Array:
    """Returns `x` after attention and two products with biases and `activation`."""
    normed = layer_norm(x, layer["attention_gain"])
    query, key, value = (in_heads(normed, layer[name]) for name in "qkv")
    x = x + attention(query, key, value, layer["out"])
    normed = layer_norm(x, layer["gain"])
    return x + activation(normed @ layer["up"] + layer["bias"]) @ layer["down"]


def llama_layer(layer: Any, x: jax.Array, activation: Activation) -> jax.Array:
    """Returns `x` after rotary attention and a gated product of two."""
    normed = rms_norm(x, layer["attention_gain"])
    query, key, value = (in_heads(normed, layer[name]) for name in "qkv")
    x = x + attention(rotated(query), rotated(key), value, layer["out"])
    normed = rms_norm(x, layer["gain"])
    gate = activation(normed @ layer["gate"])
    return x + (gate * (normed @ layer["up"])) @ layer["down"]


def dense_layer(layer: Any, x: jax.Array, activation: Activation) -> jax.Array:
    return activation(x @ layer["weight"] + layer["bias"])


def through(layers: Any, x: jax.Array, layer: Layer) -> jax.Array:
    """Returns `x` after all layers: one by one if in a list, in one loop if stacked."""
    if isinstance(layers, list):
        return functools.reduce(lambda x, each: layer(each, x), layers, x)
    return jax.lax.scan(lambda x, each: (layer(each, x), None), x, layers)[0]


def language_model(layer: Layer, norm: Callable[[jax.Array], jax.Array]) -> Loss:
    """Returns the mean cross-entropy of each next word, in f32."""

    def loss(params: Any, words: jax.Array) -> jax.Array:
        x = norm(through(params["layers"], params["words"][words], layer))
        logits = (x @ params["words"].T).astype(jnp.float32)
        following = jnp.roll(words, -1, axis=1)[..., None]
        told = jnp.take_along_axis(jax.nn.log_softmax(logits), following, axis=-1)
        return -told.mean()

    return loss


def perceptron(layer: Layer) -> Loss:
    """Returns the mean square of what comes out, in f32."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (through(params["layers"], x, layer).astype(jnp.float32) ** 2).mean()

    return loss


def layers_of(
    key: jax.Array, count: int, shapes: dict[str, tuple[int, ...]], scanned: bool
) -> Any:
    """Returns the parameters of `count` layers, in a list or, `scanned`, stacked.

    Matrices are normal of variance 1 / rows; of the vectors, gains are 1, biases 0.
    """

    def parameter(key: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.full(shape, float("gain" in name))
        return jax.random.normal(key, shape) / shape[0] ** 0.5

    layers = [
        {
            name: parameter(jax.random.fold_in(each, index), name, shape)
            for index, (name, shape) in enumerate(shapes.items())
        }
        for each in jax.random.split(key, count)
    ]
    if scanned:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return layers


def gpt_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {name: (width, width) for name in ("q", "k", "v", "out")} | {
        "up": (width, 4 * width),
        "bias": (4 * width,),
        "down": (4 * width, width),
        "attention_gain": (width,),
        "gain": (width,),
    }


def llama_shapes(width: int) -> dict[str, tuple[int, ...]]:
    hidden = 11 * width // 4
    return {name: (width, width) for name in ("q", "k", "v", "out")} | {
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
        "attention_gain": (width,),
        "gain": (width,),
    }


def dense_shapes(width: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (width, width), "bias": (width,)}


def text_sample(
    shapes: Callable[[int], dict[str, tuple[int, ...]]],
    *,
    scanned: bool,
    layers: int = 2,
    width: int = 64,
    vocabulary: int = 256,
    batch: tuple[int, int] = (4, 32),
) -> Sample:
    """Returns what samples a language model and words; the defaults are the small."""

    def sample(key: jax.Array) -> tuple[Any, Any]:
        first, second, third = jax.random.split(key, 3)
        params = {
            "words": jax.random.normal(first, (vocabulary, width)) / width**0.5,
            "layers": layers_of(second, layers, shapes(width), scanned),
        }
        return params, jax.random.randint(third, batch, 0, vocabulary)

    return sample


def dense_sample(
    *, scanned: bool, layers: int = 2, width: int = 64, rows: int = 128
) -> Sample:
    """Returns what samples a perceptron and its inputs; the defaults are the small."""

    def sample(key: jax.Array) -> tuple[Any, Any]:
        first, second = jax.random.split(key)
        params = {"layers": layers_of(first, layers, dense_shapes(width), scanned)}
        return params, jax.random.normal(second, (rows, width))

    return sample


def in_half(loss: Loss) -> Loss:
    """Returns `loss` of parameters and a batch that are cast in front of it."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(DTYPE) if leaf.dtype == jnp.float32 else leaf

    return lambda params, batch: loss(*jax.tree.map(cast, (params, batch)))


def plain(
    loss: Callable[[Activation], Loss],
    activation: Activation,
    large: Sample,
    small: Sample,
) -> Model:
    """Returns a model that this file has, and its programs by hand."""
    by_hand = {
        "by hand": in_half(loss(activation)),
        "checkpoint": in_half(loss(jax.checkpoint(activation))),
    }
    return Model(*(Size(each, loss(activation), by_hand) for each in (large, small)))


def text_model(
    layer: Callable[..., jax.Array],
    norm: Callable[[jax.Array], jax.Array],
    activation: Activation,
    shapes: Callable[[int], dict[str, tuple[int, ...]]],
    scanned: bool,
) -> Model:
    """Returns a language model of 8 layers in a loop, or of 4."""
    large = text_sample(
        shapes,
        scanned=scanned,
        layers=8 if scanned else 4,
        width=1024,
        vocabulary=8192,
        batch=(8, 512),
    )
    return plain(
        lambda f: language_model(functools.partial(layer, activation=f), norm),
        activation,
        large,
        text_sample(shapes, scanned=scanned),
    )


def dense_model(scanned: bool) -> Model:
    """Returns a perceptron of 6 layers."""
    return plain(
        lambda f: perceptron(functools.partial(dense_layer, activation=f)),
        jax.nn.gelu,
        dense_sample(scanned=scanned, layers=6, width=4096, rows=8192),
        dense_sample(scanned=scanned),
    )


def of_zoo(name: str) -> Model:
    """Returns a model of `tests/zoo`, by hand its twin."""
    cases = (zoo.CASES[name, size] for size in ("large", "small"))
    return Model(*(Size(c.sample, c.loss, {"by hand": c.twin(DTYPE)}) for c in cases))


def all_models() -> dict[str, Model]:
    """Returns the models by their names."""
    found = {}
    for suffix, scanned in (("scanned", True), ("unrolled", False)):
        found[f"gpt_{suffix}"] = text_model(
            gpt_layer, layer_norm, jax.nn.gelu, gpt_shapes, scanned
        )
        found[f"llama_{suffix}"] = text_model(
            llama_layer, rms_norm, jax.nn.silu, llama_shapes, scanned
        )
        found[f"mlp_{suffix}"] = dense_model(scanned)
    return found | {name: of_zoo(name) for name in OF_ZOO}


MODELS = all_models()


def figures_of_program(compiled: Any, device: roofline.Device) -> dict[str, Any]:
    """Returns the figures of a training step that is compiled for an H100.

    Besides those of the table there are `flops`, of matrix products and convolutions,
    and where the roofline does not know what something takes, `unknown`.
    """
    found = roofline.schedule(compiled.as_text(), device)
    totals = roofline.totals(found.kernels, device)
    return {
        "temp": h100.temp_bytes(compiled),
        "ms": totals["ms"],
        "kernels": totals["kernels"],
        "flops": totals["flops"],
    } | ({"unknown": found.unknown} if found.unknown else {})


def compiled_figures(
    loss: Loss, args: tuple[Any, Any], device: roofline.Device
) -> dict[str, Any]:
    """Returns the figures of a loss, whose training step is compiled for an H100."""
    step = compare_precision.training_step(loss)
    return figures_of_program(
        h100.compile_for_gpu(step, *args, donate_argnums=0), device
    )


def traced_figures(loss: Loss, args: tuple[Any, Any]) -> dict[str, Any]:
    """Returns the bytes that `jax.vjp` keeps, without its arguments, and `products`.

    Those are the matrix products and convolutions of both passes, those in loops once.
    """
    found = measures.traced(compare_precision.with_state(loss), *args)
    products = compare_precision.traced_products(found.jaxpr)
    return {"kept": found.saved_bytes, "products": len(products)}


def trace_seconds(size: Size, rounds: int) -> dict[str, float]:
    """Returns the least CPU seconds that the gradient of each program is traced in."""
    args = size.abstract()
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, loss in size.programs().items():
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            jax.make_jaxpr(jax.grad(loss))(*args)
            seconds.setdefault(name, []).append(time.process_time() - start)
    return {name: min(found) for name, found in seconds.items()}


def one_by_one(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Returns what a jaxpr computes, each operation a program, in loops and calls too.

    XLA rounds otherwise what it fuses: compiled whole, equal programs differ.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name == "scan":
            results = _turn_by_turn(eqn, inputs)
        elif inner is not None:
            # That of `checkpoint` is open.
            open_jaxpr = getattr(inner, "jaxpr", inner)
            results = one_by_one(open_jaxpr, getattr(inner, "consts", ()), *inputs)
        else:
            results = eqn.primitive.bind(*inputs, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _turn_by_turn(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Returns what `lax.scan` does, given its equation."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    carried = jaxprs.carried(eqn)
    consts, turned = inputs[: carried.start], inputs[carried.stop :]
    carry = inputs[carried.start : carried.stop]
    rows: list[list[Any]] = [[]] * length
    for turn in reversed(range(length)) if eqn.params["reverse"] else range(length):
        row = [each[turn] for each in turned]
        found = one_by_one(body.jaxpr, body.consts, *consts, *carry, *row)
        carry, rows[turn] = found[: len(carry)], found[len(carry) :]
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def gradients(size: Size) -> dict[str, Any]:
    """Returns the gradient of each program and of "f32", of one sample."""
    sample = jax.jit(size.sample)(jax.random.key(0))
    found = {}
    for name, loss in ({"f32": size.loss} | size.programs()).items():
        traced = jax.make_jaxpr(jax.grad(loss))(*sample)
        leaves = jax.tree.leaves(sample)
        found[name] = one_by_one(traced.jaxpr, traced.consts, *leaves)
    return found


def gradient_errors(size: Size) -> dict[str, float]:
    """Returns the relative error of each program's gradient against that in f32."""
    found = gradients(size)
    wide = found.pop("f32")
    return {name: measures.relative_error(each, wide) for name, each in found.items()}


def figures_of(
    model: Model, *, gpu: bool, rounds: int, device: roofline.Device = roofline.H100
) -> dict[str, dict[str, Any]]:
    """Returns {program: its figures}; without `gpu` nothing is compiled for one."""
    # The plain models broadcast biases and gains, dtypes they do not mix.
    with jax.numpy_rank_promotion("allow"):
        args = model.large.abstract()
        rows: dict[str, dict[str, Any]] = {
            name: traced_figures(loss, args)
            for name, loss in model.large.programs().items()
        }
        if gpu:
            for name, loss in model.large.programs().items():
                rows[name] |= compiled_figures(loss, args, device)
        for name, seconds in trace_seconds(model.large, rounds).items():
            rows[name]["trace"] = seconds
        for name, error in gradient_errors(model.small).items():
            rows[name]["error"] = error
    return rows


class Column(NamedTuple):
    """A figure of the table: its title, its key, and how a value of it is written."""

    title: str
    figure: str
    written: Callable[[Any], str]
    has_ratio: bool = True


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.1f}MB"


COLUMNS = (
    Column("temp", "temp", _megabytes),
    Column("kept", "kept", _megabytes),
    Column("modelled", "ms", "{:.3f}ms".format),
    Column("kernels", "kernels", str),
    Column("trace", "trace", "{:.2f}s".format),
    Column("error", "error", "{:.3e}".format, has_ratio=False),
)


def ratios(rows: dict[str, dict[str, Any]], figure: str) -> dict[str, float]:
    """Returns {program: its figure over that of "all"}, of those that have it.

    Example:
      >>> ratios({"all": {"temp": 200}, "auto": {"temp": 50}, "least": {}}, "temp")
      {'all': 1.0, 'auto': 0.25}
    """
    whole = rows["all"].get(figure)
    found = {name: row[figure] for name, row in rows.items() if figure in row}
    return {name: value / whole for name, value in found.items()} if whole else {}


def table(name: str, rows: dict[str, dict[str, Any]]) -> Table:
    """Returns the table of a model, with columns for the figures that its rows have."""
    found = Table(title=name, title_justify="left")
    found.add_column("program")
    cells: dict[str, list[str]] = {program: [program] for program in rows}
    for column in COLUMNS:
        if not any(column.figure in row for row in rows.values()):
            continue
        found.add_column(column.title, justify="right")
        for program, row in rows.items():
            cells[program].append(column.written(row[column.figure]))
        if column.has_ratio:
            found.add_column("x all", justify="right")
            for program, ratio in ratios(rows, column.figure).items():
                cells[program].append(f"{ratio:.3f}x")
    for row in cells.values():
        found.add_row(*row)
    return found


def conditions(
    gpu: bool, rounds: int, device: roofline.Device = roofline.H100
) -> dict[str, Any]:
    """Returns under which conditions the figures were found."""
    packages = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin")
    return {
        "versions": {
            distribution.name: distribution.version
            for distribution in map(_distribution, packages)
            if distribution
        }
        | {"python": platform.python_version()},
        "device": "described H100, compiled, not run" if gpu else None,
        "compiled_for": "NVIDIA H100 80GB HBM3, Triton gemms off" if gpu else None,
        "modelled": dataclasses.asdict(
            dataclasses.replace(device, rates=dict(device.rates))
        ),
        "dtype": DTYPE,
        "step": "value_and_grad and SGD in f32, parameters donated",
        "trace": f"CPU seconds, least of {rounds}, caches cleared, in turns",
        "error": "on a CPU against f32, operation by operation, one sample",
        "cpu_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME",
        help=f"of {', '.join(MODELS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="how often to trace")
    parser.add_argument("--no-gpu", action="store_true", help="compile for no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    gpu = not options.no_gpu
    if options.rounds < 1:
        parser.error("--rounds begins at 1")
    if gpu and (reason := h100.why_no_compiler()):
        parser.error(f"{reason}; or use --no-gpu")
    console = Console(width=None if sys.stdout.isatty() else 150)
    if gpu:
        console.print(
            "Compiled for a described H100, not run; times are modelled. "
            + roofline.H100.assumptions(),
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    found = {}
    for name in options.model:
        found[name] = figures_of(MODELS[name], gpu=gpu, rounds=options.rounds)
        console.print(table(name, found[name]))
        jax.clear_caches()
    if options.json:
        told = {"conditions": conditions(gpu, options.rounds), "models": found}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
