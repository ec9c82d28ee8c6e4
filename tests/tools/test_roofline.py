"""The modelled time of a program is that of its products, bytes and launches."""

import dataclasses
import doctest
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import compare_precision
from jax import lax

from examples.benchmarks import hlo_text, roofline
from tests import h100

BF16, F32, F8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
FILE = Path(roofline.__file__).parent / "results" / "roofline_h100.json"
H100 = roofline.H100


def aval(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def kernels_of(fn, *args, **jit_options):
    text = h100.compile_for_gpu(fn, *args, **jit_options).as_text()
    found = roofline.schedule(text)
    assert found.unknown == ()
    return found.kernels


def entry(*lines, before=""):
    return "\n".join([before, "ENTRY %main (x: f32[]) -> f32[] {", *lines, "}"])


def moved(kernels):
    return sum(kernel.bytes * kernel.times for kernel in kernels)


# Texts of programs are read below; here they are compiled too.
@pytest.mark.slow
@h100.needs_compiler
class TestProducts:
    @pytest.mark.parametrize(
        "dtype, precision, rate",
        [
            (BF16, None, 989e12),
            (jnp.float16, None, 989e12),
            (F32, None, 494e12),
            (F32, "high", 494e12),
            (F32, "highest", 67e12),
        ],
    )
    def test_large_product_takes_its_flops_at_the_rate_of_its_dtype(
        self, dtype, precision, rate
    ):
        m, k, n = 4096, 8192, 2048
        (kernel,) = kernels_of(
            lambda x, w: lax.dot(x, w, precision=precision),
            aval(m, k, dtype=dtype),
            aval(k, n, dtype=dtype),
        )
        assert kernel.flops == 2 * m * k * n
        assert kernel.bytes == jnp.dtype(dtype).itemsize * (m * k + k * n + m * n)
        seconds = 2 * m * k * n / rate + H100.launch
        np.testing.assert_allclose(kernel.seconds(H100), seconds, rtol=1e-12)

    def test_thin_product_takes_the_bytes_of_its_weight(self):
        k, n = 8192, 8192
        kernels = kernels_of(lax.dot, aval(8, k, dtype=BF16), aval(k, n, dtype=BF16))
        found = roofline.totals(kernels)
        seconds = 2 * (8 * k + k * n + 8 * n) / 3.35e12 + 2e-6
        np.testing.assert_allclose(found["ms"], 1e3 * seconds, rtol=1e-12)
        assert (found["kernels"], found["products"]) == (1, 1.0)

    def test_batched_product_contracts_each_example(self):
        kernels = kernels_of(
            lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
            aval(4, 128, 8, 64, dtype=BF16),
            aval(4, 256, 8, 64, dtype=BF16),
        )
        (product,) = [kernel for kernel in kernels if kernel.is_product]
        assert product.flops == 2 * 4 * 8 * 128 * 256 * 64

    def test_product_of_8_bits_has_twice_the_rate(self):
        def scaled(x, w, scale):
            wide = [each.astype(BF16) * scale for each in (x, w)]
            return lax.dot(*wide)

        kernels = kernels_of(
            scaled,
            aval(512, 1024, dtype=F8),
            aval(1024, 2048, dtype=F8),
            aval(dtype=BF16),
        )
        (product,) = [kernel for kernel in kernels if kernel.is_product]
        assert product.rate == "f8"
        assert product.flops == 2 * 512 * 1024 * 2048
        assert H100.rates["f8"] == 1979e12

    def test_gradients_of_a_convolution_have_the_flops_of_the_convolution(self):
        def loss(x, kernel):
            out = lax.conv_general_dilated(
                x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jnp.sum(jnp.sin(out.astype(F32)))

        kernels = kernels_of(
            jax.grad(loss, argnums=(0, 1)),
            aval(8, 32, 32, 64, dtype=BF16),
            aval(3, 3, 64, 128, dtype=BF16),
        )
        products = [kernel for kernel in kernels if kernel.is_product]
        # Each of 8 x 16 x 16 x 128 results multiplies 3 x 3 x 64 taps.
        flops = 2 * (8 * 16 * 16 * 128) * (3 * 3 * 64)
        assert [(kernel.kind, kernel.flops) for kernel in products] == [
            ("conv", flops)
        ] * 3
        assert {kernel.rate for kernel in products} == {"half"}

    def test_convolution_in_groups_multiplies_the_features_of_its_group(self):
        def grouped(x, kernel):
            return lax.conv_general_dilated(
                x,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=4,
            )

        kernels = kernels_of(
            grouped, aval(8, 16, 16, 64, dtype=BF16), aval(3, 3, 16, 128, dtype=BF16)
        )
        (product,) = [kernel for kernel in kernels if kernel.is_product]
        assert product.flops == 2 * (8 * 16 * 16 * 128) * (3 * 3 * 16)


@pytest.mark.slow
@h100.needs_compiler
class TestMemory:
    def test_elementwise_program_reads_and_writes_once(self):
        n = 2**24
        kernels = kernels_of(lambda x, y: x * y + x, aval(n), aval(n))
        found = roofline.totals(kernels)
        assert (found["bytes_moved"], found["flops"]) == (3 * 4 * n, 0)
        seconds = 3 * 4 * n / 3.35e12 + 2e-6
        np.testing.assert_allclose(found["ms"], 1e3 * seconds, rtol=1e-12)
        (kernel,) = kernels
        assert kernel.operations == 2 * n

    def test_loop_runs_as_often_as_it_does_and_reads_its_slices(self):
        trips, m, k = 7, 256, 512

        def loop(x, weights):
            def body(x, w):
                x = lax.dot(x, w)
                return x, jnp.sum(x, 0)

            return lax.scan(body, x, weights)

        kernels = kernels_of(
            loop, aval(m, k, dtype=BF16), aval(trips, k, k, dtype=BF16)
        )
        products = [kernel for kernel in kernels if kernel.is_product]
        assert sum(kernel.times for kernel in products) == trips
        assert sum(k.flops * k.times for k in products) == trips * 2 * m * k * k
        # A slice of seven is copied, a place of seven written; both are told which.
        (slices,) = [k for k in kernels if k.source.endswith("/dynamic_slice")]
        assert (slices.times, slices.bytes) == (trips, 2 * 2 * k * k + 4)
        (updates,) = [k for k in kernels if k.source.endswith("/dynamic_update_slice")]
        assert (updates.times, updates.bytes) == (trips, 2 * 2 * k + 4)

    def test_branch_that_takes_longest_counts(self):
        def branches(i, x, w):
            return lax.switch(i, [lambda: x, lambda: x @ w, lambda: (x @ w) @ w])

        kernels = kernels_of(
            branches,
            aval(dtype=jnp.int32),
            aval(512, 512, dtype=BF16),
            aval(512, 512, dtype=BF16),
        )
        assert sum(kernel.is_product for kernel in kernels) == 2

    def test_lookup_reads_the_rows_that_it_takes(self):
        kernels = kernels_of(
            lambda table, rows: table.at[rows].get(mode="clip"),
            aval(2**20, 256),
            aval(4096, dtype=jnp.int32),
        )
        assert moved(kernels) == 4 * 4096 + 2 * 4 * 4096 * 256

    def test_scatter_in_place_reads_and_writes_the_rows_that_it_changes(self):
        def add(table, rows, updates):
            return table.at[rows].add(updates, mode="drop")

        kernels = kernels_of(
            add,
            aval(2**20, 256),
            aval(4096, dtype=jnp.int32),
            aval(4096, 256),
            donate_argnums=0,
        )
        # The updates once, the rows that they are added to twice.
        assert moved(kernels) == 4 * 4096 + 3 * 4 * 4096 * 256

    def test_update_in_place_writes_the_slice(self):
        def write(cache, x, i):
            return lax.dynamic_update_slice(cache, 2 * x, (i, 0))

        kernels = kernels_of(
            write,
            aval(2**20, 256),
            aval(8, 256),
            aval(dtype=jnp.int32),
            donate_argnums=0,
        )
        assert moved(kernels) == 4 + 2 * 4 * 8 * 256
        # Without the donation the cache is copied first.
        kernels = kernels_of(
            write, aval(2**20, 256), aval(8, 256), aval(dtype=jnp.int32)
        )
        assert moved(kernels) == 4 + 2 * 4 * 8 * 256 + 2 * 4 * 2**20 * 256

    def test_slice_of_an_operand_is_what_is_read(self):
        kernels = kernels_of(lambda x: 2 * x[:128], aval(2**16, 64))
        assert moved(kernels) == 2 * 4 * 128 * 64

    def test_bytes_are_those_that_the_reader_of_traffic_finds(self):
        def norm(x, w):
            x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))
            return jax.nn.softmax(x @ w)

        program = h100.compile_for_gpu(norm, aval(1024, 512), aval(512, 256))
        found = roofline.totals(roofline.schedule(program.as_text()).kernels)
        expected = h100.traffic(program)
        assert found["kernels"] == expected.kernels
        # That reader counts the workspace of cublasLt too.
        expected_bytes = expected.bytes_moved - h100.CUBLAS_WORKSPACE_BYTES
        np.testing.assert_allclose(found["bytes_moved"], expected_bytes, rtol=1e-3)


def test_long_arithmetic_takes_longer_than_its_bytes():
    n, steps = 2**20, 200
    body = [f"  %s0 = f32[{n}]{{0}} parameter(0)"]
    body += [f"  %s{i + 1} = f32[{n}]{{0}} sine(%s{i})" for i in range(steps)]
    body[-1] = body[-1].replace("  %", "  ROOT %", 1)
    text = entry(
        f"  %x = f32[{n}]{{0}} parameter(0)",
        f"  ROOT %y = f32[{n}]{{0}} fusion(%x), kind=kLoop, calls=%long",
        before="\n".join(["%long (s0: f32[]) -> f32[] {", *body, "}"]),
    )
    (found,) = roofline.schedule(text).kernels
    assert (found.bytes, found.operations) == (2 * 4 * n, steps * n)
    np.testing.assert_allclose(found.busy(H100), steps * n / 33.5e12, rtol=1e-12)


class TestWhatIsNotKnown:
    def test_custom_call_of_no_known_library_is_listed_and_moves_its_bytes(self):
        text = entry(
            "  %x = f32[1000]{0} parameter(0)",
            "  ROOT %y = f32[500]{0} custom-call(%x), custom_call_target="
            '"__vendor$sort"',
        )
        found = roofline.schedule(text)
        assert found.unknown == ("custom call __vendor$sort: its bytes alone",)
        assert [kernel.bytes for kernel in found.kernels] == [6000]

    def test_loop_with_an_unknown_number_of_runs_is_listed(self):
        body = "%body (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        body += "  ROOT %c = f32[8]{0} copy(%p)\n}\n"
        text = entry(
            "  %x = f32[8]{0} parameter(0)",
            "  ROOT %y = f32[8]{0} while(%x), condition=%test, body=%body",
            before=body,
        )
        found = roofline.schedule(text)
        assert "unknown number of runs" in found.unknown[0]
        assert [kernel.bytes for kernel in found.kernels] == [64]

    def test_operation_that_is_no_known_kernel_is_listed(self):
        text = entry(
            "  %x = f32[8]{0} parameter(0)", "  ROOT %y = f32[8]{0} cholesky(%x)"
        )
        assert "cholesky" in roofline.schedule(text).unknown[0]

    @pytest.mark.parametrize(
        "line, message",
        [
            ("  what is this", "is no instruction"),
            ("  ROOT %y = f32[8]{0} copy(%gone)", "reads .'gone'."),
            ("  ROOT %y = f6[8]{0} copy(%x)", "how many bytes has f6"),
            (
                "  ROOT %y = f32[8,8]{1,0} custom-call(%x, %x), "
                'custom_call_target="__cublas$lt$matmul"',
                "over which dimensions",
            ),
            (
                "  ROOT %y = f32[8,8]{1,0} custom-call(%x, %x), "
                'custom_call_target="__cudnn$convForward"',
                "without dim_labels",
            ),
            (
                "  ROOT %y = f32[8,8]{1,0} custom-call(%i, %i), "
                'custom_call_target="__cublas$gemm", lhs_contracting_dims={0}',
                "no rate is known for .'s32'.",
            ),
            ("  ROOT %y = f32[8]{0} conditional(%x)", "what does this conditional run"),
            ("  ROOT %y = f32[8]{0} while(%x)", "what does this while run"),
        ],
    )
    def test_text_that_cannot_be_read_is_an_error(self, line, message):
        operands = ("  %x = f32[8]{0} parameter(0)", "  %i = s32[8]{0} parameter(1)")
        with pytest.raises(ValueError, match=message):
            roofline.schedule(entry(*operands, line))

    def test_text_without_a_program_is_an_error(self):
        with pytest.raises(ValueError, match="no ENTRY"):
            roofline.schedule("HloModule nothing")


def kernel(name, moved):
    return roofline.Kernel(name, "", "fusion", "", 0, 0, moved)


def test_differences_are_the_kernels_that_take_another_time():
    ours = [kernel("a", 1e9), kernel("b", 5e8), kernel("c", 2e8)]
    theirs = [kernel("d", 1.001e9), kernel("e", 2e8), kernel("f", 2e8)]
    only_ours, only_theirs = roofline.differences(ours, theirs)
    assert [each.name for each in only_ours] == ["b"]
    assert len(only_theirs) == 1 and only_theirs[0].bytes == 2e8


def test_attained_fraction_stretches_everything_but_launches():
    half = dataclasses.replace(H100, attainable=0.5)
    one = kernel("a", 3.35e9)
    np.testing.assert_allclose(one.seconds(H100), 1e-3 + 2e-6, rtol=1e-12)
    np.testing.assert_allclose(one.seconds(half), 2e-3 + 2e-6, rtol=1e-12)


def committed():
    return json.loads(FILE.read_text())


@pytest.mark.slow
@h100.needs_compiler
def test_figures_of_the_perceptron_are_those_that_are_committed(
    tmp_path, capsys, monkeypatch
):
    file = tmp_path / "roofline.json"
    arguments = ["--roofline", "--check", "--model", "mlp", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["compare_precision.py", *arguments])
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    assert compare_precision.main() == 0
    printed = capsys.readouterr().out
    assert "H100 SXM" in printed and "2 us a launch" in printed
    (here,) = json.loads(file.read_text())["models"]
    # Forward, to the weight, and but for the first layer to the input.
    batch, width = 8192, 2048
    macs = 2 * 784 * width + 3 * 2 * width**2 + 3 * width * 10
    assert here["programs"]["f32 TF32"]["flops"] == 2 * batch * macs
    assert here["programs"]["autocast"]["ms"] < here["programs"]["f32 TF32"]["ms"]
    (there,) = [row for row in committed()["models"] if row["model"] == "mlp"]
    for program, figures in there["programs"].items():
        for name, value in figures.items():
            # Another version of the compiler lays it out by a little otherwise.
            measured = here["programs"][program][name]
            np.testing.assert_allclose(measured, value, rtol=0.05)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(hlo_text).failed == 0
