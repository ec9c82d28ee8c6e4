"""Kept figures of compiled programs serve as long as nothing has moved."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from tests import h100, kept

X = jax.ShapeDtypeStruct((256, 512), jnp.float32)


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """Returns a function (scale) -> figures, with how many programs it has read."""
    monkeypatch.delenv("H100_FIGURES", raising=False)
    read = []

    def figures(scale: int) -> dict:
        def of(program):
            read.append(program)
            return {"casts": len(h100.pure_casts(program)), "read": len(read)}

        def program(x):
            return x.astype(jnp.bfloat16) if scale == 1 else x * float(scale)

        return kept.figures("it", program, X, read=of, file=figures.file)

    figures.read = read
    figures.file = tmp_path / "figures.json"
    return figures


@h100.needs_compiler
class TestFigures:
    def test_a_program_is_compiled_once_as_long_as_nothing_moves(
        self, figures, monkeypatch
    ):
        monkeypatch.setenv("H100_FIGURES", "write")
        assert figures(1) == {"casts": 1, "read": 1}
        monkeypatch.delenv("H100_FIGURES")
        assert figures(1) == {"casts": 1, "read": 1}
        assert len(figures.read) == 1

    @pytest.mark.parametrize("moved", ["program", "version", "flag"])
    def test_it_is_compiled_again_where_something_moved(
        self, figures, monkeypatch, moved
    ):
        monkeypatch.setenv("H100_FIGURES", "write")
        figures(1)
        monkeypatch.setenv("H100_FIGURES", "again" if moved == "flag" else "")
        if moved == "version":
            text = json.loads(figures.file.read_text())
            text["versions"]["jaxlib"] = "0.9.0"
            figures.file.write_text(json.dumps(text))
        before = figures.file.read_text()
        scale = 2 if moved == "program" else 1
        assert figures(scale) == {"casts": int(scale == 1), "read": 2}
        assert figures.file.read_text() == before

    def test_figures_of_another_version_are_not_kept_beside_new_ones(
        self, figures, monkeypatch
    ):
        old = {"versions": {"jaxlib": "0.9.0"}, "programs": {"it": {}, "other": {}}}
        figures.file.write_text(json.dumps(old))
        monkeypatch.setenv("H100_FIGURES", "write")
        figures(1)
        found = json.loads(figures.file.read_text())
        assert list(found["programs"]) == ["it"]
        assert found["versions"] == kept.versions()

    def test_what_was_kept_is_what_is_judged(self, figures, monkeypatch):
        monkeypatch.setenv("H100_FIGURES", "write")
        figures(1)
        monkeypatch.delenv("H100_FIGURES")
        found = json.loads(figures.file.read_text())
        found["programs"]["it"]["figures"]["casts"] = 7
        figures.file.write_text(json.dumps(found))
        assert figures(1)["casts"] == 7


def test_a_hash_tells_programs_apart_but_not_addresses():
    assert kept.digest("f at 0x7f00 x") == kept.digest("f at 0x1234 x")
    assert kept.digest("f32[2]") != kept.digest("f32[3]")
