"""The benchmark of tracing."""

import json

import jax
import pytest
from benchmarks import trace_costs


@pytest.mark.slow
def test_every_program_is_traced_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_costs, "LEAVES", 2)
    path = tmp_path / "found.json"
    # Flax's norms with dtype= mix dtypes, which strict JAX refuses.
    with jax.numpy_dtype_promotion("standard"):
        assert trace_costs.main(["--layers", "2", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["seconds"]
    assert list(found) == ["gradient 1", "gradient 2", "model 12", "update 2"]
    assert list(found["gradient 2"]) == ["f32", "all", "auto"]
    assert all(s > 0 for row in found.values() for s in row.values())


def test_the_table_compares_layer_by_layer():
    rows = {"gradient 1": {"f32": 1.0}, "gradient 4": {"f32": 5.0}}
    made = trace_costs.table(rows, [1, 4])
    assert list(made.columns[3].cells) == ["1.00x", "1.25x"]


def test_a_depth_below_one_is_refused():
    with pytest.raises(SystemExit) as error:
        trace_costs.main(["--layers", "0"])
    assert error.value.code == 2
