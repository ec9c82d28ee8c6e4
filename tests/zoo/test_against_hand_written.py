"""Autocast against mixed precision written by hand with Flax's `dtype=`.

The model, its parameters, the batch and the optimizer are the same; autocast gets the
f32 model unchanged, around the whole loss or around the forward pass alone.

A gradient's error depends on the seed: both programs are measured against f64 on the
same seeds, and "no worse" is the one-sided sign test on the seeds where they differ:
the median of the errors' ratio is taken to be at most 1 unless so many seeds were worse
that equal programs would show it less than once in a hundred times. Where the models
are smooth, equal programs have a median ratio within 3 % of 1 (99 % of draws of 15
seeds, found by comparing the twin with itself at nudged parameters), so that more than
that fails too. A rounding that flips a ReLU moves single seeds by much more.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest

from tests import h100, measures, twins

SEEDS = 15
SIGNIFICANCE = 0.01
SMOOTH_MARGIN = 1.03

# One process for a model (`--dist loadgroup`): its programs are compiled once.
each_model = pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.xdist_group(m)) for m in twins.MODELS],
)
each_half = pytest.mark.parametrize("dtype", measures.HALF)
each_way = pytest.mark.parametrize("program", twins.AUTOCAST)
# Around the whole loss it is compiled and measured with the zoo.
forward_alone = pytest.mark.parametrize("program", [twins.AUTOCAST[-1]])


@functools.cache
def traced(model: str, dtype: str, program: str):
    case = twins.CASES[model, "large"]
    return twins.traced(case, twins.program_loss(case, dtype, program))


@functools.cache
def compiled(model: str, dtype: str, program: str) -> twins.Compiled:
    case = twins.CASES[model, "large"]
    return twins.compiled(case, twins.program_loss(case, dtype, program))


@functools.cache
def errors(model: str, size: str, dtype: str, program: str) -> list[float]:
    loss = twins.program_loss(twins.CASES[model, size], dtype, program)
    return twins.gradient_errors(loss, dtype, model, size, SEEDS)


@each_model
@each_half
@each_way
def test_every_matmul_runs_in_half_precision_forward_and_backward(
    model, dtype, program
):
    matmuls, _ = traced(model, dtype, program)
    by_hand, _ = traced(model, dtype, "twin")
    assert Counter((m.primitive, m.operands) for m in matmuls) == Counter(
        (m.primitive, m.operands) for m in by_hand
    )


@each_model
@each_half
@each_way
def test_no_more_is_saved_for_the_backward_pass_than_by_hand(model, dtype, program):
    _, saved = traced(model, dtype, program)
    _, by_hand = traced(model, dtype, "twin")
    assert saved <= 1.05 * by_hand


@pytest.mark.slow
@h100.needs_compiler
@each_model
@each_half
@forward_alone
class TestOnH100:
    def test_every_gemm_and_convolution_is_in_half_precision(
        self, model, dtype, program
    ):
        ours = compiled(model, dtype, program)
        by_hand = compiled(model, dtype, "twin")
        half = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        assert {g.operands for g in ours.gemms} == {(half, half)}
        assert Counter((c.kind, c.operands) for c in ours.convolutions) == Counter(
            (c.kind, c.operands) for c in by_hand.convolutions
        )
        # XLA merges products that share an operand, so that there may be fewer.
        assert len(ours.gemms) <= len(by_hand.gemms)

    def test_step_needs_no_more_memory_than_by_hand_and_less_than_float32(
        self, model, dtype, program
    ):
        ours = compiled(model, dtype, program).temp_bytes
        assert ours <= 1.05 * compiled(model, dtype, "twin").temp_bytes
        assert ours < compiled(model, "float32", "f32").temp_bytes

    def test_kernels_that_only_cast_are_as_few_as_by_hand(self, model, dtype, program):
        ours = compiled(model, dtype, program).pure_casts
        by_hand = compiled(model, dtype, "twin").pure_casts
        assert len(ours) <= len(by_hand) + 2
        assert sum(c.elements for c in ours) <= sum(c.elements for c in by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("model, size", twins.RUN)
@each_half
@forward_alone
def test_gradient_is_as_close_to_float64_as_by_hand(model, size, dtype, program):
    ours = errors(model, size, dtype, program)
    by_hand = errors(model, size, dtype, "twin")
    found = measures.compare(ours, by_hand)
    assert np.isfinite(ours).all()
    assert found.p_worse > SIGNIFICANCE, found
    if size == "smooth":
        assert found.ratio <= SMOOTH_MARGIN, found
