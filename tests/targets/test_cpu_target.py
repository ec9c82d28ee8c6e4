"""Targets: what a plan for a CPU runs in half precision, and what it does not."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_amp as amp
from jmp_amp.plan.program import cpu_target
from jmp_amp.plan.program.cpu_target import Cpu
from tests.programs import equations

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
SHAPE = (128, 128)


@pytest.fixture
def native(monkeypatch):
    """A CPU with instructions for products of bf16, whatever this one has."""
    monkeypatch.setattr(cpu_target, "this_cpu", lambda: Cpu(native=True))


@pytest.fixture
def without(monkeypatch):
    """A CPU without them."""
    monkeypatch.setattr(cpu_target, "this_cpu", lambda: Cpu(native=False))


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(-3, 4, shape), F32) for shape in shapes]


def jaxpr_of(fn, *args):
    """The text of a program; functions in it have no addresses."""
    return str(jax.make_jaxpr(fn)(*args))


def products(fn, *args):
    """The dtypes of the operands and the result of each product."""
    return [
        tuple(str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))
        for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]


def lowered(fn, *args):
    """The operations that XLA gets, each with the dtypes of its operands and result."""
    text = jax.jit(fn).lower(*args).as_text()
    found = []
    for line in text.splitlines():
        operation = re.search(r"stablehlo\.(\w+)|custom_call @(\w+)", line)
        if operation is not None:
            dtypes = re.findall(r"tensor<(?:\d+x)*(bf16|f16|f32)>", line)
            found.append((operation[1] or operation[2], *dtypes))
    return found


def mlp(w, v, x):
    hidden = jax.nn.gelu(x @ w)
    return jnp.mean(jax.nn.softmax(hidden @ v) ** 2)


NATIVE = ("bfloat16", "bfloat16", "float32")


@pytest.mark.breadth(2)
@pytest.mark.parametrize("target", [None, "gpu", "tpu"])
def test_gpus_and_tpus_have_one_plan_which_is_the_default(native, target):
    args = arrays(SHAPE, SHAPE, SHAPE)
    plain = jaxpr_of(jax.grad(amp.autocast(mlp)), *args)
    assert jaxpr_of(jax.grad(amp.autocast(mlp, target=target)), *args) == plain
    assert set(products(amp.autocast(mlp, target=target), *args)) == {
        ("bfloat16", "bfloat16", "bfloat16")
    }


@pytest.mark.parametrize("target", ["cpu", "auto"])
def test_on_a_cpu_products_are_of_bf16_with_f32_results(native, target):
    args = arrays(SHAPE, SHAPE, SHAPE)
    loss = amp.autocast(mlp, target=target)
    assert products(loss, *args) == [NATIVE] * 2
    step = lowered(jax.grad(loss, (0, 1, 2)), *args)
    found = [dtypes for name, *dtypes in step if name == "dot_general"]
    # A function is in the program once for all its calls.
    assert found == [["bf16", "bf16", "f32"]] * len(found) and len(found) >= 4


def test_on_a_cpu_all_else_is_f32(native):
    args = arrays(SHAPE, SHAPE, SHAPE)
    step = lowered(jax.grad(amp.autocast(mlp, target="cpu"), (0, 1, 2)), *args)
    in_half = {name for name, *dtypes in step if "bf16" in dtypes}
    # An operand is cast, brought into its layout and multiplied. What follows is what
    # XLA leaves out: times one, plus zero, the sum of no elements.
    assert in_half == {
        *("convert", "transpose", "custom_call", "optimization_barrier"),
        "dot_general",
        *("slice", "pad", "add", "constant"),
    }


@pytest.mark.breadth(2)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "fp8"])
def test_on_a_cpu_without_instructions_the_program_is_that_of_f32(without, policy):
    args = arrays(SHAPE, SHAPE, SHAPE)
    found = jaxpr_of(jax.grad(amp.autocast(mlp, policy, target="cpu")), *args)
    assert found == jaxpr_of(jax.grad(amp.autocast(mlp, "float32")), *args)


def test_f16_has_no_products_on_a_cpu(native):
    args = arrays(SHAPE, SHAPE, SHAPE)
    found = jaxpr_of(amp.autocast(mlp, "mixed_float16", target="cpu"), *args)
    assert found == jaxpr_of(amp.autocast(mlp, "float32"), *args)


def test_fp8_has_bf16_products_on_a_cpu(native):
    args = arrays(SHAPE, SHAPE, SHAPE)
    assert products(amp.autocast(mlp, "fp8", target="cpu"), *args) == [NATIVE] * 2


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "left, right, is_native",
    [
        ((128, 128), (128, 128), True),
        ((512, 32), (32, 512), True),
        ((1024, 1024), (1024, 16), False),  # a head for 16 classes
        ((8, 1024), (1024, 1024), False),  # a small batch
        ((64, 64), (64, 64), False),
        ((64, 2, 64), (2, 64, 512), True),  # two dimensions are summed over
        ((8, 128, 128), (8, 128, 128), True),
        ((64, 32, 32), (64, 32, 32), False),  # each of the batch is small
        ((4096, 32), (32, 32), False),  # two sides are small
    ],
)
def test_small_products_are_f32(native, left, right, is_native):
    if len(left) == 3 and len(right) == 3:
        batched = left[0] == right[0]
        fn = jnp.matmul if batched else lambda x, y: jnp.tensordot(x, y, 2)
    else:
        fn = jnp.matmul
    found = products(amp.autocast(fn, target="cpu"), *arrays(left, right))
    assert found == [NATIVE if is_native else ("float32",) * 3]


def test_a_region_has_the_products_of_its_policy(native):
    def two(w, x):
        return amp.full_precision(jnp.matmul)(x, w) @ w

    found = products(amp.autocast(two, target="cpu"), *arrays(SHAPE, SHAPE))
    assert found == [("float32",) * 3, NATIVE]


def test_the_products_of_a_module_are_those_of_its_policy(native):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.LayerNorm()(nn.Dense(128, name="body")(x)))
            return nn.Dense(128, name="head")(x)

    model, x = Two(), jnp.ones(SHAPE)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    policies = amp.PolicyMap("mixed_bfloat16", {"head": "float32"})
    apply = amp.autocast(model.apply, policies, target="cpu")
    assert products(apply, variables, x) == [NATIVE, ("float32",) * 3]
    # The norm hands on f32 here: no cast but those of the product's operands.
    casts = [
        eqn.params["new_dtype"]
        for eqn in equations(jax.make_jaxpr(apply)(variables, x).jaxpr)
        if eqn.primitive.name == "convert_element_type"
    ]
    assert casts == [BF16, BF16]


def test_a_region_hands_on_f32_on_a_cpu(native):
    half = amp.Policy(F32, BF16, BF16)

    @jax.jit
    def region(x):
        return amp.with_policy(half)(jnp.tanh)(x)

    def fn(w, x):
        hidden = region(x @ w)
        return hidden @ w + hidden

    args = arrays(SHAPE, SHAPE)
    found = {
        target: ("convert", "bf16", "f32")
        in lowered(amp.autocast(fn, target=target), *args)
        for target in ("gpu", "cpu")
    }
    assert found == {"gpu": True, "cpu": False}


def test_a_norm_takes_and_hands_on_f32_on_a_cpu(native):
    class Embedded(nn.Module):
        @nn.compact
        def __call__(self, ids):
            x = nn.LayerNorm()(nn.Embed(8, 128)(ids))
            return nn.Dense(128)(nn.gelu(x))

    model, ids = Embedded(), jnp.zeros(128, int)
    variables = jax.eval_shape(model.init, jax.random.key(0), ids)

    apply = amp.autocast(model.apply, target="cpu")
    casts = [each for each in lowered(apply, variables, ids) if each[0] == "convert"]
    # The operands of the product.
    assert casts == [("convert", "f32", "bf16")] * 2


def test_a_product_that_asks_for_digits_is_f32(native):
    fn = amp.autocast(lambda x, y: jnp.matmul(x, y, precision="highest"), target="cpu")
    assert products(fn, *arrays(SHAPE, SHAPE)) == [("float32",) * 3]


def test_nothing_is_computed_twice_on_a_cpu(native):
    args = arrays(SHAPE, SHAPE, SHAPE)

    def checkpoints(target):
        text = jaxpr_of(amp.autocast(mlp, target=target), *args)
        return text.count("checkpoint[") + text.count("remat")

    assert checkpoints("gpu") > 0
    assert checkpoints("cpu") == 0


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_cast_inputs_without_a_dtype_changes_nothing_on_a_cpu(native, policy):
    # In the derivative rule of a user, which is traced later, too.
    seen = []

    @amp.cast_inputs
    def kernel(x):
        seen.append(x.dtype)
        return 2 * x

    @jax.custom_jvp
    def fn(x):
        return kernel(x)

    @fn.defjvp
    def derivative(primals, tangents):
        return fn(*primals), kernel(*tangents)

    x = jnp.ones(8)
    loss = amp.autocast(lambda x: jnp.sum(fn(x)), policy, target="cpu")
    gradient = jax.grad(loss)(x)
    assert {each.name for each in seen} == {"float32"}
    assert len(seen) > 1
    np.testing.assert_array_equal(gradient, 2 * x)


def test_cast_inputs_under_a_policy_of_f32_casts_half_arrays_up_on_a_cpu(native):
    seen = []

    @amp.cast_inputs
    def kernel(h):
        seen.append(h.dtype.name)
        return h

    amp.autocast(kernel, "float32", target="cpu")(jnp.ones(8, F16))
    assert seen == ["float32"]


def test_a_marked_function_of_half_arrays_is_the_function_on_a_cpu(native):
    kernel = amp.cast_inputs(lambda h: 2 * h)

    def fn(x):
        # In strict code both terms have to be f16.
        h = x.astype(F16)
        return kernel(h) + h

    found = amp.autocast(fn, target="cpu")(jnp.ones(8))
    assert found.dtype == F16
    np.testing.assert_array_equal(found, 3)


def layer(x, w):
    return jnp.tanh(x @ w / 64)


def around_a_region(x, w):
    return amp.with_policy("mixed_bfloat16")(layer)(layer(x, w), w)


@functools.cache
def gradients_in_f64(is_around):
    """Those of the test below, where no policy is."""
    inner = around_a_region if is_around else layer
    with jax.enable_x64(True):
        wide = [np.float64(each) for each in arrays(SHAPE, SHAPE)]
        loss = lambda w, x: jnp.sum(layer(inner(x, w), w) ** 2)  # noqa: E731
        return jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(*wide))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "fp8"])
@pytest.mark.parametrize("place", ["alone", "in a region", "around a region"])
def test_a_marked_function_is_planned_as_any_other_on_a_cpu(native, policy, place):
    def loss(mark):
        marked = mark(around_a_region if place == "around a region" else layer)
        if place == "in a region":
            marked = amp.with_policy("mixed_float16")(marked)
        return lambda w, x: jnp.sum(layer(marked(x, w), w) ** 2)

    w, x = arrays(SHAPE, SHAPE)
    ours = loss(amp.cast_inputs)
    plain = amp.autocast(loss(lambda fn: fn), policy, target="cpu")
    step = jax.grad(amp.autocast(ours, policy, target="cpu"), (0, 1))
    assert jaxpr_of(step, w, x) == jaxpr_of(jax.grad(plain, (0, 1)), w, x)
    report = amp.explain(ours, policy, target="cpu")(w, x)
    made = [e.dtype for e in report.equations if e.operation == "tanh"]
    assert set(made) == {"f32"}
    assert "half precision where" not in str(report.on_cpu)
    expected = gradients_in_f64(place == "around a region")
    for found, exact in zip(jax.jit(step)(w, x), expected, strict=True):
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert error < 4 * float(jnp.finfo(BF16).eps)


def test_a_marked_function_under_f16_does_not_overflow_on_a_cpu(native):
    # 128 * 30 * 30 = 115200 has no place in f16.
    x = jnp.full(SHAPE, 30.0)
    fn = amp.autocast(amp.cast_inputs(jnp.matmul), "mixed_float16", target="cpu")
    np.testing.assert_array_equal(fn(x, x), 115200.0)


def test_a_jitted_helper_is_traced_anew_for_another_target(native):
    seen = []

    @jax.jit
    @amp.cast_inputs
    def kernel(x):
        seen.append(x.dtype.name)
        return 2 * x

    for target in ("gpu", "cpu", "gpu"):
        amp.autocast(lambda x: kernel(x) + 1, target=target)(jnp.ones(8))
    assert seen == ["bfloat16", "float32"]


@pytest.mark.parametrize("dtype, short", [(F16, "f16"), (BF16, "bf16")])
def test_a_dtype_that_cast_inputs_names_is_no_gain_of_the_cpu(native, dtype, short):
    kernel = amp.cast_inputs(layer, dtype)
    args = arrays(SHAPE, SHAPE)
    for policy in ("mixed_float16", "mixed_bfloat16"):
        report = amp.explain(kernel, policy, target="cpu")(*args)
        made = {e.operation: e.dtype for e in report.equations}
        assert (made["dot_general"], made["tanh"]) == (short, short)
        assert report.on_cpu == "f32, and half precision where the program asks for it"

    def both(x, w):
        return kernel(x @ w, w)

    report = amp.explain(both, target="cpu")(*args)
    assert report.on_cpu == (
        "bf16 products with f32 results, f32 between them, and half precision where "
        "the program asks for it"
    )


def test_a_custom_vjp_on_a_cpu_is_not_advised_to_be_half(native):
    @jax.custom_vjp
    def kernel(x, w):
        return x @ w

    kernel.defvjp(lambda x, w: (kernel(x, w), w), lambda w, g: (g @ w.T, None))
    args = arrays(SHAPE, SHAPE)
    for fn in (kernel, amp.cast_inputs(kernel)):
        report = amp.explain(fn, target="cpu")(*args)
        (call,) = report.opaque
        assert call.reason == "a custom_vjp: as traced, with 1 product in f32"
        assert "cast_inputs" not in str(report)


def test_an_entry_that_switches_fp8_off_is_no_reason_on_a_cpu(native):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(128, name="head")(nn.gelu(nn.Dense(128, name="body")(x)))

    model, x = Two(), jnp.ones(SHAPE)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    policies = amp.PolicyMap("fp8", {"head": "mixed_bfloat16"})
    report = amp.explain(model.apply, policies, target="cpu")(variables, x)
    reason = "on this CPU: bf16 x bf16 -> f32"
    assert [each.reason for each in report.products] == [reason]
    assert report.on_cpu == "bf16 products with f32 results, f32 between them"


@pytest.mark.parametrize("output", ["float32", "bfloat16"])
def test_what_is_returned_has_the_output_dtype_of_the_policy(native, output):
    policy = amp.Policy(F32, BF16, output)
    args = arrays(SHAPE, SHAPE)
    for target in (None, "cpu"):
        fn = amp.autocast(jnp.matmul, policy, target=target)
        assert jax.eval_shape(fn, *args).dtype == output


def test_half_parameters_are_multiplied_as_they_are_stored(native):
    w, x = (each.astype(BF16) for each in arrays(SHAPE, SHAPE))
    policy = amp.Policy(BF16, BF16, F32)
    fn = amp.autocast(lambda w, x: jax.nn.relu(x @ w), policy, target="cpu")
    assert products(fn, w, x) == [NATIVE]
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(fn(w, x))))(w, x)
    exact = np.asarray(x, float).T @ (np.asarray(x, float) @ np.asarray(w, float) > 0)
    np.testing.assert_array_equal(gradient.astype(F32), exact)


def test_an_oversized_constant_is_never_multiplied_in_bf16(native):
    def masked(mask, x, w):
        return jnp.where(mask, x @ w, jnp.finfo(F32).min).T @ w

    x, w = arrays(SHAPE, SHAPE)
    mask = jnp.arange(128) < 100
    fn = amp.autocast(masked, target="cpu")
    assert products(fn, mask, x, w) == [NATIVE, ("float32",) * 3]
    # In bf16 the constant is -inf, and -inf times 0 is NaN.
    assert np.isfinite(fn(mask, x, w * 0)).all()


@pytest.mark.parametrize("target", ["cuda", "CPU", "", "cpu "])
@pytest.mark.parametrize("word", ["autocast", "explain"])
def test_an_unknown_target_is_refused_with_the_list(word, target):
    with pytest.raises(ValueError, match='"gpu", "tpu", "cpu" or "auto"') as error:
        getattr(amp, word)(mlp, target=target)
    assert f"{word}(fn, target={target!r}): unknown target" in str(error.value)


def test_a_target_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="a target is text, found int"):
        amp.autocast(mlp, target=1)
    with pytest.raises(TypeError, match="a target is text, found"):
        amp.explain(mlp, target=jax.devices()[0])


def test_a_decorator_has_a_target_too(native):
    @amp.autocast(target="cpu")
    def fn(x, y):
        return x @ y

    assert products(fn, *arrays(SHAPE, SHAPE)) == [NATIVE]


def test_a_recipe_has_a_target_too(native):
    for name, expected in (("O1", NATIVE), ("O0", ("float32",) * 3)):
        fn = amp.recipe(name, half_dtype="bf16").autocast(jnp.matmul, target="cpu")
        assert products(fn, *arrays(SHAPE, SHAPE)) == [expected]


def test_explain_says_what_the_cpu_does(native):
    small = jnp.ones((128, 16))
    report = amp.explain(lambda x, y, z: jnp.exp(x @ y) @ z, target="cpu")(
        *arrays(SHAPE, SHAPE), small
    )
    assert [each.reason for each in report.products] == [
        "on this CPU: bf16 x bf16 -> f32",
        "on this CPU: a side of 16 is too small to gain from bf16",
    ]
    assert [e.dtype for e in report.equations] == ["bf16", "f32", "f32"]
    assert "on this CPU (bf16 products with f32 results, f32 between" in report.summary
    assert amp.Report.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["on_cpu"] == report.on_cpu


def test_explain_says_that_a_cpu_has_no_instructions(without):
    report = amp.explain(jnp.matmul, target="cpu")(*arrays(SHAPE, SHAPE))
    reason = "no instructions for bf16 products, so all is f32"
    assert [each.reason for each in report.products] == [f"on this CPU: {reason}"]
    assert reason in report.summary


@pytest.mark.parametrize(
    "policy, sizes, told",
    [
        ("mixed_bfloat16", SHAPE, "bf16 products with f32 results, f32 between them"),
        ("fp8", SHAPE, "bf16 products with f32 results, f32 between them"),
        # CPUs with avx512_fp16 multiply f16, but XLA has no such products.
        ("mixed_float16", SHAPE, "XLA computes products of f16 in f32, so all is f32"),
        ("float32", SHAPE, "no product in bf16, so all is f32"),
        ("mixed_bfloat16", (64, 64), "no product in bf16, so all is f32"),
    ],
)
def test_the_heading_says_what_the_cpu_does_under_the_policy(
    native, policy, sizes, told
):
    report = amp.explain(jnp.matmul, policy, target="cpu")(*arrays(sizes, sizes))
    assert f"on this CPU ({told}): " in report.summary
    in_half = report.total.matmuls_in_half
    assert in_half == ("so all is f32" not in told)
    assert "no instructions" not in str(report)


def test_the_heading_knows_the_regions_of_other_policies(native):
    def fn(x, w):
        return amp.with_policy("mixed_bfloat16")(jnp.matmul)(x, w) @ w

    for policy in ("float32", "mixed_float16"):
        report = amp.explain(fn, policy, target="cpu")(*arrays(SHAPE, SHAPE))
        assert report.total.matmuls_in_half == 1
        assert "(bf16 products with f32 results, f32 between" in report.summary


def test_explain_says_why_no_product_is_of_f16(native):
    report = amp.explain(jnp.matmul, "mixed_float16", target="cpu")(
        *arrays(SHAPE, SHAPE)
    )
    reason = "on this CPU: XLA computes products of f16 in f32"
    assert [each.reason for each in report.products] == [reason]


@pytest.mark.parametrize("result", [None, F16, F32])
def test_xla_computes_products_of_f16_in_f32(result):
    # Where it does no more, the sentence above is false, and f16 may gain.
    product = functools.partial(jnp.matmul, preferred_element_type=result)
    x = jnp.ones((256, 256), F16)
    text = jax.jit(product).lower(x, x).compile().as_text()
    made = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    operands = re.findall(r" dot\((%[\w.-]+), (%[\w.-]+)\)", text)
    assert [made[name] for pair in operands for name in pair] == ["f32", "f32"]


def test_explain_tells_what_f32_between_products_costs(native):
    args = arrays((512, 128), SHAPE, SHAPE)

    def loss(x, w, v):
        return jnp.sum(jax.nn.relu(x @ w) @ v)

    def saved(target):
        total = amp.explain(loss, target=target)(*args).total
        return total.saved - total.copies

    # Of the activation both keep half precision, for the second product; on a CPU the
    # relu keeps its f32 too.
    assert saved("cpu") > saved("gpu")


def test_a_report_of_a_gpu_says_nothing_of_cpus(native):
    report = amp.explain(jnp.matmul)(*arrays(SHAPE, SHAPE))
    assert report.on_cpu is None
    assert "CPU" not in str(report)


X86 = "processor : 0\nflags\t\t: fpu avx512f {}\nprocessor : 1\nflags\t\t: fpu\n"
ARM = "processor : 0\nFeatures\t: fp asimd {}\n"


@pytest.mark.parametrize(
    "told, found",
    [
        (X86.format("avx512_bf16"), True),
        (X86.format("amx_bf16 amx_tile"), True),
        (X86.format("avx512_fp16"), False),
        (ARM.format("bf16 i8mm"), True),
        (ARM.format("asimdhp"), False),
        ("model name : avx512_bf16\n", False),
        (None, False),  # no such file: macOS, Windows
    ],
)
def test_instructions_are_read_from_what_linux_tells(
    monkeypatch, tmp_path, told, found
):
    path = tmp_path / "cpuinfo"
    if told is not None:
        path.write_text(told)
    monkeypatch.setattr(cpu_target, "_CPU_INFO", path)
    assert cpu_target._has_instructions() is found


def test_the_plan_is_for_a_cpu_without_instructions_if_the_compiler_casts(monkeypatch):
    cpu_target.this_cpu.cache_clear()
    monkeypatch.setattr(cpu_target, "_has_instructions", lambda: True)
    monkeypatch.setattr(cpu_target, "_keeps_bf16", lambda: False)
    try:
        assert cpu_target.this_cpu() == Cpu(native=False)
    finally:
        cpu_target.this_cpu.cache_clear()


def test_the_default_precision_of_a_caller_does_not_change_what_a_cpu_has(monkeypatch):
    kept = cpu_target._keeps_bf16()
    with jax.default_matmul_precision("highest"):
        assert cpu_target._keeps_bf16() == kept


def test_auto_is_the_default_backend(monkeypatch, native):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert cpu_target.cpu_of("auto") is None
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert cpu_target.cpu_of("auto") == Cpu(native=True)


@pytest.mark.parametrize("target", [None, "cpu"])
def test_an_autocast_inside_has_the_target_that_it_names(native, target):
    x, w = arrays(SHAPE, SHAPE)
    inside = amp.autocast(jnp.dot, target=target)
    outer = amp.autocast(lambda x, w: inside(x, w) + 1.0)
    assert products(outer, x, w) == products(inside, x, w)
