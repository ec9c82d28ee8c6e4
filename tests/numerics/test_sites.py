"""What other formats make of values: the casts of numpy and ml_dtypes tell."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmp_amp as amp
from tests.numerics.made import site

DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f32": np.float32,
}
each_format = pytest.mark.parametrize("name", DTYPES)


def shares(name, values):
    """Overflow, underflow and subnormal as a cast of every value has them."""
    dtype = DTYPES[name]
    finite = np.asarray(values)[np.isfinite(values)]
    with np.errstate(all="ignore"):
        held = finite.astype(dtype).astype(np.float64)
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    return tuple(
        float(np.mean(those))
        for those in (
            ~np.isfinite(held),
            (held == 0) & (finite != 0),
            (held != 0) & (np.abs(finite) < smallest),
        )
    )


def told(made, name):
    return made.overflow(name), made.underflow(name), made.subnormal(name)


@each_format
def test_shares_are_those_of_a_cast_of_every_value(name):
    random = np.random.default_rng(0)
    # All powers of two that f32 has, subnormals too, and a mantissa off the borders.
    powers = np.arange(-148.0, 128.0)
    values = np.outer([1.125, 1.25, -1.5], 2.0**powers).ravel()
    values = np.concatenate([values, np.zeros(50), [np.inf, np.nan]])
    info = ml_dtypes.finfo(DTYPES[name])
    top = np.floor(np.log2(float(info.max)))
    # The power of two of the largest number is undecided, see the tests below.
    values = values[
        ~((np.abs(values) >= 2.0**top) & (np.abs(values) < 2.0 ** (top + 1)))
    ]
    made = site(random.permutation(values))
    np.testing.assert_allclose(told(made, name), shares(name, values), rtol=1e-12)
    assert sum(told(made, name)) > 0 or name == "f32"


@each_format
@pytest.mark.parametrize("share", [0.5, 0.999, 1.0, 1.001, 1.02, 1.2])
def test_the_largest_value_decides_whether_its_power_of_two_fits(name, share):
    largest = float(ml_dtypes.finfo(DTYPES[name]).max)
    values = np.full(3, largest * share)
    assert site(values).overflow(name) == shares(name, values)[0]


@each_format
@pytest.mark.parametrize("share", [0.4, 0.5, 0.51, 0.75, 1.0])
def test_half_of_the_smallest_number_underflows_and_more_does_not(name, share):
    values = np.full(3, float(ml_dtypes.finfo(DTYPES[name]).smallest_subnormal) * share)
    if name == "f32":
        values = values[:0]  # f32 has no smaller values
    if values.size:
        assert told(site(values), name) == shares(name, values)


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (65504, {"f16": True, "e4m3": False, "e5m2": False, "bf16": True}),
        (65519, {"f16": True}),
        (65520, {"f16": False, "bf16": True}),
        (448, {"e4m3": True}),
        (464, {"e4m3": True}),
        (465, {"e4m3": False, "e5m2": True}),
        (57344, {"e5m2": True}),
        (61440, {"e5m2": False}),
    ],
)
def test_the_borders_of_the_formats(value, fits):
    made = site([float(value)])
    assert {name: not made.overflow(name) for name in fits} == fits


def test_the_power_of_two_of_the_largest_number_fits_unless_amax_does_not():
    assert site([40000.0, 65504.0, 1.0]).overflow("f16") == 0.0
    # From exponents alone nothing tells 40000 from 65535.
    assert site([40000.0, 65535.0, 1.0, 0.0]).overflow("f16") == 0.5


@pytest.mark.parametrize("name", ["f16", "e4m3", "e5m2"])  # f32 goes no further
@pytest.mark.parametrize("factor", [2.0, 64.0, 2.0**40])
def test_what_is_far_too_large_takes_none_of_a_lower_power_of_two_along(name, factor):
    largest = float(ml_dtypes.finfo(DTYPES[name]).max)
    top = 2.0 ** np.floor(np.log2(largest))
    values = [0.0, 1.0, top, largest, largest * factor]
    assert site(values).overflow(name) == shares(name, values)[0] == 0.2


def test_a_diagnosis_counts_what_fits_beside_what_is_far_too_large():
    x = jnp.array([40000.0, 1e6])
    (doubled,) = amp.diagnose(lambda x: x + 0.0, "float32")(x).sites
    assert doubled.overflow("f16") == 0.5


def test_values_that_are_not_finite_do_not_count_and_zeros_do():
    made = site([np.inf, np.nan, -np.inf, 0.0, 1e-9, 1e9, 1e-6])
    assert told(made, "f16") == (0.25, 0.25, 0.25)
    assert told(site([np.inf, np.nan]), "f16") == (0.0, 0.0, 0.0)
    assert told(site([0.0, 0.0]), "f16") == (0.0, 0.0, 0.0)
    assert told(site([]), "f16") == (0.0, 0.0, 0.0)


def test_a_format_has_many_names():
    made = site([300.0, 500.0, 1e5, 1e-7])
    for names in (
        ("e4m3", "E4M3FN", "f8_e4m3", "float8_e4m3fn", "fp8_e4m3", jnp.float8_e4m3fn),
        ("e5m2", "f8_e5m2", "float8_e5m2", jnp.dtype(jnp.float8_e5m2)),
        ("f16", "float16", "fp16", np.float16, jnp.dtype("float16")),
        ("bf16", "bfloat16", jnp.bfloat16),
        ("f32", "float32", jnp.float32),
    ):
        assert len({told(made, name) for name in names}) == 1, names


@pytest.mark.parametrize("name", ["f17", "e4m4", "int8", "float8_e4m3", None, 3, int])
@pytest.mark.parametrize("method", ["overflow", "underflow", "subnormal"])
def test_an_unknown_format_is_an_error_that_lists_the_known_ones(method, name):
    with pytest.raises(ValueError, match=rf"Site\.{method}\(.*f16, bf16, e4m3, e5m2"):
        getattr(site(), method)(name)
