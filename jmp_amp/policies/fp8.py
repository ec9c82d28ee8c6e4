"""`Fp8`: the part of a policy that says which matrix products run in 8-bit floats.

What it means for a product is in `jmp_amp/plan/rewrites/fp8.py`.
"""

from __future__ import annotations

import dataclasses
import numbers

import numpy as np

from jmp_amp.policies.arguments import checked_flag
from jmp_amp.policies.dtypes import E4M3, E5M2

# The formats that GPUs multiply, by the names of `Fp8`.
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
# Tensor Cores multiply blocks of 16 numbers of 8 bits.
BLOCK = 16
# Why an option is gone, and what to write.
GONE = {
    "scaling": "each array has one scale. Leave it out",
    "power_of_2": "scales are powers of two. Leave it out",
    "attention": "products with batch dimensions run in bf16. Leave it out",
}


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Matrix products of 8-bit floats with scales, for `Policy(matmul=...)`.

    Each operand of a product is divided by a scale and rounded to 8 bits. The scale is
    the least power of two that brings the largest magnitude into the range of the
    format. The result is bf16.
    Scales are made of the values themselves, at every step: there is no state. Delayed
    scaling, which keeps a history of maxima, is not built.

    XLA multiplies the 8-bit operands on NVIDIA GPUs from compute capability 8.9 on (L4,
    H100, B200), with its default flags: a product says that they are 8 bits, and in
    which way it adds up. Older GPUs, TPUs and CPUs restore the operands to bf16 first,
    and compute the same numbers but for the order of sums. Where no GPU is at hand,
    a program that is compiled or exported for one is taken to run on an H100. With jax
    0.10 and 0.11, export for one platform at a time: a CPU refuses what a GPU is told.

    These run in bf16: convolutions; products with batch dimensions, with a side that is
    below `min_size` or no multiple of 16, or that ask for a dtype or a precision.
    `explain` has the reason of each. An infinite operand becomes the largest number.

    Attributes:
      forward: the format of operands, "e4m3": 4 bits of exponent, 3 of mantissa, up to
        448.
      backward: the format of cotangents, "e5m2" (up to 57344) or "e4m3".
      fast_accumulation: Tensor Cores may add up the forward product with fewer bits.
        The backward products are added up in f32.
      min_size: products with a side below this number run in bf16. A side is the
        number of rows, of columns or of terms: m, n or k.

    Raises:
      ValueError: if a format is unknown, `forward` is "e5m2" (then the gradient of a
        weight would be a product of two e5m2, which no GPU has), or `min_size` is no
        multiple of 16.
      TypeError: if the switch is no bool, `min_size` no int, or an option unknown.

    Source: Micikevicius et al. 2022, arXiv:2209.05433, for the formats; the scaling is
    `tensorwise` of torchao.float8 (torchao/float8/float8_utils.py).

    Example:
      >>> import jmp_amp as amp
      >>> print(amp.Policy(matmul=amp.Fp8(backward="e4m3")))
      p=f32,c=bf16,o=f32,m=fp8+backward=e4m3
      >>> print(amp.get_policy("fp8"))
      p=f32,c=bf16,o=f32,m=fp8
    """

    forward: str = "e4m3"
    backward: str = "e5m2"
    fast_accumulation: bool = True
    min_size: int = BLOCK

    def __new__(cls, *_: object, **options: object) -> Fp8:
        for name in GONE.keys() & options:
            call = f"Fp8({name}={options[name]!r})"
            raise TypeError(f"{call}: this option is gone: {GONE[name]}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field, given in (("forward", self.forward), ("backward", self.backward)):
            if given not in tuple(FORMATS):
                raise ValueError(
                    f"Fp8({field}={given!r}): unknown {given!r}. Use one of "
                    f"{', '.join(FORMATS)}."
                )
        if self.forward == "e5m2":
            raise ValueError(
                'Fp8(forward="e5m2"): the gradient of a weight would multiply e5m2 by '
                "e5m2, which no GPU does in 8 bits. Use e4m3 forward."
            )
        is_fast = checked_flag(self.fast_accumulation, "Fp8(fast_accumulation={})")
        object.__setattr__(self, "fast_accumulation", is_fast)
        size = self.min_size
        if not isinstance(size, numbers.Integral) or isinstance(size, bool):
            raise TypeError(f"Fp8(min_size={size!r}): use an int, such as min_size=64.")
        if size < BLOCK or size % BLOCK:
            raise ValueError(
                f"Fp8(min_size={size}): {size} is no positive multiple of {BLOCK}, "
                "the block that Tensor Cores multiply. Use 16, 32, 256, ..."
            )
        object.__setattr__(self, "min_size", int(size))

    @property
    def forward_dtype(self) -> np.dtype:
        return FORMATS[self.forward]

    @property
    def backward_dtype(self) -> np.dtype:
        return FORMATS[self.backward]

    def __str__(self) -> str:
        values = [(each, getattr(self, each.name)) for each in dataclasses.fields(self)]
        said = [
            f"{each.name}={value}" for each, value in values if value != each.default
        ]
        return "+".join(["fp8", *said]).lower()
