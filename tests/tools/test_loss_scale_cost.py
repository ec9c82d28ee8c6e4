"""What loss scaling costs in a training step compiled for an H100.

The step is the hand-written f16 model's, its parameters and optimizer state donated;
the only difference is the scaler. No update is written before every gradient is known
to be finite, so gradients that would be consumed one by one have to wait for the last.
A step that clips by their global norm waits anyway.
"""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from benchmarks import loss_scale_cost
from benchmarks.loss_scale_cost import CASES, FEW_TOKENS, STORAGE, Cost
from rich.console import Console

from tests import h100

PARAMETER_BYTES = sum(
    p.size * 4 for p in jax.tree.leaves(FEW_TOKENS.case().abstract()[0])
)


def cost_on_h100(program: tuple[Any, ...]) -> Cost:
    donated = loss_scale_cost.DONATED
    return h100.figures(*program, read=loss_scale_cost.cost_of, donate_argnums=donated)


@functools.cache
def cost(name: str, clipped: bool, scaled: bool) -> Cost:
    return cost_on_h100(loss_scale_cost.step_program(name, clipped, scaled))


@functools.cache
def cost_of_update(storage: str, scaled: bool) -> Cost:
    return cost_on_h100(loss_scale_cost.update_program(storage, scaled))


@pytest.mark.breadth(1)
@pytest.mark.parametrize("clipped", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        pytest.param("cnn", marks=pytest.mark.slow),
        pytest.param("transformer", marks=pytest.mark.slow),
    ],
)
def test_loss_scaling_adds_at_most_one_percent_of_temporary_memory(name, clipped):
    scaled, plain = cost(name, clipped, True), cost(name, clipped, False)
    assert scaled.temp_bytes <= 1.01 * plain.temp_bytes


@pytest.mark.slow
def test_loss_scaling_adds_no_buffer_to_a_step_that_clips_by_global_norm():
    scaled, plain = cost("few tokens", True, True), cost("few tokens", True, False)
    # A few scalars; the smallest kernel has a megabyte.
    assert scaled.temp_bytes - plain.temp_bytes < 16 * 1024


@pytest.mark.slow
def test_gradients_that_wait_for_the_last_are_no_copy_of_the_parameters():
    scaled, plain = cost("few tokens", False, True), cost("few tokens", False, False)
    # In the dtype that the backward pass left them in: f16.
    assert scaled.temp_bytes - plain.temp_bytes < PARAMETER_BYTES / 2


@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("few tokens", marks=pytest.mark.slow)]
)
def test_donated_parameters_and_state_are_updated_in_place(name):
    scaled, plain = cost(name, True, True), cost(name, True, False)
    classifier, tx = CASES[name]
    params, _ = classifier.case().abstract()
    state = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(tx.init, params))
    )
    parameters = sum(p.size * 4 for p in jax.tree.leaves(params))
    assert scaled.donated_bytes >= plain.donated_bytes >= parameters + state


# The update alone


def per_parameter(count: int) -> float:
    return round(count / loss_scale_cost.parameters(), 1)


DEAR = ("bf16, masters", "bf16, stochastic")


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "storage",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in DEAR)) for each in STORAGE],
)
def test_the_check_of_a_step_that_clips_reads_no_gradient_again(storage):
    plain = cost_of_update(storage, False)
    scaled = cost_of_update(storage, True)
    # Half moments, which f32 gradients turn into f32 ones, are f32 from the start.
    more = 2.0 if storage == "bf16, rounded" else 0.0
    found = per_parameter(scaled.bytes_moved) - per_parameter(plain.bytes_moved)
    assert found == pytest.approx(more, abs=0.05)
    assert scaled.temp_bytes < 0.01 * 4 * loss_scale_cost.parameters()


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("storage", "kept", "moved"),
    [
        # Weight and moments are read and written, the gradient is read twice.
        ("f32", 4 + 8, 2 * (4 + 8) + 2 * 4),
        ("bf16, masters", 2 + 4 + 8, 2 * (2 + 4 + 8) + 2 * 4),
        ("bf16, Kahan", 2 + 2 + 8, 2 * (2 + 2 + 8) + 2 * 4),
        pytest.param(
            "bf16, stochastic", 2 + 8, 2 * (2 + 8) + 2 * 4, marks=pytest.mark.slow
        ),
    ],
)
def test_an_update_moves_every_number_once(storage, kept, moved):
    found = cost_of_update(storage, True)
    assert per_parameter(found.donated_bytes) == kept
    assert per_parameter(found.bytes_moved) == moved


def test_the_benchmark_prints_the_figures_that_were_committed():
    results = Path(loss_scale_cost.__file__).parent / "results/loss_scale_cost.json"
    found = json.loads(results.read_text())
    steps, updates = loss_scale_cost.tables(found)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(steps, updates)
    text = console.export_text()
    for row in found["steps"]:
        before, after = (row[kind]["temp_bytes"] for kind in ("plain", "scaled"))
        assert f"{before / 1e6:.2f} -> {after / 1e6:.2f}" in text
        assert f"{after / before:.3f}x" in text
    assert all(name in text for name in STORAGE)


def test_timing_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        loss_scale_cost.main(["--run"])
    assert "--run: there is no GPU here" in capsys.readouterr().err
