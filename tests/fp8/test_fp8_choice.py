"""Which products run in 8 bits, and what is told of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jmp_amp as amp
from tests.fp8.programs import E4M3, formats, numbers, quantisations, reasons
from tests.fp8.reference import relative_error
from tests.programs import results_of, with_rule

M, K, N = 32, 64, 48


def aval(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = aval(M, K), aval(K, N)
F8 = jnp.float8_e4m3fn


def convolution(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )


def ragged(x, w):
    return lax.ragged_dot(x, w, jnp.array([16, 16]))


def half(x):
    return x.astype(jnp.bfloat16)


def asking(**options):
    return lambda x, w: jnp.dot(x, w, **options)


NO_MULTIPLE = " is no multiple of 16"
PRODUCTS = {
    "plain": (jnp.dot, (X, W), "e4m3", E4M3),
    "x[B,T,K] @ w": (jnp.matmul, (aval(2, 8, K), W), "e4m3", E4M3),
    "an f32 result": (asking(preferred_element_type="float32"), (X, W), "e4m3", E4M3),
    "default precision": (asking(precision="default"), (X, W), "e4m3", E4M3),
    "jitted": (jax.jit(jnp.dot), (X, W), "e4m3", E4M3),
    "m": (jnp.dot, (aval(8, K), W), "bf16", f"m = 8{NO_MULTIPLE}"),
    "n": (jnp.dot, (X, aval(K, 17)), "bf16", f"n = 17{NO_MULTIPLE}"),
    "k": (jnp.dot, (aval(M, 100), aval(100, N)), "bf16", f"k = 100{NO_MULTIPLE}"),
    "m of three": (jnp.matmul, (aval(2, 4, K), W), "bf16", f"m = 8{NO_MULTIPLE}"),
    "a vector": (jnp.dot, (X, aval(K)), "bf16", f"n = 1{NO_MULTIPLE}"),
    "no terms": (jnp.dot, (aval(M, 0), aval(0, N)), "bf16", f"k = 0{NO_MULTIPLE}"),
    "no rows": (jnp.dot, (aval(0, K), W), "bf16", f"m = 0{NO_MULTIPLE}"),
    "batched": (
        jnp.matmul,
        (aval(4, M, K), aval(4, K, N)),
        "bf16",
        "batched: such products run in bf16",
    ),
    "convolution": (
        convolution,
        (aval(1, 8, 8, 16), aval(3, 3, 16, 16)),
        "bf16",
        "convolutions run in bf16",
    ),
    "ragged": (
        ragged,
        (X, aval(2, K, N)),
        "bf16",
        "the groups of a ragged product have no scales: bf16",
    ),
    "astype": (
        lambda x, w: half(x) @ half(w),
        (X, W),
        "bf16",
        "an operand has its dtype from the program",
    ),
    "fp8 operands": (
        lambda x, w: (x.astype(F8) @ w.astype(F8)).astype(jnp.float32),
        (X, W),
        "f8_e4m3",
        None,
    ),
    "vdot": (jnp.vdot, (aval(K), aval(K)), "f32", None),
    "HIGHEST": (asking(precision="highest"), (X, W), "f32", None),
    "HIGH": (asking(precision="high"), (X, W), "f32", None),
    "algorithm": (
        asking(precision=lax.DotAlgorithmPreset.BF16_BF16_F32),
        (X, W),
        "f32",
        None,
    ),
    "full_precision": (amp.full_precision(jnp.dot), (X, W), "f32", None),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("fn", "args", "dtype", "reason"), PRODUCTS.values(), ids=PRODUCTS
)
def test_a_product_is_fp8_where_it_fits_and_else_says_why_not(fn, args, dtype, reason):
    assert formats(fn, *args) == [dtype]
    if reason is not None:
        assert reasons(fn, *args) == [reason]
    # What is told is what is done; a size never raises.
    made = quantisations(amp.autocast(fn, "fp8"), *args)
    casts = 2 if dtype in ("e4m3", "f8_e4m3") else 0
    assert made == ["float8_e4m3fn"] * casts


def test_f64_is_as_traced():
    with jax.enable_x64(True):
        x, w = aval(M, K, dtype="float64"), aval(K, N, dtype="float64")
        assert formats(jnp.dot, x, w) == ["f64"]


@pytest.mark.parametrize(
    ("side", "arrays"),
    [
        ("m", (aval(16, 32), aval(32, 32))),
        ("n", (aval(32, 32), aval(32, 16))),
        ("k", (aval(32, 16), aval(16, 32))),
    ],
)
def test_a_side_below_min_size_is_bf16(side, arrays):
    policy = amp.Policy(matmul=amp.Fp8(min_size=32))
    assert reasons(jnp.dot, *arrays, policy=policy) == [
        f"{side} = 16 is below min_size = 32"
    ]
    at_size = amp.Policy(matmul=amp.Fp8(min_size=16))
    assert reasons(jnp.dot, *arrays, policy=at_size) == [E4M3]


def test_a_product_that_does_not_fit_is_that_of_mixed_bfloat16():
    def program(policy):
        loss = lambda x, w: jnp.sum(amp.autocast(jnp.dot, policy)(x, w))  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss))(aval(M, 100), aval(100, N)))

    assert program("fp8") == program("mixed_bfloat16")


# Policies and regions


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("full=dot_general", "f32"),
        ("full=layer", "f32"),
        ("low=dot_general", "e4m3"),
        ("low=layer", "e4m3"),
        ("follow=dot_general", "f32"),  # its operands are f32
    ],
)
def test_what_a_policy_names_wins_over_fp8(names, dtype):
    @jax.jit
    def layer(x, w):
        return x @ w

    policy = f"p=f32,c=bf16,o=f32,m=fp8,{names}"
    assert formats(layer, X, W, policy=policy) == [dtype]


def test_an_operation_that_follows_half_operands_is_no_product_to_quantise():
    policy = "p=f32,c=bf16,o=f32,m=fp8,follow=dot_general"
    fn = lambda x, w: half(x) @ half(w)  # noqa: E731
    assert formats(fn, X, W, policy=policy) == ["bf16"]


def test_everything_else_is_mixed_bfloat16():
    def model(x, w, v):
        h = jax.nn.gelu(x @ w) + jnp.exp(x @ w)
        return jax.nn.softmax(h @ v) * jnp.mean(h)

    args = X, W, aval(N, 16)
    kept = {}
    for policy in ("fp8", "mixed_bfloat16"):
        report = amp.explain(model, policy)(*args)
        kept[policy] = [
            (e.operation, e.dtype, e.shapes, e.reason, e.casts)
            for e in report.equations
            if not e.matmuls
        ]
    assert kept["fp8"] == kept["mixed_bfloat16"]
    shapes = [
        jax.eval_shape(amp.autocast(model, p), *args) for p in ("fp8", "mixed_bfloat16")
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("output", ["f32", "bf16"])
def test_outputs_have_the_output_dtype(output):
    policy = amp.Policy("f32", "bf16", output, matmul=amp.Fp8())
    found = jax.eval_shape(amp.autocast(jnp.dot, policy), X, W)
    assert found.dtype == amp.get_policy(output).output_dtype


# Derivative rules of the program


rule = with_rule(jnp.matmul)


@jax.custom_vjp
def opaque(x, w):
    return x @ w


opaque.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
)


def summed(fn):
    return lambda x, w: jnp.sum(amp.autocast(fn, "fp8")(x, w))


def test_a_product_in_a_custom_jvp_is_quantised_and_its_tangents_are_not():
    assert reasons(rule, X, W) == [E4M3]
    gradient = jax.grad(summed(rule), argnums=(0, 1))
    # Both operands of the primal. The products of the rule are linear.
    assert quantisations(gradient, X, W) == ["float8_e4m3fn"] * 2
    x, w = numbers(M, K), numbers(K, N, seed=1)
    dx, dw = jax.jit(gradient)(x, w)
    ones = jnp.ones((M, N))
    eps = float(jnp.finfo("bfloat16").eps)
    for found, exact in ((dx, ones @ w.T), (dw, x.T @ ones)):
        assert jnp.abs(found - exact).max() <= 4 * eps * jnp.abs(exact).max()


# What a rule may do with a tangent before it multiplies it.
TANGENTS = {
    "scaled": lambda t, w: (2.0 * t) @ w,
    "moved": lambda t, w: t[::-1] @ w,
    "carried": lambda t, w: jax.lax.scan(
        lambda c, _: (c + t, c @ w), jnp.zeros_like(t), None, 2
    )[1].sum(0),
    "kept in a carry": lambda t, w: jax.lax.fori_loop(0, 2, lambda _, c: c @ w, t),
    "chosen": lambda t, w: jax.lax.cond(w[0, 0] > 0, lambda t: t, lambda t: -t, t) @ w,
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", TANGENTS)
def test_what_is_made_of_a_tangent_is_not_quantised(name):
    @jax.custom_jvp
    def fn(x, w):
        return jnp.tanh(x)

    @fn.defjvp
    def derivative(primals, tangents):
        x, w = primals
        return fn(x, w), TANGENTS[name](tangents[0], w)

    x, w = numbers(32, 32), numbers(32, 32, seed=1)

    def tangent(x, t):
        return jax.jvp(lambda x: amp.autocast(fn, "fp8")(x, w), (x,), (t,))[1]

    assert results_of(tangent, x, x, primitive="dot_general")
    assert quantisations(tangent, x, x) == []


def test_the_second_derivative_of_a_rule_of_the_program_is_as_before():
    x, w = numbers(16, 16), numbers(16, 16, seed=1)

    def product(transform):
        loss = lambda w: jnp.sum(transform(rule)(x, w) ** 2)  # noqa: E731
        return jax.jit(lambda w: jax.jvp(jax.grad(loss), (w,), (w,))[1])(w)

    exact = product(lambda fn: fn)
    found = product(lambda fn: amp.autocast(fn, "fp8"))
    assert relative_error(found, np.asarray(exact, np.float64)) < 0.1


def test_a_custom_vjp_is_as_traced():
    assert formats(opaque, X, W) == ["f32"]
    gradient = jax.grad(summed(opaque), argnums=(0, 1))
    assert quantisations(gradient, X, W) == []
    assert results_of(gradient, X, W, primitive="dot_general") == ["float32"] * 3


# The report


def test_8_bit_operands_that_are_kept_count_as_copies_of_arguments():
    report = amp.explain(lambda w, x: jnp.sum(x @ w), "fp8")(W, X)
    # A byte each, and a scale of f32 for each of both.
    kept = M * K + K * N + 2 * 4
    assert (report.total.saved, report.total.copies) == (kept, kept)


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(64)(x)


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.ones, (64, 64))
        x = Inner(name="inner")(x)
        return lax.scan(lambda c, _: (c @ kernel, None), x, None, 2)[0]


@pytest.mark.parametrize("order", [1, -1])
def test_the_report_names_the_innermost_entry_and_enters_loops(order):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64)(Outer(name="outer")(x))

    entries = [("outer", "mixed_bfloat16"), ("outer/inner", "mixed_bfloat16")]
    policies = amp.PolicyMap("fp8", dict(entries[::order]))
    model, x = Model(), jnp.ones((64, 64))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    report = amp.explain(model.apply, policies)(variables, x)
    assert [e.reason for e in report.equations if e.matmuls] == [
        "the policy of outer/inner",
        "the policy of outer",
        E4M3,
    ]


def test_totals_count_products_operations_and_arrays():
    def fn(x, w, v):
        h = x @ w + x @ w * 2.0
        return h @ v

    report = amp.explain(fn, "fp8")(X, W, aval(N, 17))
    total = report.total
    assert (total.matmuls, total.matmuls_in_half, total.fp8_matmuls) == (3, 3, 2)
    assert total.fp8_flops == 2 * (2 * M * K * N)
    # x and w, for each of both.
    assert total.quantisations == 4
    assert [(p.reason, p.equations) for p in report.products] == [
        (E4M3, 2),
        (f"n = 17{NO_MULTIPLE}", 1),
    ]


def test_a_scan_counts_its_turns():
    def fn(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    report = amp.explain(fn, "fp8")(aval(M, K), aval(5, K, K))
    assert report.total.fp8_flops == 5 * 2 * M * K * K


@pytest.mark.parametrize(("width", "pays"), [(1024, True), (1008, False)])
def test_the_report_says_where_fp8_hardly_pays(width, pays):
    report = amp.explain(jnp.dot, "fp8")(aval(2048, width), aval(width, 2048))
    assert (report.hardly_pays is None) is pays
    assert ("hardly pay" in str(report)) is not pays
    other = amp.explain(jnp.dot)(aval(16, 16), aval(16, 16))
    assert other.hardly_pays is None and "fp8" not in str(other)
