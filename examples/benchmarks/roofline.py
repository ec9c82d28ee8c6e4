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
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from examples.benchmarks.hlo_text import Computation, Instruction, Program, parse


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
      kind: `gemm`, `conv`, or the opcode.
      source: where it comes from, as JAX names it.
      rate: which of `Device.rates` its FLOPs run at.
      flops, operations, bytes: of one run.
      times: how often it runs.
    """

    name: str
    kind: str
    source: str
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

    Two are the same if both are products, or neither, and their times are within 2 %,
    whatever they are called.
    """
    left: tuple[list[Kernel], list[Kernel]] = ([], [])
    for is_product in (True, False):
        pairs = [
            sorted(
                (kernel for kernel in kernels if kernel.is_product == is_product),
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


# What is there already: no kernel.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "opt-barrier", "copy-done", "async-done", "async-update", "partition-id",
    "replica-id",
}  # fmt: skip
# Kernels that read their operands and write their results once.
_STREAMS = {
    "copy", "copy-start", "reduce", "broadcast", "iota", "convert", "transpose",
    "concatenate", "pad", "slice", "select", "compare", "add", "subtract", "multiply",
    "divide", "rng-bit-generator", "rng-get-and-update-state",
}  # fmt: skip


def _kernels(
    program: Program, name: str, device: Device, unknown: list[str], times: int = 1
) -> Iterator[Kernel]:
    """Yields the kernels of a computation that runs `times` in a row."""
    computation = program.computations[name]
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode in _FREE:
            continue
        if opcode == "while":
            trips = _trip_count(instruction)
            if trips is None:
                unknown.append("a loop with an unknown number of runs, counted once")
            for body in instruction.names("body"):
                yield from _kernels(
                    program,
                    body,
                    device,
                    unknown,
                    times * (1 if trips is None else trips),
                )
        elif opcode == "conditional":
            branches = [
                [*_kernels(program, branch, device, unknown, times)]
                for key in (
                    "branch_computations",
                    "true_computation",
                    "false_computation",
                )
                for branch in instruction.names(key)
            ]
            if not branches:
                raise ValueError(f"{instruction.name}: a conditional without branches")
            yield from max(branches, key=lambda found: _seconds(found, device))
        elif opcode in ("call", "async-start"):
            called = instruction.names("to_apply") + instruction.names("calls")
            if not called:
                raise ValueError(f"{instruction.name}: what does this {opcode} call?")
            for each in called:
                yield from _kernels(program, each, device, unknown, times)
        elif opcode == "fusion":
            yield from _fusion(program, computation, instruction, unknown, times)
        elif opcode == "custom-call":
            yield _library_call(computation, instruction, unknown, times)
        else:
            if opcode not in _STREAMS:
                unknown.append(f"{opcode}: counted as one that reads and writes once")
            moved = instruction.bytes if opcode != "copy-start" else 0
            for operand in computation.operands(instruction):
                moved += operand.bytes * (2 if opcode == "copy-start" else 1)
            operations = instruction.elements if opcode not in _MOVES else 0
            yield Kernel(
                instruction.name,
                opcode,
                instruction.source,
                "",
                0,
                operations,
                moved,
                times,
            )


def _seconds(kernels: Sequence[Kernel], device: Device) -> float:
    return sum(kernel.seconds(device) for kernel in kernels)


def _trip_count(instruction: Instruction) -> int | None:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.attributes)
    return int(found[1]) if found else None


# ---------------------------------------------------------------- library calls

_GEMMS = ("__cublas$lt$matmul", "__cublas$gemm")


def _library_call(
    computation: Computation, call: Instruction, unknown: list[str], times: int
) -> Kernel:
    target = call.text("custom_call_target")
    operands = computation.operands(call)
    results = call.results
    if len(results) > 1 and results[-1].dtype in ("s8", "u8"):
        results = results[:-1]  # scratch memory of the library
    moved = sum(operand.bytes for operand in operands)
    moved += sum(result.bytes for result in results)
    flops, kind, rate = 0, target, ""
    if target.startswith(_GEMMS):
        kind, flops = "gemm", _gemm_flops(call, operands)
        rate = _rate(call, operands)
    elif target.startswith("__cudnn$conv"):
        kind, flops = "conv", _conv_flops(target, call, operands)
        rate = _rate(call, operands)
    else:
        unknown.append(f"custom call {target}: its bytes alone")
    return Kernel(call.name, kind, call.source, rate, flops, 0, moved, times)


def _rate(product: Instruction, operands: Sequence[Instruction]) -> str:
    """Returns which of `Device.rates` a product on Tensor Cores has."""
    dtypes = {operand.results[0].dtype for operand in operands[:2]}
    if all(dtype.startswith("f8") for dtype in dtypes):
        return "f8"
    if dtypes <= {"bf16", "f16"}:
        return "half"
    if dtypes == {"f32"}:
        # TF32 at XLA's precisions "default" and "high", as cuBLAS and cuDNN are asked.
        highest = re.search(
            r"operand_precision(=\{|\":\[)[^\]}]*highest", product.attributes, re.I
        )
        return "f32" if highest else "tf32"
    if dtypes == {"f64"} or dtypes == {"s8"}:
        return dtypes.pop()
    raise ValueError(f"{product.name}: no rate is known for {sorted(dtypes)}")


def _gemm_flops(product: Instruction, operands: Sequence[Instruction]) -> int:
    contracting = product.numbers("lhs_contracting_dimensions")
    if contracting is None:
        contracting = product.numbers("lhs_contracting_dims")
    if contracting is None:
        raise ValueError(f"{product.name}: over which dimensions does it contract?")
    sizes = operands[0].results[0].sizes
    return 2 * product.elements * math.prod(sizes[axis] for axis in contracting)


def _conv_flops(target: str, call: Instruction, operands: Sequence[Instruction]) -> int:
    """Returns the FLOPs of the convolution, or of the one that this is a gradient of.

    Each of its results multiplies the kernel of one output feature; a gradient has the
    same products in another order.
    """
    labels = re.search(r"dim_labels=\w+_(\w+)->", call.attributes)
    if not labels:
        raise ValueError(f"{call.name}: a convolution without dim_labels")
    if "BackwardFilter" in target:
        kernel, result = call.results[0], operands[1].results[0]
    elif "BackwardInput" in target:
        kernel, result = operands[1].results[0], operands[0].results[0]
    else:
        kernel, result = operands[1].results[0], call.results[0]
    features = kernel.sizes[labels[1].index("o")]
    return 2 * result.elements * kernel.elements // features


# --------------------------------------------------------------------- fusions

# Inside a kernel: no arithmetic.
_MOVES = _FREE | {
    "broadcast", "iota", "copy", "copy-start", "transpose", "reshape", "slice",
    "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "reverse", "gather",
    "scatter", "dot", "fusion", "call",
}  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")


def _fusion(
    program: Program,
    computation: Computation,
    fusion: Instruction,
    unknown: list[str],
    times: int,
) -> Iterator[Kernel]:
    (name,) = fusion.names("calls")
    body = program.computations[name]
    calls = [i for i in body.instructions.values() if i.opcode == "custom-call"]
    if calls:
        # A library call that reads or writes slices where they lie.
        for call in calls:
            yield _library_call(body, call, unknown, times)
        return
    needed = _needed(body)
    read = sum(
        needed[i.name] / max(i.elements, 1) * i.bytes
        for i in body.instructions.values()
        if i.opcode == "parameter"
    )
    flops, rate = 0, ""
    on_tensor_cores = "__triton" in fusion.attributes
    for owner, product in _dots(program, body):
        operands = owner.operands(product)
        flops += _gemm_flops(product, operands)
        rate = _rate(product, operands) if on_tensor_cores else "f32"
    yield Kernel(
        fusion.name,
        "fusion" if not flops else "gemm",
        fusion.source,
        rate,
        flops,
        _operations(body, needed),
        read + sum(_written(body, output) for output in _outputs(body)),
        times,
    )


def _dots(
    program: Program, body: Computation
) -> Iterator[tuple[Computation, Instruction]]:
    for instruction in body.instructions.values():
        if instruction.opcode == "dot":
            yield body, instruction
        elif instruction.opcode == "convolution":
            raise ValueError(f"{instruction.name}: a convolution that no library runs")
        elif instruction.opcode in ("fusion", "call"):
            called = instruction.names("calls") + instruction.names("to_apply")
            for name in called:
                yield from _dots(program, program.computations[name])


def _behind(body: Computation, instruction: Instruction) -> Instruction:
    """Returns what a bitcast shows in another shape."""
    while instruction.opcode == "bitcast":
        (instruction,) = body.operands(instruction)
    return instruction


def _outputs(body: Computation) -> list[Instruction]:
    root = body.root
    outputs = body.operands(root) if root.opcode == "tuple" else [root]
    return [_behind(body, output) for output in outputs]


def _in_place(body: Computation, output: Instruction) -> bool:
    """Whether the kernel changes a part of an operand, which is its result."""
    return (
        output.opcode in ("dynamic-update-slice", "scatter")
        and _behind(body, body.operands(output)[0]).opcode == "parameter"
    )


def _update(body: Computation, output: Instruction) -> Instruction:
    operands = body.operands(output)
    return operands[1] if output.opcode == "dynamic-update-slice" else operands[-1]


def _written(body: Computation, output: Instruction) -> float:
    """Returns the bytes that a kernel writes for one of its results."""
    if output.opcode not in ("dynamic-update-slice", "scatter"):
        return output.bytes
    touched = _update(body, output).elements * output.results[0].itemsize
    if output.opcode == "scatter":
        touched *= 2  # it reads what it adds to
    return touched if _in_place(body, output) else output.bytes + touched


def _needed(body: Computation) -> dict[str, float]:
    """Returns how many elements of each instruction the results are made of.

    All of most, of what is only sliced or gathered as many as that takes.
    """
    needed = dict.fromkeys(body.instructions, 0.0)
    outputs = _outputs(body)
    in_place = {output.name for output in outputs if _in_place(body, output)}
    for output in outputs:
        needed[output.name] = output.elements
    for instruction in reversed(body.instructions.values()):
        if instruction.opcode == "tuple" and instruction.is_root:
            continue
        elements = max(instruction.elements, 1)
        wanted = needed[instruction.name] = min(needed[instruction.name], elements)
        for position, operand in enumerate(body.operands(instruction)):
            if instruction.name in in_place:
                share = operand.elements if position else 0
            elif instruction.opcode in _SLICES and position == 0:
                share = wanted
            else:
                share = operand.elements * wanted / elements
            needed[operand.name] += share
    return needed


def _operations(body: Computation, needed: Mapping[str, float]) -> float:
    found = 0.0
    for instruction in body.instructions.values():
        if instruction.opcode.startswith("reduce"):
            first = body.operands(instruction)[0]
            share = needed[instruction.name] / max(instruction.elements, 1)
            found += first.elements * share
        elif instruction.opcode not in _MOVES:
            found += needed[instruction.name]
    return found
