"""The text of a compiled program (HLO), read into instructions.

What it cannot read is an error: a line that were skipped would cost nothing.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from tests.h100 import split_shape

BYTES = {
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f16", "bf16", "s16", "u16"), 2),
    **dict.fromkeys(
        ("s8", "u8", "pred", "f8e4m3fn", "f8e5m2", "f8e4m3", "s4", "u4"), 1
    ),
    "c128": 16,
    "token": 0,
}


class Shape(NamedTuple):
    """An array: `bf16[8,128]`."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def itemsize(self) -> int:
        if self.dtype not in BYTES:
            raise ValueError(f"how many bytes has {self.dtype}? Add it to BYTES.")
        return BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name: of its result.
      opcode: `fusion`, `custom-call`, ...
      results: the arrays of its result, those of nested tuples too, in order.
      operands: names of instructions of the same computation.
      attributes: the rest of the line, as it is written.
      literal: what `constant` and `parameter` have in place of operands.
      is_root: whether its result is that of the computation.
    """

    name: str
    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    literal: str
    is_root: bool

    @property
    def elements(self) -> int:
        """How many elements its first array has."""
        return self.results[0].elements if self.results else 0

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.results)

    @property
    def source(self) -> str:
        """Where it comes from, as JAX names it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    def names(self, attribute: str) -> tuple[str, ...]:
        """Returns the computations that `attribute` names: `calls`, `body`, ..."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
        return tuple(re.findall(r"%([\w.\-]+)", found[1])) if found else ()

    def numbers(self, attribute: str) -> tuple[int, ...] | None:
        """Returns the integers of `attribute={0,1}`, or of `"attribute":["0","1"]`."""
        found = re.search(
            rf'\b{attribute}(?:=\{{|":\[)([\d,"]*)[\}}\]]', self.attributes
        )
        if not found:
            return None
        return tuple(int(number) for number in re.findall(r"\d+", found[1]))

    def text(self, attribute: str) -> str:
        """Returns the value of `attribute="value"`, or of `"attribute":"value"`."""
        found = re.search(rf'\b{attribute}(?:=|":)"([^"]*)"', self.attributes)
        return found[1] if found else ""


class Computation(NamedTuple):
    """The instructions of a computation, operands before those that read them."""

    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands]


class Program(NamedTuple):
    """The computations of a module; `entry` is the name of the one that is run."""

    computations: dict[str, Computation]
    entry: str


_HEADER = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%(\S+) = (.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\]")


def parse(text: str) -> Program:
    """Returns the instructions of a compiled program's text.

    Raises:
      ValueError: a line of a computation is no instruction, or reads what is not there.

    Example:
      >>> text = '''
      ... ENTRY %main (x: f32[4,2]) -> f32[4,2] {
      ...   %x = f32[4,2]{1,0} parameter(0)
      ...   ROOT %y = f32[4,2]{1,0} negate(%x), metadata={op_name="jit(f)/neg"}
      ... }'''
      >>> root = parse(text).computations["main"].root
      >>> root.opcode, root.operands, root.bytes, root.source
      ('negate', ('x',), 32, 'jit(f)/neg')
    """
    computations: dict[str, Computation] = {}
    entry, inside = "", False
    computation = Computation({})
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            inside, name = True, header[2]
            computation = computations[name] = Computation({})
            entry = name if header[1] else entry
        elif inside and line.strip() == "}":
            inside = False
        elif inside:
            found = _instruction(line, f"line {number}")
            unknown = set(found.operands) - computation.instructions.keys()
            if unknown:
                raise ValueError(f"line {number} reads {sorted(unknown)}: {line[:200]}")
            computation.instructions[found.name] = found
    if not entry:
        raise ValueError("the text has no ENTRY: it is no compiled program")
    return Program(computations, entry)


def _instruction(line: str, where: str) -> Instruction:
    match = _LINE.match(line)
    if not match:
        raise ValueError(f"{where} is no instruction: {line[:200]}")
    root, name, rest = match.groups()
    shape, rest = split_shape(rest)
    opcode, parenthesis, rest = rest.partition("(")
    if not parenthesis:
        raise ValueError(f"{where} has no operands: {line[:200]}")
    literal, _, attributes = rest.partition(")")
    # A constant may have a parenthesis in its text, and no operands.
    operands = re.findall(r"%([\w.\-]+)", literal) if opcode != "constant" else ()
    return Instruction(
        name,
        opcode.strip(),
        tuple(_shape(*found) for found in _SHAPE.findall(shape)),
        tuple(operands),
        attributes,
        literal,
        bool(root),
    )


def _shape(dtype: str, sizes: str) -> Shape:
    # "<=8": at most that many, known at run time only.
    return Shape(
        dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
    )
