"""Paddle's guide: its levels and its accumulation, against SGD in f64 numpy."""

import functools

import from_paddle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jmp_amp as amp
from tests.examples.tutorials import as_f64, gradients, movement_error
from tests.rounding import eps

WIDTH, BATCH, STEPS, PIECES, RATE = 32, 8, 20, 10, 0.16
BOTH_WAYS = pytest.mark.parametrize("accumulate", [1, PIECES])

# `optax.apply_updates` adds f32 updates to half-precision weights, and MultiSteps
# divides by an integer: strict JAX refuses both.
standard = functools.partial(jax.numpy_dtype_promotion, "standard")


@functools.cache
def trained(level, accumulate, half_dtype="float16"):
    with standard():
        return from_paddle.train(
            *(level, accumulate),
            half_dtype=half_dtype,
            **{"steps": STEPS, "width": WIDTH, "batch": BATCH, "rate": RATE},
        )


def mean_square(label):
    def loss(outputs):
        error = outputs - label
        return np.mean(error**2), 2 * error / error.size

    return loss


def first_params():
    return from_paddle.first_params(0, width=WIDTH)


@functools.cache
def plain_training(accumulate):
    """The weights after SGD on concatenated batches, and the loss of each batch.

    The guide adds gradients up: `accumulate` times the mean over all their images.
    """
    params = as_f64(first_params())
    batches = np.float64(from_paddle.batches(STEPS, 0, WIDTH, BATCH))
    losses, rate = [], RATE * accumulate
    for first in range(0, STEPS, accumulate):
        window = batches[first : first + accumulate]
        losses += [gradients(params, x, mean_square(y))[0] for x, y in window]
        data, label = window.swapaxes(0, 1).reshape(2, -1, WIDTH)
        _, grads = gradients(params, data, mean_square(label))
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return params, np.array(losses)


@pytest.mark.breadth(1)
@BOTH_WAYS
def test_o0_trains_as_plain_sgd_on_the_batches_that_are_added_up(accumulate):
    result = trained("O0", accumulate)
    params, losses = plain_training(accumulate)
    # Measured: 9 eps, and 5 of the losses.
    assert movement_error(result.params, params, first_params()) < 32 * eps("float32")
    np.testing.assert_allclose(result.losses, losses, rtol=16 * eps("float32"))
    assert (result.skips, result.scale) == (0, 1)


@pytest.mark.breadth(1)
@BOTH_WAYS
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_trains_as_plain_sgd_does_to_its_precision(level, accumulate):
    result = trained(level, accumulate)
    params, losses = plain_training(accumulate)
    # Measured: 0.4 eps, and 0.08 of the losses. Less would not be half precision.
    error = movement_error(result.params, params, first_params())
    assert eps("float16") / 16 < error < eps("float16")
    np.testing.assert_allclose(result.losses, losses, rtol=eps("float16") / 4)
    assert (result.skips, result.scale) == (0, 1024)


def test_weights_stand_still_until_the_batches_are_added_up():
    losses = trained("O0", PIECES).losses
    each = STEPS // from_paddle.EPOCHS
    # Batches come again with every epoch, and so do their losses until then.
    np.testing.assert_array_equal(losses[:each], losses[each : 2 * each])
    again = slice(2 * each, 2 * each + 2)
    np.testing.assert_array_equal(losses[:2], losses[again])
    assert losses[PIECES] < losses[PIECES % each]


def test_losses_fall():
    losses = trained("O2", 1).losses
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("level, width_in_bytes", [("O0", 4), ("O1", 4), ("O2", 2)])
def test_weights_are_stored_as_the_level_says(level, width_in_bytes):
    recipe = from_paddle.make_recipe(level, "float16")
    params = recipe.cast_params(from_paddle.first_params(0, width=WIDTH))
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(params)} == {width_in_bytes}
    weights = 3 * (WIDTH + 1) * WIDTH
    # A half-precision weight and what it lacks of f32 are 4 bytes again; the state has
    # a few scalars besides.
    assert 0 <= trained(level, 1).bytes - 4 * weights < 64
    assert 0 <= trained(level, PIECES).bytes - 8 * weights < 64


def test_biases_but_the_last_are_added_in_half_without_a_custom_white_list():
    recipe = from_paddle.make_recipe("O1", "float16")
    net = from_paddle.SimpleNet(WIDTH)
    params = {"params": from_paddle.first_params(0, width=WIDTH)}
    report = amp.explain(net.apply, recipe.policy)(params, jnp.zeros((8, WIDTH)))
    dtypes = [e.dtype for e in report.equations if e.operation == "add"]
    assert dtypes == ["f16", "f16", "f32"]


def test_table_compares_each_run_with_o0_of_as_many_batches(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "88")
    losses = {"O0": 2.0, "O1": 2.5}
    results = {
        (level, accumulate): trained(level, 1)._replace(
            losses=np.full(5, accumulate * loss), seconds=loss, skips=3, bytes=10**6
        )
        for accumulate in (1, 10)
        for level, loss in losses.items()
    }
    Console().print(from_paddle.table_of(results, "a title"))
    rows = [row.split() for row in capsys.readouterr().out.splitlines() if "2**" in row]
    assert rows == [
        ["O0", "1", "1.00x", "2.0000", "+0e+00", "3", "2**0", "1.00MB"],
        ["O1", "1", "1.25x", "2.5000", "+2e-01", "3", "2**10", "1.00MB"],
        ["O0", "10", "1.00x", "20.0000", "+0e+00", "3", "2**0", "1.00MB"],
        ["O1", "10", "1.25x", "25.0000", "+2e-01", "3", "2**10", "1.00MB"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half_dtype", "accumulate"), [("float16", 1), ("bfloat16", PIECES)]
)
def test_whole_training_ends_at_the_loss_of_o0(half_dtype, accumulate):
    settings = vars(from_paddle.parse(["--half-dtype", half_dtype]))
    del settings["accumulate"]

    with standard():
        results = [
            from_paddle.train(level, accumulate, **settings)
            for level in from_paddle.LEVELS
        ]
    o0, *others = (float(from_paddle.final_loss(each)) for each in results)
    assert o0 < 0.8 * float(results[0].losses[0])
    np.testing.assert_allclose(others, o0, rtol=eps(half_dtype) / 4)
