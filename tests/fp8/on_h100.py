"""Figures of an fp8 program compiled for an H100."""

from __future__ import annotations

import re
from typing import Any

from jmp_amp.plan.rewrites import fp8
from tests import h100

F8 = re.compile(r"f8e\dm\d\w*")
_ALGORITHM = re.compile(r'matmul\$f8".*"algorithm":"ALG_DOT_(\w+)"')
# Kernels of fewer elements are free.
FULL_SIZE = 2**14


def read(program: Any) -> dict[str, Any]:
    """Returns the figures of a compiled program.

    `f8`, `others`: its products of 8-bit floats and all others. `temp`: bytes. `moved`,
    `kernels`: its traffic. `casts of f8`: kernels that only widen 8-bit floats.
    `multiplies`: full-size kernels that only multiply by a scalar, as scales would be
    that are part of no product. `algorithms`: those of the products of 8-bit floats.
    """
    text = program.as_text()
    products = h100.gemms(program)
    f8 = sum(map(_is_in_8_bits, products))
    traffic = h100.traffic(program)
    return {
        "f8": f8,
        "others": len(products) - f8,
        "temp": h100.temp_bytes(program),
        "moved": traffic.bytes_moved,
        "kernels": traffic.kernels,
        "casts of f8": [
            [each.elements, *each.dtypes]
            for each in h100.pure_casts(program)
            if any(F8.match(dtype) for dtype in each.dtypes)
        ],
        "multiplies": multiplies(text),
        "algorithms": _ALGORITHM.findall(text),
    }


def _is_in_8_bits(product: h100.Gemm) -> bool:
    """Whether it is a call of cublasLt for 8-bit floats.

    Without an algorithm XLA may give it to Triton, which multiplies 8-bit floats too.
    """
    if fp8._HAS_ALGORITHMS:
        return "$f8" in product.target
    return all(F8.match(dtype) for dtype in product.operands)


_HEADER = re.compile(r"^%(\S+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%\S+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
# What may stand beside a multiplication by a scalar.
_BESIDE = set("parameter bitcast copy reshape broadcast convert constant".split())


def multiplies(text: str) -> list[list[Any]]:
    """Returns the elements and results of fused kernels that multiply by a scalar."""
    found, name, body = [], "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, body = header[1], []
        elif operation := _OPERATION.match(line):
            body.append(operation.groups())
        elif line.startswith("}") and name.startswith(("fused_", "wrapped_")):
            found += _multiplied(body)
    return found


def _multiplied(body: list[tuple[str, str, str]]) -> list[list[Any]]:
    opcodes = [opcode for _, _, opcode in body]
    scalars = any(not sizes and opcode == "parameter" for _, sizes, opcode in body)
    if (
        not scalars
        or "multiply" not in opcodes
        or set(opcodes) - _BESIDE != {"multiply"}
    ):
        return []
    dtype, sizes, _ = body[-1]
    elements = 1
    for size in filter(None, sizes.split(",")):
        elements *= int(size)
    return [[elements, dtype]] if elements >= FULL_SIZE else []
