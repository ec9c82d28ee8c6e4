"""The figures of `baseline.json` hold: nothing is worse than its tolerance."""

import copy
import json

import pytest

from tests import baseline, h100, zoo
from tests.idioms.row import normals, row, weights


def named(part, names):
    """Parameters: names of rows; those of a model are in one process."""
    marks = pytest.mark.xdist_group
    return [pytest.param(name, marks=marks(name.partition(" ")[0])) for name in names]


def assert_not_worse(part, name, found):
    said = baseline.worse(found, baseline.committed()[part][name])
    assert not said, f"{name}: {'; '.join(said)}"


def test_every_model_shape_and_group_of_programs_has_a_row():
    rows = {part: sorted(rows) for part, (_, rows) in baseline.PARTS.items()}
    assert rows == {part: sorted(baseline.committed()[part]) for part in rows}
    assert len(baseline.FILE.read_bytes()) < 60_000


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", named("steps", baseline.STEPS))
def test_no_more_is_kept_for_the_backward_pass(name):
    assert_not_worse("steps", name, baseline.kept(name))


@pytest.mark.slow
@h100.needs_compiler
@pytest.mark.parametrize("name", named("steps", baseline.STEPS[: len(zoo.MODELS)]))
def test_a_step_on_an_h100_needs_no_more_memory_time_and_f32_products(name):
    assert_not_worse("steps", name, baseline.step(name))


@pytest.mark.nightly
@h100.needs_compiler
@pytest.mark.parametrize("name", named("steps", baseline.STEPS[len(zoo.MODELS) :]))
def test_a_step_of_another_shape_needs_no_more_either(name):
    assert_not_worse("steps", name, baseline.step(name))


@pytest.mark.nightly
@pytest.mark.parametrize("name", named("gradients", zoo.MODELS))
def test_gradients_are_as_near_to_f64(name):
    assert_not_worse("gradients", name, baseline.gradient(name))


@pytest.mark.breadth(1, slow=6)
@pytest.mark.parametrize(
    "name", sorted(baseline.GROUPS, key=lambda each: len(baseline.programs_of(each)))
)
def test_no_more_numerical_programs_are_wrong(name):
    assert_not_worse("numerical", name, baseline.numerical(name))


# The instrument


def test_a_row_that_got_worse_is_told_and_one_that_got_better_is_not():
    before = {"temp": 1000, "modelled": 50.0, "kept": 1000, "half": 8, "full": 1}
    better = {"temp": 900, "modelled": 40.0, "kept": 900, "half": 9, "full": 0}
    assert baseline.worse(before, before) == baseline.worse(better, before) == []
    worse = {"temp": 1011, "modelled": 50.6, "kept": 1011, "half": 7, "full": 2}
    for name, value in worse.items():
        (said,) = baseline.worse(before | {name: value}, before)
        assert said.startswith(name)


def test_an_error_that_is_no_number_is_worse():
    for error in (float("nan"), float("inf")):
        assert baseline.worse({"gradient": error}, {"gradient": 1.0})


def test_a_program_that_became_wrong_is_named_and_one_that_became_right_is_not():
    before = {"programs": 4, "wrong": ["b float16"], "median": 1.0}
    assert baseline.worse(before | {"wrong": []}, before) == []
    found = before | {"wrong": ["a bfloat16", "b float16"]}
    assert baseline.worse(found, before) == ["wrong: a bfloat16"]


@pytest.mark.parametrize(("off", "is_wrong"), [(0.0, False), (0.1, True)])
def test_a_program_that_is_off_by_more_than_its_products_is_wrong(
    off, is_wrong, monkeypatch
):
    @row(weights(w=(8, 8)), normals(x=(4, 8)))
    def program(p, inputs):
        return inputs["x"] @ p["w"]

    def policy(fn):
        return lambda p, inputs: fn(p, inputs) * (1 + off)

    monkeypatch.setattr(baseline, "programs_of", lambda group: [program])
    monkeypatch.setattr(baseline, "_policy", lambda group, dtype: policy)
    found = baseline.numerical("idioms sums")
    both = ["program bfloat16", "program float16"]
    assert found["programs"] == 2 and found["wrong"] == both * is_wrong
    # An f32 product has none of the roundings of half, one that is off has more.
    assert found["median"] > 10 if is_wrong else found["median"] < 0.01


def test_the_table_is_written_line_by_line_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "FILE", tmp_path / "baseline.json")
    monkeypatch.setattr(baseline, "_git", lambda *command: "")
    rows = {"steps": {"vit large": {"temp": 3, "half": 1}, "cnn large": {"temp": 2}}}
    baseline.write(copy.deepcopy(rows))
    text = baseline.FILE.read_text()
    assert json.loads(text)["steps"] == rows["steps"]
    assert text.index("cnn large") < text.index("vit large")
    assert '"vit large": {"half": 1, "temp": 3}\n' in text


def test_changes_that_are_in_no_commit_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(baseline, "FILE", tmp_path / "baseline.json")
    monkeypatch.setattr(baseline, "_git", lambda *command: "M jmp_amp/__init__.py")
    with pytest.raises(SystemExit, match="changes that are in no commit"):
        baseline.write({})
    assert not baseline.FILE.exists()


@pytest.mark.parametrize("arguments", [[], ["--compare"]])
def test_without_the_compiler_it_names_the_extra_and_writes_nothing(
    arguments, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(baseline, "FILE", tmp_path / "baseline.json")
    monkeypatch.setattr(h100, "why_no_compiler", lambda: "pip install '.[gpu-check]'")
    assert baseline.main(arguments) == 2
    assert "[gpu-check]" in capsys.readouterr().err
    assert not baseline.FILE.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "vit"], "--only goes with --compare"),
        (["--compare", "--only", "bit"], "--only 'bit': no part, model or row"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        baseline.main(arguments)
    assert message in capsys.readouterr().err
