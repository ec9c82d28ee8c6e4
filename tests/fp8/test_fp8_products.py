"""Values and gradients of fp8 products, beside numpy's and torchao's."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.lax import DotAlgorithmPreset, Precision

import jmp_amp as amp
from jmp_amp.plan.rewrites import fp8 as rewrites_fp8
from tests.fp8 import reference
from tests.fp8.programs import numbers, quantisations
from tests.fp8.reference import E4M3, E5M2, HALF_EPS, relative_error
from tests.measures import EXACTLY_AS_WRITTEN
from tests.programs import equations

ORACLE = Path(__file__).parents[1] / "oracle" / "fp8"
TORCHAO = json.loads((ORACLE / "torchao_linear.json").read_text())["cases"]
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
# f32 sums of a few dozen products, beside sums in f64.
SUM_EPS = 64 * 2.0**-24


def policy_of(output="f32", **settings):
    return amp.Policy("f32", "bf16", output, matmul=amp.Fp8(**settings))


def linear(x, w, g, policy, jit=True, fn=jnp.dot):
    """y, dx and dw of a product with the cotangent g."""

    def both(x, w, g):
        y, backward = jax.vjp(amp.autocast(fn, policy), x, w)
        return y, *backward(g)

    run = jax.jit(both, compiler_options=EXACTLY_AS_WRITTEN) if jit else both
    return reference.Linear(*run(x, w, g))


def assert_rounded_once(found, expected, error=HALF_EPS):
    """A result of bf16 has an exact sum's digits, but for f32's roundings of it."""
    found = np.asarray(found)
    assert found.dtype == np.float32 and found.shape == expected.shape
    room = SUM_EPS * np.abs(expected).max()
    assert (np.abs(found - expected) <= error * np.abs(expected) + room).all()


SETTINGS = {
    "default": {},
    "e4m3 backward": {"backward": "e4m3"},
    "exact accumulation": {"fast_accumulation": False},
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_product_and_its_gradients_are_those_of_numpy(settings):
    x = numbers(32, 64, seed=1, scale=3.0)
    # Columns of other sizes: with one scale for all the smallest lose digits.
    sizes = jnp.exp2(-2 * (jnp.arange(48.0) // 6))[None]
    w = numbers(64, 48, seed=2) * sizes
    # All columns have the same part in the gradient of x.
    g = numbers(32, 48, seed=3, scale=1e-3) / sizes
    found = linear(x, w, g, policy_of(**settings))
    expected = reference.linear(x, w, g, FORMATS[settings.get("backward", "e5m2")])
    for a, b in zip(found, expected, strict=True):
        assert_rounded_once(a, b)


def test_the_dtype_of_gradients_changes_no_value():
    # bf16 rounds it to the middle of 1 and 1.125, and 8 bits that to 1. At once it
    # would be 1.125.
    x, w = (
        np.full((32, 32), 1.0625 + 2.0**-12, np.float32),
        np.eye(32, dtype=np.float32),
    )
    for reduce_dtype in (None, "float32"):
        policy = dataclasses.replace(policy_of(), reduce_dtype=reduce_dtype)
        y, *_ = linear(x, w, np.ones_like(x), policy)
        np.testing.assert_array_equal(y, np.ones_like(x))


@pytest.mark.slow
def test_compiled_and_eager_products_are_equal():
    x, w, g = numbers(32, 64, seed=1), numbers(64, 48, seed=2), numbers(32, 48, seed=3)
    compiled = linear(x, w, g, policy_of())
    eager = linear(x, w, g, policy_of(), jit=False)
    for a, b in zip(compiled, eager, strict=True):
        # But for the order of sums in f32.
        np.testing.assert_allclose(a, b, rtol=2 * HALF_EPS, atol=SUM_EPS)
        assert relative_error(a, np.asarray(b, np.float64)) < 1e-3


def test_numbers_of_8_bits_are_multiplied_exactly():
    """Integers up to 8, whose sums bf16 holds: nothing is rounded at all."""
    generator = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(generator.integers(-2, 3, shape), jnp.float32)
        for shape in ((16, 32), (32, 16), (16, 16))
    )
    for found, exact in zip(
        linear(x, w, g, policy_of()), (x @ w, g @ w.T, x.T @ g), strict=True
    ):
        np.testing.assert_array_equal(found, exact)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("exponent", [-60, 20])
def test_powers_of_two_change_no_digit(exponent):
    """Scales follow: a gradient a million times smaller is as exact."""
    x, w, g = numbers(16, 32, seed=1), numbers(32, 16, seed=2), numbers(16, 16, seed=3)
    factor = jnp.float32(2.0**exponent)
    plain = linear(x, w, g, policy_of())
    scaled = linear(x * factor, w, g / factor, policy_of())
    np.testing.assert_array_equal(scaled.y, plain.y * factor)
    np.testing.assert_array_equal(scaled.dx, plain.dx / factor)
    np.testing.assert_array_equal(scaled.dw, plain.dw)


# torchao


def torchao_arrays(case):
    m, k, n = case["m"], case["k"], case["n"]

    def read(name, *shape):
        bits = np.array(case[name], np.uint16).view(ml_dtypes.bfloat16)
        return bits.astype(np.float32).reshape(shape)

    x, w, g = read("x_bf16", m, k), read("w_bf16_n_k", n, k), read("g_bf16", m, n)
    return x, w.T, g


def case_name(case):
    return f"{case['m']}x{case['k']}x{case['n']}"


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case_name(case), marks=() if case["m"] == 32 else pytest.mark.slow
        )
        for case in TORCHAO
    ],
)
def test_errors_are_not_larger_than_those_of_torchao(case):
    arrays = torchao_arrays(case)
    x, w, g = (each.astype(np.float64) for each in arrays)
    exact = reference.Linear(x @ w, g @ w.T, x.T @ g)
    found = linear(*map(jnp.asarray, arrays), policy_of())
    for ours, expected, bound in zip(found, exact, case["rel_err_vs_f64"], strict=True):
        # Theirs have free scales: errors are of mantissas, by chance a little larger.
        assert relative_error(ours, expected) < 1.1 * bound


# Shapes

EINSUMS = {
    "x[B,T,K] @ w": ("btk,kn->btn", (2, 8, 32), (32, 16)),
    "heads": ("btd,dhk->bthk", (2, 8, 32), (32, 4, 8)),
    "two contracted": ("bthk,hkd->btd", (2, 8, 4, 8), (4, 8, 32)),
    "a gradient of heads": ("btd,bthk->dhk", (2, 8, 32), (2, 8, 4, 8)),
    "transposed weight": ("mk,nk->mn", (16, 32), (48, 32)),
    "transposed input": ("km,kn->mn", (32, 16), (32, 48)),
    "swapped result": ("mk,kn->nm", (16, 32), (32, 48)),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", EINSUMS)
def test_every_shape_of_a_product_is_quantised(name):
    text, left, right = EINSUMS[name]
    x, w = numbers(*left, seed=1), numbers(*right, seed=2)
    fn = functools.partial(jnp.einsum, text)
    inputs, result = text.split("->")
    labels = inputs.split(",")

    g = numbers(*jax.eval_shape(fn, x, w).shape, seed=3)
    y, dx, dw = linear(x, w, g, policy_of(), fn=fn)
    q = [reference.quantised(each).exact() for each in (x, w)]
    assert_rounded_once(y, np.einsum(text, *q))
    cotangent = reference.quantised(g, E5M2).exact()
    back = f"{result},{labels[1]}->{labels[0]}"
    # A CPU adds up some layouts in bf16 (jax 0.11): more roundings than one.
    assert relative_error(dx, np.einsum(back, cotangent, q[1])) < 2 * HALF_EPS
    back = f"{labels[0]},{result}->{labels[1]}"
    assert relative_error(dw, np.einsum(back, q[0], cotangent)) < 2 * HALF_EPS


# What is quantised, and how often


def test_each_product_quantises_its_operands_and_each_cotangent_once():
    x = numbers(16, 32)
    weights = [numbers(32, 16, seed=i) for i in range(3)]

    def fn(x, *weights):
        q, k, v = (x @ w for w in weights)
        return q + k + v

    assert quantisations(amp.autocast(fn, "fp8"), x, *weights) == ["float8_e4m3fn"] * 6
    assert amp.explain(fn, "fp8")(x, *weights).total.quantisations == 6

    def gradient(x, *weights):
        loss = lambda *args: jnp.sum(amp.autocast(fn, "fp8")(*args) ** 2)  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2, 3))(x, *weights)

    # A cotangent is for both gradients.
    found = quantisations(gradient, x, *weights)
    assert sorted(found) == ["float8_e4m3fn"] * 6 + ["float8_e5m2"] * 3


def test_the_cotangent_has_the_backward_format():
    x, w = numbers(16, 32), numbers(32, 16)
    for format_, name in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")):
        policy = policy_of(backward=format_)
        loss = amp.autocast(lambda x, w: jnp.sum((x @ w) ** 2), policy)
        found = quantisations(jax.grad(loss), x, w)
        assert found == ["float8_e4m3fn"] * 2 + [name]


def accumulation(fast):
    """What a product of 8-bit floats asks for."""
    if rewrites_fp8._HAS_ALGORITHMS:
        return DotAlgorithmPreset["ANY_F8_ANY_F8_F32" + "_FAST_ACCUM" * fast]
    return (Precision.DEFAULT if fast else Precision.HIGHEST,) * 2


@pytest.mark.parametrize("fast", [True, False])
def test_fast_accumulation_is_for_the_forward_product_only(fast):
    x, w = numbers(16, 32), numbers(32, 16)
    loss = amp.autocast(
        lambda x, w: jnp.sum((x @ w) ** 2), policy_of(fast_accumulation=fast)
    )

    def found(fn):
        return [
            eqn.params["precision"]
            for eqn in equations(jax.make_jaxpr(fn)(x, w))
            if eqn.primitive.name == "dot_general"
            and eqn.invars[0].aval.dtype.itemsize == 1
        ]

    assert found(loss) == [accumulation(fast)]
    assert found(jax.grad(loss, argnums=(0, 1))) == [
        accumulation(fast),
        *[accumulation(False)] * 2,
    ]


def test_gradients_of_f32_parameters_are_f32_and_weights_are_quantised_from_bf16():
    x = numbers(16, 32)
    w = numbers(32, 16) * (1 + 2.0**-10)  # more digits than bf16 has
    found = linear(x, w, numbers(16, 16, seed=3), policy_of())
    assert {each.dtype.name for each in found} == {"float32"}
    expected = reference.linear(x, reference.half(w), numbers(16, 16, seed=3))
    assert_rounded_once(found.y, expected.y)


def test_a_parameter_that_is_stored_in_bf16_counts_as_cast():
    x = numbers(16, 32)
    w = numbers(32, 16, seed=2).astype(jnp.bfloat16)
    policy = amp.get_policy("p=bf16,c=bf16,o=f32,m=fp8")
    fn = amp.autocast(jnp.dot, policy)
    assert quantisations(fn, x, w) == ["float8_e4m3fn"] * 2
    expected = reference.quantised(x).exact() @ reference.quantised(w).exact()
    assert_rounded_once(jax.jit(fn)(x, w), expected)
    dw = jax.eval_shape(jax.grad(lambda w: jnp.sum(fn(x, w))), w)
    assert dw.dtype == jnp.bfloat16
