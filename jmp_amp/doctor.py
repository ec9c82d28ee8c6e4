"""The precision that suits a machine and why, and a trial of it.

`advise` is knowledge: the half dtype that the matrix units of a device take. `examine`
asks the machine: it times a matrix product in each dtype and trains a small model in
mixed precision beside f32. `python -m jmp_amp doctor` prints both.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_amp import timings
from jmp_amp.checkup import Check, check
from jmp_amp.plan.program.cpu_target import this_cpu
from jmp_amp.policies.dtypes import BF16, F16, F32, half_dtype, short_name
from jmp_amp.recipes import recipe
from jmp_amp.reports.tables import Table, as_text, quantity
from jmp_amp.timings import Product, Speeds

_PACKAGES = ("jmp_amp", "jax", "jaxlib", "flax", "optax")

# Why a precision suits a kind of device.
_CPU = (
    "A CPU computes most of half precision in f32, and casts on top. O1 shows here "
    "how\na model will do on an accelerator."
)
_MEASURED = (
    "A training\nstep of a small network is {on_cpu:.1f}x as fast as in f32 if the "
    "plan is for this CPU, {autocast:.1f}x if\nit is for a GPU (measured now: 3 layers "
    "of 512, a batch of 512; medians of {rounds} rounds)."
)
_GAINS = (
    "This CPU multiplies bf16, with results in f32; the plan keeps all else f32. "
    f"{_MEASURED}"
)
_GAINS_LITTLE = f"{_CPU}\nThis CPU multiplies bf16, but gains little by it. {_MEASURED}"
# A gain below it may be noise.
_WORTH_IT = 1.1
_NOT_ON_CPU = (
    'This CPU has no instructions for products of bf16: target="auto" computes in f32 '
    "here."
)
_TPU = (
    "TPUs multiply f32 as bf16 by default; O1 has arrays be bf16 too, half the bytes\n"
    "to keep and to move. bf16 has the range of f32: no scaling."
)
_BOTH_HALVES = (
    "Its matrix units take bf16 and f16 alike, and bf16 has the range of f32:\n"
    "nothing overflows or is lost, so nothing has to be scaled."
)
_SECOND_GEAR = (
    ' The second gear is\namp.recipe("fp8"), for products with sides of 1024 and '
    "more: amp.explain tells\nwhere it hardly pays. It needs no XLA flags."
)
_F16_ONLY = (
    "Its matrix units take f16, not bf16. f16 has no room for small gradients, so O1\n"
    "scales the loss, dynamically."
)
_NO_UNITS = (
    "It has no matrix units: products that add up in f32 are no faster in half. O1 "
    "with\nf16 saves memory."
)
_IF_NOT_FINITE = (
    "If steps are skipped or a loss is NaN, amp.diagnose(loss_fn, policy{})(params, "
    "batch)\ntells where that begins and what mends it."
)
_FP8_UNITS = {
    True: "yes (under fp8, products multiply the 8-bit operands, without XLA flags)",
    False: "no (products then run in bf16 after quantising: slower, same numbers)",
    None: "not known (without, products run in bf16 after quantising: same numbers)",
}


class Advice(NamedTuple):
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
        """Returns the findings as dictionaries, lists, text and numbers."""
        found = dataclasses.asdict(self) | {"advice": self.advice._asdict()}
        for name in ("products", "checks"):
            found[name] = [each._asdict() for each in getattr(self, name)]
        speeds = None if self.speeds is None else self.speeds._asdict()
        told = {"notes": list(self.notes), "speeds": speeds}
        return found | told | {"healthy": self.healthy}

    def to_json(self) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {each}" for name, each in self.versions.items())
        memory = f", {quantity(self.memory)}B each" if self.memory else ""
        half, name, why, fp8_units, target = self.advice
        given = "" if name == "O0" else f", half_dtype={half!r}"
        use = f"amp.recipe({name!r}{given})"
        if target is not None:
            use = f'amp.recipe("{name}").autocast(fn, target="{target}")'
        heading = [
            versions,
            f"{self.device}{memory}",
            "",
            f"Use {use}. Half precision here is {half}.",
            why,
            f"fp8 units: {_FP8_UNITS[fp8_units]}.",
            *(f"Note: {note}" for note in self.notes),
            _IF_NOT_FINITE.format("" if target is None else f', target="{target}"'),
        ]
        tables = [_of_products(self.products), _of_checks(self.checks, target)]
        failed = sum(not each.holds for each in self.checks)
        verdict = f"All {len(self.checks)} checks hold."
        if failed:
            verdict = f"{failed} of {len(self.checks)} checks fail: do not train so."
        text = as_text("\n".join(heading), tables, 88)
        return f"{text}\n\n{verdict}"


def _of_products(products: Sequence[Product]) -> Table:
    numbers = ("largest", "smallest", "last place", "product")
    note = "product: how fast a matrix product is, measured now, f32 being 1."
    rows = [
        (dtype, *(f"{limit:.2g}" for limit in limits), f"{speed:.2f}x")
        for dtype, *limits, speed, _ in products
    ]
    on_cpu = [each.speed_on_cpu for each in products]
    if any(on_cpu):
        numbers += ("on this CPU",)
        note += '\non this CPU: as target="auto" runs it, bf16 with a result in f32.'
        rows = [
            (*row, "" if speed is None else f"{speed:.2f}x")
            for row, speed in zip(rows, on_cpu, strict=True)
        ]
    return Table("What it computes with", ("dtype", *numbers), rows, numbers, note)


def _of_checks(checks: Sequence[Check], target: str | None) -> Table:
    """Returns one row for each sentence, one column for each dtype."""
    shown: dict[str, dict[str, str]] = {}
    for dtype, what, holds, measured in checks:
        verdict = "ok" if holds else "FAILS"
        shown.setdefault(what, {})[dtype] = f"{verdict}: {measured}"
    dtypes = list(dict.fromkeys(each.dtype for each in checks))
    rows = [(what, *(by[dtype] for dtype in dtypes)) for what, by in shown.items()]
    title = "A small model, trained by O1 and beside it by O0"
    if target is not None:
        title = f"{title}; the plan is for a GPU"
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
        return Advice("bf16", "O1", _TPU, None)
    # "9.0" is NVIDIA's; AMD's are names such as "gfx942", of GPUs that are new enough.
    if not re.fullmatch(r"\d+\.\d+", capability):
        return Advice("bf16", "O1", _BOTH_HALVES, None)
    version = tuple(map(int, capability.split(".")))
    if version >= (8, 9):  # Ada, Hopper, Blackwell
        return Advice("bf16", "O1", _BOTH_HALVES + _SECOND_GEAR, True)
    if version >= (8, 0):
        return Advice("bf16", "O1", _BOTH_HALVES)
    if version >= (7, 0):
        return Advice("f16", "O1", _F16_ONLY)
    return Advice("f16", "O0", _NO_UNITS)


def _advise_cpu(speeds: Speeds | None) -> Advice:
    if speeds is None:
        return Advice("bf16", "O0", f"{_CPU}\n{_NOT_ON_CPU}")
    measured = {**speeds._asdict(), "rounds": timings.ROUNDS}
    if speeds.on_cpu <= _WORTH_IT:
        return Advice("bf16", "O0", _GAINS_LITTLE.format(**measured))
    return Advice("bf16", "O1", _GAINS.format(**measured), target="auto")


def examine() -> Examination:
    """Returns the findings on the default device of JAX.

    It takes seconds, and compiles and runs a few small programs.
    """
    devices = jax.local_devices()
    device = devices[0]
    multiplies_bf16 = device.platform == "cpu" and this_cpu().native
    speeds = timings.of_steps() if multiplies_bf16 else None
    # The oldest device decides, as in `half_dtype`.
    suits = [
        advise(each.platform, str(getattr(each, "compute_capability", "")), speeds)
        for each in devices
    ]
    half = short_name(half_dtype())
    advice = next((each for each in suits if each.half_dtype == half), suits[0])
    return Examination(
        {name: metadata.version(name) for name in _PACKAGES},
        f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        (device.memory_stats() or {}).get("bytes_limit"),
        advice,
        timings.of_products(device.platform, multiplies_bf16),
        tuple(each for half in (BF16, F16) for each in check(recipe("O1", half), half)),
        tuple(notes(device.platform)),
        speeds,
    )


def notes(kind: str) -> list[str]:
    """Returns the settings of JAX that may surprise; `kind` is as for `advise`."""
    notes = []
    asked = os.environ.get("JAX_PLATFORMS", "")
    plugin = importlib.util.find_spec("jax_plugins") is not None
    if kind == "cpu" and "cpu" in asked:
        notes.append(f"JAX_PLATFORMS={asked} keeps JAX on the CPU.")
    elif kind == "cpu" and plugin:
        notes.append("a plugin of JAX is installed, but it found no device here.")
    if kind == "cpu":
        notes.append(
            "compiled for a CPU, half precision keeps more digits than on a GPU; the\n"
            "compiler option xla_allow_excess_precision=False rounds everywhere."
        )
    if jnp.result_type(float) != F32:
        notes.append("jax_enable_x64 is on: what is f64 in a program stays f64.")
    return notes
