"""Figures of reports and of diagnoses."""

import io
import itertools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests.numerics.made import diagnosis, site


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layers(count):
    """A report of `count` jitted layers, each with a larger product than the last."""

    def fn(x, ws):
        for i, w in enumerate(ws):

            def layer(x, w):
                return jnp.tanh(x @ w)

            layer.__name__ = f"layer_{i}"
            x = jax.jit(layer)(x, w)
        return x

    widths = [8 * (i + 1) for i in range(count + 1)]
    ws = [f32(a, b) for a, b in itertools.pairwise(widths)]
    return amp.explain(fn)(f32(4, 8), ws)


def widths(axes):
    return [[bar.get_width() for bar in container] for container in axes.containers]


def test_the_bars_are_the_figures_of_the_report():
    report = layers(3)
    flops, casts, saved = amp.plots.explain(report).axes
    modules = {path: costs for path, costs in report.modules.items() if any(costs)}
    costs = list(modules.values())
    assert [text.get_text() for text in flops.get_yticklabels()] == list(modules)
    assert widths(flops) == [[c.flops for c in costs], [0] * len(costs)]
    assert widths(casts) == [[c.cast_elements for c in costs]]
    assert widths(saved)[0] == [c.saved for c in costs]


def test_products_in_8_bits_are_a_bar_of_their_own():
    report = amp.explain(lambda x, w: x @ w @ w[:, :8], "fp8")(f32(16, 32), f32(32, 32))
    flops, *_ = amp.plots.explain(report).axes
    assert widths(flops) == [[2 * 16 * 32 * 32], [2 * 16 * 32 * 8], [0]]


def test_the_smaller_of_many_modules_are_added_up():
    report = layers(40)
    flops, *_ = amp.plots.explain(report).axes
    labels = [text.get_text() for text in flops.get_yticklabels()]
    assert len(labels) == 30
    assert labels[:-1] == [f"layer_{i}" for i in range(11, 40)]
    assert labels[-1] == "(11 smaller modules)"
    assert sum(widths(flops)[0]) == report.total.flops_in_half


def test_a_report_without_anything_to_plot_is_a_figure_too():
    figure = amp.plots.explain(amp.explain(lambda n: n + 1)(jnp.arange(3)))
    figure.savefig(io.BytesIO(), format="png")


def test_a_figure_is_written_without_a_display():
    written = io.BytesIO()
    amp.plots.explain(layers(3)).savefig(written, format="png")
    assert written.getvalue().startswith(b"\x89PNG")


def test_matplotlib_is_imported_by_the_first_plot_and_not_before():
    code = "import sys, jmp_amp; print([m for m in sys.modules if 'matplotlib' in m])"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jmp_amp\[plots\]'"):
        amp.plots.explain(layers(1))
    with pytest.raises(ImportError, match=r"amp\.plots\.diagnose: matplotlib is not"):
        amp.plots.diagnose(diagnosis())


def diagnosed():
    """A diagnosis of two modules: 1, 2 and 2 forward in one, 2^-30 backward in both."""
    tiny = {"direction": "backward"}
    return diagnosis(
        [site([math.inf], module="up", makes_nonfinite=True, dtype="f16")],
        [
            site([1.0, 2.0, 3.0, 0.0], module="up"),
            site([1e30], module="down"),
            site([2.0**-30], module="up", **tiny),
            site([2.0**-30], module="down", **tiny),
        ],
        loss_scale=2.0**10,
    )


def test_the_map_of_a_diagnosis_has_the_shares_of_the_powers_of_two():
    figure = amp.plots.diagnose(diagnosed())
    _, _, forward, backward = figure.axes
    (shown,), (other,) = forward.images, backward.images
    left, right, below, above = shown.get_extent()
    assert (below, above) == (1.5, -0.5)
    place = int(0 - (left + 0.5))  # of the power 0
    up, down = np.square(shown.get_array())
    np.testing.assert_allclose(up[place : place + 2], [1 / 3, 2 / 3])
    # Values beyond what is shown are counted at the end.
    assert down[-1] == 1.0 and up.sum() == pytest.approx(1.0)
    place = int(-30 - (left + 0.5))
    np.testing.assert_array_equal(np.square(other.get_array())[:, place], [1.0, 1.0])
    # f16 begins at 2^-24 and ends below 2^16; the loss scale holds 2^-34.
    bounds = [
        [line.get_xdata()[0] for line in axes.lines] for axes in (forward, backward)
    ]
    assert bounds == [[-24.5, 15.5], [-24.5, 15.5, -34.5]]
    assert left < -34.5 and right > 15.5


def test_ranges_of_formats_and_failing_modules_are_marked():
    ranges, _, forward, _ = amp.plots.diagnose(diagnosed()).axes
    names = [label.get_text() for label in ranges.get_yticklabels()]
    assert names == ["f16", "bf16", "e4m3", "e5m2"]
    spans = {}
    for bar in ranges.patches:
        row = names[round(bar.get_y() + bar.get_height() / 2)]
        spans.setdefault(row, []).append((bar.get_x() + 0.5, bar.get_width()))
    # From the smallest subnormal to the smallest normal, and on to the largest.
    assert spans["f16"] == [(-24, 10), (-14, 30)]
    assert spans["e4m3"] == [(-9, 3), (-6, 15)]
    assert spans["e5m2"] == [(-16, 2), (-14, 30)]
    labels = {each.get_text(): each.get_color() for each in forward.get_yticklabels()}
    assert labels["down"] == "black" != labels["up"]


def test_a_caption_tells_what_lines_greys_and_colours_stand_for():
    caption = amp.plots.diagnose(diagnosed()).get_supxlabel()
    for words in ("greys: ", "pale ends of bars: ", "dotted: the range of f16"):
        assert words in caption
    assert "dashed: its lower end with the suggested loss scale 2**10" in caption
    assert "red: made a value that is not finite" in caption
    caption = amp.plots.diagnose(diagnosis([site()], [site()])).get_supxlabel()
    assert "dotted" in caption and "dashed" not in caption and "red" not in caption


def test_of_many_modules_those_that_fail_are_shown():
    sites = [site(module=f"m{i}", makes_nonfinite=i == 70) for i in range(80)]
    _, _, forward, _ = amp.plots.diagnose(diagnosis(sites, sites)).axes
    labels = [label.get_text() for label in forward.get_yticklabels()]
    assert labels == [*(f"m{i}" for i in range(29)), "m70"]


def test_a_diagnosis_of_nothing_is_a_figure_too():
    amp.plots.diagnose(diagnosis()).savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize("plot", ["explain", "diagnose", "tune"])
def test_what_is_no_report_is_refused_with_the_way_to_one(plot):
    with pytest.raises(TypeError, match=rf"amp.plots.{plot}\(int\): wanted a .*"):
        getattr(amp.plots, plot)(3)
