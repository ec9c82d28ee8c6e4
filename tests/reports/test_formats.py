"""Reasons know the half format of the policy, and norms."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jmp_amp as amp
from jmp_amp.plan.tables.operations import GROUPS
from jmp_amp.plan.tables.rules import FULL_FUNCTIONS

ALL = [group.words for group in GROUPS] + [words for words, _ in FULL_FUNCTIONS]
IN_BF16 = {each.reason: each.in_bf16 for each in ALL if each.in_bf16}
X, W = jnp.ones((8, 16)), jnp.ones((16, 16))
MIXED = ("mixed_float16", "mixed_bfloat16")


def is_of_f16(reason):
    return any(word in reason for word in ("f16 ", "65504", "255.9")) or (
        reason.endswith("f16") and not reason.endswith("bf16")
    )


def without_bf16(reason):
    return reason.replace("bf16", "")


def test_every_reason_of_the_tables_that_is_about_f16_has_a_form_for_bf16():
    reasons = {each.reason for each in ALL}
    assert {each for each in reasons if is_of_f16(without_bf16(each))} == {*IN_BF16}
    assert not any(is_of_f16(without_bf16(each)) for each in IN_BF16.values())


def everything(x, w):
    h = x @ w
    return (
        jnp.sum(jnp.exp(h)),
        jnp.sum(jnp.asinh(h)),
        jnp.var(h),
        jnp.mean(optax.l2_loss(h)),
    )


@pytest.mark.parametrize("policy", [*MIXED, "fp8"])
def test_a_plan_gives_the_reasons_of_its_own_format(policy):
    report = amp.explain(everything, policy)(X, W)
    reasons = {each.reason for each in report.equations}
    wanted, others = [*IN_BF16], [*IN_BF16.values()]
    if policy != "mixed_float16":
        wanted, others = others, wanted
    assert reasons >= {*wanted} and not reasons & {*others}


def test_modules_of_two_formats_have_the_reasons_of_each():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.exp(nn.Dense(4)(x)), nn.Dense(4, name="other")(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return [Model(name=name)(x) for name in ("one", "two")]

    model = Outer()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    policy = amp.PolicyMap("mixed_float16", {"two": "mixed_bfloat16"})
    report = amp.explain(model.apply, policy)(params, X)
    reasons = {e.module: e.reason for e in report.equations if e.operation == "exp"}
    assert "f16 has no range" in without_bf16(reasons["Outer/one"])
    assert "bf16 has no digits" in reasons["Outer/two"]


def test_a_norm_has_the_reasons_of_the_format_around_it():
    model = nn.Sequential([nn.Dense(16), nn.LayerNorm()])
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    for policy, is_f16 in zip(MIXED, (True, False), strict=True):
        rows = amp.explain(model.apply, policy)(params, X).equations
        (reason,) = {row.reason for row in rows if row.operation == "reduce_sum"}
        assert is_of_f16(without_bf16(reason)) == is_f16


def test_who_asks_for_a_product_is_its_reason_unless_more_is_told():
    def fn(x, w):
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    for policy, reason in (
        ("mixed_bfloat16", "asked for by the program itself"),
        ("fp8", "an operand has its dtype from the program"),
    ):
        rows = amp.explain(fn, policy)(X, W).equations
        (row,) = (row for row in rows if row.operation == "dot_general")
        assert (row.reason, row.asked_by) == (reason, "the program itself")


def test_a_class_that_parameters_give_is_not_the_one_of_the_table():
    report = amp.explain(lambda x, y: jnp.einsum("i,j->ij", x, y) @ W)(X[0], W[0])
    outer, product = (e for e in report.equations if e.operation == "dot_general")
    assert "its parameters and dtypes give it" in report.why(outer)
    assert "the table of operations gives it" in report.why(product)


@pytest.mark.parametrize("policy", MIXED)
def test_a_norm_is_f32_by_itself_and_another_module_by_its_policy(policy):
    model = nn.Sequential([nn.Dense(16), nn.LayerNorm(), nn.Dense(4), jnp.tanh])
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    policy = amp.PolicyMap(policy, {"layers_2": "float32"})
    report = amp.explain(model.apply, policy)(params, X)
    reasons = {}
    for row in report.equations:
        reasons.setdefault(row.module, set()).add(row.reason)
    norm = "a norm computes in f32, whatever the policy around it"
    assert norm in reasons["Sequential/layers_1"]
    assert "the policy computes in f32" not in reasons["Sequential/layers_1"]
    assert "the policy computes in f32" in reasons["Sequential/layers_2"]
    assert norm not in reasons["Sequential/layers_2"]


def test_why_has_the_reason_of_the_row():
    report = amp.explain(everything, "mixed_bfloat16")(X, W)
    texts = {row: report.why(row.identity) for row in report.equations}
    (row,) = (row for row in texts if row.operation == "exp")
    assert row.reason in texts[row]
    assert not any(is_of_f16(without_bf16(text)) for text in texts.values())


def test_of_more_than_three_modules_the_number_is_told():
    class Tower(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(5):
                x = nn.Dense(4, dtype=jnp.bfloat16)(x)
            return x

    model, x = Tower(), jnp.ones((2, 4))
    params = model.init(jax.random.key(0), x)
    text = str(amp.explain(model.apply, "float32")(params, x))
    assert "Tower/Dense_2 and 2 more" in text
