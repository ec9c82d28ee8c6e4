"""The benchmark of tracing and planning; its committed figures."""

import json
import math
from pathlib import Path

import jax
import pytest
from benchmarks import planning_cost

COMMITTED = Path(planning_cost.__file__).parent / "results" / "planning_cost.json"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    path = tmp_path_factory.mktemp("planning") / "found.json"
    options = ["--layers", "1", "2", "--rounds", "1", "--json", str(path)]
    programs = planning_cost.programs
    with pytest.MonkeyPatch.context() as patch:
        # One layer says of its program what twelve do.
        patch.setattr(
            *(planning_cost, "programs"),
            lambda case, layers, **told: programs(case, layers=min(layers, 2), **told),
        )
        # Flax's norms with dtype= mix dtypes, which strict JAX refuses.
        with jax.numpy_dtype_promotion("standard"):
            assert planning_cost.main(options) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_every_program_of_every_model_is_traced(ran):
    assert list(ran["models"]) == ["unrolled 1", "unrolled 2", "jitted 12", "decode 12"]
    for name, row in ran["models"].items():
        assert ("gradient" in row) == (name != "decode 12")
        for phase in {"forward", "gradient"} & set(row):
            assert list(row[phase]) == list(planning_cost.PROGRAMS)
            assert all(0 < each < math.inf for each in row[phase].values())


@pytest.mark.slow
def test_equations_are_those_of_the_model(ran):
    one, two = (ran["models"][f"unrolled {n}"]["equations"] for n in (1, 2))
    # The layers are alike: so many equations each, and the rest once.
    loss, args = planning_cost.training(planning_cost.GPT(3))
    assert len(jax.make_jaxpr(loss)(*args).eqns) == two + (two - one)


def test_growth_is_the_ratio_to_half_the_depth():
    models = {
        "unrolled 12": {"gradient": {"autocast": 2.0}},
        "unrolled 24": {"gradient": {"autocast": 5.0}},
    }
    assert planning_cost.growth(models, "unrolled 24", "gradient", "autocast") == 2.5
    assert planning_cost.growth(models, "unrolled 12", "gradient", "autocast") is None


def test_the_committed_figures_are_of_the_default_depths():
    found = json.loads(COMMITTED.read_text())
    depths = [f"unrolled {n}" for n in planning_cost.LAYERS]
    assert list(found["models"]) == [*depths, "jitted 12", "decode 12"]
    assert found["conditions"]["rounds"] >= 3


@pytest.mark.parametrize("wrong", [["--layers", "0"], ["--rounds", "0"]])
def test_a_wrong_option_is_refused(wrong):
    with pytest.raises(SystemExit) as error:
        planning_cost.main(wrong)
    assert error.value.code == 2
