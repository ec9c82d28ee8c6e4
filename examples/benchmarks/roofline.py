"""How long a compiled program takes on an H100 at least: a roofline for each kernel.

    python examples/benchmarks/compare_precision.py --roofline [--model gpt vit]

prints it for the zoo, see `roofline_precision.py`. Here is the model:

  time of a kernel
      = max(FLOPs / rate of the dtype, operations / rate, bytes / bandwidth) + launch

summed over the schedule: one kernel at a time, the body of a loop as often as it runs,
of a conditional the branch that takes longest.

FLOPs       of matrix products and convolutions, 2 for a multiplication and an addition,
            at the rate of the Tensor Cores for the dtype of the operands; a product in
            a kernel that XLA writes itself, not with Triton, runs on the CUDA cores.
            Convolutions: those of the implicit product, taps on padding too
operations  arithmetic of all other kernels, 1 for each element of each instruction,
            a `tanh` too: less than what it takes
bytes       what a kernel reads and writes of memory: its operands and results; of what
            it slices or gathers the slices, of what it updates in place the update.
            Everything comes from memory: 50 MB of L2 cache are not modelled

It is a lower bound, but for that cache and for launches that hide behind kernels. How
near to its peak a library comes, it does not know: `Device.attainable` is 1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from examples.benchmarks import roofline_work
from examples.benchmarks.hlo_text import Instruction, Program, parse


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device can do at most.

    Attributes:
      name: of the device.
      rates: FLOP/s of products, by what multiplies: `half` are f16 and bf16, `f32` the
        products of f32 on CUDA cores ("highest"), `tf32` those on Tensor Cores.
      operations: simple instructions a second on all CUDA cores.
      bandwidth: bytes a second from and to memory.
      launch: seconds from the end of one kernel to the start of the next.
      attainable: the part of the rates and of the bandwidth that kernels come to.
    """

    name: str
    rates: Mapping[str, float]
    operations: float
    bandwidth: float
    launch: float
    attainable: float = 1.0

    def assumptions(self) -> str:
        rates = ", ".join(
            f"{kind} {rate / 1e12:g}" for kind, rate in self.rates.items()
        )
        return (
            f"{self.name}: {rates} TFLOP/s, {self.operations / 1e12:g} T operations/s, "
            f"{self.bandwidth / 1e12:g} TB/s, {self.launch * 1e6:g} us a launch, "
            f"{self.attainable:.0%} of each attained"
        )


# NVIDIA's figures for the H100 SXM (https://www.nvidia.com/en-us/data-center/h100/).
# What it says of Tensor Cores is for sparse matrices: dense ones, here, have half.
H100 = Device(
    name="H100 SXM",
    rates=MappingProxyType(
        {
            "f8": 1979e12,
            "s8": 1979e12,
            "half": 989e12,
            "tf32": 494e12,
            "f32": 67e12,
            "f64": 67e12,
        }
    ),
    # 67 TFLOP/s count a fused multiply-add as two.
    operations=33.5e12,
    bandwidth=3.35e12,
    # An assumption, no figure of NVIDIA's: about what one kernel in a stream takes to
    # follow another that is short. CUDA graphs hide much of it.
    launch=2e-6,
    # No measurement here justifies another one.
    attainable=1.0,
)


class Kernel(NamedTuple):
    """What the device is asked to run, `times` in a row.

    Attributes:
      name: of the instruction in the program's text.
      source: where it comes from, as JAX names it.
      kind, rate, flops, operations, bytes: the `Work` of one run.
      times: how often it runs.
    """

    name: str
    source: str
    kind: str
    rate: str
    flops: float
    operations: float
    bytes: float
    times: int = 1

    @property
    def is_product(self) -> bool:
        return self.flops > 0

    def busy(self, device: Device) -> float:
        """Returns the seconds of one run without its launch."""
        flops = self.flops / device.rates[self.rate] if self.flops else 0.0
        operations = self.operations / device.operations
        return max(flops, operations, self.bytes / device.bandwidth) / device.attainable

    def seconds(self, device: Device) -> float:
        """Returns the seconds of all its runs and their launches."""
        return self.times * (self.busy(device) + device.launch)


class Schedule(NamedTuple):
    """The kernels of a program, and what of it the model does not know."""

    kernels: tuple[Kernel, ...]
    unknown: tuple[str, ...]


def schedule(text: str, device: Device = H100) -> Schedule:
    """Returns the kernels of a compiled program's text, in the order of the text.

    Args:
      text: of an optimised HLO module, as `compiled.as_text()` returns it.
      device: it decides which branch of a conditional takes longest.

    Raises:
      ValueError: the text cannot be read, or a product has a dtype without a rate.
    """
    program = parse(text)
    unknown: list[str] = []
    kernels = tuple(_kernels(program, program.entry, device, unknown))
    return Schedule(kernels, tuple(sorted(set(unknown))))


def totals(kernels: Sequence[Kernel], device: Device = H100) -> dict[str, Any]:
    """Returns the times in milliseconds, and what they are made of."""
    products = [kernel for kernel in kernels if kernel.is_product]
    whole = sum(kernel.seconds(device) for kernel in kernels)
    runs = sum(kernel.times for kernel in kernels)
    in_products = sum(kernel.seconds(device) for kernel in products)
    return {
        "ms": whole * 1e3,
        "ms_launches": runs * device.launch * 1e3,
        "products": in_products / whole if whole else 0.0,
        "flops": sum(kernel.flops * kernel.times for kernel in kernels),
        "bytes_moved": round(sum(kernel.bytes * kernel.times for kernel in kernels)),
        "kernels": runs,
    }


def differences(
    ours: Sequence[Kernel], theirs: Sequence[Kernel], device: Device = H100
) -> tuple[list[Kernel], list[Kernel]]:
    """Returns the kernels of each that the other has not, the longest first.

    Two are the same if they are of one kind and their times are within 2 %, whatever
    they are called.
    """
    left: tuple[list[Kernel], list[Kernel]] = ([], [])
    for kind in sorted({kernel.kind for kernel in (*ours, *theirs)}):
        pairs = [
            sorted(
                (kernel for kernel in kernels if kernel.kind == kind),
                key=lambda kernel: kernel.seconds(device),
            )
            for kernels in (ours, theirs)
        ]
        while all(pairs):
            times = [kernels[-1].seconds(device) for kernels in pairs]
            same = min(times) >= 0.98 * max(times)
            for index, kernels in enumerate(pairs):
                if same:
                    kernels.pop()
                elif times[index] == max(times):
                    left[index].append(kernels.pop())
        for index, kernels in enumerate(pairs):
            left[index].extend(kernels)
    for kernels in left:
        kernels.sort(key=lambda kernel: -kernel.seconds(device))
    return left


def _kernels(
    program: Program, name: str, device: Device, unknown: list[str], times: int = 1
) -> Iterator[Kernel]:
    """Yields the kernels of a computation that runs `times` in a row."""

    def inside(called: str, times: int = times) -> list[Kernel]:
        return list(_kernels(program, called, device, unknown, times))

    computation = program.computations[name]
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode in roofline_work.FREE:
            continue
        if opcode == "while":
            trips = _trip_count(instruction)
            if trips is None:
                unknown.append("a loop with an unknown number of runs, counted once")
            for body in _called(instruction, "body"):
                yield from inside(body, times * (1 if trips is None else trips))
        elif opcode == "conditional":
            called = _called(
                instruction,
                "branch_computations",
                "true_computation",
                "false_computation",
            )
            yield from max(
                map(inside, called),
                key=lambda kernels: sum(kernel.seconds(device) for kernel in kernels),
            )
        elif opcode in ("call", "async-start"):
            for each in _called(instruction, "to_apply", "calls"):
                yield from inside(each)
        else:
            if opcode == "fusion":
                works = roofline_work.of_fusion(program, instruction, unknown)
            elif opcode == "custom-call":
                works = [
                    roofline_work.of_library_call(computation, instruction, unknown)
                ]
            else:
                works = [roofline_work.of_stream(computation, instruction, unknown)]
            for work in works:
                yield Kernel(instruction.name, instruction.source, *work, times)


def _called(instruction: Instruction, *attributes: str) -> list[str]:
    names = [name for each in attributes for name in instruction.names(each)]
    if not names:
        raise ValueError(
            f"{instruction.name}: what does this {instruction.opcode} run?"
        )
    return names


def _trip_count(instruction: Instruction) -> int | None:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.attributes)
    return int(found[1]) if found else None
