"""A slow test runs where code that it reaches has moved, and is skipped elsewhere."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import conftest, unmoved

FILES = {
    "pyproject.toml": "",
    "jmp_amp/__init__.py": "",
    "jmp_amp/transform/autocasting.py": "from jmp_amp.plan import planner",
    "jmp_amp/plan/planner.py": "HALF = 1",
    "jmp_amp/reports/explaining.py": "",
    "examples/gan.py": "import numpy",
    "tests/conftest.py": "from tests import unmoved",
    "tests/unmoved.py": "import jmp_amp as amp\namp._ROOMS",
    "tests/data.json": "{}",
    "tests/programs.py": "import gan",
    "tests/table/__init__.py": "import importlib\nimportlib.import_module(f'{1}')",
    "tests/table/row.py": "",
    "tests/room/conftest.py": "",
    "tests/room/test_it.py": """
import jmp_amp as amp
from tests import programs, table

def test_it():
    '''It is one, as data.json says not.'''
    assert amp.autocast(programs.P)  # as ever
""",
    "tests/test_reads.py": "FILE = 'oracle/data.json'",
    "tests/test_command.py": "call('python -m jmp_amp doctor')",
    "tests/test_all.py": "import jmp_amp\ngetattr(jmp_amp, 'grad')",
}
IT = "tests/room/test_it.py"


@pytest.fixture
def top(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def code(top, name=IT):
    return unmoved.Checkout(top).code(top / name)


@pytest.mark.parametrize(
    "test, moved, changes",
    [
        (IT, IT, True),
        (IT, "tests/conftest.py", True),
        (IT, "tests/room/conftest.py", True),
        (IT, "pyproject.toml", True),
        (IT, "tests/programs.py", True),
        (IT, "examples/gan.py", True),
        (IT, "tests/table/row.py", True),
        (IT, "jmp_amp/transform/autocasting.py", True),
        (IT, "jmp_amp/plan/planner.py", True),
        (IT, "jmp_amp/reports/explaining.py", False),
        (IT, "tests/data.json", False),
        (IT, "tests/test_reads.py", False),
        ("tests/test_reads.py", "tests/data.json", True),
        ("tests/test_reads.py", "jmp_amp/plan/planner.py", False),
        ("tests/test_command.py", "jmp_amp/reports/explaining.py", True),
        ("tests/test_all.py", "jmp_amp/reports/explaining.py", True),
    ],
)
def test_code_of_a_test_is_what_it_reaches(top, test, moved, changes):
    before = code(top, test)
    with (top / moved).open("a") as file:
        file.write("\nmoved = 1\n")
    assert (code(top, test) != before) == changes


def test_comments_and_docstrings_are_no_code(top):
    before, text = code(top), FILES[IT]
    (top / IT).write_text(text.replace("as ever", "always").replace("one", "1"))
    assert code(top) == before


def test_what_passed_is_unmoved_until_code_or_versions_move(top, monkeypatch):
    monkeypatch.delenv("KEPT_FIGURES", raising=False)
    file = top / "unmoved.json"

    def is_unmoved(name=IT):
        return unmoved.is_unmoved(top / name, file, unmoved.Checkout(top))

    assert not is_unmoved()
    unmoved.keep({IT}, file, unmoved.Checkout(top))
    assert is_unmoved() and not is_unmoved("tests/test_reads.py")
    unmoved.keep({"tests/test_reads.py"}, file, unmoved.Checkout(top))
    assert is_unmoved() and is_unmoved("tests/test_reads.py")
    monkeypatch.setenv("KEPT_FIGURES", "again")
    assert not is_unmoved()
    monkeypatch.delenv("KEPT_FIGURES")
    with monkeypatch.context() as other:
        other.setattr(unmoved, "versions", lambda: {"jax": "0"})
        assert not is_unmoved()
    (top / "jmp_amp/plan/planner.py").write_text("HALF = 2")
    assert not is_unmoved() and is_unmoved("tests/test_reads.py")


def test_a_file_of_which_a_test_failed_or_was_skipped_is_not_kept():
    outcomes = unmoved.Outcomes()
    for name, found in (
        ("passes", {"passed": True}),
        ("fails as expected", {"passed": False, "wasxfail": "why"}),
        ("fails", {"passed": True}),
        ("fails", {"passed": False}),
        ("is skipped", {"passed": False}),
    ):
        report = SimpleNamespace(nodeid=f"{name}::test[1]@group", **found)
        outcomes.pytest_runtest_logreport(report)
    assert outcomes.passed - outcomes.others == {"passes", "fails as expected"}


@pytest.mark.parametrize(
    ("marks", "unmoved_is", "skips"),
    [
        (["slow"], True, True),
        (["slow"], False, False),
        (["slow", "trains"], True, False),
        ([], True, False),
    ],
)
def test_only_slow_tests_whose_code_has_not_moved_are_skipped(
    monkeypatch, marks, unmoved_is, skips
):
    asked = []
    monkeypatch.setattr(unmoved, "is_unmoved", lambda p: asked.append(p) or unmoved_is)
    item = SimpleNamespace(get_closest_marker=lambda m: m in marks or None, path="it")
    if skips:
        with pytest.raises(pytest.skip.Exception, match="KEPT_FIGURES=again runs it"):
            conftest.pytest_runtest_setup(item)
    else:
        conftest.pytest_runtest_setup(item)
    assert asked == ["it"] * (marks == ["slow"])


# What a process has imported of the repository when the tests of a file have passed.
_LOADED = """
import pathlib, sys
import pytest
sys.argv = ["pytest"]
assert not pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", {test!r}])
files = (getattr(m, "__file__", None) or "" for m in list(sys.modules.values()))
print("LOADED", *map(pathlib.Path, files))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("policies/test_casting.py", "transform/test_closures.py"),
        *("reports/test_folding.py", "training/test_collectives.py"),
    ],
)
def test_a_process_imports_no_code_that_is_not_reached(name):
    top = unmoved.HERE.top
    test = top / "tests" / name
    program = _LOADED.format(test=str(test))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True, check=True)
    *_, files = done.stdout.partition("LOADED")
    # An environment may be in the repository, beside these.
    ours = tuple(f"{top}/{each}/" for each in ("jmp_amp", "examples", "tests"))
    loaded = {each for each in files.split() if each.startswith(ours)}
    loaded = {each for each in loaded if not each.endswith("__init__.py")}
    reached = {*map(str, unmoved.HERE.reached(test))}
    assert len(loaded) > 5
    # `conftest.py` asks for the code of slow tests, with these.
    assert loaded - reached <= {str(top / "tests" / "unmoved.py")}
    assert not any("/jmp_amp/numerics/" in each for each in reached)
