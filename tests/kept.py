"""Figures of programs and trainings, beside a hash of what was compiled and run.

A program is traced in a second, and compiled for an H100 in a minute.
`h100_figures.json` keeps what was read from each compiled program, the hash of its
jaxpr, and the versions of JAX, of the compiler and of the described GPU. A program is
compiled again where one of them has moved: the tests then judge what is read from the
new program. Otherwise they judge what was kept.

`training_figures.json` has the outcomes of trainings likewise. A training is known by
the jaxprs of all that it compiles, by the code of its example, by versions, and by the
code of `jmp_amp.training`, which runs outside of compiled programs too.
`error_figures.json` has the errors of programs that run here, against f32 or f64. They
are known by their jaxprs and arguments, by the modules that measure them, and by
versions. Another CPU may round otherwise: the first line below runs them all.

    KEPT_FIGURES=again python -m pytest -m "slow or not slow" tests
    KEPT_FIGURES=write python -m pytest -m "slow or not slow" tests/zoo/test_zoo.py ...

The first compiles, trains and runs all, whatever was kept. The second keeps the figures
of what moved; remove the file to make them all anew. First weights are part of the
hash, and how XLA optimises moves their last bits: figures of tests marked `trains` are
written with the `XLA_FLAGS` of `.ci/run`, the others without.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

from tests import dry_run, h100

FILE = Path(__file__).with_name("h100_figures.json")
TRAININGS = Path(__file__).with_name("training_figures.json")
ERRORS = Path(__file__).with_name("error_figures.json")
_OF_RUNS = ("flax", "jax", "jaxlib", "numpy", "optax", "scikit-learn")
_TRAINING = sorted((Path(__file__).parents[1] / "jmp_amp" / "training").glob("*.py"))
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef)
NOTHING: dict[str, Any] = {"versions": {}, "programs": {}}


def digest(text: str) -> str:
    """Returns a hash of `text` but for the addresses of objects in it."""
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "0x", text).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Returns what a compiled program depends on besides its jaxpr."""
    compilers = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
    found = versions_of("jax", "jaxlib", *compilers)
    return found | {"described GPU": digest(h100.H100)}


@functools.cache
def versions_of(*names: str) -> dict[str, str]:
    """Returns the versions of those distributions that are installed."""
    return {
        name: importlib.metadata.version(name)
        for name in names
        if any(importlib.metadata.distributions(name=name))
    }


def figures(
    name: str,
    fn: Callable[..., Any],
    *args: Any,
    read: Callable[[Any], dict[str, Any]],
    file: Path = FILE,
    made_by: Sequence[str] = (),
    **jit_options: Any,
) -> dict[str, Any]:
    """Returns the figures of `fn(*args)`, compiled for an H100 if they are not kept.

    Args:
      name: of the program, in the file.
      fn: the function, as for `h100.compile_for_gpu`.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      read: compiled program -> its figures, which JSON can hold.
      file: where they are kept.
      made_by: the code of a program that the library has no part in. It is known by
        this code and the version of Flax, and is not traced.
      **jit_options: options of `jax.jit` such as `donate_argnums`.
    """
    if made_by:
        program = [*map(code_of, made_by), versions_of("flax")]
    else:
        program = jax.jit(fn, **jit_options).trace(*args).jaxpr
    text = f"{program} {sorted(jit_options.items())}"
    compiled = functools.partial(h100.compile_for_gpu, fn, *args, **jit_options)
    return figures_of_text(name, text, compiled, read, file)


def compiled_figures(
    name: str,
    compiled: Callable[[], Any],
    read: Callable[[Any], dict[str, Any]],
    file: Path = FILE,
) -> dict[str, Any]:
    """Returns the figures of a program that `compiled` lowers and compiles by itself.

    It is known by its text when it is lowered, and by the options of its compiler.
    """
    with mock.patch.object(jax.stages.Lowered, "compile", _lowered_text):
        text = compiled()
    return figures_of_text(name, text, compiled, read, file)


def _lowered_text(program: Any, **options: Any) -> str:
    return f"{program.as_text()} {sorted(options.items())}"


def figures_of_text(
    name: str,
    text: str,
    compiled: Callable[[], Any],
    read: Callable[[Any], dict[str, Any]],
    file: Path = FILE,
) -> dict[str, Any]:
    """Returns the figures of a program that is known by a text, see `figures`.

    `compiled` returns the program, which is compiled if its figures are not kept.
    """
    traced = digest(text)
    mode = _mode()
    kept = _read(file)
    found = kept["programs"].get(name)
    current = versions()
    # Without a compiler its version is unknown: then that of the figures will do.
    moved = current.items() - kept["versions"].items()
    if found and not moved and found["traced"] == traced and not again():
        return found["figures"]
    reason = h100.why_no_compiler()
    if h100.skips(reason, h100.compiler_is_required()):
        pytest.skip(f"{name} is not the program whose figures are kept, and {reason}")
    found = {"traced": traced, "figures": json.loads(json.dumps(read(compiled())))}
    if mode == "write":
        keep(name, found, current, file)
    return found["figures"]


def training(
    name: str,
    train: Callable[[], Any],
    read: Callable[[Any], dict[str, Any]],
    modules: Sequence[types.ModuleType],
    file: Path = TRAININGS,
) -> dict[str, Any]:
    """Returns the figures of a training, see `outcome`; `modules` are its examples."""
    return outcome(name, train, read, modules, file, _TRAINING)


def outcome(
    name: str,
    run: Callable[[], Any],
    read: Callable[[Any], Any],
    modules: Sequence[types.ModuleType],
    file: Path = ERRORS,
    sources: Sequence[Path] = (),
    of_library: Callable[[], Any] | None = None,
) -> Any:
    """Returns the figures of `run()`, which runs if they are not kept.

    Args:
      name: in the file.
      run: a function without arguments.
      read: what it returns -> the figures, which JSON can hold.
      modules: those whose code runs outside of what is compiled.
      file: where they are kept.
      sources: files whose code runs outside of it too.
      of_library: what of `run` the library has a part in, if not all: the rest is known
        by the code of `modules` and `sources`. It bears zeros, see `dry_run`.
    """
    code = [*map(inspect.getsource, modules), *map(Path.read_text, sources)]
    texts = [*map(code_of, code)]
    if of_library is not nothing:
        texts.insert(0, dry_run.programs_of(of_library or run, modules))
    ran, mode, current = digest("\n".join(texts)), _mode(), versions_of(*_OF_RUNS)
    kept = _read(file)
    found = kept["programs"].get(name)
    same = found and found["traced"] == ran and kept["versions"] == current
    if same and not again():
        return found["figures"]
    found = {"traced": ran, "figures": json.loads(json.dumps(read(run())))}
    if mode == "write":
        keep(name, found, current, file)
    return found["figures"]


def nothing() -> None:
    """What the library has a part in, of a run that is made without it."""


@functools.cache
def code_of(source: str) -> str:
    """Returns the code of a source without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def _read(file: Path) -> dict[str, Any]:
    return _parsed(file.read_text()) if file.exists() else NOTHING


# What is kept is asked for a thousand times. Nobody changes what this returns.
_parsed = functools.lru_cache(maxsize=4)(json.loads)


def again() -> bool:
    """Whether all is to run again, whatever was kept."""
    return _mode() == "again"


def _mode() -> str:
    mode = os.environ.get("KEPT_FIGURES", "")
    assert mode in ("", "again", "write"), f"KEPT_FIGURES={mode}: again, or write"
    return mode


def keep(name: str, found: dict[str, Any], current: dict[str, str], file: Path) -> None:
    """Writes the figures of one program; those of other versions are dropped.

    Other processes write as well, one after the other, and read at any time.
    """
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        kept = _read(file)
        same = kept["versions"] == current
        programs = (kept["programs"] if same else {}) | {name: found}
        # One line for each program.
        lines = (
            f"{json.dumps(n)}: {json.dumps(programs[n])}" for n in sorted(programs)
        )
        text = ",\n".join(lines)
        fresh = file.with_suffix(".new")
        fresh.write_text(
            f'{{"versions": {json.dumps(current)}, "programs": {{\n{text}\n}}}}\n'
        )
        os.replace(fresh, file)
    finally:
        os.close(folder)
