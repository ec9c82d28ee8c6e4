"""`Policy.saved`: the word, its text, what it is in policies made of others, errors."""

import copy
import dataclasses
import itertools
import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from jmp_amp import jmp
from jmp_amp.plan.program.cpu_target import Cpu
from jmp_amp.plan.program.regions import region_at, region_of
from jmp_amp.policies.policy_map import as_policy_map
from jmp_amp.transform import scopes

WORDS = ("all", "auto", "least")
HALF = ("bf16", "f16")
OTHERS = ("f32", "f64", "f8_e4m3", "f8_e5m2")
LISTED = 'Use "all", "auto" or "least"'
LEGAL = [(each, word) for each in (*HALF, *OTHERS) for word in WORDS]

each_legal = pytest.mark.parametrize(("compute", "word"), LEGAL)


def of(compute, saved=None):
    return amp.Policy(compute_dtype=compute, saved=saved)


def default(compute):
    return "auto" if compute in HALF else "all"


def raises(kind, message):
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


# The word


@pytest.mark.parametrize("compute", [*HALF, *OTHERS])
def test_the_default_is_auto_in_half_and_all_elsewhere(compute):
    assert of(compute).saved == default(compute)
    assert amp.get_policy(f"c={compute}").saved == default(compute)
    assert amp.get_policy(compute).saved == default(compute)


def test_the_policies_that_words_name_save_auto():
    for text in ("mixed_bfloat16", "mixed_float16", "fp8"):
        assert amp.get_policy(text).saved == "auto"


@each_legal
def test_the_word_is_read_as_it_was_given(compute, word):
    for given in (word, word.upper(), f"  {word.title()} ", np.str_(word)):
        assert of(compute, given).saved == word
    assert repr(of(compute, word).saved) == repr(word)


@pytest.mark.parametrize("compute", [*HALF, *OTHERS])
def test_a_policy_that_names_its_default_is_the_one_that_leaves_it_out(compute):
    named, plain = of(compute, default(compute)), of(compute)
    assert named == plain and hash(named) == hash(plain)
    assert str(named) == str(plain) == f"p=f32,c={compute},o=f32"
    assert "saved" not in repr(named)
    assert not named.says_saved


@each_legal
def test_policies_of_different_words_differ(compute, word):
    others = [each for dtype, each in LEGAL if dtype == compute and each != word]
    assert others
    for other in others:
        assert of(compute, word) != of(compute, other)
        assert str(of(compute, word)) != str(of(compute, other))


def test_another_word_is_another_static_argument_and_the_default_named_is_not():
    traces = []

    def traced(policy, x):
        traces.append(policy.saved)
        return x

    jitted = jax.jit(traced, static_argnums=0)
    for saved in (None, "auto", "AUTO", "least", "Least"):
        jitted(amp.Policy(saved=saved), 1.0)
    assert traces == ["auto", "least"]


# Text


@each_legal
def test_a_policy_is_read_back_from_its_text_with_its_word(compute, word):
    policy = of(compute, word)
    text = str(policy)
    part = "" if word == default(compute) else f",s={word}"
    assert text == f"p=f32,c={compute},o=f32{part}"
    read = amp.get_policy(text)
    assert read == policy and read.saved == word and str(read) == text
    assert eval(repr(policy), {"Policy": amp.Policy}) == policy


@each_legal
def test_the_key_and_the_word_are_read_forgivingly(compute, word):
    for part in ("s={}", "saved={}", "S={}", "SAVED={}", " Saved = {} ", "s=  {}"):
        for given in (word, word.upper()):
            first = amp.get_policy(f"{part.format(given)},c={compute},o=f32")
            last = amp.get_policy(f"c={compute},o=f32,{part.format(given)}")
            assert first == last == of(compute, word), part


def test_the_word_stands_between_products_and_operations():
    names = dict(low={"tanh"}, full={"exp"}, follow={"sin"})
    policy = amp.Policy(matmul=amp.Fp8(), saved="least", **names)
    text = "p=f32,c=bf16,o=f32,m=fp8,s=least,low=tanh,full=exp,follow=sin"
    assert str(policy) == text
    assert amp.get_policy(text) == policy
    assert repr(amp.Policy(saved="least")) == (
        "Policy(param_dtype='f32', compute_dtype='bf16', output_dtype='f32', "
        "saved='least')"
    )


@each_legal
def test_the_word_passes_through_a_name_scope(compute, word):
    policy = of(compute, word)
    outer = region_at("", amp.get_policy("float32"), None)
    assert region_of(f"jvp(amp[{policy}])/Dense_0", outer).policy == policy


# Maps


def test_a_map_says_the_word_of_each_module():
    text = (
        "p=f32,c=bf16,o=f32,s=least; a: p=f32,c=f16,o=f16,s=all; "
        "b: p=f32,c=bf16,o=f32; **/c: p=f32,c=f32,o=f32,s=auto"
    )
    policies = amp.PolicyMap(
        amp.Policy(saved="least"),
        {
            "a": amp.Policy("f32", "f16", "f16", saved="all"),
            "b": "mixed_bfloat16",
            "**/c": amp.Policy("f32", "f32", "f32", saved="auto"),
        },
    )
    assert str(policies) == text
    found = [each.saved for _, each in policies.entries]
    assert found == ["all", "auto", "auto"]
    through_json = json.loads(json.dumps(policies.to_dict()))
    assert amp.PolicyMap.from_dict(through_json) == policies
    assert through_json["policies"]["a"] == "p=f32,c=f16,o=f16,s=all"
    # The text of the whole map stands wherever a policy does.
    assert as_policy_map(text, "autocast(fn, {})") == policies
    assert eval(repr(policies), {"PolicyMap": amp.PolicyMap}) == policies


def test_maps_of_different_words_differ():
    made = [amp.PolicyMap("bf16", {"a": f"c=bf16,s={word}"}) for word in WORDS]
    assert len(set(made)) == len(WORDS)
    assert made[1] == amp.PolicyMap("bf16", {"a": "c=bf16"})


# Policies that are made of others


@pytest.mark.parametrize(
    ("compute", "word", "replaced", "wanted"),
    [
        # A default is that of the new dtype.
        ("bf16", None, "f32", "all"),
        ("bf16", "auto", "f32", "all"),
        ("f32", None, "f16", "auto"),
        ("f32", "all", "f16", "auto"),
        ("bf16", None, "f16", "auto"),
        ("f32", None, "f64", "all"),
        # A word that was said stays.
        ("bf16", "least", "f32", "least"),
        ("f32", "least", "bf16", "least"),
        ("bf16", "all", "f16", "all"),
        ("bf16", "all", "f32", "all"),
        ("f32", "auto", "bf16", "auto"),
        ("f32", "auto", "f64", "auto"),
    ],
)
def test_a_replaced_compute_dtype_has_the_word_where_it_can(
    compute, word, replaced, wanted
):
    policy = of(compute, word)
    made = dataclasses.replace(policy, compute_dtype=replaced)
    assert made == of(replaced, wanted) and made.saved == wanted
    assert amp.get_policy(str(made)) == made
    assert policy == of(compute, word)


@each_legal
def test_other_changes_leave_the_word(compute, word):
    policy = of(compute, word)
    for made in (
        policy.with_low("tanh"),
        policy.with_full("exp"),
        policy.with_follow("sin"),
        policy.with_output_dtype("f64"),
        dataclasses.replace(policy, param_dtype="f64"),
        dataclasses.replace(policy, compute_dtype=policy.compute_dtype),
    ):
        assert made.saved == word and made.says_saved == policy.says_saved


def test_a_word_is_replaced():
    policy = amp.Policy(saved="all")
    assert dataclasses.replace(policy, saved="least") == amp.Policy(saved="least")
    assert dataclasses.replace(policy, saved=None) == amp.Policy()


CLONES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {n}": lambda each, n=n: pickle.loads(pickle.dumps(each, n))
        for n in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("way", CLONES)
def test_a_copied_or_pickled_policy_has_the_word(way):
    clone, policies = CLONES[way], amp.PolicyMap("bf16", {"a": "c=f16,s=least"})
    assert clone(policies) == policies
    for policy in itertools.starmap(of, LEGAL):
        cloned = clone(policy)
        assert cloned == policy and hash(cloned) == hash(policy)
        assert cloned.saved == policy.saved and str(cloned) == str(policy)
        # What was a default still is one.
        for dtype in ("bf16", "f32"):
            want = dataclasses.replace(policy, compute_dtype=dtype)
            assert dataclasses.replace(cloned, compute_dtype=dtype) == want


@pytest.mark.parametrize(
    ("word", "wanted"),
    [(None, "all"), ("auto", "all"), ("all", "all"), ("least", "least")],
)
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("native", [False, True])
def test_a_plan_for_a_cpu_saves_all_unless_a_policy_says_otherwise(
    word, wanted, half, native
):
    asked = of(half, word)
    runs = Cpu(native).runs(asked)
    assert runs == amp.Policy("f32", "f32", "f32", saved=wanted)
    assert runs.saved == wanted
    assert region_at("", asked, Cpu(native)).policy.saved == wanted


@pytest.mark.parametrize("word", ["all", "auto", "least"])
def test_a_policy_in_f32_has_its_word_on_a_cpu_too(word):
    asked = amp.Policy("f32", "f32", "f32", saved=word)
    assert Cpu(True).runs(asked) == asked


@pytest.mark.parametrize(
    ("word", "wanted"),
    [(None, "all"), ("all", "all"), ("least", "least")],
)
@pytest.mark.parametrize("half", HALF)
def test_a_norm_has_the_word_where_it_can(word, wanted, half):
    found = scopes.norm_policy(of(half, word))
    assert found == amp.Policy("f32", "f32", half, saved=wanted)
    assert found.saved == wanted


def test_a_region_in_f32_has_the_word_of_the_region_around_it():
    outer = region_at("", amp.Policy(saved="least"), None)
    assert outer.saved == "least"
    norm = region_of(f"Model/amp[{scopes.norm_policy(amp.Policy())}]", outer)
    assert norm.policy.compute_dtype == jnp.float32 and norm.saved == "least"
    full = region_of("amp[p=f32,c=f32,o=f32,s=auto]", outer)
    assert full.saved == "auto"
    # The nearest one around it.
    inner = region_of("amp[p=f32,c=bf16,o=f32,s=all]/amp[p=f32,c=f32,o=f32]", outer)
    assert inner.saved == "all"
    half = region_of("amp[p=f32,c=bf16,o=f32]", outer)
    assert half.saved == "auto"


def test_a_region_in_half_has_its_own_word_on_a_cpu_too():
    outer = region_at("", amp.Policy(saved="least"), Cpu(True))
    assert outer.saved == "least"
    for text in ("p=f32,c=bf16,o=f32", "p=f32,c=bf16,o=f32,s=all"):
        assert region_of(f"amp[{text}]", outer).saved == "all"
    assert region_of("amp[p=f32,c=f32,o=f32]", outer).saved == "least"


def test_what_makes_policies_of_others_keeps_the_word():
    def loss(x):
        return jnp.sum(jnp.square(x * 300.0)) / 1e6

    x = jnp.full(64, 4.0)
    policy = amp.Policy(compute_dtype="f16", saved="least").with_low("square")
    found = amp.diagnose(loss, policy)(x).policy
    assert found.default != policy and found.default.full
    assert found.default.saved == "least"


@pytest.mark.breadth(2)
@pytest.mark.parametrize("word", WORDS)
def test_a_tuned_policy_has_the_word_where_it_is_half(word):
    policy = amp.Policy(saved=word)
    x = jax.random.normal(jax.random.key(0), (16, 16))
    tuning = amp.tune(lambda w: jnp.mean((x @ w) ** 2), policy, max_grad_error=1e-6)
    default = tuning(x.T).policy.default
    assert default != policy and default.full
    assert default.compute_dtype == jnp.bfloat16 and default.saved == word


# Errors


def refuses(kind, given, message):
    """Whether a policy, its text and a recipe refuse a word with their call."""
    message = f"Policy(saved={given!r}): {message}"
    with raises(kind, message):
        amp.Policy(saved=given)
    with raises(kind, f"recipe('O1'): {message}"):
        amp.recipe("O1", saved=given)
    for key in ("s", "saved", "S"):
        if isinstance(given, str):
            text = f"c=bf16,{key}={given}"
            with raises(kind, f'get_policy("{text}"): {message}'):
                amp.get_policy(text)


@pytest.mark.parametrize("given", ["leest", "al", "everything", "none", ""])
def test_an_unknown_word_is_refused_with_the_three_words(given):
    fact = f"unknown word {given!r}. {LISTED}: what the backward pass keeps."
    refuses(ValueError, given, fact)


@pytest.mark.parametrize("given", ["int8", "e4m3"])
def test_a_word_that_is_gone_is_refused_with_the_reason(given):
    message = (
        f"{given!r} is gone: on an H200 residuals in 8 bits needed more time and "
        'memory than "all". Use "least", the fewest bytes.'
    )
    refuses(ValueError, given, message)


@pytest.mark.parametrize("given", [True, 3, b"all", ["all"], amp.Fp8(), jnp.int8])
def test_what_is_neither_text_nor_none_is_a_type_error(given):
    refuses(TypeError, given, f"{given!r} is neither text nor None. {LISTED}.")


def test_a_word_is_given_once_and_with_dtypes():
    with raises(
        ValueError,
        'get_policy("c=bf16,s=all,saved=all"): "saved=" sets saved a second time. Set '
        "it once.",
    ):
        amp.get_policy("c=bf16,s=all,saved=all")
    with raises(
        ValueError,
        'get_policy("s=least"): saved but no dtypes. Say which, for example '
        '"p=f32,c=bf16,o=f32,s=least".',
    ):
        amp.get_policy("s=least")


def loss(w):
    return jnp.sum(w)


# What an error begins with, and a call that reads the text of a policy.
ENTRIES = [
    ("get_policy(", amp.get_policy),
    ("get_policy(", jmp.get_policy),
    # It reads the text before it knows what it marks.
    ("get_policy(", lambda text: amp.with_policy(text)(loss)),
    ("PolicyMap(default=", amp.PolicyMap),
    ("PolicyMap(..., {'a': ", lambda text: amp.PolicyMap("bf16", {"a": text})),
    (
        "PolicyMap(..., {'b': ",
        lambda text: amp.PolicyMap.from_dict(
            {"default": "bf16", "policies": {"b": text}}
        ),
    ),
    ("autocast(fn, 'p=", lambda text: amp.autocast(loss, text)),
    ("autocast(fn, 'bf16; a: ", lambda text: amp.autocast(loss, f"bf16; a: {text}")),
    ("explain(", lambda text: amp.explain(loss, text)),
    ("diagnose(", lambda text: amp.diagnose(loss, text)),
    ("tune(fn, 'p=", lambda text: amp.tune(loss, text, max_grad_error=1)),
    (
        "tune(fn, candidates=",
        lambda text: amp.tune(loss, max_grad_error=1, candidates=(text,)),
    ),
    ("cast_params(", lambda text: amp.cast_params({}, text)),
]


@pytest.mark.parametrize(("begins", "call"), ENTRIES)
def test_every_call_that_takes_a_policy_reads_the_word_and_refuses_a_wrong_one(
    begins, call
):
    for word in WORDS:
        call(f"p=f32,c=bf16,o=f32,s={word}")
    with pytest.raises(ValueError) as found:
        call("p=f32,c=bf16,o=f32,s=leest")
    assert "Policy(saved='leest'): unknown word 'leest'." in str(found.value)
    assert LISTED in str(found.value)
    assert str(found.value).startswith(begins)
