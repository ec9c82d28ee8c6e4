"""What the kernels of a compiled program do: FLOPs, operations, bytes.

`roofline.py` says what is counted, and turns it into time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from examples.benchmarks.hlo_text import Computation, Instruction, Program


class Work(NamedTuple):
    """One run of a kernel.

    Attributes:
      kind: `gemm`, `conv`, or what the instruction is called.
      rate: which of `Device.rates` its FLOPs run at.
      flops, operations, bytes: how much of each.
    """

    kind: str
    rate: str
    flops: float
    operations: float
    bytes: float


# What is there already: no kernel.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "opt-barrier", "copy-done", "async-done", "async-update", "partition-id",
    "replica-id",
}  # fmt: skip
# Kernels that read their operands and write their results once.
STREAMS = {
    "copy", "copy-start", "reduce", "broadcast", "iota", "convert", "transpose",
    "concatenate", "pad", "slice", "select", "compare", "add", "subtract", "multiply",
    "divide", "rng-bit-generator", "rng-get-and-update-state",
}  # fmt: skip


def of_stream(
    computation: Computation, instruction: Instruction, unknown: list[str]
) -> Work:
    """Returns the work of a kernel that reads its operands and writes its results."""
    opcode = instruction.opcode
    if opcode not in STREAMS:
        unknown.append(f"{opcode}: counted as one that reads and writes once")
    moved = sum(operand.bytes for operand in computation.operands(instruction))
    # The result of `copy-start` has its operand in it too.
    moved += moved if opcode == "copy-start" else instruction.bytes
    operations = 0 if opcode in _MOVES else instruction.elements
    return Work(opcode, "", 0, operations, moved)


_GEMMS = ("__cublas$lt$matmul", "__cublas$gemm")


def of_library_call(
    computation: Computation, call: Instruction, unknown: list[str]
) -> Work:
    target = call.text("custom_call_target")
    operands = computation.operands(call)
    results = call.results
    if len(results) > 1 and results[-1].dtype in ("s8", "u8"):
        results = results[:-1]  # scratch memory of the library
    moved = sum(operand.bytes for operand in operands)
    moved += sum(result.bytes for result in results)
    if target.startswith(_GEMMS):
        flops = _gemm_flops(call, operands)
        return Work("gemm", _rate(call, operands), flops, 0, moved)
    if target.startswith("__cudnn$conv"):
        flops = _conv_flops(target, call, operands)
        return Work("conv", _rate(call, operands), flops, 0, moved)
    unknown.append(f"custom call {target}: its bytes alone")
    return Work(target, "", 0, 0, moved)


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


# Inside a kernel: no arithmetic.
_MOVES = FREE | {
    "broadcast", "iota", "copy", "copy-start", "transpose", "reshape", "slice",
    "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "reverse", "gather",
    "scatter", "dot", "fusion", "call",
}  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")


def of_fusion(
    program: Program, fusion: Instruction, unknown: list[str]
) -> Iterator[Work]:
    """Yields the work of a fusion: of one kernel, or of the library calls in it."""
    (name,) = fusion.names("calls")
    body = program.computations[name]
    calls = [i for i in body.instructions.values() if i.opcode == "custom-call"]
    if calls:
        # A library call that reads or writes slices where they lie.
        for call in calls:
            yield of_library_call(body, call, unknown)
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
    yield Work(
        "gemm" if flops else "fusion",
        rate,
        flops,
        _operations(body, needed),
        read + sum(_written(body, output) for output in _outputs(body)),
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
