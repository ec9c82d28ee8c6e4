"""The readers of compiled programs and the measures tell the truth."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import compare_precision
from jax import lax

from tests import h100, measures
from tests.zoo.hand_written import BRANCHING

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def aval(*shape: int, dtype=F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(x, w):
    return lax.dot(x, w)


def conv(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_compiler_is_there_where_it_is_required():
    if h100.compiler_is_required():
        assert h100.why_no_compiler() is None


@pytest.mark.parametrize(
    "missing, required, skips",
    [
        (None, True, False),
        (None, False, False),
        ("not installed", True, False),
        ("not installed", False, True),
    ],
)
def test_only_a_missing_compiler_that_nobody_requires_skips(missing, required, skips):
    assert h100.skips(missing, required) is skips


@h100.needs_compiler
class TestTraffic:
    def test_a_kernel_moves_its_operands_and_its_results(self):
        x = aval(1024, 1024, dtype=BF16)
        program = h100.compile_for_gpu(lambda x, y: jnp.tanh(x) * y, x, x)
        assert h100.traffic(program) == (1, 3 * 2 * 1024**2)

    def test_what_a_second_kernel_reads_counts_again(self):
        # The sum has to be known before anything is divided by it.
        x = aval(1024, 1024)
        program = h100.compile_for_gpu(lambda x: x / jnp.sum(x), x)
        kernels, moved = h100.traffic(program)
        assert kernels >= 2
        assert 3 * 4 * 1024**2 <= moved < 3.1 * 4 * 1024**2


@h100.needs_compiler
class TestGemms:
    @pytest.mark.parametrize(
        "dtype, name", [(F32, "f32"), (BF16, "bf16"), (F16, "f16")]
    )
    def test_gemm_has_the_dtype_of_its_operands(self, dtype, name):
        program = h100.compile_for_gpu(
            matmul, aval(256, 512, dtype=dtype), aval(512, 128, dtype=dtype)
        )
        (gemm,) = h100.gemms(program)
        assert gemm.target == "__cublas$lt$matmul"
        assert gemm.operands == (name, name)
        assert gemm.result == name
        assert "dot_general" in gemm.source

    def test_mixed_operands_make_a_float32_gemm(self):
        def mixed(x, w):
            return lax.dot(x, w, preferred_element_type=F32)

        program = h100.compile_for_gpu(
            mixed, aval(256, 512), aval(512, 128, dtype=BF16)
        )
        assert [g.operands for g in h100.gemms(program)] == [("f32", "f32")]
        assert [(c.dtypes, c.elements) for c in h100.pure_casts(program)] == [
            (("bf16->f32",), 512 * 128)
        ]

    def test_preferred_float32_result_of_half_operands_is_one_gemm(self):
        def preferred(x, w):
            return lax.dot(x, w, preferred_element_type=F32)

        program = h100.compile_for_gpu(
            preferred, aval(256, 512, dtype=BF16), aval(512, 128, dtype=BF16)
        )
        (gemm,) = h100.gemms(program)
        assert (gemm.operands, gemm.result) == (("bf16", "bf16"), "f32")
        assert h100.pure_casts(program) == []

    def test_backward_gemms_are_listed(self):
        def loss(x, w):
            return jnp.sum(matmul(x, w).astype(F32) ** 2)

        program = h100.compile_for_gpu(
            jax.grad(loss, argnums=(0, 1)),
            aval(256, 512, dtype=BF16),
            aval(512, 128, dtype=BF16),
        )
        assert [g.operands for g in h100.gemms(program)] == [("bf16", "bf16")] * 3

    def test_gemm_of_a_loop_body_is_listed_once(self):
        def loop(x, weights):
            return lax.scan(lambda x, w: (matmul(x, w), None), x, weights)[0]

        program = h100.compile_for_gpu(
            loop, aval(256, 512, dtype=BF16), aval(4, 512, 512, dtype=BF16)
        )
        assert [g.operands for g in h100.gemms(program)] == [("bf16", "bf16")]

    def test_program_without_products_has_no_gemm(self):
        program = h100.compile_for_gpu(lambda x: x * x, aval(256, 512))
        assert h100.gemms(program) == []
        assert h100.convolutions(program) == []


@pytest.mark.breadth(2)
@h100.needs_compiler
@pytest.mark.parametrize("dtype, name", [(F32, "f32"), (BF16, "bf16"), (F16, "f16")])
def test_convolution_has_its_kind_and_dtypes_forward_and_backward(dtype, name):
    def loss(x, kernel):
        return jnp.sum(jnp.sin(conv(x, kernel).astype(F32)))

    program = h100.compile_for_gpu(
        jax.grad(loss, argnums=(0, 1)),
        aval(8, 16, 16, 8, dtype=dtype),
        aval(3, 3, 8, 16, dtype=dtype),
    )
    found = h100.convolutions(program)
    assert {c.kind for c in found} == {"Forward", "BackwardInput", "BackwardFilter"}
    assert {c.operands for c in found} == {(name, name)}
    assert {c.result for c in found} == {name}
    assert len(found) == 3


@h100.needs_compiler
class TestPureCasts:
    def test_lone_cast_is_a_kernel(self):
        program = h100.compile_for_gpu(lambda x: x.astype(BF16), aval(256, 512))
        (cast,) = h100.pure_casts(program)
        assert cast.dtypes == ("f32->bf16",)
        assert cast.elements == 256 * 512

    @pytest.mark.breadth(2)
    @pytest.mark.parametrize(
        "fn, x",
        [
            (lambda x: (x * x).astype(BF16), aval(256, 512)),
            (lambda x: x.astype(F32).sum(), aval(256, 512, dtype=BF16)),
            (lambda x: x.astype(F32), aval(256, 512, dtype=jnp.int32)),
            (lambda x: x.T, aval(256, 512)),
        ],
        ids=["into the product", "into the sum", "of integers", "none at all"],
    )
    def test_cast_that_is_part_of_other_work_is_no_kernel(self, fn, x):
        assert h100.pure_casts(h100.compile_for_gpu(fn, x)) == []

    def test_weights_that_a_gemm_reads_in_half_are_cast_by_a_kernel(self):
        def layer(x, w):
            return matmul(x, w.astype(BF16))

        program = h100.compile_for_gpu(
            layer, aval(256, 512, dtype=BF16), aval(512, 128)
        )
        assert [c.elements for c in h100.pure_casts(program)] == [512 * 128]
        assert [g.operands for g in h100.gemms(program)] == [("bf16", "bf16")]


@h100.needs_compiler
class TestMemory:
    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_temp_bytes_are_the_intermediate_and_the_workspace(self, dtype):
        def two_layers(x, v, w):
            return matmul(matmul(x, v), w)

        x, v, w = (aval(2048, 2048, dtype=dtype) for _ in range(3))
        program = h100.compile_for_gpu(two_layers, x, v, w)
        hidden = 2048 * 2048 * jnp.dtype(dtype).itemsize
        expected = hidden + h100.CUBLAS_WORKSPACE_BYTES
        assert expected <= h100.temp_bytes(program) <= expected + 4096

    def test_donated_state_needs_no_second_buffer(self):
        program = h100.compile_for_gpu(
            lambda x, g: x - 0.1 * g,
            aval(1024, 1024),
            aval(1024, 1024),
            donate_argnums=0,
        )
        assert program.memory_analysis().alias_size_in_bytes == 4 * 1024 * 1024


@h100.needs_compiler
def test_arguments_may_be_arrays_keys_scalars_and_avals():
    def noisy(tree, x, scale, key):
        return tree["a"] + x * scale + jax.random.normal(key, x.shape)

    arguments = ({"a": np.ones(3, np.float32)}, aval(3), 2.0, jax.random.key(0))
    program = h100.compile_for_gpu(noisy, *arguments)
    assert program.memory_analysis().output_size_in_bytes == 3 * 4


class TestMeasures:
    def test_matmuls_are_found_in_every_nested_function(self):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w)

        def loss(w, x):
            x, _ = lax.scan(lambda x, _: (jax.jit(layer)(x, w), None), x, length=3)
            return lax.cond(x[0, 0] > 0, lambda: (x @ w).sum(), lambda: x.sum())

        found = measures.matmuls(loss, aval(4, 4, dtype=F16), aval(4, 4, dtype=F16))
        assert [m.operands for m in found] == [("float16", "float16")] * 2

    def test_saved_bytes_are_those_of_the_activations(self):
        def loss(params, batch):
            hidden = jnp.sin(batch @ params["v"])
            return jnp.sum(hidden.astype(BF16) @ params["w"].astype(BF16)).astype(
                F32
            ), 0

        params = {"v": aval(8, 16), "w": aval(16, 4)}
        # sin keeps its cosine, f32[32, 16]; the second product keeps both its
        # operands in bf16; the parameters and the batch are arguments.
        expected = 32 * 16 * 4 + 32 * 16 * 2 + 16 * 4 * 2
        assert measures.traced(loss, params, aval(32, 8)).saved_bytes == expected

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ["mlp", "cnn"])
    def test_float64_reference_drops_and_normalises_as_the_float32_model(self, model):
        case = BRANCHING[model]
        errors = compare_precision.gradient_errors(
            compare_precision.gradients(case, "float32", "f32", seeds=2)
        )
        for error in errors:
            assert jnp.finfo(F32).eps / 10 < error < 20 * jnp.finfo(F32).eps

    def test_relative_error_is_that_of_the_whole_tree(self):
        exact = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}
        wrong = {"a": np.array([3.0, 0.5]), "b": np.array([[4.0]], np.float32)}
        assert math.isclose(measures.relative_error(wrong, exact), 0.1)

    @pytest.mark.parametrize("dtype", measures.HALF)
    def test_gradient_rounds_where_the_program_does(self, dtype):
        half = jnp.dtype(dtype)

        def loss(params, far):
            # Half precision has no 0.5 that far from zero: `lost` is 0.
            lost = (params.astype(half) + far) - far
            return jnp.sum(lost**2).astype(F32), 0

        far = jnp.asarray([4 / float(jnp.finfo(half).eps)], half)
        assert measures.gradient(loss, dtype)(jnp.full((1,), 0.5), far) == 0.0

    def test_sign_test_counts_only_seeds_that_differ(self):
        equal = measures.compare([1.0] * 15, [1.0] * 15)
        assert (equal.ratio, equal.p_worse) == (1.0, 1.0)
        worse = measures.compare([1.1] * 10 + [1.0] * 5, [1.0] * 15)
        assert (worse.worse, worse.better, worse.p_worse) == (10, 0, 2**-10)
        better = measures.compare([0.9] * 15, [1.0] * 15)
        assert (better.ratio, better.p_worse) == (0.9, 1.0)
