"""What an H100 would run in a training step of a case."""

from __future__ import annotations

from typing import Any

import jax
from benchmarks import compare_precision

from tests import h100
from tests.zoo.case import Case


def figures_on_h100(case: Case, dtype: str, program: str) -> dict[str, Any]:
    """Returns `compare_precision.compiled_figures` of a training step of a program."""
    step = compare_precision.training_step(
        compare_precision.program_loss(case, dtype, program)
    )
    read = compare_precision.compiled_figures
    return h100.figures(step, *case.abstract(), read=read, donate_argnums=0)


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
