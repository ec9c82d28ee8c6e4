"""`Fp8`: which matrix products run in 8-bit floats, and how they are scaled.

It is a part of a `Policy`, so it is plain data and has a text form. What it means for a
product is in `jmp_amp/plan/rewrites/fp8.py`.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import cast

import jax.numpy as jnp
import numpy as np

# The formats that GPUs multiply, by the names of `Fp8`.
FORMATS = {
    "e4m3": np.dtype(jnp.float8_e4m3fn),
    "e5m2": np.dtype(jnp.float8_e5m2),
}
# Tensor Cores multiply blocks of 16 numbers of 8 bits.
BLOCK = 16
# Why an option is gone, and what to write.
_GONE = {
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
        for name in _GONE.keys() & options:
            call = f"Fp8({name}={options[name]!r})"
            raise TypeError(f"{call}: this option is gone: {_GONE[name]}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in ("forward", "backward"):
            self._check_word(field, tuple(FORMATS))
        if self.forward == "e5m2":
            raise ValueError(
                'Fp8(forward="e5m2"): the gradient of a weight would multiply e5m2 by '
                "e5m2, which no GPU does in 8 bits. Use e4m3 forward."
            )
        given = self.fast_accumulation
        if not isinstance(given, bool | np.bool_):
            raise TypeError(f"Fp8(fast_accumulation={given!r}): use True or False.")
        object.__setattr__(self, "fast_accumulation", bool(given))
        self._check_size()

    def _check_word(self, field: str, allowed: tuple[str, ...]) -> None:
        given = getattr(self, field)
        if given not in allowed:
            raise ValueError(
                f"Fp8({field}={given!r}): unknown {given!r}. Use one of "
                f"{', '.join(allowed)}."
            )

    def _check_size(self) -> None:
        given = self.min_size
        if not isinstance(given, numbers.Integral) or isinstance(given, bool):
            raise TypeError(f"Fp8(min_size={given!r}): use an int.")
        if given < BLOCK or given % BLOCK:
            raise ValueError(
                f"Fp8(min_size={given}): {given} is no positive multiple of {BLOCK}, "
                "the block that Tensor Cores multiply. Use 16, 32, 256, ..."
            )
        object.__setattr__(self, "min_size", int(given))

    @property
    def forward_dtype(self) -> np.dtype:
        return FORMATS[self.forward]

    @property
    def backward_dtype(self) -> np.dtype:
        return FORMATS[self.backward]

    def __str__(self) -> str:
        parts = ["fp8"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={_text(value)}")
        return "+".join(parts)


def fp8_from(text: str, call: str) -> Fp8 | None:
    """Returns what `str(Fp8(...))` wrote; None for "none".

    Args:
      text: `fp8`, or `fp8+backward=e4m3+min_size=64`.
      call: the caller's call as written, for the error.
    """
    name, *settings = (part.strip() for part in text.lower().split("+"))
    if name == "none" and not settings:
        return None
    if name != "fp8":
        raise ValueError(
            f"{call}: unknown kind of product {name!r}. Use fp8, with settings such as "
            "fp8+backward=e4m3, or none."
        )
    fields = {field.name: field for field in dataclasses.fields(Fp8)}
    found: dict[str, object] = {}
    for setting in settings:
        key, _, value = (token.strip() for token in setting.partition("="))
        if key in _GONE:
            raise ValueError(f"{call}: {key!r} of fp8 is gone: {_GONE[key]}.")
        if key not in fields:
            raise ValueError(
                f"{call}: unknown setting {key!r} of fp8. There are "
                f"{', '.join(fields)}."
            )
        if key in found:
            raise ValueError(f"{call}: {key!r} is set twice. Set it once.")
        found[key] = _read(key, value, fields[key].default, call)
    try:
        return Fp8(**cast(dict[str, str], found))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{call}: {error}") from None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(key: str, value: str, default: object, call: str) -> object:
    if isinstance(default, bool):
        if value not in ("true", "false"):
            raise ValueError(
                f"{call}: {key}={value!r} is neither true nor false. Write {key}=true."
            )
        return value == "true"
    if isinstance(default, int):
        if not value.isdigit():
            raise ValueError(f"{call}: {key}={value!r} is no number. Write {key}=64.")
        return int(value)
    return value
