"""PyTorch's recipe: its loop against f64 numpy, its checkpoints to the bit."""

import functools
import json
import sys

import chex
import from_torch
import jax
import numpy as np
import pytest
from flax import serialization

import jmp_amp as amp
from tests.rounding import eps
from tests.scripts import refusal, run_example

USE_AMP = pytest.mark.parametrize("use_amp", [False, True], ids=["default", "amp"])
SAVED = from_torch.SCALER


def training(use_amp):
    return from_torch.make_training(use_amp, from_torch.MAX_NORM)


@functools.cache
def batches(steps=4):
    return list(from_torch.batches(from_torch.digits()[0], steps, 0))


def bad(batch):
    image = batch["image"].copy()
    image[0, 0, 0] = np.inf
    return batch | {"image": image}


def new_state(tx, **scaler):
    params = from_torch.first_params(0)
    state = tx.init(params)
    if scaler:
        taken_over = amp.loss_scale_from_torch(SAVED | scaler)
        state = state._replace(loss_scale=taken_over)
    return params, state


def run(step, state, batches):
    losses = []
    for batch in batches:
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    return tuple(state), losses


def as_f64(tree):
    return jax.tree.map(np.float64, jax.device_get(tree))


def gradients(params, batch):
    """The loss of the net and its gradients, by hand."""
    names = sorted(params)
    inputs = [np.float64(batch["image"]).reshape(len(batch["label"]), -1)]
    for name in names:
        h = inputs[-1] @ params[name]["kernel"] + params[name]["bias"]
        inputs.append(h if name == names[-1] else np.maximum(h, 0.0))
    logits, rows = inputs.pop(), np.arange(len(batch["label"]))
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    cotangent, grads = np.exp(log_p), {}
    cotangent[rows, batch["label"]] -= 1
    cotangent /= len(rows)
    for name in reversed(names):
        x = inputs.pop()
        grads[name] = {"kernel": x.T @ cotangent, "bias": cotangent.sum(axis=0)}
        cotangent = (cotangent @ params[name]["kernel"].T) * (x > 0)
    return -log_p[rows, batch["label"]].mean(), grads


def norm(tree):
    return np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


@functools.cache
def plain_training():
    """Weights and losses of SGD on gradients that are clipped as torch clips them."""
    params, losses = as_f64(from_torch.first_params(0)), []
    for batch in batches():
        loss, grads = gradients(params, batch)
        losses.append(loss)
        rate = from_torch.RATE * min(1.0, from_torch.MAX_NORM / norm(grads))
        params = jax.tree.map(lambda p, g, rate=rate: p - rate * g, params, grads)
    return params, losses


def difference(one, other):
    return jax.tree.map(lambda a, b: a - b, as_f64(one), as_f64(other))


@USE_AMP
def test_loop_trains_as_plain_sgd_on_clipped_gradients_does(use_amp):
    tx, step = training(use_amp)
    (params, opt_state), losses = run(step, new_state(tx), batches())
    expected, expected_losses = plain_training()
    moved = norm(difference(expected, from_torch.first_params(0)))
    error = norm(difference(params, expected)) / moved
    if use_amp:
        # Measured: 9 eps, as with Flax's own dtype=float16, because some units change
        # sides in their ReLU. Less than an eps would not be half precision.
        assert eps("float16") < error < 16 * eps("float16")
    else:
        assert error < 32 * eps("float32")
    # Measured: 0.02 eps of f16.
    rtol = eps("float16") / 4 if use_amp else 16 * eps("float32")
    np.testing.assert_allclose(losses, expected_losses, rtol=rtol)
    scale = amp.loss_scale_of(opt_state).value
    assert scale == (2.0**16 if use_amp else 1)


@pytest.mark.parametrize("scale", [2.0**4, 2.0**16])
@pytest.mark.parametrize("max_norm", [from_torch.MAX_NORM, 10.0])
def test_true_gradients_are_clipped_and_not_those_of_the_scaled_loss(max_norm, scale):
    tx, step = from_torch.make_training(True, max_norm)
    first = new_state(tx, scale=scale)
    true = norm(gradients(as_f64(first[0]), batches()[0])[1])
    # The smaller maximum clips, and the larger one would clip nothing but scaled ones.
    assert 2 * from_torch.MAX_NORM < true < 10.0 < scale * true
    (params, _), _ = run(step, first, batches()[:1])
    moved = norm(difference(params, first[0]))
    wanted = from_torch.RATE * min(max_norm, true)
    np.testing.assert_allclose(moved, wanted, rtol=4 * eps("float16"))


def test_bad_batch_is_skipped_and_halves_the_scale():
    tx, step = training(True)
    state, _ = run(step, new_state(tx), batches()[:1])
    after, losses = run(step, state, [bad(batches()[1])])
    chex.assert_trees_all_equal(after[0], state[0])
    assert np.isnan(losses[0])
    assert amp.loss_scale_to_torch(amp.loss_scale_of(after)) == {
        "scale": 2.0**15,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }


@USE_AMP
def test_run_that_is_resumed_goes_on_at_the_same_bits(use_amp):
    # The scale has moved when it is saved: the checkpoint has to bring it along.
    stream = [bad(batches()[0]), *batches()]
    tx, step = training(use_amp)
    uninterrupted, losses = run(step, new_state(tx), stream)
    half, _ = run(step, new_state(tx), stream[:3])
    checkpoint = serialization.to_bytes(half)
    tx, step = from_torch.make_training.__wrapped__(use_amp, from_torch.MAX_NORM)
    state = from_torch.resumed(checkpoint, tx)
    resumed, last_losses = run(step, state, stream[3:])
    chex.assert_trees_all_equal(resumed, uninterrupted)
    np.testing.assert_array_equal(last_losses, losses[3:])
    assert amp.metrics(resumed[1])["skipped_total"] == 1
    scale = amp.loss_scale_of(resumed[1]).value
    assert scale == (2.0**15 if use_amp else 1)


@pytest.mark.parametrize("then", [True, False], ids=["then amp", "then default"])
def test_checkpoint_of_one_precision_is_resumed_in_the_other(then):
    tx, step = training(not then)
    half, _ = run(step, new_state(tx), batches()[:2])
    tx, step = training(then)
    checkpoint = serialization.to_bytes(half)
    params, opt_state = from_torch.resumed(checkpoint, tx, switched=True)
    chex.assert_trees_all_equal(params, half[0])
    # A fresh scaler, or none.
    fresh = amp.loss_scale_of(tx.init(params))
    chex.assert_trees_all_equal(amp.loss_scale_of(opt_state), fresh)
    _, losses = run(step, (params, opt_state), batches()[2:])
    np.testing.assert_allclose(losses, plain_training()[1][2:], rtol=eps("float16"))


@pytest.mark.parametrize("overflows", [(), (3,)])
def test_scaler_of_a_torch_checkpoint_goes_on_where_it_stopped(overflows):
    tx, step = training(True)
    stream = [
        bad(batches()[0]) if number in overflows else batches()[number % 4]
        for number in range(8)
    ]
    (_, opt_state), _ = run(step, new_state(tx, _growth_tracker=1994), stream)
    # torch.amp.GradScaler, as _amp_update_scale_ has it.
    scale, tracker = SAVED["scale"], 1994
    for number in range(8):
        tracker += 1
        if number in overflows:
            scale, tracker = scale * SAVED["backoff_factor"], 0
        elif tracker == SAVED["growth_interval"]:
            scale, tracker = scale * SAVED["growth_factor"], 0
    expected = SAVED | {"scale": scale, "_growth_tracker": tracker}
    assert scale != SAVED["scale"]
    assert amp.loss_scale_to_torch(amp.loss_scale_of(opt_state)) == expected


def test_a_few_steps_print_a_row_for_each_run(monkeypatch, capsys):
    scaler = json.dumps(SAVED | {"scale": 8.0, "_growth_tracker": 1999})
    arguments = ["--steps", "2", "--seed", "1", "--scaler", scaler]
    monkeypatch.setattr(sys, "argv", ["from_torch.py", *arguments])
    monkeypatch.setenv("COLUMNS", "88")
    from_torch.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [row.split() for row in lines if "2**" in row]
    # The run, its skips, its scale and whether its bits are those of the mixed one.
    assert [(" ".join(row[:-6]), *row[-4:-2], row[-1]) for row in rows] == [
        ("default", "0", "2**0", "not"),
        ("mixed", "0", "2**16", "same"),
        ("mixed, resumed", "0", "2**16", "same"),
        ("default, then mixed", "0", "2**16", "not"),
        ("torch's scaler", "0", "2**4", rows[-1][-1]),
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "1"], "--steps 1: "),
        (["--max-norm", "0"], "--max-norm 0.0: "),
        (["--max-norm", "nan"], "--max-norm nan: "),
        (["--scaler", '{"scale": 8.0}'], "the key '_growth_tracker' is missing"),
        (["--scaler", "{scale"], "--scaler: "),
    ],
)
def test_option_that_makes_no_sense_is_refused_in_one_line(arguments, message, capsys):
    error = refusal(capsys, lambda: from_torch.parse(arguments))
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_script_runs_without_a_warning():
    done = run_example("from_torch", "--steps", "4", columns=88)
    assert done.returncode == 0, done.stderr
    for name in from_torch.RUNS:
        assert f" {name} " in done.stdout


@pytest.mark.slow
def test_whole_training_ends_at_the_loss_of_default_precision():
    results = {name: from_torch.train(name) for name in from_torch.RUNS}
    default = results["default"]
    assert default.loss < 0.25 and default.accuracy > 0.9
    for result in results.values():
        np.testing.assert_allclose(result.loss, default.loss, rtol=0.01)
        assert abs(result.accuracy - default.accuracy) < 0.01
        assert result.skips == 0
    chex.assert_trees_all_equal(
        results["mixed"].params, results["mixed, resumed"].params
    )
    assert results["torch's scaler"].scale == 2048
