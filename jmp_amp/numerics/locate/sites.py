"""Sites: what the numbers of an equation were, and what other formats make of them.

A site is an equation of a program that ran, and statistics of its results. The powers
of two of the values tell which share of them a format cannot hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_amp.plan.rewrites.fp8 import scale_of
from jmp_amp.policies.dtypes import BF16, F16, F32, is_half, parse_dtype
from jmp_amp.policies.fp8 import FORMATS

_FORMATS = {"f16": F16, "bf16": BF16, **FORMATS, "f32": F32}


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation of a program that ran, and what its numbers were.

    All figures are of its floating-point results, over all runs of it: the turns of a
    loop, the shards of a device mesh.

    Attributes:
      module: the path of the module or jitted function around it; "" outside.
      operation: the name of the primitive.
      source: `file:line` of the user's code; None if there is none.
      direction: "forward", or "backward" for what exists only for the derivative.
      dtype: the short name of the dtype of the first floating result, "f16".
      shape: of that result, `(8, 16)`.
      size: the elements of the results, in all runs; a complex number is two.
      times: how often it ran. What every turn of a `scan` computes alike runs once in
        the program of the gradient.
      amax: the largest finite magnitude; 0.0 if there is none.
      amin: the smallest magnitude that is not zero; 0.0 if there is none.
      zeros: how many values are zero.
      nonfinite: how many values are infinite or NaN.
      turn: the first run, from 0, that made a value which is not finite, if the
        equation is in a loop; else None.
      exponents: how many finite values that are not zero have each `floor(log2 |x|)`.
      error: of a forward site under a policy, the relative L2 distance to the same
        equation without; else None. A value that is finite in one of them alone is
        infinitely far from the other; if it is in neither, they count as equal.
      amplification: `error` over the largest error of the operands, which is taken to
        be at least the unit roundoff of the dtype; None without an error.
      makes_nonfinite: in some run all floating operands were finite and a result was
        not.
      path: of the module, as the patterns of a `PolicyMap` see it; None outside of all
        modules.
      identity: the way to it through the bodies of the program; the runs with and
        without a policy agree on it.
      scales: a loss scale multiplies its values. It does not reach the factors of a
        derivative, such as the `cos` of a `sin`, though they are backward.
      reads_floats: an operand holds floating-point numbers. A mask or an index that
        becomes a number reads none: its error is that of a decision.
      nans: how many values are NaN.
      is_constant: a constant of the program is `amax`, such as a mask's -1e9: it says
        nothing of what the program computes.
      makes_nan: in some run no operand held NaN and a result did: it was made of finite
        values, or of infinities, as in `inf - inf`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> x = jnp.full((2, 4), 300.0)
      >>> site = amp.diagnose(lambda x: x @ x.T, "mixed_float16")(x).first_nonfinite
      >>> site.operation, site.direction, site.dtype, site.nonfinite
      ('dot_general', 'forward', 'f16', 4)
    """

    module: str
    operation: str
    source: str | None
    direction: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    times: int
    amax: float
    amin: float
    zeros: int
    nonfinite: int
    turn: int | None
    exponents: dict[int, int]
    error: float | None
    amplification: float | None
    makes_nonfinite: bool
    path: str | None
    identity: str
    scales: bool = True
    reads_floats: bool = True
    nans: int = 0
    makes_nan: bool = False
    is_constant: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """What the same equation has in common in runs with and without a policy."""
        return self.identity, self.direction, self.operation

    @property
    def is_forward(self) -> bool:
        return self.direction == "forward"

    @property
    def is_in_half(self) -> bool:
        return is_half(parse_dtype(self.dtype))

    @property
    def own_exponents(self) -> dict[int, int]:
        """`exponents` without that of a constant."""
        if not self.is_constant:
            return self.exponents
        largest = max(self.exponents, default=0)
        return {e: count for e, count in self.exponents.items() if e < largest}

    @property
    def finite(self) -> int:
        """How many values are finite."""
        return max(self.size - self.nonfinite, 0)

    def overflow(self, format: DTypeLike) -> float:
        """Returns the share of the finite values that `format` turns into infinity.

        The values with the power of two of the format's largest value fit, unless
        `amax` is one of them and too large: then none of them is taken to fit.

        Args:
          format: "f16", "bf16", "e4m3", "e5m2", "f32", or the dtype; "e4m3" is
            `float8_e4m3fn`, which has no infinity: NaN counts.

        Raises:
          ValueError: if `format` is none of these.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> x = jnp.array([1.0, 100.0, 1e5, 0.0])
          >>> site = amp.diagnose(lambda x: x + x, "float32")(x).sites[0]
          >>> site.overflow("f16"), site.overflow("bf16"), site.overflow("e4m3")
          (0.25, 0.0, 0.25)
        """
        held = _range(format, "overflow")
        is_at_the_top = math.frexp(self.amax)[1] - 1 == held.top
        with np.errstate(all="ignore"):
            fits = math.isfinite(np.float64(self.amax).astype(held.dtype))
        top = held.top - (is_at_the_top and not fits)
        return self._share(e for e in self.exponents if e > top)

    def underflow(self, format: DTypeLike) -> float:
        """Returns the share of the finite values that `format` turns into zero.

        Zeros are among the values, and do not underflow. Arguments and errors are those
        of `overflow`.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> x = jnp.array([1.0, 1e-3, 1e-9, 0.0])
          >>> site = amp.diagnose(lambda x: x + x, "float32")(x).sites[0]
          >>> site.underflow("f16"), site.underflow("bf16"), site.underflow("e4m3")
          (0.25, 0.0, 0.25)
        """
        border = self._lost_below(_range(format, "underflow"))
        return self._share(e for e in self.exponents if e < border)

    def subnormal(self, format: DTypeLike) -> float:
        """Returns the share of the finite values that are subnormal in `format`.

        They are below its smallest normal number and do not become zero: fewer digits
        are left of them. Arguments and errors are those of `overflow`.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_amp as amp
          >>> x = jnp.array([1.0, 1e-3, 1e-6, 0.0])
          >>> site = amp.diagnose(lambda x: x + x, "float32")(x).sites[0]
          >>> site.subnormal("f16"), site.subnormal("bf16"), site.subnormal("e4m3")
          (0.25, 0.0, 0.25)
        """
        held = _range(format, "subnormal")
        border = self._lost_below(held)
        return self._share(e for e in self.exponents if border <= e < held.normal)

    def _lost_below(self, held: _Range) -> int:
        """Returns the power of two below which values underflow.

        Half of the smallest number is the power of two that is undecided: it becomes
        zero, and all that is above it does not. Where it is the smallest value exactly,
        as of powers of two, all with that exponent are taken to be it.
        """
        return held.bottom + (self.amin == 2.0**held.bottom)

    def _share(self, exponents: Iterable[int]) -> float:
        finite = sum(self.exponents.values()) + self.zeros
        return sum(self.exponents[e] for e in exponents) / max(finite, 1)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What the numbers of several sites were: those of a module.

    Attributes:
      amax, amin, zeros, nonfinite, size: as of a `Site`, over all of them; `amax` is
        without the sites that have that of a constant.
      error: the worst error of a forward site; None if none has one.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> x = jnp.array([1.0, 3.0])
      >>> numbers = amp.diagnose(lambda x: x * x, "float32")(x).modules[""]
      >>> numbers.amax, numbers.amin, numbers.size
      (9.0, 1.0, 2)
    """

    amax: float
    amin: float
    zeros: int
    nonfinite: int
    size: int
    error: float | None


@dataclasses.dataclass(frozen=True)
class Gradient(Numbers):
    """What the numbers of one parameter's gradient were, unscaled.

    Attributes:
      error: the relative L2 distance to the gradient without a policy; 0.0 if both are
        zero. Values that are not finite count as in `Site.error`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> loss = lambda w, x: jnp.sum(jnp.square(x @ w))
      >>> d = amp.diagnose(loss, "mixed_bfloat16")(jnp.ones(2), jnp.eye(2))
      >>> d.gradients[""].amax, d.gradients[""].error
      (2.0, 0.0)
    """

    error: float

    @property
    def is_lost(self) -> bool:
        """Whether all of it is zero, and in f32 it is not."""
        return 0 < self.size == self.zeros and self.error != 0


class EightBits(NamedTuple):
    """An array that became 8-bit floats with a scale: an operand of an fp8 product.

    Attributes:
      site: the array before; its `dtype` is the format, `operation` is "quantise".
      scales: for each format, the scale for the largest magnitude of all runs, rounded
        up to a power of two.
      saturated: for each format, the share of all values that become its largest
        number: infinities, for the scale is made for the rest.
      underflowed: for each format, the share of the finite values that become zero.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> x = jnp.ones((16, 16)).at[0].set(1e-3).at[1].set(1e-6)
      >>> d = amp.diagnose(lambda w, x: jnp.sum(x @ w), "fp8")(jnp.eye(16), x)
      >>> lhs = d.quantised[0]
      >>> lhs.site.direction, lhs.site.dtype, lhs.scales["e4m3"]
      ('forward', 'e4m3', 0.00390625)
      >>> lhs.underflowed["e4m3"], lhs.underflowed["e5m2"]
      (0.0625, 0.0)
    """

    site: Site
    scales: dict[str, float]
    saturated: dict[str, float]
    underflowed: dict[str, float]


def quantised(sites: Iterable[Site]) -> tuple[EightBits, ...]:
    """Returns the arrays that became 8-bit floats, in the order of the program."""
    return tuple(_eight_bits(site) for site in sites if site.operation == "quantise")


def _eight_bits(site: Site) -> EightBits:
    largest = jnp.float32(site.amax)
    scales = {name: float(scale_of(largest, dtype)) for name, dtype in FORMATS.items()}
    divided = {name: scaled(site, 1 / scale) for name, scale in scales.items()}
    infinite = site.nonfinite / max(site.size, 1)
    return EightBits(
        site,
        scales,
        {name: infinite + each.overflow(name) for name, each in divided.items()},
        {name: each.underflow(name) for name, each in divided.items()},
    )


def added_up(sites: Sequence[Site]) -> Numbers:
    """Returns the numbers of all of `sites`."""
    errors = [site.error for site in sites if site.error is not None]
    return Numbers(
        amax=max((site.amax for site in sites if not site.is_constant), default=0.0),
        amin=min((site.amin for site in sites if site.amin > 0), default=0.0),
        zeros=sum(site.zeros for site in sites),
        nonfinite=sum(site.nonfinite for site in sites),
        size=sum(site.size for site in sites),
        error=max(errors, key=or_infinite, default=None),
    )


def first_made(sites: Iterable[Site]) -> Site | None:
    """Returns the first site whose operands were all finite and a result was not."""
    return next((site for site in sites if site.makes_nonfinite), None)


def or_infinite(number: float | None) -> float:
    """Returns a number to sort by: NaN is as bad as infinity, and None is nothing."""
    if number is None:
        return -math.inf
    return math.inf if math.isnan(number) else number


def scaled(site: Site, scale: float) -> Site:
    """Returns a site with all values multiplied by a power of two."""
    fraction, shift = math.frexp(scale)
    assert fraction == 0.5
    return dataclasses.replace(
        site,
        exponents={e + shift - 1: count for e, count in site.exponents.items()},
        amax=site.amax * scale,
        amin=site.amin * scale,
    )


class _Range(NamedTuple):
    """What a format can hold.

    Attributes:
      top: the power of two of its largest number.
      normal: that of its smallest normal number.
      bottom: that of half its smallest number.
    """

    dtype: np.dtype
    top: int
    normal: int
    bottom: int


def _range(format: DTypeLike, method: str) -> _Range:
    dtype = None
    if isinstance(format, str):
        is_other_name = format.strip().lower() == "e4m3fn"
        dtype = _FORMATS["e4m3"] if is_other_name else parse_dtype(format)
    elif format is not None:
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(format)
    if dtype not in _FORMATS.values():
        raise ValueError(
            f"Site.{method}({format!r}): no known format. Use one of "
            f"{', '.join(_FORMATS)}, or the dtype."
        )
    return _range_of(dtype)


@functools.cache
def _range_of(dtype: np.dtype) -> _Range:
    info = jnp.finfo(dtype)
    powers = [
        math.frexp(float(number))[1] - 1
        for number in (info.max, info.smallest_normal, info.smallest_subnormal)
    ]
    return _Range(dtype, powers[0], powers[1], powers[2] - 1)
