"""What 8-bit floats make of the operands of fp8 products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp

from jmp_amp.numerics.locate.sites import Site, scaled
from jmp_amp.plan.rewrites.quantising import scale_of
from jmp_amp.policies.fp8 import FORMATS


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
    scales = {
        name: float(scale_of(largest, dtype, power_of_2=True))
        for name, dtype in FORMATS.items()
    }
    divided = {name: scaled(site, 1 / scale) for name, scale in scales.items()}
    infinite = site.nonfinite / max(site.size, 1)
    return EightBits(
        site,
        scales,
        {name: infinite + each.overflow(name) for name, each in divided.items()},
        {name: each.underflow(name) for name, each in divided.items()},
    )
