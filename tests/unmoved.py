"""Slow tests that passed with all the code that they reach run again where it moves.

A test file reaches the modules that it imports, what these import, and the files whose
names stand in them. `unmoved.json` has a hash of that code for each file whose slow
tests have passed, and the versions that they passed with. Where both are the same, the
slow tests of the file are skipped.

    python -m tests.unmoved [FILE ...]
    KEPT_FIGURES=again python -m pytest -m "slow or not slow" tests

The first runs the slow tests of the files that have moved, and keeps the hashes of
those that pass. The second runs all tests, whatever has moved.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

import jmp_amp as amp
from tests import kept

FILE = Path(__file__).with_suffix(".json")
# Those of programs of the library. What the tests of examples, tools and of the
# repository start in other processes is not to be seen in their code.
FOLDERS = (
    *("constructs", "fp8", "idioms", "loops", "numerics", "plan", "policies"),
    *("reports", "targets", "training", "transform", "zoo"),
)
_PACKAGE = "jmp_amp"
# A dotted name; an argument or a program in a text that another process is given.
_OF_PACKAGE = re.compile(rf"^{_PACKAGE}(\.\w+)*$|(import|from|-m) {_PACKAGE}\b")
# What they read of the package, the program that they are given has read too.
_INSTRUMENTS = ("tests/dry_run.py", "tests/kept.py")
# What `conftest.py` skips tests with. It decides nothing else.
_THIS = "tests/unmoved.py"
_DISTRIBUTIONS = (
    *("flax", "jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    *("numpy", "optax", "orbax-checkpoint"),
)


class Checkout:
    """The files of a repository, and what each of them reaches.

    Args:
      top: its folder.
    """

    def __init__(self, top: Path) -> None:
        self.top = top
        self._roots = (top, top / "examples")
        self._next_of: dict[Path, frozenset[Path]] = {}
        self._contents: dict[Path, bytes] = {}

    def code(self, test: Path) -> str:
        """Returns a hash of the code that a test file reaches."""
        found = hashlib.sha256()
        for path in sorted(self.reached(test)):
            if path not in self._contents:
                is_code = path.suffix == ".py"
                code = kept.code_of(path.read_text()).encode() if is_code else None
                self._contents[path] = path.read_bytes() if code is None else code
            found.update(str(path.relative_to(self.top)).encode())
            found.update(self._contents[path])
        return found.hexdigest()[:16]

    def reached(self, test: Path) -> Set[Path]:
        """Returns the files that a test file reaches, with itself."""
        above = test.relative_to(self.top).parents
        around = (self.top / each / "conftest.py" for each in above)
        new = {test, *filter(Path.exists, around)}
        reached = {self.top / "pyproject.toml"}
        while new:
            reached |= new
            new = {each for path in new for each in self._next(path)} - reached
        return reached

    def _next(self, path: Path) -> frozenset[Path]:
        """Returns the files that a file names: modules, scripts and data."""
        if path.suffix != ".py":
            return frozenset()
        if path not in self._next_of:
            place = path.relative_to(self.top)
            names = set(_names(ast.parse(path.read_text())))
            found = set[Path]().union(*map(self._files, names))
            if place.parts[0] != _PACKAGE and str(place) not in _INSTRUMENTS:
                of_package = filter(_OF_PACKAGE.search, names)
                found = found.union(*map(self._of_package, of_package))
            if "importlib.import_module" in names:  # of its folder, one after the other
                beside = path.parent.glob("*.py")
                found.update(each for each in beside if not each.match("test_*"))
            self._next_of[path] = frozenset(found - {path, self.top / _THIS})
        return self._next_of[path]

    def _files(self, text: str) -> Set[Path]:
        """Returns the module that a text names, or the files of its last name."""
        return self._module(text) or self._by_name.get(text.rpartition("/")[2], set())

    def _of_package(self, name: str) -> Set[Path]:
        """Returns the module of a name of the package; all modules if it has none."""
        first, *rest = name.split(".")[1:] or [""]
        room = amp._ROOMS.get(first)
        if room is not None and not rest:
            name = f"{_PACKAGE}.{room or first}"
        return self._module(name) or {*(self.top / _PACKAGE).rglob("*.py")}

    def _module(self, name: str) -> Set[Path]:
        """Returns the file of a module, or of the one that defines a name."""
        parts = name.split(".")
        if not all(map(str.isidentifier, parts)):
            return set()
        for inside in filter(None, (parts, parts[:-1])):
            for path in (root.joinpath(*inside) for root in self._roots):
                for file in (path.with_suffix(".py"), path / "__init__.py"):
                    if file.exists() and inside != [_PACKAGE]:
                        return {file}
        return set()

    @functools.cached_property
    def _by_name(self) -> dict[str, set[Path]]:
        """The files beside the package by their names, and by those of folders."""
        found: dict[str, set[Path]] = defaultdict(set)
        for top in ("README.md", "examples", "notebooks", "tests"):
            for path in (self.top / top, *(self.top / top).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    found[path.name].add(path)
                    if top in ("examples", "notebooks"):
                        found[top].add(path)
        return found


def _names(tree: ast.AST) -> Iterator[str]:
    """Yields the dotted names that a module imports or reads, and the texts in it."""
    docstrings, modules, read = set(), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
            yield from (alias.name for alias in node.names if alias.name != _PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are by whole names"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings:
                yield node.value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                read.add(node.value)
                yield f"{modules[node.value.id]}.{node.attr}"
        elif isinstance(node, ast.Name) and node not in read:
            if modules.get(node.id) == _PACKAGE:
                yield _PACKAGE


HERE = Checkout(FILE.parents[1])


def versions() -> dict[str, str]:
    """Returns the versions that the outcome of a test depends on."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, **kept.versions_of(*_DISTRIBUTIONS)}


def is_unmoved(test: Path, file: Path = FILE, checkout: Checkout = HERE) -> bool:
    """Whether the slow tests of a file passed with the code that it reaches now."""
    found = _kept(file).get(str(test.relative_to(checkout.top)))
    return found is not None and not kept.again() and found == checkout.code(test)


def keep(names: Set[str], file: Path = FILE, checkout: Checkout = HERE) -> None:
    """Writes the hashes of test files; those of other versions are dropped."""
    found = {name: checkout.code(checkout.top / name) for name in names}
    rows = {"versions": versions(), "files": _kept(file) | found}
    file.write_text(json.dumps(rows, indent=0, sort_keys=True) + "\n")


def _kept(file: Path) -> dict[str, str]:
    found = _parsed(file.read_text()) if file.exists() else {}
    return found["files"] if found.get("versions") == versions() else {}


_parsed = functools.lru_cache(maxsize=1)(json.loads)


class Outcomes:
    """A plugin of pytest that notes the files of which all tests passed.

    Attributes:
      passed: the files of which a test passed, or failed as expected.
      others: the files of which a test failed or was skipped.
    """

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.others: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        passed = report.passed or hasattr(report, "wasxfail")
        (self.passed if passed else self.others).add(file)


def main() -> None:
    """Runs the slow tests of what has moved, and keeps what passes."""
    given = [Path(each).resolve() for each in sys.argv[1:]] or [
        path for each in FOLDERS for path in (FILE.parent / each).rglob("test_*.py")
    ]
    moved = sorted(str(path) for path in given if not is_unmoved(path))
    if not moved:
        return
    # With hashes of what ran, if somebody edits a file meanwhile.
    for path in moved:
        HERE.code(Path(path))
    groups = ("-n", "2", "--dist", "loadgroup", "--max-worker-restart", "0")
    outcomes = Outcomes()
    options = ("-q", *groups, "-m", "slow and not trains")
    status = pytest.main([*options, *moved], [outcomes])
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        keep(outcomes.passed - outcomes.others)
    sys.exit(status)


if __name__ == "__main__":
    main()
