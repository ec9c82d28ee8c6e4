"""Figures of reports, diagnoses and tunings, by matplotlib, an optional extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jmp_amp.exponent_maps import draw_map, draw_ranges, map_of, span
from jmp_amp.numerics.diagnose.diagnosis import Diagnosis
from jmp_amp.numerics.tune.tuning import Tuned, Tuning, by_figure
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
_MOST_MAPS = 8


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
    _check(report, Report, "explain", "amp.explain(fn, policy)(*args)")
    modules = _shown(report.modules)
    labels = [_label(path) for path, _ in modules]
    costs = [each for _, each in modules]
    figure = _figure("explain", (11, 1.8 + 0.28 * len(modules)))
    left, middle, right = figure.subplots(1, 3, sharey=True)
    in_8_bits = ("in fp8", [c.fp8_flops for c in costs], _EIGHT)
    _bars(
        left,
        "FLOP of matmuls",
        labels,
        *([in_8_bits] if report.total.fp8_flops else []),
        ("in half", [c.flops_in_half - c.fp8_flops for c in costs], _HALF),
        ("in f32", [c.flops - c.flops_in_half for c in costs], _FULL),
    )
    elements = [c.cast_elements for c in costs]
    _bars(middle, "elements cast", labels, ("casts", elements, _CASTS))
    saved = [c.saved for c in costs]
    # A module that keeps more than without has no second bar.
    less = [max(c.saved_without - c.saved, 0) for c in costs]
    _bars(
        right,
        "saved for backward",
        labels,
        ("bytes", saved, _KEPT),
        ("more bytes without autocast", less, _MORE),
    )
    bars = [each for axes in (left, right) for each in axes.get_legend_handles_labels()]
    handles, names = bars[0] + bars[2], bars[1] + bars[3]
    figure.legend(
        handles, names, loc="outside lower center", ncols=len(names), frameon=False
    )
    figure.suptitle(report.summary, fontsize="small", wrap=True)
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
    _check(diagnosis, Diagnosis, "diagnose", "amp.diagnose(fn, policy)(*args)")
    sites = diagnosis.reference or diagnosis.sites
    failed = {site.module for site in diagnosis.sites if site.makes_nonfinite}
    order = list(dict.fromkeys(site.module for site in sites))
    shown = sorted(order, key=lambda path: path not in failed)[:_MOST_MODULES]
    paths = [path for path in order if path in shown]
    limits = span(sites, diagnosis.loss_scale)
    figure = _figure("diagnose", (11, 2.6 + 0.28 * len(paths)))
    grid = figure.subplots(
        2, 2, sharex=True, height_ratios=[4, max(len(paths), 3)], squeeze=False
    )
    for column, direction in enumerate(("forward", "backward")):
        ranges, axes = grid[:, column]
        ranges.set_title(direction, fontsize="medium")
        draw_ranges(ranges, limits)
        scale = diagnosis.loss_scale if direction == "backward" else 1.0
        draw_map(axes, map_of(sites, direction, paths, limits), limits, scale)
        axes.set_yticks(range(len(paths)), map(_label, paths), fontsize="small")
        for label, path in zip(axes.get_yticklabels(), paths, strict=True):
            label.set_color(_FAILED if path in failed else "black")
    for axes in grid[:, 1]:
        axes.tick_params(labelleft=False)
    caption = _caption(diagnosis.loss_scale, bool(failed))
    figure.supxlabel(caption, fontsize="small", wrap=True)
    figure.suptitle(diagnosis.summary, fontsize="small", wrap=True)
    return figure


def _caption(loss_scale: float, fails: bool) -> str:
    """Returns what lines, greys and colours of a diagnosis stand for."""
    parts = [
        "greys: the darker, the more of a module's values have the power of two",
        "pale ends of bars: subnormal numbers, with fewer digits",
        "dotted: the range of f16",
    ]
    if loss_scale > 1.0:
        scale = scale_text(loss_scale)
        parts.append(f"dashed: its lower end with the suggested loss scale {scale}")
    if fails:
        parts.append("red: made a value that is not finite")
    lines = ["; ".join(parts[:2]), "; ".join(parts[2:])]
    return "\n".join(lines)


def _check(value: object, kind: type, name: str, how: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"amp.plots.{name}({type(value).__name__}): wanted a {kind.__name__}. "
            f"Write amp.plots.{name}({how})."
        )


def _figure(name: str, size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"amp.plots.{name}: matplotlib is not installed. Install it with "
            "`pip install 'jmp_amp[plots]'`."
        ) from error
    return Figure(figsize=size, layout="constrained")


def _shown(modules: dict[str, Costs]) -> list[tuple[str, Costs]]:
    """Returns the modules that cost something, the largest ones if there are many."""
    costly = {
        path: costs
        for path, costs in modules.items()
        if costs.flops or costs.casts or costs.saved or costs.saved_without
    }
    if len(costly) > _MOST_MODULES:
        weight = {
            path: (c.flops, c.saved_without + c.cast_elements)
            for path, c in costly.items()
        }
        largest = set(sorted(weight, key=weight.__getitem__)[1 - _MOST_MODULES :])
        rest = [costly.pop(path) for path in list(costly) if path not in largest]
        added = Costs(*map(sum, zip(*rest, strict=True)))
        costly[f"({len(rest)} smaller modules)"] = added
    return list(costly.items())


def _label(path: str) -> str:
    path = path or TOP_LEVEL
    if len(path) <= 40:
        return path
    return f".../{path[-40:].partition('/')[2] or path[-40:]}"


def _bars(
    axes: Axes,
    title: str,
    labels: list[str],
    *layers: tuple[str, list[int], str],
) -> None:
    places = range(len(labels))
    left = [0] * len(labels)
    for name, widths, color in layers:
        axes.barh(places, widths, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_title(title, fontsize="medium")
    axes.set_yticks(places, labels, fontsize="small")
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)  # in order, from the top
    axes.xaxis.set_major_formatter(lambda value, _: quantity(value).strip())
    axes.xaxis.set_tick_params(labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)


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
    _check(tuning, Tuning, "tune", "amp.tune(fn, policy, max_grad_error=0.01)(*args)")
    modules = by_figure(tuning, "error")[:_MOST_MODULES]
    figure = _figure("tune", (11, 4.2 + 0.14 * len(modules)))
    curve, bars = figure.subplots(1, 2)
    _draw_steps(curve, tuning)
    maps = _draw_numbers(curve, tuning)
    _draw_sensitivities(bars, modules)
    figure.suptitle(tuning.summary, fontsize="small", wrap=True)
    figure.supxlabel("\n".join(maps), x=0.01, ha="left", fontsize="small")
    return figure


def _draw_steps(axes: Axes, tuning: Tuning) -> None:
    shown = _on_log([*(s.error for s in tuning.steps), tuning.error], tuning)
    costs = [100 * step.cost for step in tuning.steps]
    axes.plot(costs, shown[:-1], color=_CASTS, linewidth=0.6)
    axes.scatter(costs, shown[:-1], color=_HALF, label="measured", zorder=3)
    axes.scatter([100 * tuning.cost], shown[-1:], s=90, color=_FULL, label="result")
    axes.axhline(tuning.max_grad_error, color=_KEPT, linestyle="--", label="bound")
    axes.set_yscale("log")
    axes.set_xlabel("matmul FLOP in half precision, %")
    axes.set_ylabel("gradient error")
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_numbers(axes: Axes, tuning: Tuning) -> list[str]:
    """Writes the numbers of maps at their points; returns a line for each map.

    Maps with one error and one cost share a point.
    """
    points: dict[tuple[float, float], list[int]] = {}
    shown = _on_log([step.error for step in tuning.steps], tuning)
    for number, (step, error) in enumerate(zip(tuning.steps, shown, strict=True)):
        points.setdefault((100 * step.cost, error), []).append(number)
    for point, numbers in points.items():
        text = ", ".join(map(str, numbers))
        place = {"xytext": (5, 5), "textcoords": "offset points"}
        axes.annotate(text, point, fontsize="small", **place)
    start = tuning.steps[0].policy if tuning.steps else ""
    lines = []
    for number, step in enumerate(tuning.steps[:_MOST_MAPS]):
        added = step.policy.removeprefix(start).lstrip("; ") if number else "the start"
        lines.append(f"{number}: {_shortened(added or 'the start again')}")
    left_out = len(tuning.steps) - len(lines)
    return lines + [f"{left_out} more: Tuning.steps has them"] * bool(left_out)


def _shortened(text: str) -> str:
    return text if len(text) <= 140 else f"{text[:137]}..."


def _on_log(errors: list[float], tuning: Tuning) -> list[float]:
    """Returns errors as a log axis has them: what is not finite is at the end."""
    known = [*(step.error for step in tuning.steps), tuning.max_grad_error]
    return _clipped(errors, known)


def _clipped(numbers: list[float], known: list[float]) -> list[float]:
    finite = [each for each in known if 0 < each < float("inf")] or [1.0]
    top, bottom = 10 * max(finite), min(finite) / 10
    # A comparison with NaN is false: it is at the end too.
    return [max(each, bottom) if each < top else top for each in numbers]


def _draw_sensitivities(axes: Axes, modules: list[tuple[str, Tuned]]) -> None:
    sensitivities = [each.sensitivity for _, each in modules]
    widths = _clipped(sensitivities, sensitivities)
    policies = list(dict.fromkeys(str(each.policy) for _, each in modules))
    for number, policy in enumerate(policies):
        rows = [i for i, (_, each) in enumerate(modules) if str(each.policy) == policy]
        color = _POLICIES[number % len(_POLICIES)]
        axes.barh(rows, [widths[i] for i in rows], color=color, label=policy)
    axes.set_xscale("log")
    axes.set_xlim(left=min(widths, default=1.0) / 2)
    axes.tick_params(axis="x", which="minor", labelbottom=False)  # they touch
    axes.set_xlabel("sensitivity")
    labels = [_label(path) for path, _ in modules]
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if policies:
        axes.legend(frameon=False, fontsize="small")


def __dir__() -> list[str]:
    return __all__
