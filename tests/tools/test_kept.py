"""Kept figures of compiled programs serve as long as nothing has moved."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import dry_run, h100, kept

X = jax.ShapeDtypeStruct((256, 512), jnp.float32)


class Keeper(NamedTuple):
    """Figures of a program, or of a training, by a number that is a part of it.

    Attributes:
      figure: a number -> its figure, which is kept.
      exact: a number -> what the figure is.
      ran: the numbers for which nothing was kept, in their order.
      file: where they are kept.
      version: the name of a package of whose version they are.
    """

    figure: Callable[[float], float]
    exact: Callable[[float], float]
    ran: list[float]
    file: Path
    version: str


def of_programs(file: Path) -> Keeper:
    ran = []

    def figure(scale: float) -> float:
        def program(x):
            return x.astype(jnp.bfloat16) if scale == 1 else x * scale

        def read(program):
            ran.append(scale)
            return {"casts": len(h100.pure_casts(program))}

        return kept.figures("it", program, X, read=read, file=file)["casts"]

    return Keeper(figure, lambda scale: int(scale == 1), ran, file, "jaxlib")


def of_trainings(file: Path) -> Keeper:
    ran = []

    def figure(rate: float) -> float:
        def train():
            w = jnp.ones(3)
            for _ in range(5):
                w = step_of(rate)(w)
            return w

        def read(w):
            ran.append(rate)
            return {"end": float(w[0])}

        return kept.training("it", train, read, [sys.modules[__name__]], file)["end"]

    def exact(rate: float) -> float:
        w = 1.0
        for _ in range(5):
            w -= rate * np.sin(w)
        return w

    return Keeper(figure, exact, ran, file, "optax")


KINDS = {"figures": of_programs, "training": of_trainings}


@pytest.fixture(params=[pytest.param("figures", marks=h100.needs_compiler), "training"])
def keeper(request, tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT_FIGURES", "write")
    return KINDS[request.param](tmp_path / "kept.json")


@pytest.fixture
def training(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT_FIGURES", "write")
    return of_trainings(tmp_path / "kept.json")


def test_it_runs_once_as_long_as_nothing_moves(keeper, monkeypatch):
    first = keeper.figure(1)
    np.testing.assert_allclose(first, keeper.exact(1), rtol=1e-6)
    monkeypatch.delenv("KEPT_FIGURES")
    assert keeper.figure(1) == first and keeper.ran == [1]


@pytest.mark.breadth(4)
@pytest.mark.parametrize("moved", ["program", "version", "flag", "source"])
def test_it_runs_again_where_something_moved(keeper, monkeypatch, moved):
    keeper.figure(1)
    monkeypatch.setenv("KEPT_FIGURES", "again" if moved == "flag" else "")
    if moved == "version":
        text = json.loads(keeper.file.read_text())
        text["versions"][keeper.version] = "0.1.0"
        keeper.file.write_text(json.dumps(text))
    if moved == "source":
        monkeypatch.setattr(kept.inspect, "getsource", lambda module: "x = 2")
    before = keeper.file.read_text()
    number = 2 if moved == "program" else 1
    np.testing.assert_allclose(keeper.figure(number), keeper.exact(number), rtol=1e-6)
    # A compiled program is known by what was traced.
    of_source = moved == "source" and keeper.version == "jaxlib"
    assert keeper.ran == ([1] if of_source else [1, number])
    assert keeper.file.read_text() == before


def test_what_was_kept_is_what_is_judged(keeper, monkeypatch):
    keeper.figure(1)
    monkeypatch.delenv("KEPT_FIGURES")
    found = json.loads(keeper.file.read_text())
    (name,) = found["programs"]["it"]["figures"]
    found["programs"]["it"]["figures"][name] = 7.0
    keeper.file.write_text(json.dumps(found))
    assert keeper.figure(1) == 7.0


@h100.needs_compiler
class TestFigures:
    def test_a_program_that_compiles_by_itself_is_known_as_it_is_lowered(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("KEPT_FIGURES", "write")
        read = []

        def found(scale, **options):
            lowered = jax.jit(lambda x: x * scale).lower(X)
            return kept.compiled_figures(
                "it",
                lambda: lowered.compile(compiler_options=options),
                lambda program: read.append(program) or {"read": len(read)},
                tmp_path / "figures.json",
            )

        scales = (1.0, 1.0, 2.0, 2.0)
        assert [found(scale)["read"] for scale in scales] == [1, 1, 2, 2]
        assert found(2.0, xla_backend_optimization_level=0)["read"] == 3

    def test_a_program_without_the_library_is_known_by_its_code(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("KEPT_FIGURES", "write")
        read = []

        def found(*code):
            return kept.figures(
                "it",
                lambda x: x * len(read),
                X,
                read=lambda program: read.append(program) or {"read": len(read)},
                file=tmp_path / "figures.json",
                made_by=code,
            )

        codes = ["x = 1", "x = 1  # one", "x = 2"]
        assert [found(code)["read"] for code in codes] == [1, 1, 2]

    def test_figures_of_another_version_are_not_kept_beside_new_ones(
        self, tmp_path, monkeypatch
    ):
        old = {"versions": {"jaxlib": "0.9.0"}, "programs": {"it": {}, "other": {}}}
        keeper = of_programs(tmp_path / "kept.json")
        keeper.file.write_text(json.dumps(old))
        monkeypatch.setenv("KEPT_FIGURES", "write")
        keeper.figure(1)
        found = json.loads(keeper.file.read_text())
        assert list(found["programs"]) == ["it"]
        assert found["versions"] == kept.versions()


def test_a_hash_tells_programs_apart_but_not_addresses():
    assert kept.digest("f at 0x7f00 x") == kept.digest("f at 0x1234 x")
    assert kept.digest("f32[2]") != kept.digest("f32[3]")


def jnp_full(value: int) -> jax.Array:
    return jnp.full(2, value)


def np_full(value: int) -> np.ndarray:
    return np.full(2, value)


@functools.cache
def step_of(rate: float):
    return jax.jit(lambda w: w - rate * jnp.sin(w), donate_argnums=0)


class TestTrainings:
    def test_code_of_the_library_counts_where_it_runs_beside_what_is_compiled(
        self, training, monkeypatch, tmp_path
    ):
        source = tmp_path / "weights.py"
        monkeypatch.setattr(kept, "_TRAINING", [source])
        for rate, code in ((0.5, "x = 1"), (0.5, "x = 1  # one"), (0.5, "x = 2")):
            source.write_text(code)
            training.figure(rate)
        assert training.ran == [0.5, 0.5]

    def test_errors_of_a_program_are_kept_in_whatever_json_holds(self, tmp_path):
        rows = []

        def read(found):
            rows.append(found)
            return [["value", float("inf")], ["gradient", float(found[0])]]

        def errors(scale, mode):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KEPT_FIGURES", mode)
                run = lambda: jax.jit(lambda x: x * scale)(jnp.ones(3))  # noqa: E731
                return kept.outcome("it", run, read, [], tmp_path / "errors.json")

        expected = [["value", np.inf], ["gradient", 2.0]]
        assert errors(2.0, "write") == errors(2.0, "") == expected
        assert len(rows) == 1
        assert errors(3.0, "") == [["value", np.inf], ["gradient", 3.0]]

    @pytest.mark.parametrize("has_part", [True, False])
    def test_what_the_library_has_no_part_in_is_known_by_its_code(
        self, tmp_path, monkeypatch, has_part
    ):
        monkeypatch.setenv("KEPT_FIGURES", "write")
        source, ran = tmp_path / "zoo.py", []

        def found(scale, code):
            source.write_text(code)
            of_library = lambda: jax.jit(lambda x: x * scale)(jnp.ones(3))  # noqa: E731
            return kept.outcome(
                "it",
                lambda: ran.append(scale),
                lambda _: len(ran),
                [],
                tmp_path / "errors.json",
                [source],
                of_library if has_part else kept.nothing,
            )

        runs = [(2.0, "x = 1"), (2.0, "x = 1"), (3.0, "x = 1"), (3.0, "x = 2")]
        assert [found(*each) for each in runs] == [1, 1, 1 + has_part, 2 + has_part]

    def test_prose_of_the_source_does_not_count(self, training, monkeypatch):
        def source(prose, code):
            text = (
                f'"""{prose}"""\n# {prose}\ndef f():\n    """{prose}"""\n    {code}\n'
            )
            monkeypatch.setattr(kept.inspect, "getsource", lambda module: text)

        source("One.", "return 1")
        training.figure(0.5)
        monkeypatch.delenv("KEPT_FIGURES")
        source("Another.", "return 1")
        training.figure(0.5)
        assert training.ran == [0.5]
        source("One.", "return 2")
        training.figure(0.5)
        assert training.ran == [0.5, 0.5]


class TestDryRun:
    def test_every_program_is_in_the_text_once_and_nothing_runs(self):
        ran = []

        def run():
            # Begun outside of the dry run, it would be real.
            ran.append(step_of(0.5)(jnp.ones(2)))
            ran.append(step_of(0.5)(ran[-1]))
            ran.append(jax.jit(jnp.cos)(ran[-1]))
            ran.append(jax.jit(lambda key: jax.random.split(key))(jax.random.key(1)))

        text = dry_run.programs_of(run, [sys.modules[__name__]])
        assert text.count(" sin ") == 1 and text.count(" cos ") == 1
        assert [np.asarray(x).tolist() for x in ran[:3]] == [[0.0, 0.0]] * 3
        assert jax.dtypes.issubdtype(ran[3].dtype, jax.dtypes.prng_key)
        assert float(step_of(0.5)(jnp.ones(2))[0]) != 0

    def test_what_was_jitted_in_it_runs_after_it(self):
        made = [step_of]

        def run():
            made[0] = jax.jit(jnp.cos)
            made[0](jnp.zeros(2))

        dry_run.programs_of(run, [])
        assert made[0](jnp.zeros(2)).tolist() == [1.0, 1.0]

    def test_options_and_types_make_other_programs(self):
        def text(dtype, **options):
            def run():
                jax.jit(lambda x: x + 1, **options)(jnp.ones(2, dtype))

            return dry_run.programs_of(run, [])

        plain = text(jnp.float32)
        assert plain == text(jnp.float32)
        assert (
            len({plain, text(jnp.bfloat16), text(jnp.float32, donate_argnums=0)}) == 3
        )

    @pytest.mark.breadth(2)
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("make", [jnp_full, np_full, jax.random.key])
    def test_arrays_that_a_program_closes_over_make_another(self, make, inside):
        def text(number):
            const = make(number)

            def fn(x):
                if make is jax.random.key:
                    return x + jax.random.uniform(const)
                return x + jnp.asarray(const, jnp.float32)[:2]

            def run():
                jax.jit(jax.jit(fn) if inside else fn)(jnp.ones(()))

            return dry_run.programs_of(run, [])

        assert text(3) == text(3) != text(4)

    @pytest.mark.parametrize("make", [jnp_full, np_full, jax.random.key])
    def test_arrays_that_a_program_is_called_with_first_make_another(self, make):
        def text(number):
            def run():
                jax.jit(lambda x: x)(make(number))

            return dry_run.programs_of(run, [])

        assert text(3) == text(3) != text(4)

    def test_what_is_jitted_inside_of_what_is_jitted_is_a_part_of_it(self):
        def outer(x):
            return jax.jit(jnp.sin)(x) * 2

        text = dry_run.programs_of(lambda: jax.jit(outer)(jnp.ones(2)), [])
        assert text.count(" sin ") == 1 and " mul " in text

    def test_a_training_that_compiles_nothing_is_refused(self):
        with pytest.raises(AssertionError, match="nothing was jitted"):
            dry_run.programs_of(lambda: None, [])
