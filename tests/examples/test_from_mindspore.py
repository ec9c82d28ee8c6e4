"""MindSpore's train_step: by hand and in short, against its scaler."""

import json
import sys
from pathlib import Path

import chex
import from_mindspore
import numpy as np
import pytest
from rich.console import Console

import jmp_amp as amp
from tests.examples.tutorials import bad, mindspore
from tests.rounding import eps

# One process has them and those of `test_tutorials`: they share compiled steps.
pytestmark = pytest.mark.xdist_group("tutorials")
ROOT = Path(__file__).parents[2]
ORACLE = ROOT / "tests" / "oracle" / "scalers_other.json"
# Larger scales overflow by themselves, without a bad pixel.
SCENARIOS = [
    scenario
    for scenario in json.loads(ORACLE.read_text())["scenarios"]
    if scenario["system"] == "mindspore"
    and max(scale for scale, _ in scenario["trace"]) <= 2.0**14
]


def test_there_are_traces_to_follow():
    factors = [scenario["config"]["scale_factor"] for scenario in SCENARIOS]
    assert len(SCENARIOS) >= 8 and set(factors) == {2, 3}
    assert sum(sum(scenario["overflow"]) for scenario in SCENARIOS) > 50


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "scenario, by_hand",
    [(scenario, True) for scenario in SCENARIOS] + [(SCENARIOS[1], False)],
    ids=lambda value: value if isinstance(value, bool) else value["sequence"],
)
def test_scaler_in_training_goes_the_way_of_dynamic_loss_scaler(scenario, by_hand):
    tutorial = mindspore(by_hand)
    good = tutorial.batches()[0]
    scaler = amp.loss_scale_preset("mindspore", **scenario["config"])
    state, trace = with_scaler(tutorial.start(), scaler), []
    for overflows in scenario["overflow"]:
        state, _ = tutorial.step(state, bad(good) if overflows else good)
        scaler = amp.loss_scale_of(state)
        trace.append((float(scaler.value), int(scaler.growth_tracker)))
    # A factor of 1/3 is rounded in f64 there; powers of two are exact.
    rtol = 0 if scenario["config"]["scale_factor"] == 2 else 1e-6
    np.testing.assert_allclose(trace, scenario["trace"], rtol=rtol)


def with_scaler(state, scaler):
    if state.loss_scaler is not None:
        return state._replace(loss_scaler=scaler)
    opt_state = state.opt_state._replace(loss_scale=scaler)
    return state._replace(opt_state=opt_state)


def test_short_step_writes_the_bits_of_the_one_by_hand():
    both = mindspore(True), mindspore(False)
    one, other = (each.start() for each in both)
    batches = both[0].batches()
    for batch in (*batches[:2], bad(batches[0]), *batches[2:]):
        one, loss = both[0].step(one, batch)
        other, short_loss = both[1].step(other, batch)
        np.testing.assert_array_equal(loss, short_loss)
        chex.assert_trees_all_equal(one.params, other.params)
        chex.assert_trees_all_equal(one.opt_state, other.opt_state.inner_state)
        chex.assert_trees_all_equal(one.loss_scaler, other.opt_state.loss_scale)


def test_recipe_has_the_scaler_of_the_table():
    scaler = amp.loss_scale_preset(
        "mindspore", scale_value=1024, scale_factor=2, scale_window=1000
    )
    assert repr(from_mindspore.RECIPES["f16"].loss_scale) == repr(scaler)
    assert (scaler.backoff_factor, scaler.min_scale) == (0.5, 1)


def test_a_few_steps_print_the_runs_and_whether_bits_are_the_same(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["from_mindspore.py", "--steps", "3"])
    monkeypatch.setenv("COLUMNS", "88")
    from_mindspore.main()
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row[:1] in (["f32"], ["f16"])]
    # Without the loss.
    assert [row[:-4] + row[-3:] for row in rows] == [
        ["f32", "short", "no", "0", "1", "-"],
        ["f16", "by", "hand", "no", "0", "1024", "-"],
        ["f16", "short", "no", "0", "1024", "same"],
        ["f16", "by", "hand", "yes", "1", "512", "-"],
        ["f16", "short", "yes", "1", "512", "same"],
    ]
    losses = [float(row[-4]) for row in rows]
    assert losses[1] == losses[2] < losses[3] == losses[4]


def test_table_says_when_bits_are_not_the_same(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "88")
    result = from_mindspore.Result({"w": np.ones(2)}, 1.0, 0, 1.0)
    other = result._replace(params={"w": np.array([1.0, 1 + eps("float32")])})
    results = {("f16", True, False): result, ("f16", False, False): other}
    Console().print(from_mindspore.table_of(results))
    assert "1.0000       0       1   not" in capsys.readouterr().out


@pytest.mark.slow
def test_whole_training_ends_at_the_loss_of_f32():
    f32 = from_mindspore.train("f32", False)
    assert f32.loss < 0.03
    for short in (True, False):
        half = from_mindspore.train("f16", short)
        # Measured: 1 %, of a loss that is 100 times smaller than at first.
        np.testing.assert_allclose(half.loss, f32.loss, rtol=0.05)
        assert (half.skips, half.scale) == (0, 1024)
