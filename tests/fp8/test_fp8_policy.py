"""fp8 as a policy: its text, its place in maps and scopes, and what it refuses."""

import copy
import dataclasses
import pickle
import re
from collections import Counter

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from hypothesis import strategies as st

import jmp_amp as amp
from tests.programs import equations, results_of

MIXED, FP8 = "mixed_bfloat16", "fp8"
E4M3 = "e4m3 x e4m3 -> bf16"
# Each field with a value that is not its default.
SETTINGS = {
    "backward": "e4m3",
    "fast_accumulation": False,
    "min_size": 64,
}
fp8s = st.builds(
    amp.Fp8,
    backward=st.sampled_from(["e4m3", "e5m2"]),
    fast_accumulation=st.booleans(),
    min_size=st.integers(1, 10**6).map(lambda n: 16 * n),
)


# As data and as text


def test_fp8_is_mixed_bfloat16_with_products_in_8_bits():
    policy = amp.get_policy(FP8)
    assert policy == amp.Policy("f32", "bf16", "f32", matmul=amp.Fp8())
    assert dataclasses.replace(policy, matmul=None) == amp.get_policy(MIXED)
    assert amp.Policy().matmul is None and policy != amp.Policy()


def test_defaults_are_those_of_the_field():
    # e4m3 forward, e5m2 backward: Micikevicius et al. 2022, arXiv:2209.05433.
    assert dataclasses.asdict(amp.Fp8()) == {
        "forward": "e4m3",
        "backward": "e5m2",
        "fast_accumulation": True,
        "min_size": 16,
    }
    assert SETTINGS.keys() | {"forward"} == dataclasses.asdict(amp.Fp8()).keys()


def test_text_is_short_where_it_is_the_default():
    assert str(amp.get_policy(FP8)) == "p=f32,c=bf16,o=f32,m=fp8"


@pytest.mark.parametrize(("field", "value"), SETTINGS.items())
def test_text_tells_every_setting_and_is_read_back(field, value):
    policy = amp.Policy(matmul=amp.Fp8(**{field: value}))
    written = str(value).lower()
    assert str(policy) == f"p=f32,c=bf16,o=f32,m=fp8+{field}={written}"
    assert amp.get_policy(str(policy)) == policy
    assert getattr(amp.get_policy(str(policy)).matmul, field) == value


@hypothesis.given(fp8s, st.sampled_from(["f32", "bf16"]), st.booleans())
@hypothesis.settings(deadline=None)
def test_text_survives_every_way_that_it_travels(fp8, output, named):
    policy = amp.Policy("f32", "bf16", output, matmul=fp8)
    policy = policy.with_full("exp") if named else policy
    text = str(policy)
    # A name scope cuts at slashes, and transformations wrap it in parentheses.
    assert not set(text) & set("()[]/ ;:")
    assert amp.get_policy(text) == policy
    assert amp.get_policy(f" {text.upper()} ").matmul == fp8
    assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
    assert hash(pickle.loads(pickle.dumps(policy))) == hash(policy)
    # repr is Python.
    assert eval(repr(fp8), {"Fp8": amp.Fp8}) == fp8
    assert repr(fp8) in repr(policy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("c=bf16,m=fp8", amp.Policy("f32", "bf16", "bf16", matmul=amp.Fp8())),
        ("p=bf16,m=fp8", amp.Policy("bf16", "bf16", "bf16", matmul=amp.Fp8())),
        ("params=f32,compute=bf16,output=f32,matmul=fp8", amp.get_policy(FP8)),
        ("m=fp8,p=f32,c=bf16,o=f32", amp.get_policy(FP8)),
        ("p=f32,c=bf16,o=f32,m=none", amp.get_policy(MIXED)),
        ("FP8", amp.get_policy(FP8)),
        (
            "p=f32,c=bf16,o=f32,m = FP8 + backward = E4M3 + min_size = 32",
            amp.Policy(matmul=amp.Fp8(backward="e4m3", min_size=32)),
        ),
    ],
)
def test_text_may_be_written_in_other_ways(text, expected):
    assert amp.get_policy(text) == expected


def test_what_a_policy_is_made_with_later_keeps_its_products():
    policy = amp.Policy(matmul=amp.Fp8(min_size=32))
    for changed in (
        policy.with_output_dtype("bf16"),
        policy.with_low("exp"),
        policy.with_full("exp"),
        policy.with_follow("exp"),
    ):
        assert changed.matmul == policy.matmul and changed != policy


def test_equal_policies_are_one_static_argument():
    traces = []

    def fn(x, policy):
        traces.append(policy)
        return x

    jitted = jax.jit(fn, static_argnums=1)
    for each in (amp.Fp8(), amp.Fp8(min_size=16), amp.Fp8(backward="e4m3")):
        jitted(jnp.ones(2), amp.Policy(matmul=each))
    assert [p.matmul.backward for p in traces] == ["e5m2", "e4m3"]


# In maps and scopes


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(32, name="body", use_bias=False)(x))
        return nn.Dense(16, name="head", use_bias=False)(x)


MODEL = Model()
INPUT = jnp.ones((16, 16))
VARIABLES = jax.eval_shape(MODEL.init, jax.random.key(0), INPUT)


def formats(policy, apply=MODEL.apply):
    report = amp.explain(apply, policy)(VARIABLES, INPUT)
    return [e.dtype for e in report.equations if e.matmuls]


MAPS = {
    "off in the head": (FP8, MIXED, ["e4m3", "bf16"]),
    "on in the head": (MIXED, FP8, ["bf16", "e4m3"]),
    "f32 in the head": (FP8, "float32", ["e4m3", "f32"]),
    "on in the head of f32": ("float32", FP8, ["f32", "e4m3"]),
    "f16 in the head": (FP8, "mixed_float16", ["e4m3", "f16"]),
    "larger in the head": (FP8, "c=bf16,m=fp8+min_size=32", ["e4m3", "bf16"]),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("default", "head", "expected"), MAPS.values(), ids=MAPS)
def test_a_map_switches_fp8_on_and_off_by_module(default, head, expected):
    policy = amp.PolicyMap(default, {"**/head": head})
    assert formats(policy) == expected
    assert formats(str(policy)) == expected  # and so does its text
    assert formats(pickle.loads(pickle.dumps(policy))) == expected


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("default", "head", "expected"), MAPS.values(), ids=MAPS)
def test_a_mark_switches_fp8_on_and_off(default, head, expected):
    class Marked(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jnp.tanh(nn.Dense(32, name="body", use_bias=False)(x))
            return amp.with_policy(head)(nn.Dense)(16, name="head", use_bias=False)(x)

    assert formats(default, Marked().apply) == expected


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("default", "inner", "expected"), MAPS.values(), ids=MAPS)
def test_a_nested_autocast_switches_fp8_on_and_off(default, inner, expected):
    def fn(variables, x):
        kernels = variables["params"]
        x = jnp.tanh(x @ kernels["body"]["kernel"])
        return amp.autocast(jnp.dot, inner)(x, kernels["head"]["kernel"])

    found = results_of(
        amp.autocast(fn, default), VARIABLES, INPUT, primitive="convert_element_type"
    )
    # The inner one has been at work before the outer one sees the product.
    assert found.count("float8_e4m3fn") == 2 * expected.count("e4m3")


def test_explain_names_the_entry_that_switches_fp8_off():
    policy = amp.PolicyMap(FP8, {"**/head": MIXED})
    report = amp.explain(MODEL.apply, policy)(VARIABLES, INPUT)
    reasons = [e.reason for e in report.equations if e.matmuls]
    assert reasons == [E4M3, "the policy of **/head"]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("field", SETTINGS)
def test_every_setting_reaches_the_products_through_a_name_scope(field):
    """A region is a name scope: what is not in its text is lost."""
    policy = amp.Policy(matmul=amp.Fp8(**{field: SETTINGS[field]}))
    x = jax.ShapeDtypeStruct((16, 32, 64), "float32")

    def fn(x):
        mixed = jnp.einsum("bij,jk->bik", x, x[0].T @ x[1])
        return jnp.einsum("bij,bkj->bik", mixed, x)

    def program(fn, policy):
        gradient = jax.grad(lambda x: jnp.sum(amp.autocast(fn, policy)(x)))
        return Counter(
            f"{eqn.primitive} {eqn.params.get('precision')} {eqn.outvars[0].aval}"
            for eqn in equations(jax.make_jaxpr(gradient)(x))
            if eqn.outvars
        )

    marked = program(amp.with_policy(policy)(fn), "float32")
    assert marked == program(fn, policy)
    assert marked != program(fn, FP8)


# What is refused, by name

REFUSED = {
    "forward": (lambda: amp.Fp8(forward="e5m2"), "e5m2", "e4m3"),
    "unknown forward": (lambda: amp.Fp8(forward="e3m4"), "'e3m4'", "e4m3, e5m2"),
    "unknown backward": (lambda: amp.Fp8(backward="fp8"), "'fp8'", "e4m3, e5m2"),
    "fnuz": (lambda: amp.Fp8(backward="e4m3fnuz"), "'e4m3fnuz'", "e4m3, e5m2"),
    "min_size 0": (lambda: amp.Fp8(min_size=0), "min_size=0", "16"),
    "min_size 8": (lambda: amp.Fp8(min_size=8), "min_size=8", "16"),
    "min_size 24": (lambda: amp.Fp8(min_size=24), "min_size=24", "16"),
    "negative": (lambda: amp.Fp8(min_size=-16), "min_size=-16", "16"),
    "f16": (
        lambda: amp.Policy(compute_dtype="f16", matmul=amp.Fp8()),
        "compute_dtype=f16",
        "bf16",
    ),
    "f32": (
        lambda: amp.Policy(compute_dtype="f32", matmul=amp.Fp8()),
        "compute_dtype=f32",
        "bf16",
    ),
}
TEXTS = {
    "p=f32,c=f16,o=f32,m=fp8": ("compute_dtype=f16", "bf16"),
    "m=fp8": ("m=fp8", "p=f32,c=bf16,o=f32,m=fp8"),
    "c=bf16,m=fp8+backward=e3m4": ("'e3m4'", "e4m3, e5m2"),
    "c=bf16,m=fp8+forward=e5m2": ("e5m2", "e4m3"),
    "c=bf16,m=fp8+min_size=8": ("min_size=8", "16"),
    "c=bf16,m=fp8+min_size=big": ("'big'", "min_size=64"),
    "c=bf16,m=fp8+min_size=-16": ("'-16'", "min_size=64"),
    "c=bf16,m=fp8+fast_accumulation=yes": ("='yes'", "neither True nor False"),
    "c=bf16,m=fp8+amax=3": ("'amax'", "backward, fast_accumulation, min_size"),
    "c=bf16,m=fp8+min_size=32+min_size=32": ("'min_size'", "once"),
    "c=bf16,m=int8": ("'int8'", "fp8"),
    "c=bf16,m=": ("''", "fp8"),
    "c=bf16,m=fp8,m=fp8": ("m=", "once"),
}


@pytest.mark.parametrize(("call", "token", "remedy"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_name_with_what_can(call, token, remedy):
    with pytest.raises(ValueError) as raised:
        call()
    assert token in str(raised.value) and remedy in str(raised.value)


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_cannot_be_is_refused_by_name_with_what_can(text):
    with pytest.raises(ValueError) as raised:
        amp.get_policy(text)
    assert f'get_policy("{text}")' in str(raised.value)
    for each in TEXTS[text]:
        assert each in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fast_accumulation", 1),
        ("fast_accumulation", "yes"),
        ("fast_accumulation", None),
        ("min_size", 32.0),
        ("min_size", "32"),
        ("min_size", True),
    ],
)
def test_a_setting_of_another_type_is_refused(field, value):
    with pytest.raises(TypeError, match=re.escape(f"{field}={value!r}")):
        amp.Fp8(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("scaling", "rowwise", "each array has one scale"),
        ("power_of_2", False, "scales are powers of two"),
        ("attention", True, "products with batch dimensions run in bf16"),
    ],
)
def test_an_option_that_is_gone_is_refused_with_the_reason(field, value, why):
    message = f"Fp8({field}={value!r}): this option is gone: {why}. Leave it out."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        amp.Fp8(**{field: value})
    text = f"c=bf16,m=fp8+{field}={value}".lower()
    with pytest.raises(ValueError) as raised:
        amp.get_policy(text)
    assert f"{field!r} of fp8 is gone: {why}. Leave it out." in str(raised.value)
    assert f'get_policy("{text}")' in str(raised.value)


@pytest.mark.parametrize("given", [True, "fp8", "e4m3", jnp.float8_e4m3fn])
def test_matmul_is_an_fp8_or_none(given):
    with pytest.raises(TypeError, match=r"amp\.Fp8"):
        amp.Policy(matmul=given)


def test_fields_cannot_be_set():
    with pytest.raises(dataclasses.FrozenInstanceError):
        amp.Fp8().min_size = 32
