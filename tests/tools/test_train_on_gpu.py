"""The benchmark for a real GPU runs, in tiny sizes; how fast is not tested here."""

import dataclasses
import doctest
import json
import math

import jax
import numpy as np
import pytest
from benchmarks import train_on_gpu

from tests.programs import equations

QUICK = ("--tiny", "--steps", "2", "--rounds", "2", "--warmup", "1")
TASK = train_on_gpu.Task(
    "run", "simple", "bfloat16", ("twin", "autocast"), tiny=True, steps=2, rounds=2
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("results") / "run.json"
    code = train_on_gpu.main(
        [*QUICK, "--model", "simple", "--one-process", "--json", str(file)]
    )
    assert code == 0
    (entry,) = json.loads(file.read_text()).items()
    return entry


@pytest.mark.slow
def test_every_program_is_timed_in_every_round_and_its_memory_is_known(results):
    name, run = results
    assert name == "simple bfloat16 batch 8 tiny"
    assert tuple(run["programs"]) == train_on_gpu.PROGRAMS
    for row in run["programs"].values():
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) > 0
        assert row["program_bytes"] == row["temp_bytes"] + row["argument_bytes"]
        # Three weights and biases, an input and a target.
        assert row["argument_bytes"] >= 4 * (3 * (16 * 16 + 16) + 2 * 8 * 16)
        assert len(row["timed_with"]) == len(train_on_gpu.PROGRAMS) - 1


@pytest.mark.slow
def test_programs_train_the_same_model(results):
    programs = results[1]["programs"]
    expected = programs["f32_highest"]
    for row in programs.values():
        # Of bf16, the coarsest dtype of them all.
        np.testing.assert_allclose(row["first_loss"], expected["first_loss"], rtol=2e-2)
        assert row["last_loss"] < row["first_loss"]
    assert {name for name, row in programs.items() if "skipped" in row} == {
        "f16_scaled"
    }


@pytest.mark.slow
def test_ratios_are_those_of_the_figures_in_the_same_file(results):
    programs = results[1]["programs"]
    for name, row in programs.items():
        others = {"f32_tf32", "twin"} - {name}
        assert set(row["ratios"]) == others
        for other in others:
            pairs = zip(programs[other]["seconds"], row["seconds"], strict=True)
            speed = np.median([theirs / ours for theirs, ours in pairs])
            assert math.isclose(row["ratios"][other]["speed"], speed)
            memory = row["program_bytes"] / programs[other]["program_bytes"]
            assert math.isclose(row["ratios"][other]["program_bytes"], memory)


@pytest.mark.slow
def test_conditions_say_what_was_measured(results):
    about = results[1]["conditions"]
    assert about["device"]["kind"] == jax.devices()[0].device_kind
    assert about["jax"] == jax.__version__
    assert (about["tiny"], about["steps_in_a_round"], about["rounds"]) == (True, 2, 2)
    assert about["matmul_precision"]["f32_highest"] == "highest"
    assert about["environment"]["JAX_PLATFORMS"] == "cpu"


def products(name):
    """Returns {(operand dtypes, precision)} of the matrix products of a step."""
    program = train_on_gpu.program("simple", 1.0, True, name, "bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        abstract = jax.eval_shape(program.init, jax.random.key(0))
        with jax.default_matmul_precision(program.precision):
            jaxpr = jax.make_jaxpr(program.step)(*abstract)
    found = set()
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "dot_general":
            operands = tuple(v.aval.dtype.name for v in eqn.invars)
            found.add((operands, eqn.params["precision"]))
    return found


def test_programs_multiply_in_the_precision_that_their_names_say():
    # TF32 is XLA's default for f32.
    default = (jax.lax.Precision.DEFAULT,) * 2
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert products("f32_tf32") == {(("float32",) * 2, default)}
    assert products("f32_highest") == {(("float32",) * 2, highest)}
    assert products("twin") == products("autocast") == {(("bfloat16",) * 2, default)}
    assert products("f16_scaled") == {(("float16",) * 2, default)}


def test_program_that_fails_costs_its_own_row_alone():
    def worker(task):
        if "autocast" in task.programs and task.action == "run":
            return {"failed": "RESOURCE_EXHAUSTED"}
        return train_on_gpu.work(task)

    rows = train_on_gpu.with_ratios(train_on_gpu.measured(TASK, worker))
    assert rows["autocast"]["failed"] == "RESOURCE_EXHAUSTED"
    assert "seconds" in rows["twin"] and rows["twin"]["timed_with"] == []
    assert rows["autocast"]["ratios"] == {}


def test_programs_that_do_not_fit_together_are_timed_alone():
    def worker(task):
        if len(task.programs) > 1:
            return {"failed": "RESOURCE_EXHAUSTED"}
        return train_on_gpu.work(task)

    rows = train_on_gpu.with_ratios(train_on_gpu.measured(TASK, worker))
    assert all(row["timed_with"] == [] for row in rows.values())
    assert rows["autocast"]["ratios"]["twin"]["speed"] > 0


def test_twin_and_autocast_take_turns_where_not_all_programs_fit():
    def worker(task):
        if len(task.programs) > 2:
            return {"failed": "RESOURCE_EXHAUSTED"}
        return train_on_gpu.work(task)

    task = dataclasses.replace(TASK, programs=("f32_tf32", "twin", "autocast"))
    rows = train_on_gpu.measured(task, worker)
    assert rows["f32_tf32"]["timed_with"] == []
    assert rows["twin"]["timed_with"] == ["autocast"]
    assert rows["autocast"]["timed_with"] == ["twin"]


@pytest.mark.slow
def test_process_of_its_own_takes_its_program_from_the_cache(tmp_path):
    task = dataclasses.replace(TASK, action="compile", programs=("autocast",))
    entries = []
    for action in ("compile", "run"):
        task = dataclasses.replace(task, action=action)
        outcome = train_on_gpu.work_elsewhere(task, tmp_path, limit=120)
        assert "failed" not in outcome
        entries.append({file.name for file in tmp_path.glob("jit_step-*-cache")})
    # The second process compiled no step that the first had not.
    assert entries[0] == entries[1]
    assert len(entries[0]) == 1
    assert set(outcome["programs"]) == {"autocast"}


def test_process_that_fails_or_takes_too_long_says_so(tmp_path):
    unknown = dataclasses.replace(TASK, model="none")
    assert train_on_gpu.work(dataclasses.replace(unknown, action="compile")) == {
        "failed": "KeyError: 'none'"
    }
    assert train_on_gpu.work_elsewhere(TASK, tmp_path, limit=0.01) == {
        "failed": "took longer than 0.01 s"
    }


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(train_on_gpu).failed == 0


def test_results_of_other_runs_are_kept(tmp_path):
    file = tmp_path / "new" / train_on_gpu.file_name("NVIDIA H200")
    train_on_gpu.keep({"one": {"a": 1}, "two": {"a": 2}}, file)
    train_on_gpu.keep({"two": {"a": 3}}, file)
    assert file.name == "nvidia_h200.json"
    assert json.loads(file.read_text()) == {"one": {"a": 1}, "two": {"a": 3}}


def test_cpu_is_refused_in_one_line_that_says_what_is_needed(capsys, tmp_path):
    out = tmp_path / "out"
    code = train_on_gpu.main(["--one-process", "--out-dir", str(out)])
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "needs a GPU or a TPU" in printed.err and "--tiny" in printed.err
    assert not out.exists()


@pytest.mark.parametrize(
    "option, value",
    [
        *(("--steps", "0"), ("--rounds", "0"), ("--warmup", "-1")),
        *(("--batch-scale", "0.0"), ("--batch-scale", "nan"), ("--limit", "-1.0")),
        *(("--model", "bert"), ("--dtype", "float32"), ("--program", "twins")),
    ],
)
def test_option_that_makes_no_sense_is_refused(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_on_gpu.main([option, value])
    assert stopped.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert option in message and value in message


# Published: 124,439,808 of GPT-2, its position table of 1024 included; 25,557,032 of
# ResNet-50; ViT-B/16 has 85,798,656 below its head, and 7,690 are a head of 10 classes.
@pytest.mark.slow
@pytest.mark.parametrize(
    "model, parameters",
    [
        ("simple", 3 * (4096 * 4096 + 4096)),
        ("gpt", 124_439_808),
        ("vit", 85_798_656 + 7_690),
        ("resnet", 25_557_032),
    ],
)
def test_model_has_as_many_parameters_as_the_published_one(model, parameters):
    workload = train_on_gpu.WORKLOADS[model](1.0, False)
    with jax.numpy_dtype_promotion("standard"):
        params, _, _ = jax.eval_shape(workload.sample, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameters
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
