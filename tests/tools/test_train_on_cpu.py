"""The benchmark for this CPU runs, in tiny sizes; how fast is not tested here."""

import io
import json
import math
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from benchmarks import train_on_cpu
from rich.console import Console

from jmp_amp.plan.program import cpu_target
from jmp_amp.plan.program.cpu_target import Cpu, this_cpu
from tests.scripts import refusal

NAMES = ("mlp-256", "lstm")
EPS = float(jnp.finfo(jnp.bfloat16).eps)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "run.json"
    options = ["--quick", "--rounds", "2", "--json", str(file)]
    assert train_on_cpu.main([*options, "--model", *NAMES]) == 0
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "products.json"
    options = ["--quick", "--rounds", "2", "--json", str(file)]
    assert train_on_cpu.main([*options, "--products"]) == 0
    return json.loads(file.read_text())["products"]


def test_every_program_is_timed_in_every_round_of_both_phases(results):
    assert tuple(results["models"]) == NAMES
    for model in results["models"].values():
        assert tuple(model["programs"]) == train_on_cpu.PROGRAMS
        for row in model["programs"].values():
            for phase in train_on_cpu.PHASES:
                for seconds in row[phase]["seconds"].values():
                    assert len(seconds) == 2 and min(seconds) > 0


def assert_speed_is_that_of(row, reference):
    for clock, speed in row["speed"].items():
        for figure, of in (("min", min), ("median", statistics.median)):
            theirs = of(reference["seconds"][clock])
            expected = theirs / of(row["seconds"][clock])
            assert math.isclose(speed[figure], expected)


def test_speeds_are_those_of_the_seconds_in_the_same_file(results):
    for model in results["models"].values():
        for row in model["programs"].values():
            for phase in train_on_cpu.PHASES:
                assert_speed_is_that_of(row[phase], model["programs"]["f32"][phase])


def test_gradients_are_those_of_f64_but_for_rounding(results):
    for model in results["models"].values():
        error = {name: row["error"] for name, row in model["programs"].items()}
        assert error.pop("f32") < 100 * float(jnp.finfo(jnp.float32).eps)
        # As many roundings in a row as these few layers and steps have.
        assert max(error.values()) < 4 * EPS
        # Small products are f32 on a CPU.
        assert min(error["by hand"], error["autocast"]) > EPS / 10


def test_programs_for_a_gpu_keep_less_and_that_for_a_cpu_no_less_than_f32(results):
    for model in results["models"].values():
        kept = {name: row["kept_bytes"] for name, row in model["programs"].items()}
        assert kept["autocast"] <= kept["by hand"] < kept["f32"] <= kept["for a CPU"]


def test_conditions_say_what_was_measured(results):
    about = results["conditions"]
    assert about["jax"] == jax.__version__
    assert about["cpu"]["native"] == this_cpu().native
    assert (about["quick"], about["rounds"]) == (True, 2)
    assert len(results["load_before"]) == len(results["load_after"]) == 3


def test_single_products_are_timed_forward_and_with_backward(products):
    assert [tuple(row["size"]) for row in products] == train_on_cpu.QUICK_SIZES
    for row in products:
        for phase in ("forward", "with backward"):
            seconds = row[phase]["seconds"]
            assert_speed_is_that_of(
                {"speed": row[phase]["speed"], "seconds": seconds["bf16"]},
                {"seconds": seconds["f32"]},
            )


@pytest.mark.parametrize("size", [*train_on_cpu.SIZES, *train_on_cpu.QUICK_SIZES])
def test_table_says_which_products_autocast_runs_in_bf16(size, monkeypatch):
    monkeypatch.setattr(cpu_target, "this_cpu", lambda: Cpu(True))
    batches, rows, columns, terms = size
    x = jax.ShapeDtypeStruct((batches, rows, terms), jnp.float32)
    y = jax.ShapeDtypeStruct((batches, terms, columns), jnp.float32)
    product = train_on_cpu.amp.autocast(jnp.matmul, target="cpu")
    is_bf16 = "bf16" in str(jax.make_jaxpr(product)(x, y))
    assert is_bf16 == train_on_cpu.gains(size[1:])


def test_a_goal_is_missed_by_the_fastest_rounds_in_cpu_seconds(results):
    model = results["models"]["lstm"]
    speed = model["programs"]["for a CPU"]["training"]["speed"]["cpu"]["min"]
    for goal, count in ((speed / 2, 0), (speed * 2, 1)):
        goals = {"lstm": model | {"goals": {"training": goal}}}
        assert len(train_on_cpu.missed(goals)) == count


def test_check_needs_models_at_their_full_size(capsys):
    for option in ("--quick", "--products"):
        error = refusal(
            capsys, lambda option=option: train_on_cpu.main(["--check", option])
        )
        assert "the goals are those of models at their full size" in error


def test_check_needs_a_cpu_that_gains(capsys, monkeypatch):
    monkeypatch.setattr(train_on_cpu, "this_cpu", lambda: Cpu(False))
    error = refusal(capsys, lambda: train_on_cpu.main(["--check"]))
    assert "--check: the goals are no CPU's like this one" in error


def test_committed_figures_meet_the_goals_where_there_is_bf16_and_are_printed():
    file = Path(train_on_cpu.__file__).parent / "results" / "train_on_cpu.json"
    found = json.loads(file.read_text())
    assert tuple(found["models"]) == tuple(train_on_cpu.MODELS)
    console = Console(width=120, record=True, file=io.StringIO())
    for phase in train_on_cpu.PHASES:
        console.print(train_on_cpu.table(phase, found["models"]))
    text = console.export_text()
    for name, model in found["models"].items():
        assert model["goals"] == train_on_cpu.MODELS[name].goals
        for row in model["programs"].values():
            for phase in train_on_cpu.PHASES:
                assert_speed_is_that_of(row[phase], model["programs"]["f32"][phase])
                assert f"{row[phase]['speed']['cpu']['min']:.2f}" in text
    # Where nothing is bf16 the program is that of f32: its speed is 1 but for noise.
    same = [name for name, model in found["models"].items() if is_f32(model)]
    assert same == ["mlp-3x64", "cnn"]
    assert train_on_cpu.missed(found["models"]) == []


def is_f32(model):
    """Whether the program for a CPU is that of f32, by its gradient and its memory."""
    ours, plain = (model["programs"][name] for name in ("for a CPU", "f32"))
    alike = all(ours[key] == plain[key] for key in ("error", "kept_bytes"))
    assert ours["training"]["as_f32"] == alike
    return alike


def test_two_programs_are_told_apart_by_what_xla_compiles():
    x = jnp.ones((4, 4))
    plain = train_on_cpu.compiled_operations(jnp.sin, x)
    assert plain == train_on_cpu.compiled_operations(lambda x: jnp.sin(x), x)
    assert plain != train_on_cpu.compiled_operations(jnp.cos, x)
    assert plain != train_on_cpu.compiled_operations(jnp.sin, x.astype(jnp.bfloat16))


def test_a_program_that_is_that_of_f32_misses_no_goal_of_its_speed(results):
    model = results["models"]["lstm"]
    speed = model["programs"]["for a CPU"]["training"]["speed"]["cpu"]["min"]
    for as_f32, goal, count in ((True, 1.0, 0), (True, 1.1, 1), (False, speed * 2, 1)):
        row = model["programs"]["for a CPU"]["training"] | {"as_f32": as_f32}
        programs = model["programs"] | {"for a CPU": {"training": row}}
        changed = {"goals": {"training": goal}, "programs": programs}
        assert len(train_on_cpu.missed({"lstm": changed})) == count
