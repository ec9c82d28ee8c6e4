"""MindSpore's train_step: by hand and in short, against its scaler and plain JAX."""

import functools
import json
import sys
from pathlib import Path

import chex
import from_mindspore
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jmp_amp as amp
from tests.rounding import eps
from tests.scripts import refusal, run_example

ROOT = Path(__file__).parents[2]
ORACLE = ROOT / "tests" / "oracle" / "scalers_other.json"
BOTH_FORMS = pytest.mark.parametrize("by_hand", [True, False], ids=["hand", "short"])
OVERFLOW = 2

# Larger scales overflow by themselves, without a bad pixel.
SCENARIOS = [
    scenario
    for scenario in json.loads(ORACLE.read_text())["scenarios"]
    if scenario["system"] == "mindspore"
    and max(scale for scale, _ in scenario["trace"]) <= 2.0**14
]


@functools.cache
def batches(steps=5):
    return list(from_mindspore.batches(steps, 0, overflow=True))


def run(by_hand, batches, state=None, precision="f16"):
    """The states and the losses after each of the batches."""
    step = from_mindspore.compiled(precision, by_hand)
    state = state or from_mindspore.first_state(precision, by_hand, 0)
    states, losses = [], []
    for batch in batches:
        state, loss, is_finite = step(state, batch)
        assert is_finite == np.isfinite(batch["image"]).all()
        states.append(state)
        losses.append(float(loss))
    return states, losses


def plain_loss(params, batch):
    """The loss of plain f32 JAX, written without this library."""
    logits = from_mindspore.Network().apply({"params": params}, batch["image"])
    label = batch["label"][:, None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), label, axis=-1).mean()


@functools.cache
def plain_training():
    """Weights and losses of SGD with momentum on the batches without a bad pixel."""
    params = from_mindspore.first_params(0)
    velocity = jax.tree.map(jnp.zeros_like, params)
    gradient, losses = jax.jit(jax.value_and_grad(plain_loss)), []
    for batch in batches():
        if np.isfinite(batch["image"]).all():
            loss, grads = gradient(params, batch)
            velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
            params = jax.tree.map(lambda p, v: p - 0.05 * v, params, velocity)
            losses.append(float(loss))
    return params, losses


def movement_error(params, expected):
    """How far off from what training changes, relative to that."""
    first = jax.tree.leaves(from_mindspore.first_params(0))
    moved, wanted = (
        np.concatenate(
            [
                np.ravel(np.float64(now) - np.float64(before))
                for now, before in zip(jax.tree.leaves(tree), first, strict=True)
            ]
        )
        for tree in (params, expected)
    )
    return np.linalg.norm(moved - wanted) / np.linalg.norm(wanted)


def test_there_are_traces_to_follow():
    factors = [scenario["config"]["scale_factor"] for scenario in SCENARIOS]
    assert len(SCENARIOS) >= 8 and set(factors) == {2, 3}
    assert sum(sum(scenario["overflow"]) for scenario in SCENARIOS) > 50


@pytest.mark.parametrize(
    "scenario, by_hand",
    [(scenario, True) for scenario in SCENARIOS]
    + [(scenario, False) for scenario in SCENARIOS[:3]],
    ids=lambda value: value if isinstance(value, bool) else value["sequence"],
)
def test_scaler_in_training_goes_the_way_of_dynamic_loss_scaler(scenario, by_hand):
    good, bad = batches()[0], batches()[OVERFLOW]
    scaler = amp.loss_scale_preset("mindspore", **scenario["config"])
    state = with_scaler(from_mindspore.first_state("f16", by_hand, 0), scaler)
    states, _ = run(by_hand, [bad if o else good for o in scenario["overflow"]], state)
    scalers = [amp.loss_scale_of(state) for state in states]
    trace = [(float(s.value), int(s.growth_tracker)) for s in scalers]
    # A factor of 1/3 is rounded in f64 there; powers of two are exact.
    rtol = 0 if scenario["config"]["scale_factor"] == 2 else 1e-6
    np.testing.assert_allclose(trace, scenario["trace"], rtol=rtol)


def with_scaler(state, scaler):
    if state.loss_scaler is not None:
        return state._replace(loss_scaler=scaler)
    opt_state = state.opt_state._replace(loss_scale=scaler)
    return state._replace(opt_state=opt_state)


@BOTH_FORMS
def test_step_trains_as_plain_jax_does_without_the_bad_batch(by_hand):
    states, losses = run(by_hand, batches())
    params, expected = plain_training()
    # Measured: 5.6 eps, as with Flax's own dtype=float16, because some units change
    # sides in their ReLU. Less than an eps would not be half precision.
    error = movement_error(states[-1].params, params)
    assert eps("float16") < error < 8 * eps("float16")
    assert np.isnan(losses.pop(OVERFLOW))
    # Measured: 0.02 eps.
    np.testing.assert_allclose(losses, expected, rtol=eps("float16") / 4)


def test_f32_trains_as_plain_jax_does():
    states, losses = run(False, batches(), precision="f32")
    params, expected = plain_training()
    assert movement_error(states[-1].params, params) < 32 * eps("float32")
    del losses[OVERFLOW]
    np.testing.assert_allclose(losses, expected, rtol=16 * eps("float32"))
    assert amp.loss_scale_of(states[-1]).value == 1


def test_short_step_writes_the_bits_of_the_one_by_hand():
    by_hand, losses = run(True, batches())
    short, short_losses = run(False, batches())
    np.testing.assert_array_equal(losses, short_losses)
    for one, other in zip(by_hand, short, strict=True):
        chex.assert_trees_all_equal(one.params, other.params)
        chex.assert_trees_all_equal(one.opt_state, other.opt_state.inner_state)
        chex.assert_trees_all_equal(one.loss_scaler, other.opt_state.loss_scale)


@BOTH_FORMS
def test_bad_batch_leaves_weights_and_momentum_as_they_were(by_hand):
    before, after = run(by_hand, batches())[0][OVERFLOW - 1 : OVERFLOW + 1]
    chex.assert_trees_all_equal(after.params, before.params)
    if by_hand:
        chex.assert_trees_all_equal(after.opt_state, before.opt_state)
    else:
        inner = after.opt_state.inner_state, before.opt_state.inner_state
        chex.assert_trees_all_equal(*inner)
    assert (amp.loss_scale_of(before).value, amp.loss_scale_of(after).value) == (
        1024,
        512,
    )


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


def test_number_of_steps_that_makes_no_sense_is_refused_in_one_line(capsys):
    error = refusal(capsys, lambda: from_mindspore.parse(["--steps", "0"]))
    assert "--steps 0: " in error and error.count("\n") == 1


@pytest.mark.slow
def test_script_runs_without_a_warning():
    done = run_example("from_mindspore", "--steps", "2", columns=88)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" same") == 2


@pytest.mark.slow
def test_whole_training_ends_at_the_loss_of_f32():
    f32 = from_mindspore.train("f32", False)
    assert f32.loss < 0.03
    for by_hand in (True, False):
        result = from_mindspore.train("f16", by_hand)
        # Measured: 1 %, of a loss that is 100 times smaller than at first.
        np.testing.assert_allclose(result.loss, f32.loss, rtol=0.05)
        assert (result.skips, result.scale) == (0, 1024)
