"""Models of other libraries: Equinox, Haiku and Keras, whose layers are named scopes.

The last cell of `notebooks/03_coming_from.ipynb` has the code. The libraries are in no
extra: without one its test is skipped, and the test of a named scope is what is left.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jmp_amp as amp

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "03_coming_from.ipynb"
LIBRARIES = ("equinox", "haiku", "keras")


def code_of(library: str) -> str:
    """The block of the notebook that imports a library."""
    cell = json.loads(NOTEBOOK.read_text())["cells"][-1]
    blocks = re.findall(r"```python\n(.*?)```", "".join(cell["source"]), re.DOTALL)
    (code,) = [block for block in blocks if f"import {library}" in block]
    return code


def products(fn: Any, policy: Any, *args: Any) -> list[tuple[str, str]]:
    rows = amp.explain(fn, policy)(*args).equations
    return [(row.module.rpartition("/")[2], row.dtype) for row in rows if row.matmuls]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_layer_by_its_name_is_f32_and_explain_lists_the_layers(library, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip(library)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "amp": amp}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(code_of(library), names)
        found = products(names["fn"], names["policy"], *names["args"])
    assert [dtype for _, dtype in found] == ["bf16", "f32"]
    assert names["outputs"].dtype == jnp.float32
    layers = ["eqx.nn.Linear"] * 2 if library == "equinox" else ["body", "head"]
    assert [layer for layer, _ in found] == layers


def test_a_named_scope_is_listed_and_a_marked_function_in_it_is_f32():
    def layer(x, w, name):
        with jax.named_scope(name):
            return x @ w

    head = amp.full_precision(layer)
    x = jnp.ones((4, 4))
    fn = lambda x, w: head(jax.nn.relu(layer(x, w, "body")), w, "head")  # noqa: E731
    assert products(fn, "mixed_bfloat16", x, x) == [("body", "bf16"), ("head", "f32")]
