"""Every model of the zoo: its hand-written twin is honest, and autocast is no worse.

`python examples/benchmarks/compare_precision.py` prints the figures behind this.

A gradient's error depends on the seed: both programs are measured against f64 on the
same seeds, and "no worse" is the one-sided sign test on the seeds where they differ:
the median of the errors' ratio is taken to be at most 1 unless so many seeds were worse
that equal programs would show it less than once in a hundred times. Equal programs of
the smooth hand-written models have a median ratio within 3 % of 1 (99 % of draws of 15
seeds, found by comparing the twin with itself at nudged parameters): there more than
that fails too. A rounding that flips a ReLU moves single seeds by much more.
"""

from __future__ import annotations

import doctest
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import compare_precision

from tests import h100, measures, zoo
from tests.zoo import as_traced, language
from tests.zoo.as_traced import Traced
from tests.zoo.hand_written import BRANCHING
from tests.zoo.on_h100 import figures_on_h100

SIGNIFICANCE = 0.01
SMOOTH_MARGIN = 1.03

# Matrix products that the twin's author computes in f32, forward and backward.
DELIBERATELY_FLOAT32 = {"moe": 6}

# A rounding that sends a token to another expert moves the gradient at once.
DISCRETE = ("moe",)

each_model = pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.xdist_group(m)) for m in zoo.MODELS]
)
# Autocast around the whole loss, and around the forward pass alone where a model tells
# the two apart: those are all in half precision by hand.
WRAPPED = tuple(m for m in zoo.MODELS if zoo.CASES[m, "large"].wrapped)
WHOLE = [m for m in zoo.MODELS if m not in compare_precision.AS_TRACED]
# The benchmark has all models in f16 too; nothing in a plan depends on which half it is
# but what constants fit.
IN_F16_TOO = ("mlp", "transformer", "gpt_scan", "lstm", "moe", "resnet")


# Their layers are those of a model that is traced by default, in fewer equations.
LIKE_OTHERS = ("clip", "encoder_decoder", "gpt", "resnet", "unet", "vit")


def marks_of(model: str, dtype: str) -> list[pytest.MarkDecorator]:
    by_default = model == "moe" if dtype == "float16" else model not in LIKE_OTHERS
    return [pytest.mark.xdist_group(model), *[pytest.mark.slow] * (not by_default)]


def each_program(models: Sequence[str], dtypes: Sequence[str]) -> pytest.MarkDecorator:
    """One process for a model (`--dist loadgroup`): its programs are made once."""
    return pytest.mark.parametrize(
        ("model", "program", "dtype"),
        [
            pytest.param(*(model, program, dtype), marks=marks_of(model, dtype))
            for model in models
            for program in ("autocast", "forward")[: 1 + (model in WRAPPED)]
            for dtype in dtypes
            if dtype == "bfloat16" or model in (*IN_F16_TOO, *WRAPPED)
        ],
    )


# What compiles longest is compared with f64 below, and here only in the slow tests.
# Neither are models that are much like another.
SLOW = ("gpt", "custom_rules_unmarked")
LONG = (
    *("clip", "cnn", "encoder_decoder", "mamba", "moe", "resnet", "unet", "vae"),
    "vit",
)

each_half = pytest.mark.parametrize("dtype", measures.HALF)


def traced(model: str, dtype: str, program: str) -> Traced:
    case = zoo.CASES[model, "large"]
    return as_traced.traced(case, dtype, program)


@functools.cache
def on_h100(model: str, dtype: str, program: str) -> dict[str, Any]:
    return figures_on_h100(zoo.CASES[model, "large"], dtype, program)


def loss_and_gradient(model: str, dtype: str, program: str) -> tuple[Any, Any]:
    """Returns those of the first sample; f16 with a loss scale."""
    case = zoo.CASES[model, "small"]
    params, batch = jax.jit(case.sample)(jax.random.key(0))
    loss = compare_precision.program_loss(case, dtype, program)
    scale = measures.LOSS_SCALE[dtype]

    def unscaled(params: Any, batch: Any) -> Any:
        scaled = lambda params: loss(params, batch) * scale  # noqa: E731
        found = jax.value_and_grad(scaled)(params)
        return jax.tree.map(lambda x: x / scale, found)

    return jax.jit(unscaled, compiler_options=measures.EXACTLY_AS_WRITTEN)(
        params, batch
    )


def test_sizes_of_every_model_are_the_same_program():
    assert set(zoo.CASES) == {(m, s) for m in zoo.MODELS for s in ("small", "large")}


@pytest.mark.breadth(2)
@each_model
def test_twin_multiplies_in_half_precision_whatever_it_does_not_mean_to_do_in_float32(
    model,
):
    found = traced(model, "bfloat16", "twin").products
    wide = [p for p in found if not p.in_half]
    assert {p.operands for p in wide} <= {("float32", "float32")}
    assert len(wide) == DELIBERATELY_FLOAT32.get(model, 0), list(map(str, wide))
    assert len(found) == len(traced(model, "float32", "f32").products)


@pytest.mark.breadth(3)
@each_model
@pytest.mark.parametrize("program", ["twin", "autocast"])
def test_half_precision_program_has_the_signature_of_the_float32_program(
    model, program
):
    params, _ = zoo.CASES[model, "large"].abstract()
    found = traced(model, "bfloat16", program)
    assert found.value == "float32()"
    assert list(map(list, found.gradient)) == as_traced.types_of(params)


@pytest.mark.nightly
@pytest.mark.parametrize("model", [m for m in zoo.MODELS if m not in LONG])
def test_float32_program_is_computed_in_float64_where_its_parameters_are_float64(model):
    case = zoo.CASES[model, "small"]
    ((found, wide),) = compare_precision.gradients(case, "float32", "f32", seeds=1)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(wide)} == {"float64"}
    error = measures.relative_error(found, wide)
    # Not zero: the f64 run would have been in f32 somewhere that matters.
    assert 0 < error < 64 * jnp.finfo(jnp.float32).eps


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(m, marks=[pytest.mark.slow] * (m in LONG + SLOW))
        for m in zoo.MODELS
    ],
)
def test_half_precision_gradient_is_that_of_the_float32_program(model):
    value, gradient = loss_and_gradient(model, "bfloat16", "autocast")
    expected_value, expected = loss_and_gradient(model, "float32", "f32")
    eps = float(jnp.finfo("bfloat16").eps)
    np.testing.assert_allclose(value, expected_value, rtol=2 * eps)
    assert (
        measures.relative_error(gradient, expected)
        < (32 if model in DISCRETE else 8) * eps
    )


@pytest.mark.breadth(3)
@each_program(zoo.MODELS, measures.HALF)
def test_every_product_that_is_half_by_hand_is_half_under_autocast(
    model, program, dtype
):
    ours = traced(model, dtype, program).products
    by_hand = traced(model, dtype, "twin").products
    missing = compare_precision.missing_products(ours, by_hand)
    assert not missing, list(map(str, missing))
    assert sum(p.in_half for p in ours) >= sum(p.in_half for p in by_hand)
    if model in WRAPPED:
        assert {p.operands for p in ours} == {(dtype, dtype)}
        assert Counter(p.kind for p in ours) == Counter(p.kind for p in by_hand)


@each_program(WHOLE, measures.HALF)
def test_no_more_is_saved_for_the_backward_pass_than_by_hand(model, program, dtype):
    ours, by_hand = (traced(model, dtype, p).saved_bytes for p in (program, "twin"))
    assert ours <= by_hand


@pytest.mark.xdist_group("unet")
def test_a_unet_saves_as_much_in_f16_as_in_bf16():
    # Its streams join f32 values, which are of half ones and so in range.
    case = zoo.CASES["unet", "small"]
    saved = (
        as_traced.traced(case, dtype, "autocast").saved_bytes for dtype in measures.HALF
    )
    assert len(set(saved)) == 1


@pytest.mark.nightly
@each_program(WHOLE, ["bfloat16"])
class TestOnH100:
    def test_every_product_that_is_half_by_hand_is_half_under_autocast(
        self, model, program, dtype
    ):
        ours, by_hand = (on_h100(model, dtype, p) for p in (program, "twin"))
        missing = compare_precision.missing_products(
            ours["products"], by_hand["products"]
        )
        assert not missing, list(map(str, missing))
        if model in WRAPPED:
            assert all(p.in_half for p in ours["products"])
            # XLA merges products that share an operand, so that there may be fewer.
            assert len(ours["products"]) <= len(by_hand["products"])

    def test_step_needs_no_more_memory_than_by_hand_and_less_than_float32(
        self, model, program, dtype
    ):
        ours = on_h100(model, dtype, program)["temp"]
        limit = on_h100(model, dtype, "twin")["temp"]
        assert round(ours / limit, 2) <= 1.00
        assert ours < on_h100(model, "float32", "f32")["temp"]

    def test_kernels_that_only_cast_are_as_few_as_by_hand(self, model, program, dtype):
        ours, by_hand = (on_h100(model, dtype, p) for p in (program, "twin"))
        sums = sums_by_hand_in_half(model)
        assert ours["casts"] <= by_hand["casts"] + 2 + len(sums)
        assert ours["cast_elements"] <= by_hand["cast_elements"] + sum(sums)


def sums_by_hand_in_half(model: str) -> list[int]:
    """The sizes of the sums of cotangents that a product reads.

    In each block of a U-Net all pixels read an embedding of the time. By hand its
    gradient is added up in half. XLA rounds the sum in f32 in a kernel of its own.
    """
    if model != "unet":
        return []
    params, batch = zoo.CASES[model, "large"].abstract()
    blocks = [block for name, block in params.items() if name.startswith("UNetBlock")]
    return [batch["time"].size * block["Dense_0"]["bias"].size for block in blocks]


@functools.cache
def errors(name: str, case: zoo.Case, dtype: str, program: str) -> list[float]:
    gradients = compare_precision.gradients(case, dtype, program, seeds=15)
    return compare_precision.gradient_errors(gradients)


def compared(
    name: str, case: zoo.Case, dtype: str, program: str
) -> measures.Comparison:
    """Returns how a program compares with the twin, if it is no worse."""
    ours = errors(name, case, dtype, program)
    assert np.isfinite(ours).all()
    found = measures.compare(ours, errors(name, case, dtype, "twin"))
    assert found.p_worse > SIGNIFICANCE, found
    return found


@pytest.mark.nightly
@each_program(zoo.MODELS, measures.HALF)
def test_gradient_is_as_close_to_float64_as_by_hand(model, program, dtype):
    name, case = f"zoo {model}", zoo.CASES[model, "small"]
    found = compared(name, case, dtype, program)
    for each in (program, "twin"):
        most = (32 if model in DISCRETE else 8) * float(jnp.finfo(dtype).eps)
        assert errors(name, case, dtype, each)[0] < most
    if program == "forward":
        assert found.ratio <= SMOOTH_MARGIN, found


@pytest.mark.nightly
@each_half
@pytest.mark.parametrize("model", BRANCHING)
def test_gradient_is_as_close_to_float64_as_by_hand_where_a_rounding_flips_branches(
    model, dtype
):
    compared(f"branching {model}", BRANCHING[model], dtype, "forward")


class TestDecoding:
    """One token through LLaMA, with a cache of keys and values."""

    @pytest.mark.breadth(1)
    @each_half
    def test_every_product_is_half_precision_by_hand_and_under_autocast(self, dtype):
        params, _, token, position = language.decode_sample(jax.random.key(0))
        for cache_dtype in (jnp.float32, dtype):
            cache = language.decode_sample(jax.random.key(0), cache_dtype)[1]
            decode = compare_precision.amp.autocast(language.decode, f"mixed_{dtype}")
            found = measures.matmuls(decode, params, cache, token, position)
            assert {m.operands for m in found} == {(dtype, dtype)}
        found = measures.matmuls(
            language.decode_twin(dtype), params, cache, token, position
        )
        assert {m.operands for m in found} == {(dtype, dtype)}

    @each_half
    def test_logits_are_float32_and_the_cache_keeps_its_dtype(self, dtype):
        arguments = language.decode_sample(jax.random.key(0), dtype)
        decode = compare_precision.amp.autocast(language.decode, f"mixed_{dtype}")
        for program in (language.decode_twin(dtype), decode):
            logits, cache = jax.eval_shape(program, *arguments)
            assert logits.dtype == jnp.float32
            assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} == {dtype}

    @pytest.mark.breadth(1)
    @each_half
    @pytest.mark.parametrize(
        "program", [pytest.param("twin", marks=pytest.mark.slow), "autocast"]
    )
    def test_logits_are_those_of_the_float32_program(self, dtype, program):
        arguments = language.decode_sample(jax.random.key(0), dtype)
        # The f32 program reads the same half precision cache, widened.
        params, cache, token, position = arguments
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), cache)
        expected, _ = jax.jit(language.decode)(params, wide, token, position)
        decode = {
            "twin": language.decode_twin(dtype),
            "autocast": compare_precision.amp.autocast(
                language.decode, f"mixed_{dtype}"
            ),
        }[program]
        compiled = jax.jit(decode, compiler_options=measures.EXACTLY_AS_WRITTEN)
        logits, new_cache = compiled(*arguments)
        assert measures.relative_error(logits, expected) < 4 * jnp.finfo(dtype).eps
        for new, old in zip(
            jax.tree.leaves(new_cache), jax.tree.leaves(cache), strict=True
        ):
            written = np.asarray(new != old).any(axis=(0, 2, 3))
            assert list(np.flatnonzero(written)) == [position]

    @pytest.mark.slow
    def test_decoding_token_by_token_is_the_whole_sequence_at_once(self):
        """The decode step is checked against the training program's own logits."""
        params, cache, _, _ = language.decode_sample(jax.random.key(1), positions=6)
        cache = jax.tree.map(jnp.zeros_like, cache)
        tokens = language.random_tokens(jax.random.key(2), 64, 4, 6)
        losses, decode = [], jax.jit(language.decode)
        for position in range(6):
            logits, cache = decode(
                params, cache, tokens[:, position], jnp.int32(position)
            )
            target = tokens[:, (position + 1) % 6]
            chosen = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
            losses.append(jax.nn.logsumexp(logits, axis=-1) - chosen)
        whole = jax.jit(language.llama(64, 32, 4, 2, 2, 4, 6).loss)(params, tokens)
        np.testing.assert_allclose(
            jnp.mean(jnp.stack(losses)), whole, rtol=32 * jnp.finfo(jnp.float32).eps
        )


def test_examples_of_the_comparison_tool_run():
    assert doctest.testmod(compare_precision).failed == 0


class TestCompiledProducts:
    """The tool reads products of an H100's program as `tests/h100.py` does."""

    @pytest.mark.slow
    @h100.needs_compiler
    def test_products_are_the_gemms_and_convolutions_of_the_program(self):
        case = zoo.CASES["cnn", "large"]
        step = compare_precision.training_step(case.twin("bfloat16"))
        program = h100.compile_for_gpu(step, *case.abstract(), donate_argnums=0)
        found = compare_precision.compiled_products(program.as_text())
        expected = [*h100.gemms(program), *h100.convolutions(program)]
        assert sorted(p.operands for p in found) == sorted(e.operands for e in expected)
