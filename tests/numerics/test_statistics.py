"""What is counted and compared of many arrays at once is that of each, in f64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmp_amp.numerics.measure import blocks, distances
from jmp_amp.numerics.measure.statistics import (
    F32_LAYOUT,
    F64_LAYOUT,
    Figures,
    Worst,
    counted,
    worst_counted,
    worst_of,
)

PIECE = 16_384
# A block has 32 values and a piece 16384: none, a part, whole ones, and one more.
SIZES = (33, 0, 1, 20_000, 31, 16_384, 32, 0, 16_385, 16_383)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.complex64)
BAD = {Worst.FINITE: (), Worst.INFINITE: (np.inf, -np.inf), Worst.NAN: (np.inf, np.nan)}


@pytest.fixture(params=["cpu", "gpu"])
def backend(request, monkeypatch):
    """A CPU reads large arrays in pieces, a GPU in blocks."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)


def _made(sizes, dtypes=DTYPES):
    """Arrays in no order of sizes or dtypes, with subnormals, zeros and what is bad."""
    rng = np.random.default_rng(0)
    made = []
    for number, size in enumerate(sizes):
        for dtype in dtypes:
            values = rng.standard_normal(size) * 2.0 ** rng.integers(-30, 14, size)
            values[size // 2 : size // 2 + 2] = 0.0
            bad = BAD[Worst(number % 3)] if size > 1 else ()
            values[: len(bad)] = bad
            # They overflow to infinity where a dtype has no room.
            with np.errstate(over="ignore"):
                made.append(values.astype(dtype))
    return made


def _expected(array):
    """The figures of an array, with numpy in f64."""
    parts = (
        np.concatenate([array.real, array.imag]) if array.dtype.kind == "c" else array
    )
    x = np.abs(parts.astype(np.float64))
    finite = x[np.isfinite(x)]
    some = finite[finite > 0]
    powers, counts = np.unique(np.frexp(some)[1] - 1, return_counts=True)
    return {
        "amax": finite.max(initial=0.0),
        "amin": some.min() if some.size else 0.0,
        "zeros": np.sum(x == 0),
        "nonfinite": np.sum(~np.isfinite(x)),
        "nans": np.sum(np.isnan(x)),
        "exponents": dict(zip(powers.tolist(), counts.tolist(), strict=True)),
    }


def _assert_figures(arrays, layout):
    found = jax.jit(lambda x: counted(x, layout))(list(map(jnp.asarray, arrays)))
    for number, array in enumerate(arrays):
        row = jax.tree.map(lambda x, n=number: np.asarray(x[n]), found)
        figures = vars(Figures(row.counts.astype(np.int64), row.extremes, layout))
        assert figures == _expected(array), (number, array.dtype, array.size)
    worst = [
        Worst.NAN if np.isnan(x).any() else Worst(int(np.isinf(x).any()))
        for x in arrays
    ]
    assert worst_counted(found.counts, layout).tolist() == worst
    assert jax.jit(worst_of)(list(map(jnp.asarray, arrays))).tolist() == worst


@pytest.mark.breadth(1)
def test_figures_are_those_of_each_array(backend):
    arrays = _made(SIZES)
    arrays.append(np.array([2.0**-149, -(2.0**-140), 0.0, -0.0], np.float32))
    arrays += [np.full(5, bad, np.float32) for bad in (np.nan, np.inf, 0.0)]
    _assert_figures(arrays, F32_LAYOUT)


@pytest.mark.slow
def test_figures_of_f64_are_exact():
    with jax.enable_x64(True):
        arrays = _made(SIZES, [np.float64, np.complex128])
        arrays.append(np.array([5e-324, 2.0**-1060, 1e308, 0.0, np.nan]))
        _assert_figures(arrays, F64_LAYOUT)


def test_no_arrays_have_no_rows():
    assert counted([], F32_LAYOUT).counts.shape == (0, F32_LAYOUT.width)
    assert distances.distances([]).sums.shape == (0, 2)


def _relative(low, full):
    low, full = (x.astype(np.complex128) for x in (low, full))
    return np.linalg.norm(low - full) / np.linalg.norm(full)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("scale", [1.0, 2.0**90, 2.0**-90])
def test_distances_are_those_of_each_pair(scale, backend):
    # Squares of the scaled values are no f32.
    rng, pairs = np.random.default_rng(0), []
    for size in SIZES:
        for low, full in ("ff", "bf", "FF"):
            x = rng.standard_normal(size) * scale
            dtypes = {"f": np.float32, "b": ml_dtypes.bfloat16, "F": np.complex64}
            pairs.append(((1.01 * x).astype(dtypes[low]), x.astype(dtypes[full])))
    found = jax.jit(distances.distances)([tuple(map(jnp.asarray, p)) for p in pairs])
    expected = [_relative(*pair) if pair[0].size else 0.0 for pair in pairs]
    relative = distances.relative(jax.device_get(found))
    np.testing.assert_allclose(relative, np.asarray(expected), rtol=1e-5)


def test_a_value_that_is_finite_in_one_alone_is_infinitely_far_away():
    ones = np.ones(40, np.float32)
    bad = ones.copy()
    bad[33] = np.inf
    pairs = [(bad, ones), (bad, bad), (ones, bad), (ones, ones), (0 * ones, 0 * ones)]
    found = distances.relative(jax.jit(distances.distances)(pairs))
    assert found.tolist() == [np.inf, 0.0, np.inf, 0.0, 0.0]


def test_large_programs_are_read_in_several_groups():
    many = [1 << 19] * 4 + [7]
    groups = blocks.groups_of(["f32"] * 5, many)
    assert groups == [(0, [0, 1]), (0, [2, 3]), (32, [4])]
    # One that does not fit beside the other.
    groups = blocks.groups_of(["f32"] * 2, [3 << 18] * 2)
    assert groups == [(0, [0]), (0, [1])]


@pytest.mark.parametrize(("backend", "block"), [("cpu", 0), ("gpu", PIECE), ("tpu", 0)])
def test_a_gpu_reads_large_arrays_in_blocks(backend, block, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert blocks.groups_of(["f32"], [3 * PIECE]) == [(block, [0])]
