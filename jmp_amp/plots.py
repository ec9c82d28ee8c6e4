"""Figures of reports, diagnoses and tunings, by matplotlib, an optional extra."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jmp_amp.numerics.diagnose.diagnosis import Diagnosis
from jmp_amp.numerics.locate.sites import Site
from jmp_amp.numerics.tune.tuning import Tuned, Tuning, by_figure
from jmp_amp.policies.dtypes import parse_dtype
from jmp_amp.reports.report import Report
from jmp_amp.reports.report_tables import TOP_LEVEL
from jmp_amp.reports.rows import Costs
from jmp_amp.reports.tables import quantity, scale_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["diagnose", "explain", "tune"]

_MOST_MODULES = 30
_HALF, _FULL, _CASTS = "#2a6f97", "#d9a441", "#6c757d"
_EIGHT = "#013a63"
_KEPT, _MORE = "#468c72", "#cfe3da"
_FAILED = "#b3261e"
_POLICIES = (_FULL, _HALF, _KEPT, "#a05195", _CASTS)
_FORMATS = {"f16": _HALF, "bf16": _KEPT, "e4m3": _FULL, "e5m2": "#a05195"}
_MOST_MAPS = 8
# Values of other powers of two are counted with these.
_LOWEST, _HIGHEST = -64, 40


def explain(report: Report) -> Figure:
    """Returns a matplotlib `Figure` of a report: FLOP, casts and saved bytes by module.

    Modules are in the order of the program; beyond thirty, the smallest are added up.
    `figure.savefig("plan.png")` writes it to a file.

    Raises:
      ImportError: without matplotlib.
      TypeError: if it is no `Report`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> report = amp.explain(lambda w, x: jnp.exp(x @ w))(x, x)
      >>> [axes.get_title() for axes in amp.plots.explain(report).axes]
      ['FLOP of matmuls', 'elements cast', 'saved for backward']
    """
    figure = _figure("explain", report, Report)
    modules = _shown(report.modules)
    costs = list(modules.values())
    figure.set_size_inches(11, 1.8 + 0.28 * len(modules))
    left, middle, right = figure.subplots(1, 3, sharey=True)
    in_8_bits = {"in fp8": ([c.fp8_flops for c in costs], _EIGHT)}
    flops = {
        "in half": ([c.flops_in_half - c.fp8_flops for c in costs], _HALF),
        "in f32": ([c.flops - c.flops_in_half for c in costs], _FULL),
    }
    flops = (in_8_bits if report.total.fp8_flops else {}) | flops
    casts = {"casts": ([c.cast_elements for c in costs], _CASTS)}
    # A module that keeps more than without has no second bar.
    less = [max(c.saved_without - c.saved, 0) for c in costs]
    saved = {
        "bytes": ([c.saved for c in costs], _KEPT),
        "more bytes without autocast": (less, _MORE),
    }
    _bars(left, "FLOP of matmuls", modules, flops)
    _bars(middle, "elements cast", modules, casts)
    _bars(right, "saved for backward", modules, saved)
    handles = [*left.containers, *right.containers]
    below, columns = "outside lower center", len(handles)
    figure.legend(handles=handles, loc=below, ncols=columns, frameon=False)
    return figure


def diagnose(diagnosis: Diagnosis) -> Figure:
    """Returns a matplotlib `Figure` of the powers of two of the values, by module.

    Forward values are left, those of the backward pass right, both as the function has
    them without the policy and without a loss scale: the darker, the more of a module's
    values have the power of two. Above are the ranges of formats, lighter where they
    hold subnormal numbers; dotted lines bound f16, and a dashed one below it is where
    the suggested loss scale moves its lower bound. Modules that made a value which is
    not finite under the policy are red; of more than thirty modules these and the first
    are shown. `figure.savefig("numbers.png")` writes it.

    Raises:
      ImportError: without matplotlib.
      TypeError: if it is no `Diagnosis`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> d = amp.diagnose(lambda w, x: jnp.sum(x @ w))(jnp.ones(2), jnp.eye(2))
      >>> [axes.get_title() for axes in amp.plots.diagnose(d).axes[:2]]
      ['forward', 'backward']
    """
    figure = _figure("diagnose", diagnosis, Diagnosis)
    sites, scale = diagnosis.reference or diagnosis.sites, diagnosis.loss_scale
    failed = {site.module for site in diagnosis.sites if site.makes_nonfinite}
    order = list(dict.fromkeys(site.module for site in sites))
    shown = sorted(order, key=lambda path: path not in failed)[:_MOST_MODULES]
    paths = [path for path in order if path in shown]
    # Those of the values, and of f16 at least.
    lowest, _, highest = _bounds("f16")
    moved = lowest - math.log2(scale)
    powers = [power for site in sites for power in site.own_exponents]
    first = max(min([math.ceil(moved), *powers]), _LOWEST) - 1
    last = min(max([highest, *powers]), _HIGHEST) + 1
    figure.set_size_inches(11, 2.6 + 0.28 * len(paths))
    heights = [4, max(len(paths), 3)]
    grid = figure.subplots(2, 2, sharex=True, height_ratios=heights)
    for column, direction in enumerate(("forward", "backward")):
        ranges, axes = grid[:, column]
        ranges.set_title(direction, fontsize="medium")
        _draw_ranges(ranges)
        here = [site for site in sites if site.direction == direction]
        _draw_map(axes, here, paths, first, last)
        for edge in (lowest, highest + 1):
            axes.axvline(edge - 0.5, color=_HALF, linestyle=":", linewidth=1.2)
        if direction == "backward" and scale > 1.0 and moved - 0.5 > first:
            axes.axvline(moved - 0.5, color=_HALF, linestyle="--", linewidth=1.2)
        axes.set_xlim(first - 0.5, last + 0.5)
        for label, path in zip(axes.get_yticklabels(), paths, strict=True):
            label.set_color(_FAILED if path in failed else "black")
    for axes in grid[:, 1]:
        axes.tick_params(labelleft=False)
    caption = (
        "greys: the darker, the more of a module's values have the power of two; "
        "pale ends of bars: subnormal numbers, with fewer digits\n"
        "dotted: the range of f16"
    )
    if scale > 1.0:
        told = scale_text(scale)
        caption += f"; dashed: its lower end with the suggested loss scale {told}"
    if failed:
        caption += "; red: made a value that is not finite"
    figure.supxlabel(caption, fontsize="small", wrap=True)
    return figure


def _draw_ranges(axes: Axes) -> None:
    """Draws a bar for the range of each format, lighter where it is subnormal."""
    bounds = np.array([_bounds(name) for name in _FORMATS])
    rows, colors = range(len(_FORMATS)), list(_FORMATS.values())
    for i, alpha in enumerate((0.35, 1.0)):
        left, right = bounds[:, i], bounds[:, i + 1] + i
        axes.barh(rows, right - left, left=left - 0.5, color=colors, alpha=alpha)
    _label_rows(axes, _FORMATS)
    axes.tick_params(bottom=False, labelbottom=False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_color(_CASTS)


def _draw_map(
    axes: Axes, sites: Sequence[Site], paths: Sequence[str], first: int, last: int
) -> None:
    """Draws the share of each module's values with each power of two.

    Those beyond the first and the last power are counted there.
    """
    counts = np.zeros((len(paths), last - first + 1))
    rows = {path: row for row, path in enumerate(paths)}
    for site in sites:
        if site.module in rows:
            for power, count in site.own_exponents.items():
                counts[rows[site.module], min(max(power, first), last) - first] += count
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(
        np.sqrt(shares),  # few values matter too
        cmap="Greys",
        vmin=0.0,
        vmax=float(np.sqrt(shares.max(initial=1e-3))),
        aspect="auto",
        interpolation="nearest",
        extent=(first - 0.5, last + 0.5, max(len(paths), 1) - 0.5, -0.5),
    )
    _label_rows(axes, paths)
    axes.set_xlabel("power of two of the values", fontsize="small")


def _bounds(name: str) -> tuple[int, int, int]:
    """Returns the powers of two of a format's smallest, normal and largest numbers."""
    info = jnp.finfo(parse_dtype(name) or name)
    numbers = (info.smallest_subnormal, info.smallest_normal, info.max)
    smallest, normal, largest = (math.frexp(float(each))[1] - 1 for each in numbers)
    return smallest, normal, largest


def tune(tuning: Tuning) -> Figure:
    """Returns a matplotlib `Figure`: the measured maps, and the modules' sensitivities.

    Left is the gradient error against the FLOP in half. Each map of policies that was
    measured is a point with its number; a thin line joins them in their order, and
    below stands what each map adds to the policy at the start. The large point is the
    result, the dashed line is the bound. Right are the modules, the most sensitive
    first, in the colour of the policy that each got; of more than thirty the first are
    shown. What is not finite is drawn at the end of the axis, zero at its beginning.

    Raises:
      ImportError: without matplotlib.
      TypeError: if it is no `Tuning`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_amp as amp
      >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
      >>> w = x = jnp.ones((4, 4))
      >>> tuning = amp.tune(loss, max_grad_error=0.1)(w, x)
      >>> curve, bars = amp.plots.tune(tuning).axes
      >>> curve.get_ylabel(), bars.get_xlabel()
      ('gradient error', 'sensitivity')
    """
    figure = _figure("tune", tuning, Tuning)
    modules = by_figure(tuning, "error")[:_MOST_MODULES]
    figure.set_size_inches(11, 4.2 + 0.14 * len(modules))
    curve, bars = figure.subplots(1, 2)
    _draw_steps(curve, tuning)
    _draw_sensitivities(bars, modules)
    start = tuning.steps[0].policy if tuning.steps else ""
    maps = []
    for number, step in enumerate(tuning.steps[:_MOST_MAPS]):
        added = step.policy.removeprefix(start).lstrip("; ")
        told = added or ("the start again" if number else "the start")
        maps.append(f"{number}: {told if len(told) <= 140 else f'{told[:137]}...'}")
    if len(tuning.steps) > _MOST_MAPS:
        left_out = len(tuning.steps) - _MOST_MAPS
        maps.append(f"{left_out} more: Tuning.steps has them")
    figure.supxlabel("\n".join(maps), x=0.01, ha="left", fontsize="small")
    return figure


def _draw_steps(axes: Axes, tuning: Tuning) -> None:
    """Draws the maps that were measured, with their numbers, and the result.

    Maps with one error and one cost share a point.
    """
    errors = [step.error for step in tuning.steps]
    known = [*errors, tuning.max_grad_error]
    *shown, result = _on_log([*errors, tuning.error], known)
    costs = [100 * step.cost for step in tuning.steps]
    axes.plot(costs, shown, color=_CASTS, linewidth=0.6)
    axes.scatter(costs, shown, color=_HALF, label="measured", zorder=3)
    axes.scatter([100 * tuning.cost], [result], s=90, color=_FULL, label="result")
    axes.axhline(tuning.max_grad_error, color=_KEPT, linestyle="--", label="bound")
    axes.set_yscale("log")
    axes.set_xlabel("matmul FLOP in half precision, %")
    axes.set_ylabel("gradient error")
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    points: dict[tuple[float, float], list[str]] = {}
    for number, point in enumerate(zip(costs, shown, strict=True)):
        points.setdefault(point, []).append(str(number))
    for point, numbers in points.items():
        text, beside = ", ".join(numbers), "offset points"
        axes.annotate(text, point, (5, 5), textcoords=beside, fontsize="small")


def _draw_sensitivities(axes: Axes, modules: list[tuple[str, Tuned]]) -> None:
    sensitivities = [each.sensitivity for _, each in modules]
    widths = np.array(_on_log(sensitivities, sensitivities))
    policies = np.array([str(each.policy) for _, each in modules])
    for policy, color in zip(dict.fromkeys(policies), itertools.cycle(_POLICIES)):
        (rows,) = np.nonzero(policies == policy)
        axes.barh(rows, widths[rows], color=color, label=policy)
    axes.set_xscale("log")
    axes.set_xlim(left=widths.min(initial=1.0) / 2)
    axes.tick_params(axis="x", which="minor", labelbottom=False)  # they touch
    axes.set_xlabel("sensitivity")
    _label_rows(axes, [path for path, _ in modules])
    if modules:
        axes.legend(frameon=False, fontsize="small")


def _on_log(numbers: Sequence[float], known: Sequence[float]) -> list[float]:
    """Returns numbers as a log axis has them: what is not finite is at the end."""
    finite = [each for each in known if 0 < each < float("inf")] or [1.0]
    top, bottom = 10 * max(finite), min(finite) / 10
    # A comparison with NaN is false: it is at the end too.
    return [max(each, bottom) if each < top else top for each in numbers]


def _figure(name: str, found: Any, kind: type) -> Figure:
    """Returns a figure without plots, whose title is the summary of what was found."""
    if not isinstance(found, kind):
        raise TypeError(
            f"amp.plots.{name}({type(found).__name__}): wanted a {kind.__name__}. "
            f"Write amp.plots.{name}(amp.{name}(fn, policy, ...)(*args))."
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"amp.plots.{name}: matplotlib is not installed. Install it with "
            "`pip install 'jmp_amp[plots]'`."
        ) from error
    figure = Figure(layout="constrained")
    figure.suptitle(found.summary, fontsize="small", wrap=True)
    return figure


def _shown(modules: dict[str, Costs]) -> dict[str, Costs]:
    """Returns the modules that cost something, the largest ones if there are many."""
    costly = {
        path: costs
        for path, costs in modules.items()
        if costs.flops or costs.casts or costs.saved or costs.saved_without
    }
    if len(costly) <= _MOST_MODULES:
        return costly

    def weight(path: str) -> tuple[int, int]:
        costs = costly[path]
        return costs.flops, costs.saved_without + costs.cast_elements

    smaller = set(sorted(costly, key=weight)[: 1 - _MOST_MODULES])
    added = Costs(*map(sum, zip(*map(costly.pop, smaller), strict=True)))
    return costly | {f"({len(smaller)} smaller modules)": added}


def _bars(
    axes: Axes,
    title: str,
    paths: Collection[str],
    layers: dict[str, tuple[list[int], str]],
) -> None:
    """Draws the widths of each layer, one behind the other, in its colour."""
    left = np.zeros(len(paths))
    for name, (widths, color) in layers.items():
        axes.barh(range(len(paths)), widths, left=left, color=color, label=name)
        left += widths
    axes.set_title(title, fontsize="medium")
    _label_rows(axes, paths)
    axes.xaxis.set_major_formatter(lambda value, _: quantity(value).strip())


def _label_rows(axes: Axes, paths: Collection[str]) -> None:
    """Names the rows in order, from the top."""
    labels = [path or TOP_LEVEL for path in paths]
    labels = [path if len(path) <= 40 else f"...{path[-37:]}" for path in labels]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    axes.tick_params(labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def __dir__() -> list[str]:
    return __all__
