"""Figures of reports."""

import io
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jmp_amp as amp


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
