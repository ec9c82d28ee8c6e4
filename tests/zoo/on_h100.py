"""What an H100 would run in a training step of a case: figures that are kept."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import jax
from benchmarks import compare_precision

from tests import kept, zoo
from tests.zoo.as_traced import counted, each_of
from tests.zoo.case import Case


def counted_figures(program: Any) -> dict[str, Any]:
    """Returns the figures of a compiled step, each kind of product once."""
    found = compare_precision.compiled_figures(program)
    return found | {"products": counted(found["products"])}


def kept_figures(name: str, case: Case, dtype: str, program: str) -> dict[str, Any]:
    """Returns `compare_precision.compiled_figures` of a program, without sources."""
    loss = compare_precision.program_loss(case, dtype, program)
    made_by: list[str] = []
    if name.startswith("zoo ") and zoo.is_by_hand(name, program):
        made_by += map(Path.read_text, zoo.SOURCES)
        made_by += map(inspect.getsource, _MAKERS)
    found = kept.figures(
        f"{name} {dtype} {program}",
        compare_precision.training_step(loss),
        *case.abstract(),
        read=counted_figures,
        made_by=made_by,
        donate_argnums=0,
    )
    return found | {"products": each_of(found["products"])}


_MAKERS = (compare_precision.program_loss, compare_precision.training_step)


def bytes_of_digits(case: Case) -> int:
    """Returns what an embedding and its rows need in f32 beyond half."""
    params, batch = case.abstract()
    (table,) = (
        leaf
        for path, leaf in jax.tree.leaves_with_path(params)
        if "embedding" in str(path[-1])
    )
    tokens = jax.tree.leaves(batch)[-1]
    return 2 * (table.size + tokens.size * table.shape[1])
