"""What all tutorials `from_*` do: train, skip, save, resume, print; what all refuse.

What one of them shows beside that is tested in a file of its own.
"""

import importlib
import sys

import chex
import from_apex
import from_colossalai
import from_paddle
import from_torch
import jax
import numpy as np
import pytest
from flax import nnx, serialization

import jmp_amp as amp
from tests.examples import tutorials
from tests.rounding import eps
from tests.scripts import refusal

# Slow tests share their trainings: one process has them all (`--dist loadgroup`).
pytestmark = pytest.mark.xdist_group("tutorials")


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    # Adam of optax raises a float to its integer step count, which strict JAX refuses.
    with jax.numpy_dtype_promotion("standard"):
        yield


TUTORIALS = {
    "torch, default": lambda: tutorials.torch(False),
    "torch": lambda: tutorials.torch(True),
    "mindspore, by hand": lambda: tutorials.mindspore(True),
    "mindspore": lambda: tutorials.mindspore(False),
    "mindspore, f32": lambda: tutorials.mindspore(False, "f32"),
    "apex": lambda: tutorials.apex("O2"),
}
BY_HAND = {
    "torch": tutorials.torch_by_hand,
    "mindspore": tutorials.mindspore_by_hand,
}
APEX = pytest.param("apex", marks=pytest.mark.slow)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", [name for name in TUTORIALS if name != "apex"])
def test_it_trains_as_by_hand_but_for_the_bad_batch(name):
    tutorial = TUTORIALS[name]()
    batches = tutorial.batches()
    state, losses = tutorials.run(
        tutorial, [*batches[:2], tutorials.bad(batches[0]), *batches[2:]]
    )
    params, expected = BY_HAND[name.split(",")[0]]()
    assert np.isnan(losses.pop(2))
    first = tutorial.params(tutorial.start())
    error = tutorials.movement_error(tutorial.params(state), params, first)
    if tutorial.scale > 1:
        # Measured: 9 eps of torch's and 5.6 of mindspore's, as with Flax's own
        # dtype=float16, because some units change sides in their ReLU. Less than an eps
        # would not be half precision.
        assert eps("float16") < error < (16 if name == "torch" else 8) * eps("float16")
    else:
        assert error < 32 * eps("float32")
    # Measured: 0.02 eps of f16.
    rtol = eps("float16") / 4 if tutorial.scale > 1 else 16 * eps("float32")
    np.testing.assert_allclose(losses, expected, rtol=rtol)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["torch", "mindspore, by hand", "mindspore", APEX])
def test_bad_batch_is_skipped_and_halves_the_scale(name):
    tutorial = TUTORIALS[name]()
    batches = tutorial.batches()
    before, _ = tutorials.run(tutorial, batches[:1])
    assert amp.loss_scale_of(before).value == tutorial.scale
    after, losses = tutorials.run(tutorial, [tutorials.bad(batches[1])], before)
    assert not np.isfinite(losses[0])
    chex.assert_trees_all_equal(tutorial.written(after), tutorial.written(before))
    assert amp.loss_scale_of(after).value == tutorial.scale / 2
    made, _ = tutorials.run(tutorial, batches[1:2], after)
    # All of it goes on: weights, moments, batch statistics.
    pairs = zip(tutorial.written(made), tutorial.written(after), strict=True)
    for new, old in pairs:
        leaves = zip(*map(jax.tree.leaves, (new, old)), strict=True)
        changed = [(a != b).any() for a, b in leaves]
        # Plain SGD has no moments.
        assert any(changed) or not changed


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "name", ["torch, default", "torch", "mindspore, by hand", "mindspore", APEX]
)
def test_run_that_is_resumed_goes_on_at_the_same_bits(name):
    tutorial = TUTORIALS[name]()
    # The scale has moved when it is saved: the checkpoint has to bring it along.
    stream = [tutorials.bad(tutorial.batches()[0]), *tutorial.batches()[:4]]
    uninterrupted, losses = tutorials.run(tutorial, stream)
    half, _ = tutorials.run(tutorial, stream[:3])
    state = tutorial.resumed(serialization.to_bytes(half))
    resumed, last_losses = tutorials.run(tutorial, stream[3:], state)
    chex.assert_trees_all_equal(resumed, uninterrupted)
    np.testing.assert_array_equal(last_losses, losses[3:])
    scale = amp.loss_scale_of(resumed).value
    assert scale == (tutorial.scale / 2 if tutorial.scale > 1 else 1)


# Options, of the other examples too

# Numbers that make no sense: the message begins with the option.
SENSELESS = {
    "train_digits": ["--steps 0", "--loss-mult -1.0", "--loss-mult nan"],
    "accumulate": ["--steps 0", "--pieces 3", "--pieces 0"],
    "gan": ["--steps 0"],
    "half_weights": ["--steps 0", "--seeds 0"],
    "diagnose_nan": ["--steps 0"],
    "from_torch": ["--steps 1", "--max-norm nan"],
    "from_paddle": ["--steps 0", "--accumulate 0", "--width -1", "--batch 0"],
    "from_mindspore": ["--steps 0"],
    "from_colossalai": [
        *("--steps 0", "--warmup -1", f"--warmup {from_colossalai.STEPS}"),
    ],
}
TOLD = {
    **{
        (name, "--policy fp17"): "unknown policy 'fp17'"
        for name in ("train_digits", "accumulate", "char_gpt", "gan")
    },
    ("from_torch", "--max-norm 0"): "--max-norm 0.0: ",
    ("from_torch", '--scaler {"scale":8.0}'): "the key '_growth_tracker' is missing",
    ("from_torch", "--scaler {scale"): "--scaler: ",
    ("from_paddle", "--half-dtype fp17"): "unknown dtype 'fp17'",
    ("from_paddle", "--half-dtype f32"): "half_dtype='f32' is no half dtype",
}
# The error of the library for the same recipe.
OF_RECIPES = [
    ("from_apex", "--opt-level 02", "02", {}),
    ("from_apex", "--loss-scale 0", "O0", {"loss_scale": "0"}),
    ("from_apex", "--opt-level O2 --loss-scale 128x", "O2", {"loss_scale": "128x"}),
    *(
        (
            "from_apex",
            f"--opt-level {level} --keep-batchnorm-fp32 {kept}",
            *(level, {"keep_batchnorm_fp32": kept}),
        )
        for level, kept in (("O1", "True"), ("O2", "yes"))
    ),
    ("from_colossalai", "--mixed-precision fp61", "fp61", {}),
    ("from_colossalai", "--hysteresis -1", "fp16", {"hysteresis": -1}),
    ("from_colossalai", "--initial-scale 0", "fp16", {"init_scale": 0.0}),
    ("from_colossalai", "--growth-factor 0.5", "fp16", {"growth_factor": 0.5}),
    ("from_colossalai", "--backoff-factor 2", "fp16", {"backoff_factor": 2.0}),
]


@pytest.fixture
def refused(monkeypatch, capsys):
    """Returns a function that runs an example and returns its error."""

    def run(name, arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
        error = refusal(capsys, importlib.import_module(name).main)
        # What argparse itself refuses comes after its usage.
        assert error.startswith("usage: ") or error.count("\n") == 1
        assert f"{name}.py: error: " in error
        return error

    return run


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [(name, each, f"{each}: ") for name, given in SENSELESS.items() for each in given]
    + [(*given, told) for given, told in TOLD.items()],
)
def test_option_that_makes_no_sense_is_refused_in_one_line(
    name, arguments, told, refused
):
    assert told in refused(name, arguments)


@pytest.mark.parametrize(("name", "arguments", "level", "options"), OF_RECIPES)
def test_wrong_option_gets_the_error_of_the_library(
    name, arguments, level, options, refused
):
    # Apex's levels have the half dtype of Apex.
    dtype = ("float16",) if name == "from_apex" else ()
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as expected:
        amp.recipe(level, *dtype, **options)
    error = refused(name, arguments)
    assert error.count("\n") == 1
    assert error.endswith(f"error: {expected.value}\n")


# Scripts: arguments, and the words of what they print. That of mindspore has a test of
# its own, and `train_digits` is run as its reader runs it.


@pytest.fixture
def printed(monkeypatch, capsys):
    """Returns a function that runs a script and returns the words of its lines."""

    def run(module, arguments, columns=88):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments.split()])
        monkeypatch.setenv("COLUMNS", str(columns))
        module.main()
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.mark.slow
def test_script_of_torch_prints_a_row_for_each_run(printed):
    told = " ".join(word for row in printed(from_torch, "--steps 4") for word in row)
    for name in from_torch.RUNS:
        assert f" {name} " in told


@pytest.mark.slow
def test_script_of_paddle_prints_a_row_for_each_run(printed):
    sizes = "--steps 4 --seed 1 --width 16 --batch 4 --accumulate 2 --half-dtype bf16"
    rows = [row for row in printed(from_paddle, sizes) if "2**0" in row]
    runs = [(level, n) for n in ("1", "2") for level in from_paddle.LEVELS]
    assert [tuple(row[:2]) for row in rows] == runs
    # bf16 has no loss scale.
    assert {(row[5], row[6]) for row in rows} == {("0", "2**0")}


@pytest.mark.slow
def test_script_of_apex_prints_both_tables(printed):
    options = "--opt-level O3 --loss-scale 128 --steps 2"
    found = printed(from_apex, options, columns=120)
    level, *fine_tuned = [row for row in found if row[:1] == ["O3"]]
    assert level[3:5] == ["128", "0"] and level[-1] == "-"
    assert np.isfinite(float(level[2]))
    told = " ".join(word for row in found for word in row)
    assert "not compiled: ask for it with --h100" in told
    assert [row[1:3] for row in fine_tuned] == [
        *(["f32", "all"], ["f16", "all"], ["f32", "the"]),
    ]
    assert all(row[-3:] == ["as", "they", "were"] for row in fine_tuned)


@pytest.mark.slow
def test_script_of_colossalai_prints_a_row_for_each_recipe(printed, monkeypatch):
    make = nnx.jit(from_colossalai.make_model, static_argnums=(0, 1, 2))
    monkeypatch.setattr(from_colossalai, "make_model", lambda seed: make(seed, 16, 1))
    names = ("float32", "fp16")
    options = [f"--mixed-precision {name}" for name in names]
    options += ["--steps 3 --initial-scale 1024"]
    found = printed(from_colossalai, " ".join(options), columns=120)
    rows = {row[0]: row[1:] for row in found if row[:1] in ([name] for name in names)}
    # A first scale asks for one, in f32 too.
    assert rows["float32"][2:] == ["1.000x", "2**10", "0", "2"]
    assert rows["fp16"][3:] == ["2**10", "0", "2"]
    # Before anything is learned, f16 can hardly be told from f32.
    np.testing.assert_allclose(float(rows["fp16"][2][:-1]), 1, atol=0.01)
