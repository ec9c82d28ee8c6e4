"""What a diagnosis shows, and that it reads back; made by hand, of known numbers."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_amp as amp
from jmp_amp.numerics.diagnose.diagnosis import Diagnosis
from jmp_amp.numerics.locate.sites import Numbers
from tests.numerics.made import diagnosis, gradient, site

INF, NAN = math.inf, math.nan


def example():
    """An attention whose scores overflow in f16, and what that does to the rest."""
    up = {"module": "GPT/up", "path": "up", "source": "/home/me/gpt.py:12"}
    attn = {"module": "GPT/attn", "path": "attn", "source": "/home/me/gpt.py:41"}
    values = np.array([3.0, 2e5, 5e-9, 0.0])
    with np.errstate(over="ignore"):
        in_half = values.astype(np.float16).astype(np.float64)
    sites = (
        site([1.0, 0.5], dtype="f16", error=5e-4, amplification=1.0, **up),
        site([2.0, 0.0], error=2e-3, amplification=40.0, identity="1", **up),
        site(
            in_half,
            dtype="f16",
            operation="dot_general",
            error=INF,
            amplification=INF,
            makes_nonfinite=True,
            turn=3,
            identity="2",
            **attn,
        ),
        site([NAN] * 4, operation="exp", error=NAN, identity="3", **attn),
        site([NAN, 1e-9], direction="backward", dtype="f16", identity="4", **attn),
    )
    reference = (
        site([1.0, 0.5], **up),
        site([2.0, 0.0], identity="1", **up),
        site(values, operation="dot_general", identity="2", **attn),
        site([0.1] * 4, operation="exp", identity="3", **attn),
        site([1e-9, 1e-9], direction="backward", identity="4", **attn),
    )
    return diagnosis(
        sites,
        reference,
        value=jnp.float32(NAN),
        gradients={
            "['attn']['kernel']": gradient([NAN, 0.0], NAN),
            "['up']['kernel']": gradient([1e-3, 2.0], 2e-3),
        },
        loss_scale=2.0**20,
        policy=amp.PolicyMap("mixed_float16", {"attn": "float32"}),
        advice=("First this <b>.", "Then that."),
    )


# What follows from the sites


def test_modules_add_up_both_directions():
    up, attn = example().modules.values()
    assert list(example().modules) == ["GPT/up", "GPT/attn"]
    assert up == Numbers(2.0, 0.5, 1, 0, 4, 2e-3)
    # 3 of the forward dot, 5e-9 underflowed; 1e-9 backward, made by hand.
    assert (attn.amax, attn.amin, attn.zeros, attn.nonfinite) == (3.0, 1e-9, 2, 6)
    assert attn.size == 10 and attn.error == INF


def test_the_first_site_that_is_not_finite_is_one_that_makes_it():
    assert example().first_nonfinite == example().sites[2]
    passed_on = dataclasses.replace(example(), sites=example().sites[3:])
    assert passed_on.first_nonfinite is None
    assert not passed_on.is_finite


def test_blame_is_by_amplification_and_keeps_the_order_of_equals():
    factors = [1.0, NAN, 7.0, None, INF, 7.0]
    sites = [
        site(error=0.1, amplification=factor, identity=str(i))
        for i, factor in enumerate(factors)
    ]
    others = [site(identity="6"), site(direction="backward", error=None)]
    blame = diagnosis([*others, *sites]).blame
    assert [each.identity for each in blame] == list("142503")


@pytest.mark.parametrize(
    ("fields", "finite"),
    [
        ({}, True),
        ({"value": (jnp.ones(3), None, 3)}, True),
        ({"value": jnp.array([1.0, -INF], jnp.bfloat16)}, False),
        ({"gradients": {"": gradient([INF])}}, False),
        ({"sites": (site([INF], makes_nonfinite=True),)}, False),
        ({"sites": (site([-INF]),)}, True),  # a mask
    ],
)
def test_finite_is_the_value_the_gradients_and_what_sites_make(fields, finite):
    assert dataclasses.replace(diagnosis(), **fields).is_finite == finite


# Data


@pytest.mark.parametrize(
    "value",
    [
        jnp.float16(0.1),
        (jnp.arange(3), {"a": jnp.full((2, 2), NAN, jnp.bfloat16), "b": None}),
        np.array([INF, -INF, 0.0]),
        [1.5, 3, True, np.complex64(1 + 2j)],
    ],
)
def test_a_diagnosis_is_plain_data_that_reads_back(value):
    made = dataclasses.replace(example(), value=value)
    data = json.loads(made.to_json(), parse_constant=lambda word: 1 / 0)
    assert data == made.to_dict()
    for back in (
        Diagnosis.from_dict(made.to_dict()),
        Diagnosis.from_json(made.to_json(indent=1)),
    ):
        assert back == made and back.to_json() == made.to_json()
        assert back.sites[0] == made.sites[0] and back.policy == made.policy
        assert str(back) == str(made)
    assert back.sites[2].error == INF and math.isnan(back.sites[3].error)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.loss_scale = 2.0


def test_the_shape_of_a_site_is_a_tuple_of_ints_and_a_list_in_json():
    d = amp.diagnose(lambda x: jnp.sum(x * x), "float32")(jnp.ones((8, 16)))
    assert [site.shape for site in d.sites[:2]] == [(8, 16), ()]
    data = json.loads(d.to_json())
    assert [row["shape"] for row in data["sites"][:2]] == [[8, 16], []]
    assert Diagnosis.from_dict(data).sites == d.sites
    assert "[8,16]" in d.drill_down()
    # As earlier versions wrote it.
    data["sites"][0]["shape"] = "[8,16]"
    assert Diagnosis.from_dict(data) == d
    data["sites"][0]["shape"] = "[8,x]"
    with pytest.raises(ValueError, match="make the diagnosis again"):
        Diagnosis.from_dict(data)


def test_values_read_back_as_numbers():
    value = {"loss": jnp.float32(0.5), "x": (jnp.array([1.0, -INF]), jnp.int8(3))}
    made = diagnosis(value=value)
    back = Diagnosis.from_json(made.to_json())
    assert back.value == {"loss": 0.5, "x": [[1.0, -INF], 3]}


def test_other_numbers_are_another_diagnosis():
    made = example()
    for other in (
        {"loss_scale": 2.0},
        {"policy": amp.PolicyMap("mixed_float16")},
        {"sites": made.sites[:-1]},
        {"value": jnp.float32(1.0)},
    ):
        assert dataclasses.replace(made, **other) != made
    assert made != 3


def test_derived_figures_are_in_the_data():
    data = example().to_dict()
    assert data["summary"] == example().summary
    assert data["first_nonfinite"] == data["sites"][2]
    assert data["blame"] == [2, 1, 0, 3] and data["is_finite"] is False
    assert data["modules"]["GPT/attn"]["error"] == "inf"


def test_a_policy_with_a_class_is_written_and_says_that_no_text_reads_it_back():
    made = diagnosis(policy=amp.PolicyMap("mixed_float16", {nn.Dense: "float32"}))
    assert "Dense" in made.to_dict()["policy"]
    with pytest.raises(ValueError, match="is a class or a function, which no text"):
        Diagnosis.from_json(made.to_json())


@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        (lambda: Diagnosis.from_dict([1]), TypeError, "not a dictionary"),
        (lambda: Diagnosis.from_dict({}), ValueError, "'function' is missing"),
        (
            lambda: Diagnosis.from_dict(example().to_dict() | {"sites": [{}]}),
            ValueError,
            "make the diagnosis again",
        ),
        (
            lambda: Diagnosis.from_dict(example().to_dict() | {"gradients": {"": 1}}),
            ValueError,
            "make the diagnosis again",
        ),
        (
            lambda: Diagnosis.from_dict(example().to_dict() | {"policy": 3}),
            ValueError,
            "the policy",
        ),
        (lambda: Diagnosis.from_json(3), TypeError, "found int"),
        (lambda: Diagnosis.from_json("{"), ValueError, "not JSON"),
        (lambda: Diagnosis.from_json("[]"), ValueError, "no object"),
        (lambda: example().drill_down(3), TypeError, "is text"),
        (lambda: example().drill_down(width=1.5), TypeError, "number of characters"),
        (lambda: example().drill_down(width=True), TypeError, "number of characters"),
        (lambda: example().drill_down(width=0), ValueError, "at least 1"),
    ],
)
def test_bad_input_says_what_it_is_and_what_to_give(read, error, message):
    with pytest.raises(error, match=message):
        read()


# What is shown


def test_the_first_lines_say_what_is_wrong_where_it_began_and_what_to_do():
    text = str(example())
    assert max(map(len, text.splitlines())) <= 100
    first = " ".join(" ".join(text.splitlines()[:4]).split())
    for words in (
        "loss with p=f32,c=f16,o=f32: value nan; 1 of 2 gradients not finite",
        "first made by dot_general in GPT/attn (gpt.py:41), forward, f16, turn 3",
        "* First this <b>. * Then that.",
    ):
        assert words in first
    assert "\x1b" not in text


def test_tables_show_the_worst_first():
    lines = [line.split() for line in str(example()).splitlines()]
    # Half of the four forward values are above 0 and below the smallest of f16: one.
    assert ["GPT/attn", "3", "1e-09", "20%", "6", "25%", "100%", "inf"] in lines
    assert ["GPT/up", "2", "0.5", "25%", "0.002"] in lines
    blamed = [row for row in lines if row[-1:] in (["gpt.py:12"], ["gpt.py:41"])]
    assert blamed == [
        ["inf", "inf", "dot_general", "f16", "GPT/attn", "gpt.py:41"],
        ["40", "0.002", "mul", "f32", "GPT/up", "gpt.py:12"],
    ]
    gradients = [row[0] for row in lines if row and row[0].startswith("['")]
    assert gradients == ["['attn']['kernel']", "['up']['kernel']"]


def test_many_modules_and_gradients_are_cut_to_those_with_trouble():
    sites = [site(module=f"m{i}", error=i * 1e-6, identity=str(i)) for i in range(60)]
    sites[7] = dataclasses.replace(sites[7], nonfinite=1)
    gradients = {f"['{i}']": gradient([1.0], i * 1e-6) for i in range(60)}
    gradients["['dead']"] = gradient([0.0, 0.0], 1.0)
    text = str(diagnosis(sites, gradients=gradients))
    assert len(text.splitlines()) < 60
    words = text.split()
    assert {"m7", "m59", "m37", "['dead']", "['59']"} <= set(words)
    assert not {"m8", "m36", "['30']"} & set(words)
    assert "36 more modules" in text and "53 more gradients" in text


def test_a_gradient_that_is_0_but_for_rounding_is_told_apart_from_one_that_underflows():
    gradients = {
        "['up']": gradient([1.0, 0.5], 0.125),
        "['key']": gradient([1e-6], 4096.0),
        "['small']": gradient([1e-6], 0.75),
    }
    made = diagnosis([site()], gradients=gradients)
    assert "gradients finite, error up to 0.75" in made.summary
    lines = str(made).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith(" ['")]
    assert rows == ["['small']", "['up']", "['key']"]
    assert lines[-1] == "0 but for rounding, whatever their error: ['key']."
    alone = diagnosis([site()], gradients={"['w']": gradient([1e-6], 4096.0)})
    assert "error up to 4096" in alone.summary


def test_the_html_says_the_same_and_escapes_it():
    shown = example()._repr_html_()
    assert "<li>First this &lt;b&gt;.</li>" in shown and "<b>" not in shown
    assert shown.startswith("<p>loss with") and shown.count("<table>") == 3
    assert "GPT/attn" in shown


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("**", {"GPT/up", "GPT/attn"}),
        ("GPT/*", {"GPT/up", "GPT/attn"}),
        ("**/attn", {"GPT/attn"}),
        ("attn", {"GPT/attn"}),
        ("attn/up", set()),
    ],
)
def test_a_glob_chooses_modules(pattern, modules):
    made = example()
    lines = made.drill_down(pattern).splitlines()
    assert max(map(len, lines)) <= 140
    assert {line for line in lines if line in made.modules} == modules
    if not modules:
        assert "'attn/up' matches no module. There are GPT/up, GPT/attn." in lines[0]


def test_a_site_is_one_line_with_its_figures():
    lines = [line.split() for line in example().drill_down("**/attn").splitlines()]
    row = "2 gpt.py:41 dot_general forward f16 [4] 3 3 50% 1 (turn 3) 25% inf inf"
    assert row.split() in lines


def test_a_diagnosis_of_nothing_is_shown_too():
    made = diagnosis(value={"state": jax.random.key(0), "n": 3})
    assert str(made) == "loss with p=f32,c=f16,o=f32: value finite"
    assert made == Diagnosis.from_json(made.to_json())


def overflown(paths, first):
    """Modules of which all are not finite, because one is."""
    sites = [
        site([NAN, 1.0], module=path, identity=str(i), makes_nonfinite=path == first)
        for i, path in enumerate(paths)
    ]
    return diagnosis(sites)


def test_the_module_where_an_overflow_begins_stands_first_and_is_marked():
    paths = [f"GPT/{i}" for i in range(40)]
    made = overflown(paths, "GPT/7")
    assert made.first_nonfinite.module == "GPT/7"
    lines = str(made).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(" module"))
    rows = [line.split()[0] for line in lines[start + 2 :] if line.startswith(" GPT/")]
    assert rows[:3] == ["GPT/7", "GPT/0", "GPT/1"] and len(rows) == 24
    assert str(made).count("(begins here)") == 1
    assert "(begins here)" in lines[start + 2]


def test_nothing_begins_where_all_is_finite():
    assert "begins here" not in str(diagnosis([site([1.0], module="GPT/up")]))


def test_gradients_of_which_no_number_is_finite_are_one_row():
    gradients = {f"w{i}": gradient([INF] * 8, INF) for i in range(32)}
    text = str(diagnosis(gradients=gradients))
    assert re.search(r"^ all 32 +256 +256$", text, re.M) and "w1" not in text
    # One that is finite in part tells the others apart.
    text = str(diagnosis(gradients=gradients | {"w9": gradient([INF, 1.0], INF)}))
    assert "all 32" not in text and " w0 " in text
