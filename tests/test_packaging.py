"""What the package says of itself: its version, its metadata, how to contribute."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jmp_amp as amp

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_the_version_is_said_once_and_the_newest_change_has_it():
    assert re.fullmatch(r"\d+\.\d+\.\d+", amp.__version__)
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    path = ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert path.read_text().count(f'__version__ = "{amp.__version__}"') == 1
    changes = (ROOT / ".github" / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", changes, re.M)[0] == amp.__version__


def test_the_version_imports_nothing():
    code = "import sys, jmp_amp; jmp_amp.__version__; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_metadata_name_what_an_index_sorts_by():
    assert PROJECT["authors"] and len(PROJECT["keywords"]) == len(
        {*PROJECT["keywords"]}
    )
    classifiers = PROJECT["classifiers"]
    assert "Typing :: Typed" in classifiers and (ROOT / "jmp_amp/py.typed").exists()
    lowest = int(PROJECT["requires-python"].removeprefix(">=3."))
    minors = [
        int(each.rpartition(".")[2])
        for each in classifiers
        if each.startswith("Programming Language :: Python :: 3.")
    ]
    assert minors == [*range(lowest, lowest + len(minors))]
    text = (ROOT / "README.md").read_text()
    assert f"Python 3.{minors[0]} to 3.{minors[-1]}" in text


def test_the_extras_have_what_the_library_needs_for_them():
    extras = PROJECT["optional-dependencies"]
    assert any(each.startswith("flatbuffers") for each in extras["export"])
    assert any(each.startswith("matplotlib") for each in extras["plots"])


@pytest.mark.parametrize("name", ["CONTRIBUTING", "CHANGELOG"])
def test_links_of_the_files_for_contributors_lead_somewhere(name):
    folder = ROOT / ".github"
    text = (folder / f"{name}.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (folder / target).exists(), target


def test_tests_that_train_are_nightly():
    marked = "@pytest.mark." + "trains"
    for path in (ROOT / "tests").rglob("test_*.py"):
        before = path.read_text().split(marked)[:-1]
        assert all(each.endswith("@pytest.mark.nightly\n") for each in before), path
