"""What an H100 would run: programs compiled for it here, without a GPU, and read back.

XLA's GPU compiler needs no GPU, no driver and no CUDA toolkit: the CUDA plugin of JAX
compiles ahead of time for a *described* device (`pip install '.[gpu-check]'`). The
compiled program then shows which matrix products and convolutions run in which dtype,
which kernels do nothing but cast, and how much memory a step needs. It cannot be
executed, and it says nothing about speed: a real GPU chooses its kernels by timing.

`JAX_PLATFORMS` has to be `cpu` before JAX is imported, else the plugin looks for a
driver and is not registered.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jax.experimental import topologies

Figures = TypeVar("Figures")

# A GpuTargetConfigProto: facts of the device.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  name: "NVIDIA H100 80GB HBM3"
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# cublasLt asks for this much scratch memory in every program with a matrix product:
# compare the temporary memory of programs that need much more.
CUBLAS_WORKSPACE_BYTES = 4 * 2**20

NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def why_no_compiler() -> str | None:
    """Returns why the GPU compiler is not at hand, or None where it is.

    An installed compiler that does not work is no reason: its tests fail.
    """
    if importlib.util.find_spec("jax_plugins") and any(
        importlib.util.find_spec(plugin) for plugin in _PLUGINS
    ):
        return None
    return (
        "the CUDA compiler plugin of JAX is not installed: there are wheels for Linux "
        "only, pip install '.[gpu-check]'"
    )


def compiler_is_required() -> bool:
    """Whether a missing compiler fails the tests that need it, as CI asks for."""
    return os.environ.get("REQUIRE_GPU_COMPILER", "") not in ("", "0")


def skips(reason: str | None, required: bool) -> bool:
    """Whether tests are skipped: with a `reason`, unless the compiler is `required`."""
    return reason is not None and not required


needs_compiler = pytest.mark.skipif(
    skips(why_no_compiler(), compiler_is_required()), reason=str(why_no_compiler())
)


@functools.cache
def described_gpu() -> jax.sharding.Sharding:
    """Returns the sharding that places an array on the described H100."""
    if reason := why_no_compiler():
        raise RuntimeError(f"cannot compile for an H100: {reason}")
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=H100,
        topology="1x1x1",  # slices x hosts x GPUs
    )
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def pin(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the aval of `leaf` (an array, a PRNG key, a scalar, an aval) there."""
    aval = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=described_gpu(), weak_type=weak
    )


def compile_for_gpu(
    fn: Callable[..., Any],
    *args: Any,
    default_flags: bool = False,
    **jit_options: Any,
) -> Any:
    """Returns `jax.jit(fn, **jit_options)` for `args`, compiled for an H100.

    Args:
      fn: the function; what is static in it is bound with `functools.partial`.
      *args: pytrees of arrays, PRNG keys, scalars or `jax.ShapeDtypeStruct`s. Their
        values do not matter.
      default_flags: whether XLA compiles as it does for users. Else without Triton:
        each matrix product is a call of cublasLt then, which the text shows.
      **jit_options: options of `jax.jit` such as `donate_argnums`.

    Returns:
      A `jax.stages.Compiled`: it can be read, not called.
    """
    lowered = jax.jit(fn, **jit_options).lower(*jax.tree.map(pin, args))
    return lowered.compile(compiler_options={} if default_flags else NO_TRITON)


def figures(
    fn: Callable[..., Any], *args: Any, read: Callable[[Any], Figures], **options: Any
) -> Figures:
    """Returns what `read` finds in the program of `compile_for_gpu(fn, *args)`.

    The test that calls it is skipped where the compiler is missing and not required.
    """
    skip_without_compiler()
    return read(compile_for_gpu(fn, *args, **options))


def skip_without_compiler() -> None:
    """Skips the test that calls it where its compiler is missing and not required."""
    if skips(reason := why_no_compiler(), compiler_is_required()):
        pytest.skip(str(reason))


def temp_bytes(program: Any) -> int:
    """Returns the memory that the program needs besides its inputs and outputs."""
    return program.memory_analysis().temp_size_in_bytes


class Traffic(NamedTuple):
    """What the kernels of a program do to memory, all of them together.

    Attributes:
      kernels: how many there are: fusions, reductions, copies, calls of libraries.
      bytes_moved: what they read and write, each its whole operands and results. What
        the bodies of loops move is not counted.
    """

    kernels: int
    bytes_moved: int


def traffic(program: Any) -> Traffic:
    """Returns how many kernels a program has and how many bytes they move."""
    text = program.as_text()
    kernels = moved = 0
    sizes: dict[str, int] = {}
    for line in text[text.index("\nENTRY ") :].splitlines():
        if not (match := _LINE.match(line)):
            continue
        name, rest = match.groups()
        shape, rest = split_shape(rest)
        opcode, _, rest = rest.partition("(")
        operands = re.findall(r"%([^\s,)]+)", rest.partition(")")[0])
        sizes[name] = sum(
            _BYTES.get(dtype, 4) * _product(dims)
            for dtype, dims in _SHAPE.findall(shape)
        )
        if opcode.strip() in ("fusion", "custom-call", "reduce", "copy"):
            kernels += 1
            moved += sizes[name] + sum(sizes.get(each, 0) for each in operands)
    return Traffic(kernels, moved)


class Gemm(NamedTuple):
    """A matrix product: dtypes as HLO spells them (`bf16`, `f16`, `f32`).

    `target` is the library call, or `dot` for a product that is no library call.
    """

    target: str
    operands: tuple[str, ...]
    result: str
    source: str


class Convolution(NamedTuple):
    """A convolution; `kind` is `Forward`, `BackwardInput`, `BackwardFilter`, ...

    `kind` is `convolution` for one that is no call of cuDNN.
    """

    kind: str
    operands: tuple[str, ...]
    result: str
    source: str


class PureCast(NamedTuple):
    """A kernel that reads and writes memory only to change a dtype.

    `dtypes` are the changes that it makes, such as `f32->bf16`.
    """

    dtypes: tuple[str, ...]
    elements: int
    source: str


def gemms(program: Any) -> list[Gemm]:
    """Returns the matrix products of the compiled program, loop bodies once."""
    found = []
    for instruction in _instructions(program.as_text()):
        target = _library_call(instruction)
        if instruction.opcode == "dot":
            target = "dot"
        elif not target.startswith(("__cublas$lt$matmul", "__cublas$gemm")):
            continue
        found.append(
            Gemm(
                target,
                instruction.operands[:2],
                instruction.result,
                _source(instruction),
            )
        )
    return found


def convolutions(program: Any) -> list[Convolution]:
    """Returns the convolutions of the compiled program, loop bodies once."""
    found = []
    for instruction in _instructions(program.as_text()):
        kind = _library_call(instruction).removeprefix("__cudnn$conv")
        if instruction.opcode == "convolution":
            kind = "convolution"
        elif not _library_call(instruction).startswith("__cudnn$conv"):
            continue
        found.append(
            Convolution(
                kind, instruction.operands[:2], instruction.result, _source(instruction)
            )
        )
    return found


# What moves no data of its own inside a fusion. XLA fuses several small casts
# "horizontally": it lays them end to end, casts, and cuts them apart again.
_NO_WORK = {"parameter", "bitcast", "copy", "reshape", "slice", "concatenate", "tuple"}


def pure_casts(program: Any) -> list[PureCast]:
    """Returns the kernels that only turn floats into other floats.

    Integers and booleans that become floats are not counted, nor are converts that are
    part of a kernel that does something else: those cost next to nothing.
    """
    instructions = _instructions(program.as_text())
    bodies: dict[str, list[_Instruction]] = {}
    for instruction in instructions:
        bodies.setdefault(instruction.computation, []).append(instruction)
    found = []
    for fusion in instructions:
        body = bodies.get(fusion.calls, []) if fusion.opcode == "fusion" else []
        if {i.opcode for i in body} - _NO_WORK != {"convert"}:
            continue
        converts = [i for i in body if i.opcode == "convert"]
        if all(_FLOAT.match(i.operands[0] + " " + i.result) for i in converts):
            found.append(
                PureCast(
                    tuple(sorted({f"{i.operands[0]}->{i.result}" for i in converts})),
                    sum(i.elements for i in converts),
                    _source(converts[0]),
                )
            )
    return found


class _Instruction(NamedTuple):
    computation: str
    opcode: str
    operands: tuple[str, ...]  # their dtypes
    result: str  # the dtype, of the first part where it is a tuple
    elements: int
    calls: str
    attributes: str


_FLOAT = re.compile(r"b?f\d+\w* b?f\d+\w*$")
_HEADER = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2} | {
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
}
_CALLS = re.compile(r"\bcalls=%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@functools.lru_cache(maxsize=8)
def _instructions(text: str) -> tuple[_Instruction, ...]:
    """Returns the instructions of an HLO module's text."""
    found: list[_Instruction] = []
    computation = ""
    dtypes: dict[str, str] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            computation, dtypes = header[1], {}
        elif match := _LINE.match(line):
            name, rest = match.groups()
            shape, rest = split_shape(rest)
            opcode, _, rest = rest.partition("(")
            operands, _, attributes = rest.partition(")")
            first = _SHAPE.search(shape)
            dtypes[name], sizes = (first[1], first[2]) if first else ("", "")
            calls = _CALLS.search(attributes)
            found.append(
                _Instruction(
                    computation,
                    opcode.strip(),
                    tuple(
                        dtypes.get(operand, "")
                        for operand in re.findall(r"%([^\s,)]+)", operands)
                    ),
                    dtypes[name],
                    _product(sizes),
                    calls[1] if calls else "",
                    attributes,
                )
            )
    return tuple(found)


def split_shape(text: str) -> tuple[str, str]:
    """Splits `(f32[2]{0}, s8[4]{0}) custom-call(...` after the shape."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == " " and depth == 0:
            return text[:position], text[position + 1 :]
    return text, ""


def _product(sizes: str) -> int:
    elements = 1
    for size in filter(None, sizes.split(",")):
        elements *= int(size)
    return elements


def _library_call(instruction: _Instruction) -> str:
    target = _TARGET.search(instruction.attributes)
    return target[1] if target and instruction.opcode == "custom-call" else ""


def _source(instruction: _Instruction) -> str:
    name = _OP_NAME.search(instruction.attributes)
    return name[1] if name else ""
