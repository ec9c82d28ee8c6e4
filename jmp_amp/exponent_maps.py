"""Maps of exponents: which powers of two the values of modules have, and formats hold.

The axes are matplotlib's; nothing here imports it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jmp_amp.numerics.locate.sites import Site
from jmp_amp.policies.dtypes import parse_dtype

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = {"f16": "#2a6f97", "bf16": "#468c72", "e4m3": "#d9a441", "e5m2": "#a05195"}
_LINES = "#6c757d"
# Values of other powers of two are counted with these.
_LOWEST, _HIGHEST = -64, 40


def span(sites: Sequence[Site], scale: float) -> tuple[int, int]:
    """Returns the powers of two to show: those of the values, and f16's at least.

    Args:
      sites: of all modules and both directions.
      scale: the loss scale that moves f16's lower bound.
    """
    powers = [power for site in sites for power in site.own_exponents]
    lowest, _, highest = _bounds("f16")
    lowest -= int(math.log2(scale))
    lowest, highest = min([lowest, *powers]), max([highest, *powers])
    return max(lowest, _LOWEST) - 1, min(highest, _HIGHEST) + 1


def map_of(
    sites: Sequence[Site], direction: str, paths: Sequence[str], limits: tuple[int, int]
) -> np.ndarray:
    """Returns the share of each module's values with each power of two.

    Args:
      sites: of all modules and both directions.
      direction: "forward" or "backward".
      paths: the modules.
      limits: the first and the last power of two; those beyond are counted there.

    Returns:
      f64[modules, powers]; the rows add up to 1, or to 0 where there is no value.
    """
    first, last = limits
    counts = np.zeros((len(paths), last - first + 1))
    rows = {path: row for row, path in enumerate(paths)}
    for site in sites:
        if site.direction == direction and site.module in rows:
            for power, count in site.own_exponents.items():
                place = min(max(power, first), last) - first
                counts[rows[site.module], place] += count
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def draw_map(
    axes: Axes, shares: np.ndarray, limits: tuple[int, int], scale: float
) -> None:
    """Draws a map as `map_of` made it, and the bounds of f16.

    Args:
      scale: the loss scale that moves the lower bound; 1.0 for none.
    """
    first, last = limits
    below = max(len(shares), 1) - 0.5
    axes.imshow(
        np.sqrt(shares),  # few values matter too
        cmap="Greys",
        vmin=0.0,
        vmax=float(np.sqrt(shares.max(initial=1e-3))),
        aspect="auto",
        interpolation="nearest",
        extent=(first - 0.5, last + 0.5, below, -0.5),
    )
    lowest, _, highest = _bounds("f16")
    for edge in (lowest, highest + 1):
        axes.axvline(edge - 0.5, color=_FORMATS["f16"], linestyle=":", linewidth=1.2)
    if scale > 1.0:
        moved = lowest - math.log2(scale) - 0.5
        if moved > first:
            axes.axvline(moved, color=_FORMATS["f16"], linestyle="--", linewidth=1.2)
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.set_xlabel("power of two of the values", fontsize="small")
    axes.tick_params(labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def draw_ranges(axes: Axes, limits: tuple[int, int]) -> None:
    """Draws a bar for the range of each format, lighter where it is subnormal."""
    for row, (name, color) in enumerate(_FORMATS.items()):
        lowest, normal, highest = _bounds(name)
        for left, right, alpha in ((lowest, normal, 0.35), (normal, highest + 1, 1.0)):
            left, right = max(left, limits[0]), min(right, limits[1] + 1)
            if right > left:
                width = right - left
                axes.barh(row, width, left=left - 0.5, color=color, alpha=alpha)
    axes.set_yticks(range(len(_FORMATS)), list(_FORMATS), fontsize="small")
    axes.set_ylim(len(_FORMATS) - 0.5, -0.5)
    axes.tick_params(bottom=False, labelbottom=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(_LINES)


def _bounds(name: str) -> tuple[int, int, int]:
    """Returns the powers of two of a format's smallest, normal and largest numbers."""
    info = jnp.finfo(parse_dtype(name) or name)
    smallest, normal, largest = (
        math.frexp(float(number))[1] - 1
        for number in (info.smallest_subnormal, info.smallest_normal, info.max)
    )
    return smallest, normal, largest
