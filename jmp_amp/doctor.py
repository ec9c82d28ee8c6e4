"""The precision that suits a machine and why, and a trial of it.

`advise` is knowledge: the half dtype that the matrix units of a device take. `examine`
asks the machine: it times products and training steps, and `check` trains a small model
in mixed precision beside f32. `python -m jmp_amp doctor` prints it all.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_amp.plan.program.cpu_target import this_cpu
from jmp_amp.policies.dtypes import BF16, F16, F32, PyTree, half_dtype, short_name
from jmp_amp.recipes import Recipe, recipe
from jmp_amp.reports.explaining import explain
from jmp_amp.reports.tables import Table, as_text, quantity
from jmp_amp.training.gradients import value_and_grad
from jmp_amp.training.loss_scale_state import loss_scale_of
from jmp_amp.transform.autocasting import autocast

ROUNDS = 30
_STEPS = 20
# A gain below it may be noise.
_WORTH_IT = 1.1
_PACKAGES = ("jmp_amp", "jax", "jaxlib", "flax", "optax")
# Why a precision suits a kind of device.
_RANGE = "bf16 has the range of f32: nothing has to be scaled."
_TPU = "TPUs multiply f32 as bf16 anyway; O1 keeps and moves half the bytes."
_BOTH_HALVES = "Its matrix units take bf16 and f16 alike."
_SECOND_GEAR = (
    'The second gear is amp.recipe("fp8"), for products with sides of 1024 and more: '
    "amp.explain tells where it hardly pays. It needs no XLA flags."
)
_F16_ONLY = "Its matrix units take f16 alone; O1 scales the loss for small gradients."
_NO_UNITS = "It has no matrix units: half is no faster. O1 with f16 saves memory."
_CPU = (
    "A CPU computes most of half precision in f32, and casts on top. O1 shows here how "
    "a model will do on an accelerator."
)
_NOT_ON_CPU = 'It has no instructions for products of bf16: target="auto" is f32 here.'
_FP8_UNITS = {
    True: "yes (under fp8, products multiply the 8-bit operands, without XLA flags)",
    False: "no (products then run in bf16 after quantising: slower, same numbers)",
    None: "not known (without, products run in bf16 after quantising: same numbers)",
}


@dataclasses.dataclass(frozen=True)
class Advice:
    """The precision that suits a kind of device.

    Attributes:
      half_dtype: "bf16" or "f16".
      recipe: the name for `amp.recipe`.
      why: a sentence or two.
      fp8_units: whether its matrix units take 8-bit floats (e4m3 and e5m2 as NVIDIA
        has them); None where that is not known.
      target: for `autocast`; None to leave it out.
    """

    half_dtype: str
    recipe: str
    why: str
    fp8_units: bool | None = False
    target: str | None = None


@dataclasses.dataclass(frozen=True)
class Product:
    """The limits of a dtype, and its speed on this machine.

    Attributes:
      dtype: its short name; "bf16 to f32" is what a plan for this CPU makes of an f32
        product.
      largest: the largest finite number.
      smallest: the smallest positive number, denormals included.
      last_place: the distance from 1 to the next number.
      speed: of a matrix product, as a multiple of float32's.
    """

    dtype: str
    largest: float
    smallest: float
    last_place: float
    speed: float


@dataclasses.dataclass(frozen=True)
class Speeds:
    """How fast a training step is on this CPU, as a multiple of float32's.

    Attributes:
      autocast: under `autocast(fn)`.
      on_cpu: under `autocast(fn, target="cpu")`.
    """

    autocast: float
    on_cpu: float


@dataclasses.dataclass(frozen=True)
class Check:
    """One trial on a small training run.

    Attributes:
      dtype: the short name of the half dtype.
      what: the sentence that should be true.
      holds: whether it is.
      measured: the figure that decided.
    """

    dtype: str
    what: str
    holds: bool
    measured: str


@dataclasses.dataclass(frozen=True)
class Examination:
    """The findings of `examine`.

    Attributes:
      versions: of the packages.
      device: the number of devices, and JAX's name of their kind.
      memory: bytes of one device; None where JAX does not know.
      advice: the precision to use.
      products: the speed of each dtype.
      checks: the trials, and whether they hold.
      notes: settings of JAX that may surprise.
      speeds: of a training step, on a CPU that multiplies bf16; else None.
    """

    versions: dict[str, str]
    device: str
    memory: int | None
    advice: Advice
    products: tuple[Product, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    speeds: Speeds | None = None

    @property
    def healthy(self) -> bool:
        """Whether all checks hold."""
        return all(check.holds for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Returns the findings as dictionaries, tuples, text and numbers."""
        return dataclasses.asdict(self) | {"healthy": self.healthy}

    def to_json(self) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        advice, half = self.advice, self.advice.half_dtype
        given = "" if advice.recipe == "O0" else f", half_dtype={half!r}"
        target = "" if advice.target is None else f", target={advice.target!r}"
        use = f"amp.recipe({advice.recipe!r}{given})"
        if target:
            use += f".autocast(fn{target})"
        heading = [
            ", ".join(f"{name} {each}" for name, each in self.versions.items()),
            self.device + (f", {quantity(self.memory)}B each" if self.memory else ""),
            "",
            f"Use {use}. Half precision here is {half}.",
            advice.why,
            f"fp8 units: {_FP8_UNITS[advice.fp8_units]}.",
            *(f"Note: {note}" for note in self.notes),
            "If steps are skipped or a loss is NaN, "
            f"amp.diagnose(loss_fn, policy{target})(params, batch) tells where that "
            "begins and what mends it.",
        ]
        tables = [_of_products(self.products), _of_checks(self.checks, bool(target))]
        failed = sum(not each.holds for each in self.checks)
        verdict = f"All {len(self.checks)} checks hold."
        if failed:
            verdict = f"{failed} of {len(self.checks)} checks fail: do not train so."
        return as_text("\n".join(heading), tables, 88) + f"\n\n{verdict}"


def _of_products(products: Sequence[Product]) -> Table:
    numbers = ("largest", "smallest", "last place", "product")
    note = "product: how fast a matrix product is, measured now, f32 being 1."
    if len(products) > 3:
        note += '\nbf16 to f32: of f32 arrays, as target="auto" multiplies on this CPU.'
    rows = []
    for each in products:
        limits = (each.largest, each.smallest, each.last_place)
        shown = [f"{limit:.2g}" for limit in limits]
        rows.append((each.dtype, *shown, f"{each.speed:.2f}x"))
    return Table("What it computes with", ("dtype", *numbers), rows, numbers, note)


def _of_checks(checks: Sequence[Check], has_target: bool) -> Table:
    """Returns one row for each sentence, one column for each dtype."""
    dtypes = list(dict.fromkeys(each.dtype for each in checks))
    shown = {
        (each.what, each.dtype): f"{'ok' if each.holds else 'FAILS'}: {each.measured}"
        for each in checks
    }
    sentences = dict.fromkeys(each.what for each in checks)
    rows = [(what, *(shown[what, dtype] for dtype in dtypes)) for what in sentences]
    plan = "; the plan is for a GPU" if has_target else ""
    title = f"A small model, trained by O1 and beside it by O0{plan}"
    return Table(title, ("what should hold", *dtypes), rows)


def advise(kind: str, capability: str = "", speeds: Speeds | None = None) -> Advice:
    """Returns the precision that suits a kind of device.

    Args:
      kind: the `platform` of a `jax.Device`: "cpu", "tpu" or "gpu".
      capability: the `compute_capability` of a GPU.
      speeds: of a CPU that multiplies bf16.
    """
    if kind == "cpu":
        return _advise_cpu(speeds)
    if kind == "tpu":
        return Advice("bf16", "O1", f"{_TPU} {_RANGE}", None)
    # "9.0" is NVIDIA's; AMD's are names such as "gfx942", of GPUs that are new enough.
    if not re.fullmatch(r"\d+\.\d+", capability):
        return Advice("bf16", "O1", f"{_BOTH_HALVES} {_RANGE}", None)
    version = tuple(map(int, capability.split(".")))
    if version >= (8, 9):  # Ada, Hopper, Blackwell
        return Advice("bf16", "O1", f"{_BOTH_HALVES} {_RANGE} {_SECOND_GEAR}", True)
    if version >= (8, 0):
        return Advice("bf16", "O1", f"{_BOTH_HALVES} {_RANGE}")
    if version >= (7, 0):
        return Advice("f16", "O1", _F16_ONLY)
    return Advice("f16", "O0", _NO_UNITS)


def _advise_cpu(speeds: Speeds | None) -> Advice:
    if speeds is None:
        return Advice("bf16", "O0", f"{_CPU} {_NOT_ON_CPU}")
    measured = (
        f"A training step of a small network is {speeds.on_cpu:.1f}x as fast as in f32 "
        f"if the plan is for this CPU, {speeds.autocast:.1f}x if it is for a GPU "
        f"(3 layers of 512, a batch of 512; medians of {ROUNDS} rounds, measured now)."
    )
    if speeds.on_cpu <= _WORTH_IT:
        little = "This CPU multiplies bf16, but gains little by it."
        return Advice("bf16", "O0", f"{_CPU} {little} {measured}")
    gains = "This CPU multiplies bf16, with results in f32; all else stays f32."
    return Advice("bf16", "O1", f"{gains} {measured}", target="auto")


def examine() -> Examination:
    """Returns the findings on the default device of JAX.

    It takes seconds, and compiles and runs a few small programs.
    """
    devices = jax.local_devices()
    device = devices[0]
    multiplies_bf16 = device.platform == "cpu" and this_cpu().native
    speeds = time_steps() if multiplies_bf16 else None
    # The oldest device decides, as in `half_dtype`.
    suits = [
        advise(each.platform, str(getattr(each, "compute_capability", "")), speeds)
        for each in devices
    ]
    half = short_name(half_dtype())
    return Examination(
        {name: importlib.import_module(name).__version__ for name in _PACKAGES},
        f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        (device.memory_stats() or {}).get("bytes_limit"),
        next(each for each in suits if each.half_dtype == half),
        time_products(device.platform, multiplies_bf16),
        tuple(each for half in (BF16, F16) for each in check(recipe("O1", half), half)),
        tuple(notes(device.platform)),
        speeds,
    )


def notes(kind: str) -> list[str]:
    """Returns the settings of JAX that may surprise; `kind` is as for `advise`."""
    notes = []
    asked = os.environ.get("JAX_PLATFORMS", "")
    if kind == "cpu":
        if "cpu" in asked:
            notes.append(f"JAX_PLATFORMS={asked} keeps JAX on the CPU.")
        elif importlib.util.find_spec("jax_plugins") is not None:
            notes.append("a plugin of JAX is installed, but it found no device here.")
        notes.append(
            "compiled for a CPU, half precision keeps more digits than on a GPU; the "
            "compiler option xla_allow_excess_precision=False rounds everywhere."
        )
    if jnp.result_type(float) != F32:
        notes.append("jax_enable_x64 is on: what is f64 in a program stays f64.")
    return notes


def time_steps() -> Speeds:
    """Returns how fast a training step of a small network is, in three programs."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x * x)

    weights = [jnp.full((512, 512), 2.0**-8, F32)] * 3
    x = jnp.ones((512, 512), F32)
    programs = (loss, autocast(loss), autocast(loss, target="cpu"))
    steps = [jax.jit(jax.grad(fn)) for fn in programs]
    plain, *others = medians([functools.partial(step, weights, x) for step in steps])
    return Speeds(*(plain / each for each in others))


def time_products(kind: str, multiplies_bf16: bool) -> tuple[Product, ...]:
    """Returns the speed of a matrix product in f32, bf16 and f16.

    Args:
      kind: the `platform` of the device.
      multiplies_bf16: whether it is a CPU that does.
    """
    size = 512 if kind == "cpu" else 4096
    kinds = {"f32": (F32, jnp.matmul), "bf16": (BF16, jnp.matmul)}
    kinds["f16"] = F16, jnp.matmul
    if multiplies_bf16:
        kinds["bf16 to f32"] = F32, autocast(jnp.matmul, target="cpu")
    runs = []
    for held, product in kinds.values():
        matrix = jnp.full((size, size), 2.0**-10, held)
        runs.append(functools.partial(jax.jit(product), matrix, matrix))
    times, found = medians(runs), []
    for (name, (held, product)), seconds in zip(kinds.items(), times, strict=True):
        dtype = held if product is jnp.matmul else BF16
        info = jnp.finfo(dtype)
        largest, smallest = float(info.max), float(info.smallest_subnormal)
        speed = times[0] / seconds
        found.append(Product(name, largest, smallest, float(info.eps), speed))
    return tuple(found)


def medians(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the median seconds of each of some compiled programs.

    They take turns: a machine that slows down does so for all of them.
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS + 1):
        for run, seconds in zip(runs, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - begin)
    # The first one compiles.
    return [statistics.median(seconds[1:]) for seconds in times]


def check(tried: Recipe, half: np.dtype) -> list[Check]:
    """Returns the checks of a recipe on the device that JAX uses.

    A network of two layers with a norm between them is trained by the recipe and by
    "O0", and once on a batch with an infinite number.

    Args:
      tried: a recipe that leaves parameters in f32, such as "O1".
      half: its half dtype.
    """
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (128, 32), F32)
    batch = {"x": x, "y": jnp.tanh(x @ _matrix(keys[1]))}
    ours, plain = _Run(tried), _Run(recipe("O0"))
    total = explain(jax.grad(ours.loss_fn), "float32")(ours.params, batch).total
    losses, (grads, *_) = zip(*(ours.step(batch) for _ in range(_STEPS)), strict=True)
    # Else TPUs multiply f32 in bf16, and new GPUs in 10 bits.
    with jax.default_matmul_precision("highest"):
        steps = [plain.step(batch) for _ in range(_STEPS)]
    (*_, true_loss), (true_grads, *_) = zip(*steps, strict=True)
    error = optax.tree.norm(optax.tree.sub(grads, true_grads))
    error = float(error / optax.tree.norm(true_grads)) / float(jnp.finfo(half).eps)
    ratio = losses[-1] / true_loss
    before, scale = ours.params, ours.scale
    ours.step(batch | {"x": x.at[0, 0].set(jnp.inf)})
    skipped, backed_off = _equal(before, ours.params), ours.scale / scale
    ours.step(batch)
    goes_on = not _equal(before, ours.params) and math.isfinite(ours.step(batch)[0])
    sentences = {
        "every product of a gradient is in half precision": (
            0 < total.matmuls == total.matmuls_in_half,
            f"{total.matmuls_in_half} of {total.matmuls}",
        ),
        "gradients are f32, and right to 2 units of the last place": (
            error <= 2 and all(each.dtype == F32 for each in jax.tree.leaves(grads)),
            f"{error:.2f} units",
        ),
        f"after {_STEPS} steps the loss has halved, and is f32's to 10 %": (
            abs(ratio - 1) <= 0.1 and losses[-1] <= losses[0] / 2,
            f"{losses[0]:.3f} to {losses[-1]:.3f}, {ratio:.3f}x",
        ),
        "a step that overflows changes no parameter, and a scale backs off": (
            skipped and backed_off == (0.5 if half == F16 else 1),
            f"scale {scale:g} to {ours.scale:g}",
        ),
        "the next step goes on, and all of them were compiled once": (
            goes_on and ours.traces == 1,
            f"traced {ours.traces}x",
        ),
    }
    return [Check(short_name(half), what, *each) for what, each in sentences.items()]


class _Run:
    """A model that is trained by a recipe, as the README does it."""

    def __init__(self, tried: Recipe) -> None:
        self.traces = 0
        self.loss_fn = tried.autocast(_loss)
        tx = tried.wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3)))
        up, down = map(_matrix, jax.random.split(jax.random.key(0)))
        params = {"up": up, "scale": jnp.ones(32, F32), "down": down}
        self.params, self.state = tried.init(tx, params)

        @jax.jit
        def train_step(params: PyTree, state: PyTree, batch: PyTree) -> PyTree:
            self.traces += 1
            gradient = value_and_grad(self.loss_fn)
            loss, grads = gradient(params, batch, loss_scale=state)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss, grads

        self._train_step = train_step

    def step(self, batch: PyTree) -> tuple[float, PyTree]:
        """Makes a step; returns its loss and gradients."""
        found = self._train_step(self.params, self.state, batch)
        self.params, self.state, loss, grads = found
        return float(loss), grads

    @property
    def scale(self) -> float:
        return float(loss_scale_of(self.state).value)


def _matrix(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (32, 32), F32) / 32**0.5


def _loss(params: PyTree, batch: PyTree) -> jax.Array:
    x = batch["x"] @ params["up"]
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(variance + 1e-6) * params["scale"][None]
    return jnp.mean(jnp.square(jnp.tanh(x) @ params["down"] - batch["y"]))


def _equal(a: PyTree, b: PyTree) -> bool:
    return jax.tree.all(jax.tree.map(jnp.array_equal, a, b))
