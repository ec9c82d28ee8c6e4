"""The benchmark of Apex's levels: what it measures, and what was measured."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from benchmarks import recipe_levels
from benchmarks.recipe_levels import LEVELS

from tests import h100, zoo

RESULTS = Path(recipe_levels.__file__).parent / "results" / "recipe_levels.json"


def committed() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


def plain_losses(model: str, steps: int) -> list[float]:
    """Those of AdamW alone, without this library."""
    case, tx = zoo.CASES[model, "small"], optax.adamw(recipe_levels.RATE)
    params, batch = jax.jit(case.sample)(jax.random.key(0))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(case.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps):
            params, state, loss = step(params, state)
            losses.append(float(loss))
    return losses


@pytest.mark.slow
def test_the_first_level_is_training_without_the_library():
    found = recipe_levels.trained("mlp", "O0", steps=8)
    first, *_, last = plain_losses("mlp", 8)
    np.testing.assert_allclose([found["first"], found["last"]], [first, last], 1e-5)
    assert found["skips"] == 0


@pytest.mark.slow
def test_levels_that_keep_all_digits_train_as_the_first_does(capsys, monkeypatch):
    # What the levels share is compiled once, and is used by other tests.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    recipe_levels.main(["--model", "mlp", "--no-gpu"])
    assert "Everything holds." in capsys.readouterr().out


def memory_on_h100(model: str, level: str) -> dict[str, int]:
    program = recipe_levels.step_program(model, level)
    donated = recipe_levels.DONATED
    temporary = h100.figures(*program, read=h100.temp_bytes, donate_argnums=donated)
    return recipe_levels.memory(*program, temporary=temporary)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_memory_is_what_was_measured_and_falls(model):
    memory = {level: memory_on_h100(model, level) for level in LEVELS}
    sizes = [memory[level]["all"] for level in LEVELS]
    assert sizes[0] > sizes[1] >= sizes[2] >= sizes[3]
    (row,) = [r for r in committed()["models"] if r["model"] == model]
    for level in LEVELS:
        # Another version of the compiler lays it out by a little otherwise.
        kept = row["levels"][level]["memory"]["all"]
        np.testing.assert_allclose(memory[level]["all"], kept, rtol=0.02)


def test_what_does_not_hold_is_said():
    found = committed()
    good = next(r for r in found["models"] if r["model"] == "mlp")
    assert recipe_levels.failures({"models": [good]}) == []
    heavy, other = copy.deepcopy(good), copy.deepcopy(good)
    o1, o2 = (heavy["levels"][level]["memory"] for level in ("O1", "O2"))
    o2["all"] = o1["all"] + 257
    other["levels"]["O1"]["trained"]["last"] = other["levels"]["O1"]["trained"]["first"]
    said = recipe_levels.failures({"models": [heavy, other]})
    assert len(said) == 2
    assert said[0].startswith("mlp: memory does not fall: [")
    assert said[1] == "mlp: the loss of O1 falls otherwise than O0's"
