"""Names of dtypes, the backend's half dtype, and what a caller may pass as a dtype."""

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmp_amp as amp
from jmp_amp.policies import dtypes

ALL = [
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn",
]


@pytest.mark.parametrize("name", ALL)
def test_full_name_and_short_name_of_every_float_are_read_back(name):
    dtype = jnp.dtype(getattr(jnp, name))
    assert dtypes.parse_dtype(name) == dtype
    assert dtypes.parse_dtype(dtypes.short_name(dtype)) == dtype


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("f16", "float16"),
        ("fp16", "float16"),
        ("Float16", "float16"),
        ("bf16", "bfloat16"),
        (" BF16 ", "bfloat16"),
        ("f32", "float32"),
        ("fp32", "float32"),
        ("full", "float32"),
        ("f64", "float64"),
        ("fp64", "float64"),
        ("f8_e4m3", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("f8_e4m3fn", "float8_e4m3fn"),
        ("e4m3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("fp8_e5m2", "float8_e5m2"),
        ("f8_e5m2fnuz", "float8_e5m2fnuz"),
        ("f4_e2m1fn", "float4_e2m1fn"),
        ("half", "bfloat16"),
    ],
)
def test_spellings_of_a_dtype_are_understood(text, name):
    assert dtypes.parse_dtype(text) == jnp.dtype(getattr(jnp, name))


# numpy reads "f8" as float64 and "f16" as float128; neither is what is meant here.
@pytest.mark.parametrize("text", ["", "fp17", "f8", "f4", "float", "int32", "f 16"])
def test_text_that_names_no_float_is_not_guessed_at(text):
    assert dtypes.parse_dtype(text) is None


def test_short_name_of_other_dtypes_is_their_own():
    names = [dtypes.short_name(d) for d in (jnp.int32, bool, jnp.complex64)]
    assert names == ["int32", "bool", "complex64"]
    assert dtypes.short_name(jax.random.key(0).dtype) == "key<fry>"


@pytest.mark.parametrize(
    ("predicate", "members"),
    [
        (dtypes.is_half, {"float16", "bfloat16"}),
        (dtypes.is_castable, {"float16", "bfloat16", "float32"}),
        (
            dtypes.is_fp8,
            {name for name in ALL if name.startswith(("float8", "float4"))},
        ),
    ],
)
def test_predicates_hold_for_their_dtypes_and_no_other(predicate, members):
    others = ["int4", "int8", "uint8", "int32", "bool_", "complex64", "complex128"]
    for name in ALL + others:
        scalar_type = getattr(jnp, name)
        assert predicate(scalar_type) is (name in members), name
        assert predicate(jnp.dtype(scalar_type)) is (name in members), name
    assert not predicate(jax.random.key(0).dtype)
    assert not predicate(jax.dtypes.float0)
    assert not predicate(np.dtype(object))


@pytest.mark.parametrize("backend", ["cpu", "tpu", "gpu", "cuda", "rocm"])
def test_half_dtype_of_current_hardware_is_bf16_even_where_it_is_absent(backend):
    assert amp.half_dtype(backend) == ml_dtypes.bfloat16


def test_half_dtype_by_default_is_that_of_the_backend_in_use():
    assert amp.half_dtype() == amp.half_dtype(jax.default_backend())
    assert isinstance(amp.half_dtype(), np.dtype)


# Tensor cores do bf16 from compute capability 8.0 on:
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
@pytest.mark.parametrize(
    ("capability", "bf16"),
    [
        *(("6.1", False), ("7.0", False), ("7.5", False), ("8.0", True), ("8.9", True)),
        *(("9.0", True), ("10.0", True), ("12.0", True), ("gfx90a", True)),
    ],
)
def test_gpus_before_ampere_have_no_bf16_matrix_units(capability, bf16):
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    assert dtypes.multiplies_bf16(device) is bf16


def test_a_device_without_compute_capability_multiplies_bf16():
    assert dtypes.multiplies_bf16(types.SimpleNamespace(platform="tpu"))
    assert dtypes.multiplies_bf16(jax.devices("cpu")[0])


def test_unknown_backend_is_an_error_that_lists_the_backends():
    with pytest.raises(ValueError, match=r"half_dtype\('abacus'\).*cpu, gpu, cuda"):
        amp.half_dtype("abacus")


def test_importing_and_making_a_policy_starts_no_backend():
    # A backend that is up refuses to be configured, and multi-host programs must call
    # jax.distributed.initialize before it is.
    program = (
        "import jax, jmp_amp; jmp_amp.get_policy('p=f32,c=f8_e4m3'); jmp_amp.Policy();"
        "jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "3", done.stderr


def test_python_float_is_the_default_float_of_jax():
    assert dtypes.floating_dtype(float, "{}") == np.float32
    with jax.enable_x64(True):
        assert dtypes.floating_dtype(float, "{}") == np.float64


def test_a_big_endian_dtype_becomes_the_native_one():
    assert dtypes.floating_dtype(np.dtype(">f4"), "{}") == np.dtype("float32")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("int32", r"f\('int32'\): int32 is not a floating dtype. Use one of f16, bf16"),
        (jnp.int32, r"f\(int32\): int32 is not a floating dtype"),
        (bool, r"f\(bool\): bool is not a floating dtype"),
        (jnp.complex64, r"f\(complex64\): complex64 is not a floating dtype"),
        (None, r"f\(None\): that is not a dtype"),
        (3, r"f\(3\): that is not a dtype"),
    ],
)
def test_what_is_no_floating_dtype_is_a_type_error_that_says_what_it_is(given, message):
    with pytest.raises(TypeError, match=message):
        dtypes.floating_dtype(given, "f({})")


@pytest.mark.skipif(
    np.dtype(np.longdouble).itemsize == 8, reason="long double is f64 here"
)
def test_a_float_that_jax_does_not_have_is_a_type_error():
    with pytest.raises(TypeError, match=r"JAX has no float\d+. Use one of f16"):
        dtypes.floating_dtype(np.longdouble, "f({})")


@pytest.mark.parametrize("text", ["fp17", "f8", "", "("])
def test_text_that_is_no_dtype_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"unknown dtype .* or half \(here bfloat16\)"):
        dtypes.floating_dtype(text, "f({})")
