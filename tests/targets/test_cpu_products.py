"""Products of bf16 on a CPU: exact, differentiable, and never a program that fails.

Arrays of small integers are exact in bf16, and so are their products in f32.
"""

import functools
import itertools
import random
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import jet

import jmp_amp as amp
from jmp_amp.plan.program.cpu_target import this_cpu
from tests.programs import with_rule
from tests.targets.product_programs import (
    MODES,
    multiply_all,
    program,
    transformed,
)

F32 = jnp.float32
compiles_native = pytest.mark.skipif(
    not this_cpu().native, reason="this CPU has no instructions for products of bf16"
)


@pytest.fixture(autouse=True)
def native(monkeypatch):
    multiply_all(monkeypatch)


def on_cpu(fn):
    return amp.autocast(fn, target="cpu")


def integers(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), F32)


@functools.partial(jax.jit, static_argnums=0)
def result_and_gradients(fn, x, y):
    """The result of a function, and both gradients for one cotangent."""
    result, pullback = jax.vjp(fn, x, y)
    return result, pullback(integers(result.shape, 2))


def multiplied(compiled):
    """The dtype of the operands of each product of a compiled program."""
    text = compiled.as_text()
    made = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    return [made[name] for name in re.findall(r" dot\((%[\w.-]+),", text)]


def check(seeds, mode):
    """Runs random programs; they are those of f32, up to roundings of cotangents."""
    found = [program(random.Random(seed)) for seed in seeds]
    pairs = []
    for seed, each in zip(seeds, found, strict=True):
        x, y = (integers(shape, seed) for shape in each.shapes)
        ours, args = transformed(on_cpu(each.fn), x, y, mode)
        pairs.append((ours, transformed(each.fn, x, y, mode)[0], args))
    args = [args for *_, args in pairs]
    # A compilation takes long, however much there is to compile.
    all_ours, all_exact = (
        jax.jit(lambda args, fns=fns: [f(*a) for f, a in zip(fns, args, strict=True)])(
            args
        )
        for fns in ([ours for ours, *_ in pairs], [plain for _, plain, _ in pairs])
    )
    for each, *both in zip(found, all_ours, all_exact, strict=True):
        for ours, exact in zip(*map(jax.tree.leaves, both), strict=True):
            assert (ours.dtype, ours.shape) == (exact.dtype, exact.shape)
            # Sums of at most 1000 terms, each rounded to 2**-9.
            limit = 0.05 * (1 + np.abs(exact).max(initial=0))
            np.testing.assert_allclose(
                ours, exact, rtol=0, atol=limit, err_msg=each.text
            )


@pytest.mark.breadth(2)
@pytest.mark.parametrize("seed, mode", list(enumerate(MODES)))
def test_a_random_program_runs_and_is_that_of_f32(seed, mode):
    check([seed], mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_many_random_programs_run_and_are_those_of_f32(mode):
    check(range(100, 109), mode)


# What XLA makes a program of that fails when it runs, unless barriers stand around the
# product: transposes of the result, of an operand, a batch of one.
FAILED = {
    "a transpose of the result": lambda x, y: (x @ y).T,
    "tanh of a transpose": lambda x, y: jnp.tanh((x @ y).T),
    "attention": lambda x, y: jnp.einsum(
        "bhqk,bkhd->bqhd", x.reshape(2, 2, 32, 16), y.reshape(2, 16, 2, 16)
    ),
    "relu of a transpose": lambda x, y: jax.nn.relu(x.T).T @ y,
    "a batch of one": lambda x, y: x.T.T[None] @ y[None],
    "a pad": lambda x, y: jnp.pad(x.T, 1)[1:-1, 1:-1].T @ y,
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", FAILED)
def test_programs_that_xla_would_break_run(name):
    x, y = integers((64, 32)), integers((32, 32), 1)

    def loss(x, y):
        return jnp.sum(on_cpu(FAILED[name])(x, y) ** 2)

    ours = jax.jit(jax.grad(loss, (0, 1)))(x, y)
    alone = jax.grad(lambda x, y: jnp.sum(FAILED[name](x, y) ** 2), (0, 1))
    exact = jax.jit(alone)(x, y)
    for found, expected in zip(ours, exact, strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * scale)


@compiles_native
def test_all_products_of_a_training_step_are_multiplied_as_bf16():
    def loss(w, v, x):
        return jnp.sum((jax.nn.relu(x @ w) @ v) ** 2)

    args = integers((64, 128)), integers((128, 32)), integers((96, 64))
    compiled = jax.jit(jax.grad(on_cpu(loss), (0, 1, 2))).lower(*args).compile()
    assert multiplied(compiled) == ["bf16"] * 6
    # With the barriers, and what makes the derivative linear, nothing is added.
    text = compiled.as_text()
    assert not re.search(r"= bf16\[[^ ]* (add|multiply|pad|slice)\(", text)


@compiles_native
def test_all_products_of_an_attention_are_multiplied_as_bf16():
    def loss(q, k, v):
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", scores, v) ** 2)

    q = integers((2, 32, 2, 16))
    compiled = jax.jit(jax.grad(on_cpu(loss), (0, 1, 2))).lower(q, q, q).compile()
    assert multiplied(compiled) == ["bf16"] * 6


def one_pixel(x, w):
    made = jax.lax.conv(x[..., None, None], w.T[..., None, None], (1, 1), "VALID")
    return made[..., 0, 0]


@jax.custom_jvp
def moved(x, w):
    return x @ w


@moved.defjvp
def moved_derivative(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    _, terms = jax.lax.scan(lambda t, _: (t, (w.T @ t.T).T), dx, None, 2)
    one = jax.lax.cond(jnp.asarray(True), lambda t: t, lambda t: -t, dw)
    return moved(x, w), terms.sum(0) / 2 + jax.jit(jnp.matmul)(x, one)


RULES = {
    "two products": with_rule(jnp.matmul),
    "another rule": with_rule(with_rule(jnp.matmul)),
    "moved tangents": moved,
    "a convolution": with_rule(one_pixel),
}
GRADIENTS = [mode for mode in MODES if "gradient" in mode and "jvp" not in mode]
GRADIENTS += ["scan", "checkpoint", "cond", "shard_map"]


def bf16_products(lowered):
    """For each product that XLA gets, whether its operands are of bf16."""
    lines = re.findall(r"dot_general .* : \((.*)\) ->", lowered.as_text())
    return [line.count("xbf16>") == 2 for line in lines]


# The first rule in every mode, the others in two.
SLOW = [
    (name, mode)
    for name, mode in itertools.product(RULES, GRADIENTS)
    if name != "two products" and mode not in ("gradient", "vmap of gradient")
]


@functools.cache
def gradients_of_a_product(mode):
    x, y = integers((16, 8)), integers((8, 32), 1)
    plain, args = transformed(jnp.matmul, x, y, mode)
    return x, y, jax.tree.leaves(jax.jit(plain)(*args))


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each in SLOW))
        for each in itertools.product(RULES, GRADIENTS)
    ],
)
def test_the_backward_products_of_a_rule_of_the_program_are_of_bf16(name, mode):
    x, y, exact = gradients_of_a_product(mode)
    ours, args = transformed(on_cpu(RULES[name]), x, y, mode)
    lowered = jax.jit(ours).lower(*args)
    assert all(bf16_products(lowered)) and len(bf16_products(lowered)) >= 3
    compiled = lowered.compile()
    if this_cpu().native:
        assert set(multiplied(compiled)) == {"bf16"}
    for each, expected in zip(jax.tree.leaves(compiled(*args)), exact, strict=True):
        # Tangents and cotangents are rounded to bf16.
        limit = 0.01 * np.abs(expected).max()
        np.testing.assert_allclose(each, expected, rtol=0, atol=limit)


def derivative_of_gradient(loss):
    def squares(x, y):
        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, y))

    return jax.grad(squares, (0, 1))


def jvp_of_gradient(loss):
    return lambda x, y: jax.jvp(jax.grad(loss, (0, 1)), (x, y), (x, y))


SECOND = {
    "a gradient of a gradient": derivative_of_gradient,
    "a jvp of one": jvp_of_gradient,
    "a hessian": lambda loss: jax.hessian(loss, (0, 1)),
}


def jvp(loss):
    return lambda x, y: jax.jvp(loss, (x, y), (x, y))[1]


# A rule that calls another one multiplies two tangents in this one.
SECOND["a gradient of a jvp"] = lambda loss: jax.grad(jvp(loss), (0, 1))


@functools.cache
def derivatives(name, second, wrapped):
    """Whether each product is one of bf16, and what the derivatives are."""
    fn = RULES.get(name, jnp.matmul)
    fn = on_cpu(fn) if wrapped else fn
    derivative = SECOND[second](lambda x, y: jnp.sum(jnp.sin(fn(x, y) / 8)))
    args = integers((6, 4)), integers((4, 5), 1)
    lowered = jax.jit(derivative).lower(*args)
    return bf16_products(lowered), jax.tree.leaves(lowered.compile()(*args))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("name", ["two products", "another rule", "a convolution"])
def test_second_derivatives_of_a_rule_are_those_of_the_product(name, second):
    products, found = derivatives(name, second, True)
    if second != "a gradient of a jvp":
        as_written, _ = derivatives("as it is", second, True)
        assert products.count(False) == as_written.count(False) < products.count(True)
    exact = derivatives("as it is", second, False)[1]
    for each, expected in zip(found, exact, strict=True):
        limit = 0.02 * np.abs(expected).max()
        np.testing.assert_allclose(each, expected, rtol=0, atol=limit)


DIMENSIONS = {
    "matrices": ((5, 7), (7, 3), (((1,), (0,)), ((), ()))),
    "both transposed": ((7, 5), (3, 7), (((0,), (1,)), ((), ()))),
    "two terms": ((2, 5, 7), (7, 3, 2), (((2, 0), (0, 2)), ((), ()))),
    "two batches": ((2, 5, 3, 7), (3, 7, 4, 2), (((3,), (1,)), ((0, 2), (3, 0)))),
    "no free dimension": ((2, 7), (7, 2, 4), (((1,), (0,)), ((0,), (1,)))),
    "a vector": ((5, 7), (7,), (((1,), (0,)), ((), ()))),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", DIMENSIONS)
def test_values_and_gradients_are_exact(name):
    left, right, numbers = DIMENSIONS[name]
    x, y = integers(left), integers(right, 1)

    def product(x, y):
        return jax.lax.dot_general(x, y, numbers)

    found = result_and_gradients(on_cpu(product), x, y)
    expected = result_and_gradients(product, x, y)
    for ours, exact in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(ours, exact)


def test_the_cotangent_is_rounded_to_bf16():
    x, cotangent = np.eye(4, dtype=F32), np.full((4, 4), 1 + 2.0**-10, F32)
    _, pullback = jax.vjp(on_cpu(jnp.matmul), x, x)
    for each in jax.jit(pullback)(cotangent):
        np.testing.assert_array_equal(each, np.ones((4, 4)))


def test_the_result_keeps_the_digits_of_f32():
    # 1 + 2**-20 has no place in bf16; a sum of two products has.
    x, y = np.float32([[1.0, 2.0**-20]]), np.ones((2, 1), F32)
    assert on_cpu(jnp.matmul)(x, y) == 1 + 2.0**-20


def test_gradients_keep_the_digits_of_f32():
    # Each is a sum of 1 and 2**-20, of products of bf16.
    x, y = np.float32([[1.0], [2.0**-20]]), np.float32([[1.0, 2.0**-20]])
    policy = amp.Policy(reduce_dtype="float32")
    _, pullback = jax.vjp(amp.autocast(jnp.matmul, policy, target="cpu"), x, y)
    for each in jax.jit(pullback)(np.ones((2, 2), F32)):
        np.testing.assert_array_equal(each, np.full(each.shape, 1 + 2.0**-20))


def test_the_default_precision_of_a_backward_pass_is_not_asked_for():
    x, y = integers((8, 4)), integers((4, 6), 1)
    _, pullback = jax.vjp(on_cpu(jnp.matmul), x, y)
    with jax.default_matmul_precision("highest"):
        text = jax.jit(pullback).lower(np.ones((8, 6), F32)).as_text()
    assert "dot_general" in text
    assert "HIGHEST" not in text


def test_second_derivatives_are_those_of_f32():
    x, y = integers((5, 4)), integers((4, 3), 1)

    def loss(x, y):
        return jnp.sum((x @ y) ** 3) / 64

    def mixed(loss):
        return lambda x: jnp.sum(jax.grad(loss, 1)(x, y) ** 2)

    ours = jax.jit(jax.hessian(on_cpu(loss), (0, 1)))(x, y)
    exact = jax.jit(jax.hessian(loss, (0, 1)))(x, y)
    for found, expected in zip(
        jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True
    ):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.01 * scale)
    found = jax.jit(jax.grad(mixed(on_cpu(loss))))(x)
    expected = jax.jit(jax.grad(mixed(loss)))(x)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * scale)


def test_a_gradient_that_nobody_asks_for_is_not_computed():
    x, y = integers((8, 4)), integers((4, 6), 1)
    step = jax.jit(jax.grad(lambda y: jnp.sum(on_cpu(jnp.matmul)(x, y) ** 2)))
    assert step.lower(y).as_text().count("stablehlo.dot_general") == 2


def test_a_vmap_is_the_loop():
    xs, y = integers((3, 8, 4)), integers((4, 6), 1)

    def gradient(x, y):
        return jax.grad(lambda x, y: jnp.sum(on_cpu(jnp.matmul)(x, y) ** 2), (0, 1))(
            x, y
        )

    mapped = jax.jit(jax.vmap(gradient, (0, None)))(xs, y)
    alone_of = jax.jit(gradient)
    for i, x in enumerate(xs):
        for ours, alone in zip(mapped, alone_of(x, y), strict=True):
            np.testing.assert_array_equal(ours[i], alone)


def test_a_step_is_exported_as_the_docstring_says():
    x, y = integers((8, 4)), integers((4, 6), 1)

    def loss(x, y):
        return jnp.sum(on_cpu(jnp.matmul)(x, y) ** 2)

    step = jax.jit(jax.grad(loss, (0, 1)))
    with pytest.raises(ValueError, match="LayoutConstraint"):
        export.export(step)(x, y)
    layouts = export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    exported = export.export(step, disabled_checks=[layouts])(x, y)
    for ours, expected in zip(exported.call(x, y), step(x, y), strict=True):
        np.testing.assert_array_equal(ours, expected)
    if this_cpu().native:
        compiled = jax.jit(exported.call).lower(x, y).compile()
        assert multiplied(compiled) == ["bf16"] * 3
    docstring = " ".join(str(amp.autocast.__doc__).split())
    assert 'DisabledSafetyCheck.custom_call("LayoutConstraint")]' in docstring


def test_jet_is_called_inside_as_the_docstring_says():
    x, y, v = integers((8, 4)), integers((4, 6), 1), integers((8, 4), 2)

    def second(fn):
        # d^2/dt^2 of fn(x + t v)^2.
        def derivative(x, v):
            series = ((v, jnp.zeros_like(x)),)
            return jet.jet(lambda x: fn(x) * fn(x), (x,), series)[1][1]

        return derivative

    def product(x):
        return x @ y

    ours = on_cpu(second(product))
    assert "layout_constraint" in str(jax.make_jaxpr(ours)(x, v))
    # `jet` makes its factorials of exponentials.
    limit = 8 * float(jnp.finfo(F32).eps)
    np.testing.assert_allclose(ours(x, v), 2 * (v @ y) ** 2, rtol=limit)
    # JAX's own `relu` fails likewise: `jet` knows no derivative rules.
    with pytest.raises(Exception, match=r"unexpected tracer|process_primitive"):
        jax.jit(second(on_cpu(product)))(x, v)
    assert "`jax.experimental.jet` has no rules" in " ".join(
        str(amp.autocast.__doc__).split()
    )


CONVOLUTIONS = {
    "channels last": (("NHWC", "HWIO", "NHWC"), (1, 1)),
    "channels first": (("NCHW", "OIHW", "NCHW"), (1, 1)),
    "another order of results": (("NHWC", "HWIO", "NCHW"), (1, 1)),
    "strides": (("NHWC", "HWIO", "NHWC"), (2, 3)),
    "kernel of outputs first": (("NHWC", "OHWI", "HWNC"), (2, 1)),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_one_pixel_is_a_product(name):
    layouts, strides = CONVOLUTIONS[name]
    sizes = {"N": 2, "H": 5, "W": 7, "C": 3, "I": 3, "O": 4}
    image = integers([sizes[d] for d in layouts[0]])
    kernel = integers([1 if d in "HW" else sizes[d] for d in layouts[1]], 1)

    def convolution(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, strides, "VALID", dimension_numbers=layouts
        )

    ours = result_and_gradients(on_cpu(convolution), image, kernel)
    exact = result_and_gradients(convolution, image, kernel)
    for found, expected in zip(
        jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    text = str(jax.make_jaxpr(on_cpu(convolution))(image, kernel))
    assert "conv_general_dilated" not in text


OTHER_CONVOLUTIONS = {
    "a larger window": ((3, 3, 4, 8), {"padding": "SAME"}),
    "padding": ((1, 1, 4, 8), {"padding": [(1, 0), (0, 0)]}),
    "dilated images": ((1, 1, 4, 8), {"padding": [(0, 0)] * 2, "lhs_dilation": (2, 2)}),
    "groups": ((1, 1, 2, 8), {"padding": "VALID", "feature_group_count": 2}),
    "groups of the batch": (
        (1, 1, 4, 8),
        {"padding": "VALID", "batch_group_count": 2},
    ),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", OTHER_CONVOLUTIONS)
def test_other_convolutions_are_those_of_f32(name):
    kernel, told = OTHER_CONVOLUTIONS[name]

    def convolution(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"), **told
        )

    args = integers((2, 6, 6, 4)), integers(kernel, 1)
    ours = str(jax.make_jaxpr(on_cpu(convolution))(*args))
    assert ours == str(jax.make_jaxpr(amp.autocast(convolution, "float32"))(*args))
    report = amp.explain(convolution, target="cpu")(*args)
    (reason,) = report.products
    assert reason.reason == "on this CPU: convolutions are faster in f32"


AXES = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("equation", ["bk,kn->bn", "bk,kn->nb", "bck,ckn->cnb"])
def test_a_sharded_step_is_that_of_one_device(equation, axes):
    of_x, of_w = equation.split("->")[0].split(",")
    sizes = {"b": 16, "c": 2, "k": 8, "n": 32}
    x, w = (
        integers([sizes[d] for d in each], i) for i, each in enumerate((of_x, of_w))
    )

    def gradients(x, w):
        def loss(x, w):
            return jnp.sum(on_cpu(functools.partial(jnp.einsum, equation))(x, w) ** 2)

        return jax.value_and_grad(loss, (0, 1))(x, w)

    alone = jax.jit(gradients)(x, w)
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AXES[axes],) * 2)
    places = {"b": "data", "n": "model"}
    placed = [
        jax.device_put(
            value,
            jax.sharding.NamedSharding(
                mesh, jax.sharding.PartitionSpec(*map(places.get, each))
            ),
        )
        for value, each in ((x, of_x), (w, of_w))
    ]
    sharded = jax.jit(gradients)(*placed)
    chex.assert_trees_all_equal(jax.device_get(sharded), jax.device_get(alone))
    for gradient, argument in zip(sharded[1], placed, strict=True):
        assert gradient.sharding.is_equivalent_to(argument.sharding, argument.ndim)


def test_a_product_of_a_batch_of_any_size_is_exported():
    x, w = integers((16, 8)), integers((8, 32), 1)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(on_cpu(jnp.matmul)(x, w) ** 2)))
    (batch,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 8), jnp.float32)
    pinned = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    exported = jax.export.export(gradient, disabled_checks=[pinned])(w, shape)
    np.testing.assert_array_equal(exported.call(w, x), gradient(w, x))
    products = re.findall(r"dot_general .*", exported.mlir_module())
    assert [each.count("bf16>") for each in products] == [2, 2]
