"""The benchmark of loss scaling and weights on a CPU: it runs, and what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import weights_on_cpu

RESULTS = Path(weights_on_cpu.__file__).parent / "results" / "weights_on_cpu.json"


def committed() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


@pytest.mark.slow
def test_it_measures_every_candidate(tmp_path, capsys):
    file = tmp_path / "found.json"
    weights_on_cpu.main(["--quick", "--json", str(file)])
    found, kept = json.loads(file.read_text()), committed()
    assert found.keys() == kept.keys()
    assert found["updates"].keys() == kept["updates"].keys()
    (steps,) = found["steps"].values()
    printed = capsys.readouterr().out
    assert all(name in printed for name in [*steps, "temporary MB"])
    for row in [*steps.values(), *found["updates"].values()]:
        assert row["ms"] > 0
        assert row["ratio"] > 0
    for column in kept["steps"].values():
        assert column.keys() == steps.keys()
