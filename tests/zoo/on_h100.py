"""What an H100 would run in a training step of a case: figures that are kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
from benchmarks import compare_precision

from tests import kept
from tests.zoo.case import Case


def counted_figures(program: Any) -> dict[str, Any]:
    """Returns the figures of a compiled step, each kind of product once."""
    found = compare_precision.compiled_figures(program)
    counts = Counter(p._replace(source="") for p in found["products"])
    return found | {"products": sorted([*p[:3], n] for p, n in counts.items())}


def kept_figures(name: str, case: Case, dtype: str, program: str) -> dict[str, Any]:
    """Returns `compare_precision.compiled_figures` of a program, without sources."""
    loss = compare_precision.program_loss(case, dtype, program)
    found = kept.figures(
        f"{name} {dtype} {program}",
        compare_precision.training_step(loss),
        *case.abstract(),
        read=counted_figures,
        donate_argnums=0,
    )
    products = [
        compare_precision.Product(kind, tuple(operands), tuple(elements), "")
        for kind, operands, elements, count in found["products"]
        for _ in range(count)
    ]
    return found | {"products": products}


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
