"""Casts and scales: bit-equal to ml_dtypes, numpy and torchao.

How the traces were made is in `oracle/README.md`.
"""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmp_amp.plan.rewrites import fp8
from tests.fp8 import reference
from tests.fp8.reference import E4M3, E5M2

ORACLE = Path(__file__).parents[1] / "oracle" / "fp8"
CASTS = json.loads((ORACLE / "casts.json").read_text())["cases"]
SCALES = json.loads((ORACLE / "torchao_scales.json").read_text())["cases"]
DTYPES = {"e4m3fn": E4M3, "e5m2": E5M2}
# torchao takes smaller magnitudes for this one (float8_utils.EPS); ours needs no floor.
TORCHAO_FLOOR = 1e-12
TINY = float(np.finfo("float32").tiny)

each_format = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def floats(bits, shape=(-1,)):
    return np.array(bits, np.uint32).view(np.float32).reshape(shape)


def bits_of(q):
    return np.asarray(q).view(np.uint8)


def assert_same_bits(found, expected):
    """NaN has several bit patterns: they are one here."""
    nan = np.isnan(found.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(expected.astype(np.float32)))
    np.testing.assert_array_equal(bits_of(found)[~nan], bits_of(expected)[~nan])


JITTED = jax.jit(fp8.quantise, static_argnums=1)


def quantise(x, dtype=E4M3, jit=True):
    """The quantised array, as numpy."""
    found = (JITTED if jit else fp8.quantise)(jnp.asarray(x), dtype)
    assert found.q.dtype == dtype and found.scale.dtype == jnp.float32
    return as_numpy(found)


def as_numpy(found):
    return reference.Quantised(np.asarray(found.q), np.asarray(found.scale))


# Casts


@pytest.mark.breadth(2)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", CASTS, ids=lambda case: case["format"])
def test_a_cast_saturates_and_rounds_to_nearest_even_as_torch_and_ml_dtypes(case, jit):
    x = floats(case["x_f32_bits"])
    # An infinity among them: the scale is 1, and the quotient is x.
    assert np.isinf(x).any() and np.isnan(x).any()
    found = quantise(x, DTYPES[case["format"]], jit=jit)
    assert found.scale == 1
    expected = np.array(case["saturated"], np.uint8).view(found.q.dtype)
    assert_same_bits(found.q, expected)


@pytest.mark.parametrize("case", CASTS, ids=lambda case: case["format"])
def test_a_cast_of_bf16_is_that_of_the_same_number_in_f32(case):
    x = np.array(case["x_bf16_bits"], np.uint16).view(ml_dtypes.bfloat16)
    dtype = DTYPES[case["format"]]
    expected = quantise(x.astype(np.float32), dtype)
    found = quantise(x, dtype)
    assert_same_bits(found.q, expected.q)
    # torch and ml_dtypes agree where nothing overflows.
    cast = np.array(case["ml_dtypes_from_bf16"], np.uint8).view(dtype)
    fits = np.isfinite(cast.astype(np.float32))
    assert fits.any()
    assert_same_bits(found.q[fits], cast[fits])


# Scales


def amax_of(case):
    return np.max(np.abs(floats(case["x_f32_bits"], case["shape"])))


def in_reach(case):
    """Whether torchao's floor is not at work: it is in arrays of zeros, or near."""
    return bool(amax_of(case) >= TORCHAO_FLOOR)


def compared(case):
    """Our scale and q, and torchao's: it multiplies by the reciprocal."""
    x = floats(case["x_f32_bits"], case["shape"])
    if case["bf16"]:
        x = x.astype(ml_dtypes.bfloat16)
    dtype = DTYPES[case["format"]]
    found = quantise(x, dtype)
    factor = floats(case["scale_f32_bits"], ())
    q = np.array(case["q"], np.uint8).view(dtype).reshape(x.shape)
    return found, factor, q


def test_torchao_has_a_floor_in_few_cases_only():
    assert (sum(map(in_reach, SCALES)), len(SCALES)) == (28, 32)


def test_scales_are_torchaos_bit_by_bit_and_so_is_q():
    for case in filter(in_reach, SCALES):
        found, factor, q = compared(case)
        np.testing.assert_array_equal(1 / found.scale.astype(np.float64), factor)
        np.testing.assert_array_equal(bits_of(found.q), bits_of(q))


@pytest.mark.slow
def test_below_torchaos_floor_an_array_still_fills_the_format():
    for case in itertools.filterfalse(in_reach, SCALES):
        found, _, _ = compared(case)
        amax = amax_of(case).astype(np.float64)
        limit = float(ml_dtypes.finfo(found.q.dtype).max)
        largest = amax / found.scale.astype(np.float64)
        # Unless the scale is the smallest normal number of f32.
        if found.scale > TINY and amax > 0:
            assert largest > limit * 0.499
        assert largest <= limit * (1 + 1e-6)


ARRAYS = {
    "normal": [1.0, -3.5, 0.3, 448.0, 100.0],
    "a power of two": [448.0 * 8, 17.0],
    "one above a power of two": [np.nextafter(np.float32(448), np.inf), 1.0],
    "two above a power of two": [448 * (1 + 2**-23), 1.0],
    "one below a power of two": [np.nextafter(np.float32(448 / 8), 0), 1.0],
    "one above in bf16": [450.0, 1.0],
    "e5m2's largest": [57344.0, 1e-3],
    "zeros": [0.0, -0.0, 0.0],
    "minus zero": [-0.0],
    "large": [3e38, -3.4e38, 1e30],
    "f32's largest": [3.4028235e38],
    "tiny": [1e-36, -3e-37, 2e-38],
    "subnormal scale": [1e-37, 5e-38],
    "subnormal": [1e-40, 1e-45],
    "inf": [np.inf, 1.0, -500.0, 1e6],
    "minus inf": [-np.inf, 1.0, 500.0],
    "nan": [np.nan, 1.0, 500.0, 1e-3],
    "both": [np.nan, np.inf, 0.0],
}


@pytest.mark.breadth(4)
@pytest.mark.parametrize("jit", [False, True])
@each_format
@pytest.mark.parametrize("values", ARRAYS.values(), ids=ARRAYS)
def test_any_array_is_quantised_as_in_numpy(values, dtype, jit):
    x = np.array(values, np.float32)
    found = quantise(x, dtype, jit)
    # XLA takes f32 numbers below the smallest normal one for zeros.
    normal = np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)
    expected = reference.quantised(normal, dtype)
    np.testing.assert_array_equal(found.scale, expected.scale)
    assert_same_bits(found.q, expected.q)
    assert found.scale >= TINY and np.isfinite(found.scale)
    assert np.frexp(found.scale)[0] == 0.5


@each_format
def test_an_infinity_saturates_and_nan_stays_alone(dtype):
    x = np.array([np.inf, -np.inf, np.nan, 1.0, 0.0], np.float32)
    q = quantise(x, dtype).q.astype(np.float32)
    limit = float(ml_dtypes.finfo(dtype).max)
    np.testing.assert_array_equal(q, [limit, -limit, np.nan, 1, 0])


@each_format
def test_random_numbers_are_quantised_as_in_numpy_bit_by_bit(dtype):
    generator = np.random.default_rng(1)
    for exponent in range(-100, 101, 25):
        x = generator.standard_normal(4096).astype(np.float32)
        x = np.ldexp(x, exponent)
        found = quantise(x, dtype)
        expected = reference.quantised(x, dtype)
        np.testing.assert_array_equal(found.scale, expected.scale)
        assert_same_bits(found.q, expected.q)


def test_what_is_restored_is_exact_in_bf16():
    x = np.random.default_rng(2).standard_normal(4096).astype(np.float32)
    for dtype in DTYPES.values():
        found = fp8.quantise(jnp.asarray(x), dtype)
        restored = np.asarray(found.restored(jnp.dtype("bfloat16")))
        exact = as_numpy(found).exact()
        np.testing.assert_array_equal(restored.astype(np.float64), exact)


def test_a_scale_is_made_of_every_number_of_an_array():
    for position in ((0, 0), (63, 63), (17, 5)):
        x = np.full((64, 64), 0.5, np.float32)
        x[position] = -448.0
        assert quantise(x).scale == 1
