"""The command that runs the nightly suite: what it runs, tells and goes on with."""

import sys

import pytest

from tests import nightly
from tests.nightly import Step

# Writes what pytest would, and that it ran.
SCRIPT = """
import sys
from pathlib import Path
cases, status, log = sys.argv[1:4]
with open(log, "a") as file:
    file.write(cases[:4] + "\\n")
Path(sys.argv[4].partition("=")[2]).write_text(f"<testsuite>{cases}</testsuite>")
sys.exit(int(status))
"""
PASSES = '<testcase classname="a" name="passes"/>'
SKIPPED = '<testcase classname="a" name="no_gpu"><skipped/></testcase>'
FAILS = '<testcase classname="b" name="fails"><failure/></testcase>'


def step(tmp_path, cases, status):
    log = str(tmp_path / "log")
    return Step((sys.executable, "-c", SCRIPT, cases, str(status), log), {})


def run(tmp_path, steps, *arguments):
    return nightly.main(arguments, steps, tmp_path / "state" / "nightly.json")


@pytest.fixture
def clean(monkeypatch):
    monkeypatch.setattr(nightly, "commit", lambda: "abc")


def test_the_summary_counts_and_names_what_failed(tmp_path, capsys, clean):
    steps = {
        "plan": step(tmp_path, PASSES + SKIPPED, 0),
        "zoo": step(tmp_path, PASSES + FAILS, 1),
    }
    assert run(tmp_path, steps) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["plan", "1", "1", "0.0"] in lines
    assert ["zoo", "1", "1", "0.0"] in lines
    assert ["all", "2", "1", "1", "0.0"] in lines
    assert ["zoo:", "b::fails"] in lines


def test_a_step_that_breaks_before_its_tests_fails(tmp_path, capsys, clean):
    steps = {"zoo": Step((sys.executable, "-c", "raise SystemExit(2)"), {})}
    assert run(tmp_path, steps) == 1
    assert "no test was run" in capsys.readouterr().out


def test_it_goes_on_with_what_has_not_passed(tmp_path, clean):
    steps = {name: step(tmp_path, PASSES, 0) for name in ("plan", "zoo")}
    assert run(tmp_path, steps, "plan") == 0
    assert run(tmp_path, steps | {"zoo": step(tmp_path, FAILS, 1)}, "--resume") == 1
    assert run(tmp_path, steps, "--resume") == 0
    # Each of them passed once, and one failed before that.
    assert len((tmp_path / "log").read_text().splitlines()) == 3


@pytest.mark.parametrize("commit", ["def", "abc-dirty"])
def test_it_does_not_go_on_with_other_code(
    tmp_path, monkeypatch, capsys, clean, commit
):
    steps = {"plan": step(tmp_path, PASSES, 0)}
    assert run(tmp_path, steps) == 0
    monkeypatch.setattr(nightly, "commit", lambda: commit)
    with pytest.raises(SystemExit):
        run(tmp_path, steps, "--resume")
    assert f"the last run was of abc, and this is {commit}" in capsys.readouterr().err


def test_a_step_that_there_is_not_is_refused(tmp_path, capsys, clean):
    with pytest.raises(SystemExit):
        run(tmp_path, {"plan": step(tmp_path, PASSES, 0)}, "plain")
    assert "plain is no step. Steps: plan" in capsys.readouterr().err


def test_every_folder_of_tests_is_a_step():
    folders = {
        path.relative_to(nightly.TOP / "tests").parts[0]
        for path in (nightly.TOP / "tests").glob("*/**/test_*.py")
    }
    assert {*nightly.steps()} == {*folders, ".", "trains", *nightly.VERSIONS}
