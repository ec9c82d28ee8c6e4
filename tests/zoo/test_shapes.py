"""The models of the zoo in other shapes: bounds of memory hold for each of them.

The gradients' errors do not depend on the shape, and are measured in `test_zoo.py`.
What is compiled for an H100 is kept, see `tests/kept.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from benchmarks import compare_precision

from tests import h100, measures, zoo
from tests.zoo import as_traced
from tests.zoo.as_traced import Traced
from tests.zoo.on_h100 import bytes_of_digits, figures_on_h100
from tests.zoo.shapes import unbatched

# Autocast around the whole loss, and inside of the map that adds the axis of examples:
# there no parameter is broadcast to it.
PROGRAMS = [
    (model, shape, program)
    for model, shape in zoo.SHAPES
    for program in ("autocast", "forward")
    if program == "autocast" or shape == "unbatched"
]
# One shape a model is traced by default, of those that are traced fast.
TRACED_BY_DEFAULT = {
    *(("cnn", "small batch"), ("encoder_decoder", "long"), ("gcn", "many edges")),
    *(("llama", "unbatched"), ("lstm", "wide"), ("mamba", "states"), ("moe", "wide")),
    *(("transformer", "long"), ("vae", "small")),
}

# Layers begin with rows of a table, which an argument holds: they are looked up in f32,
# and their gradients are added up in f32.
EMBEDDED_IN_F32 = {
    ("llama", "unbatched", "autocast"),
    ("llama", "unbatched", "forward"),
    ("transformer", "unbatched", "forward"),
}

each_program = pytest.mark.parametrize(
    ("model", "shape", "program"),
    [
        pytest.param(
            *(model, shape, program),
            marks=[
                pytest.mark.xdist_group(model),
                *([pytest.mark.slow] * ((model, shape) not in TRACED_BY_DEFAULT)),
            ],
        )
        for model, shape, program in PROGRAMS
    ],
)


def traced(model: str, shape: str, program: str) -> Traced:
    return as_traced.traced(zoo.SHAPES[model, shape], "bfloat16", program)


def test_every_model_has_three_shapes():
    shapes = {m: [s for n, s in zoo.SHAPES if n == m] for m in zoo.MODELS}
    as_traced = {m: [] for m in compare_precision.AS_TRACED}
    assert {m: found for m, found in shapes.items() if len(found) < 2} == as_traced


@pytest.mark.breadth(2)
@each_program
def test_products_are_half_and_no_more_is_saved_than_by_hand(model, shape, program):
    ours, by_hand = traced(model, shape, program), traced(model, shape, "twin")
    missing = compare_precision.missing_products(ours.products, by_hand.products)
    assert not missing, list(map(str, missing))
    in_half = [sum(p.in_half for p in each.products) for each in (ours, by_hand)]
    assert in_half[0] >= in_half[1]
    assert ours.saved_bytes <= by_hand.saved_bytes


@pytest.mark.nightly
@h100.needs_compiler
@pytest.mark.parametrize(("model", "shape", "program"), PROGRAMS)
def test_a_step_on_an_h100_needs_no_more_memory_than_by_hand(model, shape, program):
    def figures(program: str) -> dict[str, Any]:
        return figures_on_h100(zoo.SHAPES[model, shape], "bfloat16", program)

    ours, by_hand = figures(program), figures("twin")
    missing = compare_precision.missing_products(ours["products"], by_hand["products"])
    assert not missing, list(map(str, missing))
    limit = by_hand["temp"]
    if (model, shape, program) in EMBEDDED_IN_F32:
        assert round(ours["temp"] / limit, 2) > 1.00, "it need not be in the list"
        limit += bytes_of_digits(zoo.SHAPES[model, shape])
    assert round(ours["temp"] / limit, 2) <= 1.00


@pytest.mark.slow
def test_an_unbatched_case_is_the_mean_of_its_examples():
    case = zoo.CASES["mlp", "small"]
    mapped = unbatched(case, 3)
    params, batches = jax.jit(mapped.sample)(jax.random.key(0))
    loss_of = jax.jit(case.loss)
    each = [
        loss_of(params, jax.tree.map(lambda leaf, i=i: leaf[i], batches))
        for i in range(3)
    ]
    assert len(set(map(float, each))) == 3
    eps = float(jnp.finfo(jnp.float32).eps)
    for loss in (mapped.loss, mapped.wrapped(lambda loss: loss)):
        found = jax.jit(loss)(params, batches)
        error = measures.relative_error(found, sum(each) / 3)
        assert error < 8 * eps
