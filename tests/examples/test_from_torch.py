"""PyTorch's recipe: what it clips, and the checkpoints that it takes over."""

import json
import sys

import chex
import from_torch
import jax
import numpy as np
import pytest
from flax import serialization

import jmp_amp as amp
from tests.examples.tutorials import (
    as_f64,
    bad,
    gradients_of_torch,
    norm,
    run,
    torch,
    torch_by_hand,
)
from tests.rounding import eps

# One process has them and those of `test_tutorials`: they share compiled steps.
pytestmark = pytest.mark.xdist_group("tutorials")
SAVED = from_torch.SCALER


def with_scaler(tx, **scaler):
    """A first state whose loss scale is that of a torch checkpoint."""
    params = from_torch.first_params(0)
    taken_over = amp.loss_scale_from_torch(SAVED | scaler)
    return params, tx.init(params)._replace(loss_scale=taken_over)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("scale", [2.0**4, 2.0**16])
@pytest.mark.parametrize("max_norm", [from_torch.MAX_NORM, 10.0])
def test_true_gradients_are_clipped_and_not_those_of_the_scaled_loss(max_norm, scale):
    tx, step = from_torch.make_training(True, max_norm)
    first, batch = with_scaler(tx, scale=scale), torch(True).batches()[0]
    true = norm(gradients_of_torch(as_f64(first[0]), batch)[1])
    # The smaller maximum clips, and the larger one would clip nothing but scaled ones.
    assert 2 * from_torch.MAX_NORM < true < 10.0 < scale * true
    params, _, _ = step(*first, batch)
    moved = norm(jax.tree.map(np.subtract, *map(as_f64, (params, first[0]))))
    wanted = from_torch.RATE * min(max_norm, true)
    np.testing.assert_allclose(moved, wanted, rtol=4 * eps("float16"))


@pytest.mark.parametrize("then", [True, False], ids=["then amp", "then default"])
def test_checkpoint_of_one_precision_is_resumed_in_the_other(then):
    before, after = torch(not then), torch(then)
    half, _ = run(before, before.batches()[:2])
    tx, _ = from_torch.make_training(then, from_torch.MAX_NORM)
    checkpoint = serialization.to_bytes(half)
    params, opt_state = from_torch.resumed(checkpoint, tx, switched=True)
    chex.assert_trees_all_equal(params, half[0])
    # A fresh scaler, or none.
    fresh = amp.loss_scale_of(tx.init(params))
    chex.assert_trees_all_equal(amp.loss_scale_of(opt_state), fresh)
    _, losses = run(after, after.batches()[2:], (params, opt_state))
    np.testing.assert_allclose(losses, torch_by_hand()[1][2:], rtol=eps("float16"))


@pytest.mark.parametrize("overflows", [(), (3,)])
def test_scaler_of_a_torch_checkpoint_goes_on_where_it_stopped(overflows):
    tx, _ = from_torch.make_training(True, from_torch.MAX_NORM)
    batches = torch(True).batches()
    stream = [
        bad(batches[0]) if number in overflows else batches[number % 4]
        for number in range(8)
    ]
    start = with_scaler(tx, _growth_tracker=1994)
    (_, opt_state), _ = run(torch(True), stream, start)
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
