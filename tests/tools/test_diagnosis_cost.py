"""The benchmark of what a diagnosis costs; its committed figures."""

import gc
import json
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import diagnosis_cost

COMMITTED = Path(diagnosis_cost.__file__).parent / "results" / "diagnosis_cost.json"


@pytest.fixture(scope="module")
def compiling():
    return diagnosis_cost.Compiling()


def test_seconds_in_the_compiler_and_of_the_cpu_are_told_from_the_whole(
    compiling, monkeypatch
):
    # Other tests need what JAX has cached, and looking through all of it takes long.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)

    def run():
        time.sleep(0.3)
        return jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))(np.ones((8, 8), np.float32))

    first = diagnosis_cost.measured(run, compiling)
    again = diagnosis_cost.measured(lambda: time.sleep(0.3), compiling)
    assert first["compile"] > 0 and again["compile"] == 0
    assert min(first["whole"], again["whole"]) >= 0.3 > again["cpu"]


@pytest.mark.slow
def test_every_program_of_a_model_is_measured(tmp_path, monkeypatch):
    # The operations that the programs share are compiled once.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    path = tmp_path / "found.json"
    assert diagnosis_cost.main(["--model", "mlp", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["models"]
    assert list(found) == ["mlp"] and list(found["mlp"]) == [*diagnosis_cost.PROGRAMS]
    for seconds in found["mlp"].values():
        assert all(0 < seconds[part] < math.inf for part in diagnosis_cost.PARTS)


def test_the_committed_figures_are_of_all_models():
    found = json.loads(COMMITTED.read_text())
    assert list(found["models"]) == [*diagnosis_cost.MODELS]
    assert found["size"] == "small"


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit) as error:
        diagnosis_cost.main(["--model", "alexnet"])
    assert error.value.code == 2
    assert "alexnet" in capsys.readouterr().err
