"""Policies by module: what a pattern matches, what a map says, and what it refuses."""

import copy
import functools
import gc
import itertools
import json
import pickle
import re
import time
import warnings
import weakref

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import strategies as st

import jmp_amp as amp
from jmp_amp.policies.policy_map import as_policy_map

BF16, F16, F32 = map(amp.get_policy, ("mixed_bfloat16", "mixed_float16", "float32"))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="up")(x)


class WideBlock(Block):
    pass


class Layer(nnx.Module):
    pass


class WideLayer(Layer):
    pass


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(Block(name="block")(x))


NET, X = Net(), jnp.ones((2, 4))
VARIABLES = jax.jit(NET.init)(jax.random.key(0), X)


def info(path, cls=Block, method="__call__"):
    names = tuple(path.split("/")) if path else ()
    return amp.ModuleInfo(names, cls, names[-1] if names else None, method)


def matches(pattern, *args, **kwargs):
    return amp.PolicyMap(BF16, {pattern: F32}).match(info(*args, **kwargs)) is not None


def raised(error, *args, **kwargs):
    with pytest.raises(error) as found:
        amp.PolicyMap(*args, **kwargs)
    return str(found.value)


# Patterns


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        (Block, [Block, WideBlock], [nn.Dense]),
        (WideBlock, [WideBlock], [Block]),
        (nn.Module, [WideBlock], [WideLayer]),
        (Layer, [Layer, WideLayer], []),
        (WideLayer, [WideLayer], [Layer]),
        (nnx.Module, [WideLayer], [Block]),
    ],
)
def test_a_class_matches_itself_and_its_subclasses(pattern, matched, others):
    for path in ("", "block", "blocks/0/block"):
        for cls in (*matched, *others):
            assert matches(pattern, path, cls) == (cls in matched), (path, cls)


@pytest.mark.parametrize(
    ("glob", "matched", "others"),
    [
        # Names.
        ("head", ["head"], ["heads", "Head", "decoder/head"]),
        ("decoder/head", ["decoder/head"], []),
        ("decoder", [], ["decoder/head"]),
        # * is any part of one name, and no part of two.
        ("*", ["head"], ["", "decoder/head"]),
        ("*/*", ["decoder/head"], []),
        ("layers_*", ["layers_", "layers_12"], ["layers_1/attn"]),
        (
            "encoder/layers_*/attn",
            ["encoder/layers_3/attn"],
            ["encoder/layers_3/mlp/attn", "encoder/layers_3/attn/query"],
        ),
        ("e*r/head", ["encoder/head"], []),
        ("e*r", [], ["encode/r"]),
        # ? is one character.
        ("layers_?", ["layers_1"], ["layers_12", "layers_"]),
        ("decoder?head", [], ["decoder/head"]),
        # [0-3] is one of these characters.
        ("blocks/[0-3]/attn", ["blocks/0/attn", "blocks/3/attn"], ["blocks/4/attn"]),
        ("blocks/[!0-3]", ["blocks/4"], ["blocks/1"]),
        ("layers_1[02]", ["layers_12"], ["layers_11"]),
        # ** is any number of names.
        ("**", ["", "encoder/layers_0"], []),
        (
            "**/head",
            ["head", "decoder/head", "model/decoder/head"],
            ["decoder/heads", "head/kernel"],
        ),
        ("encoder/**", ["encoder", "encoder/layers_0/attn"], ["model/encoder", ""]),
        ("encoder/**/attn", ["encoder/attn", "encoder/a/b/attn"], ["encoder/a/b"]),
        ("**/mlp/**", ["mlp", "a/mlp/b"], ["a/b"]),
        ("**/*", ["a/b"], [""]),
        ("*/**/*", ["a/b"], ["a"]),
        # "" is the outermost module.
        ("", [""], ["head"]),
        # A dot and a plus are themselves.
        ("a.c", [], ["abc"]),
        ("a+", ["a+"], ["aa"]),
        # Regular expressions.
        (re.compile("head"), ["head"], ["heads", "decoder/head"]),
        (
            re.compile(r"blocks/\d+/attn"),
            ["blocks/12/attn"],
            ["blocks/12/attn/query"],
        ),
        (re.compile(".*head"), ["decoder/head"], []),
        (re.compile(""), [""], ["head"]),
        (re.compile("HEAD", re.I), ["head"], []),
        (re.compile("a|ab"), ["ab"], []),
    ],
    ids=str,
)
def test_a_glob_and_a_regular_expression_match_the_whole_path(glob, matched, others):
    for path in (*matched, *others):
        for cls in (Block, WideLayer):
            assert matches(glob, path, cls) == (path in matched), path


def test_a_predicate_sees_path_class_name_and_method():
    seen = []
    policies = amp.PolicyMap(BF16, {lambda found: bool(seen.append(found)): F32})
    given = [
        amp.ModuleInfo(("blocks", "0", "attn"), Block, "attn", "encode"),
        amp.ModuleInfo((), Net, None),
    ]
    for each in given:
        assert policies.match(each) is None
    assert seen == given
    assert [tuple(each) for each in seen] == [
        (("blocks", "0", "attn"), Block, "attn", "encode"),
        ((), Net, None, "__call__"),
    ]


@pytest.mark.parametrize(
    "predicate",
    [
        lambda found: found.method == "decode",
        functools.partial(lambda method, found: found.method == method, "decode"),
        # What is true counts, be it no bool.
        lambda found: found.method == "decode" and "yes",
        lambda found: {"decode": 1}.get(found.method),
    ],
)
def test_a_predicate_decides(predicate):
    assert matches(predicate, "a", method="decode")
    assert not matches(predicate, "a", method="encode")


ALL_KINDS = {
    "class": Block,
    "base class": nn.Module,
    "glob": "**/up",
    "regex": re.compile(".*up"),
    "predicate": lambda found: found.name == "up",
}


@pytest.mark.parametrize(
    ("early", "late"), list(itertools.permutations(sorted(ALL_KINDS), 2))
)
def test_the_latest_entry_that_matches_wins_whatever_its_kind(early, late):
    early, late = ALL_KINDS[early], ALL_KINDS[late]
    policies = amp.PolicyMap(BF16, {early: F16, late: F32, "elsewhere": BF16})
    assert policies.match(info("block/up")) == (late, F32)


def test_an_entry_that_does_not_match_decides_nothing():
    policies = amp.PolicyMap(BF16, {"**/up": F16, "**/down": F32})
    assert policies.match(info("block/up")) == ("**/up", F16)
    assert policies.match(info("block")) is None
    assert amp.PolicyMap(BF16).match(info("block")) is None


NAME = st.text("ab0_.", min_size=1, max_size=3)
# A part of a glob, and the regular expression of what it matches.
PART = st.one_of(
    NAME.map(lambda name: (name, re.escape(name))),
    st.sampled_from(
        [("?", "[^/]"), ("[ab]", "[ab]"), ("[!a]", "[^a/]"), ("[0-3]", "[0123]")]
    ),
)
STAR = ("*", "[^/]*")


@st.composite
def glob_names(draw):
    """One name of a glob, and the regular expression of the names that it matches."""
    parts = draw(st.lists(PART, max_size=2))
    for place in reversed(range(len(parts) + 1)):
        if not parts or draw(st.booleans()):
            parts.insert(place, STAR)
    return "".join(part for part, _ in parts), "".join(each for _, each in parts) + "/"


GLOB_NAME = st.one_of(glob_names(), st.just(("**", "(?:[^/]+/)*")))


@hypothesis.given(
    names=st.lists(GLOB_NAME, max_size=4), path=st.lists(NAME, max_size=4)
)
@hypothesis.settings(max_examples=400, deadline=None)
def test_a_glob_matches_what_its_regular_expression_does(names, path):
    glob = "/".join(name for name, _ in names)
    reference = re.compile("".join(each for _, each in names))
    wanted = reference.fullmatch("".join(f"{name}/" for name in path)) is not None
    assert matches(glob, "/".join(path)) == wanted


def test_a_glob_of_many_stars_takes_no_time():
    # Every name of the path fits in many places; one name at the end fits in none.
    glob, path = "/".join(["**", "a"] * 10 + ["b"]), "/".join("a" * 30)
    start = time.process_time()
    assert not matches(glob, path)
    assert matches(glob, f"{path}/b")
    # In 30 * 21 comparisons; a choice of ten names out of thirty is 3e7 of them.
    assert time.process_time() - start < 1


# A map is a value


def test_maps_compare_and_hash_by_value():
    def made(*entries, default=BF16):
        return amp.PolicyMap(default, entries)

    a, b = ("**/head", F32), (Block, F16)
    same = [
        made(a, b),
        amp.PolicyMap("mixed_bfloat16", {"**/head": "float32", Block: "mixed_float16"}),
        made(list(a), list(b)),
    ]
    assert len(set(same)) == 1 and same[0] == same[1] == same[2]
    others = [made(b, a), made(a), made(), made(a, b, default=F16), BF16]
    assert len({same[0], *others}) == 6


def test_equal_regular_expressions_are_one_pattern():
    maps = {amp.PolicyMap(BF16, {re.compile("a.*"): F32}) for _ in range(2)}
    maps |= {amp.PolicyMap(BF16, {re.compile("a.*", re.I): F32})}
    maps |= {amp.PolicyMap(BF16, {"a.*": F32})}
    assert len(maps) == 3


def test_the_default_default_is_that_of_autocast():
    assert amp.PolicyMap() == amp.PolicyMap("mixed_bfloat16", {})
    assert amp.PolicyMap().default == amp.Policy()


def test_a_map_cannot_be_changed():
    policies = amp.PolicyMap(BF16, {"a": F32})
    with pytest.raises(AttributeError):
        policies.default = F16
    given = {"a": F32}
    policies = amp.PolicyMap(BF16, given)
    given["b"] = F16
    assert policies.entries == (("a", F32),)


def test_a_map_is_one_leaf_of_a_tree():
    policies = amp.PolicyMap(BF16, {"a": F32})
    assert jax.tree.leaves(policies) == [policies]


def test_copies_of_a_map_are_equal_to_it():
    policies = amp.PolicyMap(BF16, {"a": F32, Block: F16, re.compile("b", re.I): F16})
    hash(policies)
    for made in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert made(policies) == policies and hash(made(policies)) == hash(policies)


def test_a_pickle_of_a_map_holds_no_hash():
    # The hash of a text is another one in every process: maps that are equal there
    # would not hash alike.
    made, hashed = (amp.PolicyMap(BF16, {"**/head": F32}) for _ in range(2))
    hash(hashed)
    assert pickle.dumps(hashed) == pickle.dumps(made)


def test_text_of_a_map_names_every_pattern():
    policies = amp.PolicyMap(
        "mixed_bfloat16",
        {
            "**/head": "float32",
            Block: "mixed_float16",
            re.compile("a.*", re.I): "c=f16",
            named_predicate: "bf16",
        },
    )
    block = f"{__name__}.Block"
    assert str(policies) == (
        "p=f32,c=bf16,o=f32; **/head: p=f32,c=f32,o=f32; "
        f"<{block}>: p=f32,c=f16,o=f32; re:(?i)a.*: p=f32,c=f16,o=f16; "
        "<named_predicate>: p=bf16,c=bf16,o=bf16"
    )
    assert repr(policies) == (
        "PolicyMap('p=f32,c=bf16,o=f32', {'**/head': 'p=f32,c=f32,o=f32', "
        f"{block}: 'p=f32,c=f16,o=f32', re:(?i)a.*: 'p=f32,c=f16,o=f16', "
        "named_predicate: 'p=bf16,c=bf16,o=bf16'})"
    )


def named_predicate(found):
    return found.name == "a"


def test_the_repr_of_a_map_of_globs_is_what_makes_it():
    policies = amp.PolicyMap("c=f16", {"**/head": "float32", "": "bf16"})
    assert eval(repr(policies), {"PolicyMap": amp.PolicyMap}) == policies


# Text


def read(text):
    return as_policy_map(text, "autocast(fn, {})")


@pytest.mark.parametrize(
    ("text", "default", "entries"),
    [
        ("mixed_bfloat16", BF16, {}),
        ("mixed_bfloat16;", BF16, {}),
        ("mixed_bfloat16; **/head: float32", BF16, {"**/head": F32}),
        (" f16 ;a/*:c=f16 ;  b : bf16; ", "f16", {"a/*": "c=f16", "b": "bf16"}),
        ("float32; : mixed_float16", F32, {"": F16}),
        (
            r"mixed_bfloat16; re:blocks/\d+(?:/attn)?: float32",
            BF16,
            {re.compile(r"blocks/\d+(?:/attn)?"): F32},
        ),
    ],
)
def test_a_text_is_the_map_that_it_says(text, default, entries):
    policies = amp.PolicyMap(default, entries)
    assert read(text) == policies and read(str(policies)) == policies
    assert list(read(text).entries) == list(policies.entries)


def test_a_text_stands_where_a_map_does():
    text = "mixed_bfloat16; head: float32"
    policies = amp.PolicyMap(BF16, {"head": F32})
    made = [
        str(jax.make_jaxpr(amp.autocast(NET.apply, each))(VARIABLES, X))
        for each in (text, policies)
    ]
    assert made[0] == made[1]
    cast = amp.cast_params(VARIABLES, f"{text}; block: bf16")["params"]
    assert cast["block"]["up"]["kernel"].dtype == jnp.bfloat16
    assert cast["head"]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bf16; head", ("'head'", "pattern: policy", "**/head: float32")),
        ("bf16; head: f17", ("'head'", "f17")),
        ("bf17; head: f16", ("bf17",)),
        ("bf16; a//b: f16", ("a//b", "empty name")),
        ("bf16; head: f16; head: f16", ("head", "twice")),
        (f"bf16; <{__name__}.Block>: f16", ("Block", "no text can say", "in Python")),
        ("bf16; head: c=f64", ("cannot compute in float64", "'head'")),
        ("bf16; re:(: f16", ("re:(",)),
    ],
)
def test_a_wrong_text_is_refused_with_the_call(text, words):
    with pytest.raises(ValueError) as found:
        amp.autocast(lambda x: x, text)
    message = str(found.value)
    assert message.startswith(f"autocast(fn, {text!r})")
    for word in words:
        assert word in message, word


def through_json(policies):
    return amp.PolicyMap.from_dict(json.loads(json.dumps(policies.to_dict())))


def test_a_map_reads_back_from_json():
    policies = amp.PolicyMap(
        amp.get_policy("mixed_float16").with_full("gate").with_low("tanh"),
        {
            "**/head": "float32",
            "": "c=bf16",
            re.compile(r"blocks/\d+"): amp.get_policy("bf16").with_follow("my_fn"),
            "blocks/[0-3]/attn": "p=bf16,c=bf16,o=f32",
        },
    )
    assert through_json(policies) == policies
    assert through_json(amp.PolicyMap()) == amp.PolicyMap()
    assert amp.PolicyMap.from_dict({"default": "mixed_bfloat16"}) == amp.PolicyMap()


def test_json_keeps_the_order_of_the_entries():
    globs = [f"{letter}/**" for letter in "zabyc"]
    policies = amp.PolicyMap(BF16, dict.fromkeys(globs, F32))
    assert list(policies.to_dict()["policies"]) == globs
    assert [pattern for pattern, _ in through_json(policies).entries] == globs
    late = amp.PolicyMap(BF16, {"**": F16, "**/a": F32})
    early = amp.PolicyMap(BF16, {"**/a": F32, "**": F16})
    assert through_json(late).match(info("a")) == ("**/a", F32)
    assert through_json(early).match(info("a")) == ("**", F16)


@pytest.mark.parametrize(
    "pattern",
    [
        re.compile("head"),
        re.compile("HEAD|Tail", re.I),
        re.compile("head  # the last layer", re.X),
        re.compile("a.b", re.S | re.I),
        re.compile(r"\w+", re.A),
        re.compile("(?i)HEAD"),
        re.compile("(?:)"),
        re.compile("re:head"),
        re.compile("x\nhead", re.M),
    ],
)
def test_a_regular_expression_with_flags_reads_back(pattern):
    policies = amp.PolicyMap(BF16, {pattern: F32})
    found = through_json(policies)
    for path in ("head", "HEAD", "tail", "a\nb", "axb", "é", "", "re:head", "x\nhead"):
        made = [each.match(info(path)) is None for each in (policies, found)]
        assert made[0] == made[1], path
    assert found.to_dict() == policies.to_dict()
    assert found == policies


@hypothesis.given(
    default=st.sampled_from(["mixed_bfloat16", "mixed_float16", "float32", "bf16"]),
    globs=st.lists(st.lists(GLOB_NAME, max_size=3), max_size=5),
    texts=st.lists(st.sampled_from(["c=f16", "float32", "bf16"]), min_size=5),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_maps_of_globs_read_back_from_json(default, globs, texts):
    names = ["/".join(name for name, _ in each) for each in globs]
    policies = amp.PolicyMap(default, dict(zip(names, texts, strict=False)))
    assert through_json(policies) == policies
    assert read(str(policies)) == policies
    assert list(policies.to_dict()["policies"]) == list(dict.fromkeys(names))


@pytest.mark.parametrize("pattern", [Block, Layer, named_predicate])
def test_what_no_text_can_say_is_refused_by_name(pattern):
    policies = amp.PolicyMap(BF16, {"**/head": F32, pattern: F32})
    with pytest.raises(ValueError) as found:
        policies.to_dict()
    message = str(found.value)
    assert message.startswith("PolicyMap.to_dict()")
    assert pattern.__name__ in message
    assert "glob" in message and "re.Pattern" in message


# Mistakes


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (3, ("3", "no pattern", "nnx.Module", "glob", "re.Pattern", "ModuleInfo")),
        (None, ("None", "no pattern", "glob")),
        (("block", "up"), ("('block', 'up')", "no pattern", "glob")),
        (dict, ("dict", "no pattern", "subclass of flax.linen.Module", "flax.nnx.Mod")),
        (jnp.ndarray, ("no pattern", "subclass of flax.linen.Module", "glob")),
        (nn.Dense(4), ("a module, a Dense,", "no pattern", "glob", "with_policy")),
        (
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            ("a module, a Linear,", "no pattern", "glob", "with_policy"),
        ),
        (re.compile(b"head"), ("b'head'", "no pattern", "a re.Pattern of text")),
        ("re:head", ("'re:head'", "re.compile(")),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, words):
    message = raised(
        TypeError if words[-1] != "re.compile(" else ValueError,
        BF16,
        [(pattern, F32)],
    )
    assert message.startswith("PolicyMap: ")
    for word in words:
        assert word in message, word


@pytest.mark.parametrize("value", [3, None, jnp.float16, nn.Dense, {"a": 1}])
def test_what_is_no_policy_is_refused_with_its_pattern(value):
    message = raised(TypeError, BF16, {"**/head": value})
    assert "PolicyMap(" in message and "'**/head'" in message
    assert "Policy" in message.split("'**/head'")[1]
    message = raised(TypeError, value)
    assert "PolicyMap(default=" in message


def test_an_unknown_policy_is_refused_with_its_pattern():
    message = raised(ValueError, BF16, {"**/head": "c=fp17"})
    for word in ("PolicyMap(", "'**/head'", "'c=fp17'", "unknown dtype 'fp17'", "bf16"):
        assert word in message
    message = raised(ValueError, "mixed_float17")
    for word in ("PolicyMap(default='mixed_float17')", "float16"):
        assert word in message


@pytest.mark.parametrize("text", ["float64", "c=f64", "c=f8_e4m3"])
def test_a_compute_dtype_without_matrix_units_is_refused(text):
    dtype = amp.get_policy(text).compute_dtype.name
    for message in (
        raised(ValueError, BF16, {"**/head": text}),
        raised(ValueError, BF16, {"**/head": amp.get_policy(text)}),
        raised(ValueError, text),
    ):
        assert "PolicyMap(" in message
        assert f"cannot compute in {dtype}" in message
        assert "Use a compute dtype of float16, bfloat16 or float32" in message
    assert "'**/head'" in raised(ValueError, BF16, {"**/head": text})


def test_a_map_inside_of_a_map_is_refused():
    inner = amp.PolicyMap(BF16, {"a": F32})
    for message in (raised(TypeError, BF16, {"b": inner}), raised(TypeError, inner)):
        assert "wanted a Policy or its text, got PolicyMap. Write" in message


MISSHAPEN = {
    **dict.fromkeys(("/head", "head/", "a//b", "/", "**//head"), "an empty name. "),
    **dict.fromkeys(("a**b", "**b", "b**", "a/**b/c", "***"), "** inside of a name. "),
}


@pytest.mark.parametrize("glob", MISSHAPEN)
def test_a_glob_with_an_empty_name_or_with_two_stars_in_one_is_refused(glob):
    message = raised(ValueError, BF16, {glob: F32})
    remedy = 'such as "**/head", and * inside of a name.'
    for word in ("PolicyMap", repr(glob), MISSHAPEN[glob], remedy):
        assert word in message, word


@pytest.mark.parametrize(
    "pattern", ["**/head", Block, re.compile("a"), named_predicate, ""]
)
def test_a_pattern_that_is_there_twice_is_refused(pattern):
    message = raised(ValueError, BF16, [(pattern, F32), ("b", F16), (pattern, F32)])
    assert "PolicyMap" in message and "twice" in message
    name = getattr(pattern, "__name__", None) or getattr(pattern, "pattern", pattern)
    assert str(name) in message
    assert "one policy" in message


@pytest.mark.parametrize("entries", [["**/head"], "ab", [("a", F32, F16)], [None]])
def test_what_is_no_entry_is_refused(entries):
    message = raised(TypeError, BF16, entries)
    assert "PolicyMap" in message and "dictionary" in message
    assert "no entry" in message or "wanted" in message


@pytest.mark.parametrize(
    "data",
    [None, "mixed_bfloat16", [], {"default": "bf16", "policies": [("a", "f32")]}],
)
def test_from_dict_refuses_what_is_no_such_dictionary(data):
    with pytest.raises(TypeError) as found:
        amp.PolicyMap.from_dict(data)
    message = str(found.value)
    assert message.startswith(f"PolicyMap.from_dict({data!r})")
    assert '"default"' in message and '"policies"' in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"default": "bf16", "policy": {}}, ("'policy'", '"default"', '"policies"')),
        ({"policies": {}}, ("'default'", "missing")),
        ({"default": "bf17"}, ("bf17", "PolicyMap")),
        ({"default": "bf16", "policies": {"a//b": "f32"}}, ("a//b", "empty name")),
        ({"default": "bf16", "policies": {"a": "f17"}}, ("'a'", "f17")),
        ({"default": "bf16", "policies": {"re:(": "f32"}}, ("re:(", "PolicyMap")),
    ],
)
def test_from_dict_refuses_what_is_wrong_in_it(data, words):
    with pytest.raises(ValueError) as found:
        amp.PolicyMap.from_dict(data)
    for word in words:
        assert word in str(found.value)


@pytest.mark.parametrize("call", [amp.autocast, amp.explain, amp.cast_params])
def test_what_takes_a_policy_names_itself_when_it_is_none(call):
    with pytest.raises(TypeError) as found:
        call(lambda x: x, 3)
    assert "3" in str(found.value)
    with pytest.raises(ValueError, match="fp17"):
        call(lambda x: x, "c=fp17")


# Entries that matched nothing


def warned(fn, *args):
    """The texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fn(*args)
    for each in found:
        assert each.category is UserWarning
    return [str(each.message) for each in found]


def forward(policies):
    return warned(amp.autocast(NET.apply, policies), VARIABLES, X)


def test_every_entry_that_matched_nothing_is_warned_about_by_name():
    policies = amp.PolicyMap(
        BF16,
        {
            "**/haed": F32,
            "**/head": F32,
            nn.Conv: F32,
            Block: F32,
            re.compile("bloc"): F32,
            re.compile("block"): F32,
        },
    )
    found = forward(policies)
    starts = [text.split(" matched no module")[0] for text in found]
    conv = f"{nn.Conv.__module__}.Conv"
    assert starts == [
        "PolicyMap: '**/haed'",
        f"PolicyMap: {conv}",
        "PolicyMap: re:bloc",
    ]


def test_a_warning_names_the_closest_path():
    for glob, closest in (
        ("**/heed", "head"),
        ("blocks/up", "block/up"),
        ("blok", "block"),
        ("up", "block/up"),
    ):
        (found,) = forward(amp.PolicyMap(BF16, {glob: F32}))
        assert f"closest path of a module called is {closest!r}" in found, glob


def test_a_warning_about_a_class_names_the_classes_of_the_program():
    (found,) = forward(amp.PolicyMap(BF16, {WideBlock: F32}))
    assert "WideBlock matched no module" in found
    assert "Block, Dense, Net" in found


def test_a_warning_about_a_predicate_names_the_paths_of_the_program():
    def never(found):
        return False

    (found,) = forward(amp.PolicyMap(BF16, {never: F32}))
    assert "never matched no module" in found
    for path in ("'block'", "'block/up'", "'head'"):
        assert path in found


def test_a_warning_about_the_inside_of_a_lone_module_says_so():
    model = nn.Dense(3)
    variables = model.init(jax.random.key(0), X)
    policies = amp.PolicyMap(BF16, {"Dense_0": F32})
    (found,) = warned(amp.autocast(model.apply, policies), variables, X)
    assert "'Dense_0' matched no module" in found
    assert '"", of the outermost one.' in found


def test_a_class_of_the_other_library_is_pointed_out():
    class OwnLinear(nnx.Linear):
        pass

    class OwnDense(nn.Dense):
        pass

    (found,) = forward(amp.PolicyMap(BF16, {OwnLinear: F32}))
    assert "OwnLinear matched no module" in found
    assert "a class of nnx" in found and "linen" in found and "Dense" in found
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    policies = amp.PolicyMap(BF16, {OwnDense: F32, nnx.Linear: F32})
    (found,) = warned(amp.autocast(lambda m, x: m(x), policies), model, X)
    assert "OwnDense matched no module" in found
    assert "a class of linen" in found and "nnx" in found and "Linear" in found


def test_a_program_without_modules_is_pointed_out():
    policies = amp.PolicyMap(BF16, {"**/without": F32, nn.Dense: F16})
    found = warned(amp.autocast(lambda x: x @ x.T, policies), X)
    assert len(found) == 2
    for text in found:
        assert "matched no module" in text and "No Flax module was traced" in text


def test_the_second_call_is_silent_and_another_map_is_not():
    first = amp.PolicyMap(BF16, {"silent": F32})
    second = amp.PolicyMap(BF16, {"silent_too": F32})
    assert len(forward(first)) == 1
    assert forward(first) == []
    assert len(forward(second)) == 1
    assert forward(second) == forward(first) == []


def test_equal_maps_share_no_memory():
    first, second, third = (amp.PolicyMap(BF16, {"head": F32}) for _ in range(3))
    apply = amp.autocast(Block().apply, second)
    params = {"params": VARIABLES["params"]["block"]}
    assert forward(first) == []
    assert len(warned(apply, params, X)) == 1
    assert warned(apply, params, X) == forward(third) == []
    typos = [amp.PolicyMap(BF16, {"haed": F32}) for _ in range(2)]
    assert len(forward(typos[0])) == len(forward(typos[1])) == 1


def test_maps_that_are_gone_leave_nothing_behind():
    made = [amp.PolicyMap("bf16", {f"gone_{i}": F32}) for i in range(5)]
    equal = [amp.PolicyMap("bf16", {"**/gone": F32}) for _ in range(5)]
    for policies in made:
        assert len(warned(amp.cast_params, VARIABLES, policies)) == 1
    for policies in equal:
        assert len(forward(policies)) == 1
    made, equal = ([weakref.ref(each) for each in group] for group in (made, equal))
    del policies
    gc.collect()
    assert [each() for each in made] == [None] * 5
    # JAX keeps the one under which it traced helpers of its own.
    assert sum(each() is not None for each in equal) <= 1


@pytest.mark.parametrize("call", ["explain", "cast_params"])
def test_other_calls_warn_too(call):
    policies = amp.PolicyMap(BF16, {f"**/un_{call}": F32, "**/up": "bf16"})
    given = {
        "explain": (amp.explain(NET.apply, policies), VARIABLES, X),
        "cast_params": (amp.cast_params, VARIABLES, policies),
    }
    (found,) = warned(*given[call])
    assert f"'**/un_{call}' matched no module" in found


class NnxNet(nnx.Module):
    def __init__(self):
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(x)


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("stores_first", [False, True])
def test_a_computation_says_once_that_it_reads_no_names_of_parameters(
    library, stores_first
):
    policies = amp.PolicyMap("p=bf16,c=bf16,o=f32", {"**/bias": F32})
    params, fn = VARIABLES, NET.apply
    if library == "nnx":
        params, fn = NnxNet(), lambda model, x: model(x)

    def stored():
        assert warned(amp.cast_params, params, policies) == []

    if stores_first:
        stored()
    (found,) = warned(amp.autocast(fn, policies), params, X)
    start = "names a parameter." if stores_first else "matched no module."
    assert found.startswith(f"PolicyMap: '**/bias' {start}")
    assert found.endswith("Only cast_params reads names of parameters.")
    stored()
    for again in (fn, lambda *args: fn(*args)):
        assert warned(amp.autocast(again, policies), params, X) == []


def test_a_pattern_that_names_neither_a_module_nor_a_parameter_is_warned_about():
    def of_parameters(found):
        return found.path[-1:] == ("bias",)

    policies = amp.PolicyMap(
        BF16, {"head/bais": F32, "head/bias": BF16, of_parameters: F32}
    )
    found, of_function = warned(amp.cast_params, VARIABLES, policies)
    assert found.startswith("PolicyMap: 'head/bais' matched no module.")
    assert "of_parameters matched no module." in of_function
    assert warned(amp.cast_params, VARIABLES, policies) == []


def test_a_warning_points_at_the_call():
    policies = amp.PolicyMap(BF16, {"**/pointed": F32})
    with pytest.warns(UserWarning, match="pointed") as found:
        amp.autocast(NET.apply, policies)(VARIABLES, X)
    assert [each.filename for each in found] == [__file__]


def test_an_entry_that_a_later_one_overrides_everywhere_did_match():
    policies = amp.PolicyMap(BF16, {"**/up": F16, Block: F16, "**": F32})
    assert forward(policies) == []


def test_a_map_that_matched_once_is_silent_in_a_program_without_its_module():
    policies = amp.PolicyMap(BF16, {"head": F32, "block/**": F16})
    assert forward(policies) == []
    apply = amp.autocast(Block().apply, policies)
    assert warned(apply, {"params": VARIABLES["params"]["block"]}, X) == []


@pytest.mark.breadth(1)
@pytest.mark.parametrize("nested", [False, True])
def test_a_helper_that_was_traced_under_an_equal_map_tells_what_it_matched(nested):
    traces = []

    @jax.jit
    def helper(variables, x):
        traces.append(1)
        return NET.apply(variables, x)

    def forwarded(entries):
        fn = amp.autocast(lambda v, x: helper(v, x), amp.PolicyMap(BF16, entries))
        if nested:
            # The scopes of the inner autocast are no matches of the outer one.
            outer = amp.PolicyMap(BF16, {"outer": F32, "outer_too": F32})
            found = warned(amp.autocast(lambda v, x: fn(v, x), outer), VARIABLES, X)
            assert [each.split("'")[1] for each in found[-2:]] == ["outer", "outer_too"]
            return found[:-2]
        return warned(fn, VARIABLES, X)

    entries = {"head": BF16, Block: F16}
    assert forwarded(entries) == forwarded(entries) == []
    assert len(traces) == 1
    typo = {"head": BF16, "haed": BF16, Block: F16}
    for _ in range(2):
        (found,) = forwarded(typo)
        assert "'haed'" in found
    assert len(traces) == 2


def test_entries_that_match_leave_no_names_in_a_report():
    policies = amp.PolicyMap(BF16, {"**": BF16, "head": F16})
    for policy in (BF16, policies):
        report = amp.explain(NET.apply, policy)(VARIABLES, X)
        modules = {each.module for each in report.equations if each.matmuls}
        assert modules == {"Net/block/up", "Net/head"}


def test_a_program_that_jax_has_traced_before_warns_of_nothing():
    policies = amp.PolicyMap(BF16, {"head": F32, Block: F16})
    helper = jax.jit(NET.apply)
    fn = amp.autocast(lambda v, x: helper(v, x), policies)
    assert warned(fn, VARIABLES, X) == []
    assert warned(fn, VARIABLES, X) == []
    assert warned(jax.jit(fn), VARIABLES, X) == []
