"""What an H100 would run of fp8 programs, beside the same in bf16.

They are compiled with XLA's default flags, as users compile them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import jmp_amp as amp
from jmp_amp.plan.rewrites import fp8 as rewrites_fp8
from jmp_amp.plan.saved.needs import KEPT
from tests import h100
from tests.fp8.models import Gpt, Mlp, aval, training_step
from tests.fp8.on_h100 import read
from tests.measures import traced
from tests.programs import equations

MIXED, FP8 = "mixed_bfloat16", "fp8"
MLP, GPT = Mlp(), Gpt()
SMALL_MLP = Mlp(width=256, layers=2)
SMALL_GPT = Gpt(layers=2, width=256, tokens=64, batch=4, vocabulary=512, heads=4)


of_h100 = functools.partial(h100.figures, read=read, default_flags=True)


@functools.cache
def figures(model: Any, policy: str) -> dict[str, Any]:
    return of_h100(
        training_step(amp.autocast(model.loss, policy)),
        *model.shapes(),
        donate_argnums=0,
    )


def both(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return figures(model, MIXED), figures(model, FP8)


def both_keep_all(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the figures where nothing is made again: what 8 bits alone change."""
    mixed, fp8 = "p=f32,c=bf16,o=f32,s=all", "p=f32,c=bf16,o=f32,m=fp8,s=all"
    return figures(model, mixed), figures(model, fp8)


def three_each(linears: int) -> int:
    """One product forward, two backward."""
    return 3 * linears


def assert_no_waste(found: dict[str, Any]) -> None:
    assert found["casts of f8"] == found["multiplies"] == []


# Small programs


# Other versions leave it to XLA how, and so how much memory products need.
needs_algorithms = pytest.mark.skipif(
    not rewrites_fp8._HAS_ALGORITHMS, reason="JAX has none in export"
)


@needs_algorithms
def test_only_the_forward_product_adds_up_with_fewer_bits():
    for fast in (True, False):
        policy = amp.Policy(matmul=amp.Fp8(fast_accumulation=fast))
        found = figures(SMALL_MLP, str(policy))["algorithms"]
        forward = ["ANY_F8_ANY_F8_F32" + "_FAST_ACCUM" * fast] * 2
        assert sorted(found) == sorted([*forward, *["ANY_F8_ANY_F8_F32"] * 3])


@pytest.mark.breadth(2)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_every_product_of_a_small_mlp_is_of_8_bits(activation):
    model = dataclasses.replace(SMALL_MLP, activation=activation)
    mixed, fp8 = both(model)
    # The gradient of the batch is not asked for.
    assert (fp8["f8"], fp8["others"]) == (three_each(2) - 1, 0)
    assert (mixed["f8"], mixed["others"]) == (0, three_each(2) - 1)
    assert_no_waste(fp8)


def test_products_of_one_operand_are_not_merged_into_one_of_bf16():
    def loss(weights, x):
        q, k, v = (x @ w for w in weights)
        return jnp.sum(jnp.tanh(q) * jnp.sin(k) * jnp.cos(v))

    weights = [aval(256, 256)] * 3
    found = of_h100(
        jax.grad(amp.autocast(loss, FP8)),
        weights,
        aval(512, 256),
    )
    # Forward, and the gradient of each weight.
    assert (found["f8"], found["others"]) == (6, 0)


# What stands in a call: the gelu, the product, or both.
GELU = jax.nn.gelu
SCANNED = jax.checkpoint(lambda h, _: (jax.checkpoint(GELU)(h), None))
RULED = jax.custom_jvp(lambda x: GELU(x))
RULED.defjvps(lambda tangent, result, x: tangent * jnp.tanh(x))


def product(x, w):
    return x @ w


CALLED = {
    "checkpoint": lambda x, w: jax.checkpoint(GELU)(x @ w),
    "checkpoint with a policy": lambda x, w: jax.checkpoint(
        GELU, policy=jax.checkpoint_policies.dots_saveable
    )(x @ w),
    "checkpoint of jit": lambda x, w: jax.checkpoint(jax.jit(lambda x: GELU(x) * 1.0))(
        x @ w
    ),
    "rule": lambda x, w: RULED(x @ w),
    "branch": lambda x, w: jax.lax.cond(True, jax.checkpoint(GELU), jnp.sin, x @ w),
    "turn": lambda x, w: jax.lax.scan(SCANNED, x @ w, None, length=1)[0],
    "vmap": lambda x, w: jax.vmap(jax.checkpoint(GELU))(x @ w),
    "product in jit": lambda x, w: jax.checkpoint(GELU)(jax.jit(product)(x, w)),
    "product in checkpoint": lambda x, w: RULED(jax.checkpoint(product)(x, w)),
}


def of_a_gelu(through):
    def loss(weights, x):
        return jnp.mean(jnp.square(through(x, weights[0]) @ weights[1]))

    return jax.grad(amp.autocast(loss, FP8))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", CALLED)
def test_a_product_is_kept_apart_from_a_gelu_in_any_call(name):
    args = [aval(512, 512)] * 2, aval(512, 512)
    barriers = [
        eqn
        for eqn in equations(jax.make_jaxpr(of_a_gelu(CALLED[name]))(*args))
        if eqn.primitive.name == "optimization_barrier"
    ]
    # That of the second product is squared. GPUs and others have a branch each.
    assert len(barriers) == 2


@pytest.mark.parametrize("fn", [jax.nn.silu, jax.nn.relu, jnp.sin])
def test_a_product_that_leads_to_no_gelu_is_fused_with_what_reads_it(fn):
    program = of_a_gelu(lambda x, w: jax.checkpoint(fn)(jax.jit(product)(x, w)))
    names = [
        eqn.primitive.name
        for eqn in equations(
            jax.make_jaxpr(program)([aval(512, 512)] * 2, aval(512, 512))
        )
    ]
    assert "optimization_barrier" not in names


# XLA fails to compile these without the barrier.
@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "name", ["checkpoint", "rule", "product in jit", "product in checkpoint"]
)
def test_a_gelu_in_a_call_compiles(name):
    found = of_h100(
        of_a_gelu(CALLED[name]),
        [aval(512, 512)] * 2,
        aval(512, 512),
    )
    assert (found["f8"], found["others"]) == (5, 0)


def described(text: str) -> jax.sharding.Sharding:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=text, topology="1x1x1"
    )
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


A100 = (
    h100.H100.replace("major: 9 feature_extension: ACCELERATED_FEATURES", "major: 8")
    .replace("H100 80GB HBM3", "A100-SXM4-80GB")
    .replace("core_count: 132", "core_count: 108")
    .replace("233472", "167936")
    .replace("232448", "166912")
)


@h100.needs_compiler
def test_an_a100_has_no_units_of_8_bits_and_restores_the_operands(monkeypatch):
    monkeypatch.setattr(rewrites_fp8, "compute_capability", lambda: (8, 0))
    device = described(A100)
    pinned = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device),
        SMALL_MLP.shapes(),
    )
    step = training_step(amp.autocast(SMALL_MLP.loss, FP8))
    program = jax.jit(step).lower(*pinned).compile()
    found = read(program)
    assert (found["f8"], found["others"]) == (0, three_each(2) - 1)
    assert {each.operands[0] for each in h100.gemms(program)} == {"bf16"}


GELUS = {
    "with bias, f32": (True, FP8),
    "f32": (False, FP8),
    "with bias, bf16": (True, "p=f32,c=bf16,o=bf16,m=fp8"),
    "bf16": (False, "p=f32,c=bf16,o=bf16,m=fp8"),
}


@pytest.mark.parametrize(("bias", "policy"), GELUS.values(), ids=GELUS)
def test_a_gelu_whose_input_is_kept_compiles(bias, policy):
    """XLA fuses a gelu into a product, and fails if the product is a result too."""

    def fn(x, w, b):
        h = x @ w + b[None] if bias else x @ w
        return jax.nn.gelu(h), h

    found = of_h100(
        amp.autocast(fn, policy),
        *(aval(1024, 2048), aval(2048, 512), aval(512)),
    )
    assert found["f8"] == 1


def test_a_gradient_through_a_captured_gelu_compiles():
    def fn(w, x):
        def loss(w):
            h = x @ w
            return jnp.mean(jax.nn.gelu(h) ** 2), h

        return jax.value_and_grad(amp.autocast(loss, FP8), has_aux=True)(w)

    found = of_h100(
        fn,
        *(aval(2048, 512), aval(1024, 2048)),
    )
    assert found["f8"] == 2


@pytest.mark.parametrize("model", [SMALL_MLP, SMALL_GPT], ids=["mlp", "gpt"])
def test_default_flags_change_no_dtype_of_a_bf16_program(model):
    step = training_step(amp.autocast(model.loss, MIXED))

    def operands(default_flags):
        found = h100.figures(
            step, *model.shapes(), read=h100.gemms, default_flags=default_flags
        )
        return Counter(each.operands for each in found)

    without_triton = operands(default_flags=False)
    assert operands(default_flags=True) == without_triton
    assert set(without_triton) == {("bf16", "bf16")}


# Full size

slow = pytest.mark.slow


MIB = 2**20


@slow
def test_an_mlp_is_within_the_bounds_of_the_study():
    """Three layers of 4096 without biases, a batch of 4096, and SGD."""
    found = figures(dataclasses.replace(MLP, bias=False), FP8)
    assert (found["f8"], found["others"]) == (8, 0)
    assert_no_waste(found)
    assert found["kernels"] <= 46
    assert found["moved"] <= 2369 * MIB
    assert found["temp"] <= 212.1 * MIB


@slow
@needs_algorithms
@pytest.mark.parametrize(
    ("activation", "temp"),
    # Nothing is fused into a product before a gelu: XLA might fail to compile. With the
    # default flags bf16 needs a tenth less for relu than without Triton.
    [("relu", 0.835), ("silu", 0.755), ("gelu", 0.795)],
)
def test_an_mlp_needs_less_memory_and_few_kernels_more(activation, temp):
    model = dataclasses.replace(MLP, activation=activation)
    _, default = both(model)
    mixed, fp8 = both_keep_all(model)
    for found in (default, fp8):
        assert (found["f8"], found["others"]) == (8, 0)
        assert_no_waste(found)
        assert found["kernels"] <= 56
    assert fp8["temp"] <= temp * mixed["temp"]
    assert fp8["moved"] <= 1.18 * mixed["moved"]
    assert default["temp"] <= fp8["temp"]


@slow
@needs_algorithms
@pytest.mark.parametrize(
    ("loop", "calls"),
    [
        pytest.param("unrolled", 72, marks=pytest.mark.nightly),
        ("scan", 18),
        pytest.param("remat", 18, marks=pytest.mark.nightly),
    ],
)
def test_a_gpt_has_three_8_bit_products_for_each_linear(loop, calls):
    mixed, fp8 = both(dataclasses.replace(GPT, loop=loop))
    assert (fp8["f8"], mixed["f8"]) == (calls, 0)
    # None is computed twice: the others are attention and the head.
    assert fp8["f8"] + fp8["others"] == mixed["others"]
    assert_no_waste(fp8)


# What differentiation saves: read from the trace


def saved_bytes(loss, args, policy):
    run = amp.autocast(loss, policy)
    return traced(lambda p, _: (run(p), None), args, None).saved_bytes


def test_a_linear_saves_its_operands_in_8_bits():
    args = aval(512, 256), aval(256, 128)
    loss = lambda args: jnp.sum(args[0] @ args[1])  # noqa: E731
    assert saved_bytes(loss, args, FP8) <= 0.52 * saved_bytes(loss, args, MIXED)


def test_an_mlp_saves_at_most_three_quarters():
    # What the derivatives of silu and gelu save besides is the same in both.
    mixed, fp8 = (
        saved_bytes(lambda args: MLP.loss(*args), MLP.shapes(), f"{policy},s=all")
        for policy in ("p=f32,c=bf16,o=f32", "p=f32,c=bf16,o=f32,m=fp8")
    )
    assert fp8 <= 0.75 * mixed


def saved_of(loss, args, policy):
    """The shapes and dtypes of what is saved, arguments too."""

    def kept_for(*args):
        return jax.tree.leaves(jax.vjp(amp.autocast(loss, policy), *args)[1])

    # What two derivatives need is saved once.
    kept_variables = dict.fromkeys(jax.make_jaxpr(kept_for)(*args).jaxpr.outvars)
    return Counter(str(v.aval) for v in kept_variables)


def test_what_q_k_and_v_read_is_saved_in_8_bits_alone():
    x, w = aval(64, 32), aval(32, 48)

    def loss(x, *weights):
        h = jnp.sin(x)
        q, k, v = (h @ w for w in weights)
        return jnp.sum(q * k * v)

    found = saved_of(loss, (x, w, w, w), FP8)
    assert found["float8_e4m3fn[64,32]"] == found["float8_e4m3fn[32,48]"] == 3
    # No copy in bf16; x itself is kept for the derivative of sin.
    assert not {"bfloat16[64,32]", "bfloat16[32,48]"} & found.keys()


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "name", ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"]
)
def test_a_checkpoint_saves_what_it_saves_of_bf16(name):
    policy = getattr(jax.checkpoint_policies, name)

    def loss(stack, x):
        turn = jax.checkpoint(
            lambda x, w: (jnp.tanh(x @ w) @ w.T, None), policy=policy, prevent_cse=False
        )
        return jnp.sum(jax.lax.scan(turn, x, stack)[0] ** 2)

    args = aval(3, 32, 64), aval(16, 32)
    assert saved_of(loss, args, FP8) == saved_of(loss, args, MIXED)


def test_a_checkpoint_can_save_the_8_bit_operands():
    names = jax.checkpoint_policies.save_only_these_names("fp8_lhs", "fp8_rhs")

    def layer(x, w):
        return jnp.tanh(jnp.sin(x) @ jnp.cos(w))

    plain, named = jax.checkpoint(layer), jax.checkpoint(layer, policy=names)
    args = aval(64, 32), aval(32, 48)
    found = saved_of(lambda x, w: jnp.sum(named(x, w)), args, FP8)
    # JAX hands them on through the checkpoint inside, and counts them again.
    assert {"float8_e4m3fn[64,32]", "float8_e4m3fn[32,48]"} <= found.keys()
    assert not any(name.startswith("bfloat16") for name in found)
    nothing = saved_of(lambda x, w: jnp.sum(plain(x, w)), args, FP8)
    assert not any(name.startswith("float8_e4m3fn") for name in nothing)


def test_a_plain_policy_leaves_no_trace_of_fp8():
    """Programs without fp8 are what they were before there was any."""
    for model in (SMALL_MLP, dataclasses.replace(SMALL_GPT, layers=1)):
        programs = [
            jax.make_jaxpr(jax.grad(amp.autocast(model.loss, policy)))(*model.shapes())
            for policy in (amp.Policy(), amp.Policy(matmul=None), MIXED)
        ]
        assert len({str(each) for each in programs}) == 1
        found = equations(programs[0])
        names = {eqn.primitive.name for eqn in found}
        assert not {"custom_linear_solve", "optimization_barrier"} & names
        named = {e.params["name"] for e in found if e.primitive.name == "name"}
        assert named <= {KEPT}
        dtypes = {str(v.aval) for e in equations(programs[0]) for v in e.outvars}
        assert not any("float8" in text or "uint8" in text for text in dtypes)
