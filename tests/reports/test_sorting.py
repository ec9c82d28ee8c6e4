"""Tables of modules: all of them, sorted by a figure that a user names."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import jmp_amp as amp
from tests.numerics.made import diagnosis, site


def rows(text):
    """The first words of the rows of a table, which has one."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("──"))
    found = [line for line in lines[start + 1 :] if line.startswith(" ")]
    return [line.strip().split("  ")[0] for line in found]


def layer(name, fn):
    fn.__name__ = name
    return jax.jit(fn)


@pytest.fixture(scope="module")
def report():
    """Modules whose order by FLOP, by kept bytes and by casts is each another one."""

    def fn(x, thin, wide, square):
        kept = layer("kept", lambda x: jnp.sin(jnp.tile(x, (1, 64))))(x)
        small = layer("small", lambda x, w: x @ w)(x, thin)
        large = layer("large", lambda x, w: x @ w)(small.T, wide)
        cast = layer("cast", lambda x, w: x[:1] @ w)(x, square)
        return jnp.sum(kept) + jnp.sum(large) + jnp.sum(cast)

    shapes = (8, 32), (32, 4), (8, 512), (32, 32)
    return amp.explain(fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


@pytest.mark.parametrize(
    ("sort", "figure"), [("flops", "flops"), ("saved", "saved"), ("casts", "elements")]
)
def test_modules_of_a_report_are_sorted_by_a_figure(report, sort, figure):
    name = "cast_elements" if figure == "elements" else figure
    costs = {path or "(top level)": each for path, each in report.modules.items()}
    shown = rows(report.table(sort=sort))
    assert shown[-1] == "all" and sorted(shown[:-1]) == sorted(costs)
    figures = [getattr(costs[path], name) for path in shown[:-1]]
    assert figures == sorted(figures, reverse=True) and len(set(figures)) > 2


def test_each_figure_gives_another_order(report):
    orders = {tuple(rows(report.table(sort=s))) for s in ("flops", "saved", "casts")}
    assert len(orders) == 3


def test_without_a_figure_modules_stand_in_the_order_of_the_program(report):
    assert rows(report.table()) == [
        *(path or "(top level)" for path in report.modules),
        "all",
    ]
    assert (
        report.table().splitlines()[4:]
        == str(report).partition("\n\nWhat")[0].splitlines()[4:]
    )


def test_a_sorted_row_has_its_whole_path_and_equal_modules_stay_one():
    def block(x, w):
        return layer("up", lambda x, w: x @ w)(x, w)

    def fn(xs, ws):
        made = [layer(f"block_{i}", block)(xs[i], ws[i]) for i in range(3)]
        return made, layer("head", lambda x, w: x @ w)(xs[3], ws[3])

    x = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 4
    report = amp.explain(layer("net", fn))(x, x)
    first, second, *_ = rows(report.table(sort="flops"))
    assert (first, second) == ("net/block_0 .. block_2 (3x)/up", "net/head")
    assert "drill_down() tells them apart" in report.table(sort="flops")


def of_many():
    sites = [site(module=f"m{i}", error=i * 1e-6, identity=str(i)) for i in range(60)]
    bad = dataclasses.replace(sites[7], nonfinite=1)
    worst = dataclasses.replace(sites[9], error=math.nan)
    return diagnosis([*sites[:7], bad, sites[8], worst, *sites[10:]])


def test_what_a_diagnosis_cuts_off_is_in_the_table_that_it_names():
    made = of_many()
    assert "36 more modules are no worse: Diagnosis.table() shows them." in str(made)
    assert rows(made.table()) == [f"m{i}" for i in range(60)]
    assert "more modules" not in made.table()


def test_modules_of_a_diagnosis_are_sorted_by_a_figure():
    made = of_many()
    assert rows(made.table(sort="error"))[:4] == ["m9", "m59", "m58", "m57"]
    assert rows(made.table(sort="nonfinite"))[:3] == ["m7", "m0", "m1"]


def test_other_tables_that_are_cut_off_say_what_has_the_rest():
    blamed = [
        site(module=f"m{i}", error=0.1, amplification=2.0, identity=str(i))
        for i in range(11)
    ]
    told = "3 more make no more of it: Diagnosis.blame has them."
    assert told in str(diagnosis(blamed))
    assert "make no more of it" not in str(diagnosis(blamed[:8]))


def tuned(**modules):
    f16 = amp.get_policy("mixed_float16")
    tuning = amp.tune(jnp.vdot, max_grad_error=0.1)(jnp.ones(2), jnp.ones(2))
    made = {path: amp.Tuned(f16, *each) for path, each in modules.items()}
    return dataclasses.replace(tuning, modules=made)


def test_modules_of_a_tuning_are_sorted_by_how_much_error_each_makes():
    made = tuned(a=(0.1, 30), b=(math.inf, 10), c=(0.2, 20), d=(math.nan, 0))
    assert rows(made.table()) == ["b", "d", "c", "a"]
    shown = str(made).partition("Modules")[2].splitlines()
    assert [line.split()[0] for line in shown if line.startswith(" ")][1:] == [
        "b",
        "d",
        "c",
        "a",
    ]
    assert rows(made.table(sort="flops")) == ["a", "c", "b", "d"]
    assert rows(made.table(sort=None)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("make", "figures"),
    [
        (lambda: amp.explain(jnp.sin)(1.0), "'flops', 'saved' or 'casts'"),
        (diagnosis, "'error' or 'nonfinite'"),
        (tuned, "'error' or 'flops'"),
    ],
)
def test_an_unknown_figure_is_told_with_those_that_the_table_has(make, figures):
    made = make()
    name = f"{type(made).__name__}.table"
    for wrong in ("size", 3, ["flops"]):
        with pytest.raises(ValueError) as told:
            made.table(sort=wrong)
        assert f"{name}(sort={wrong!r}): the table has no such figure" in str(
            told.value
        )
        assert f"Use {figures}, the largest first, or None" in str(told.value)
    with pytest.raises(
        ValueError, match=rf"{name}\(width=0\): a width is .* at least 1"
    ):
        made.table(width=0)
    with pytest.raises(TypeError, match=rf"{name}\(width='wide'\): a width is"):
        made.table(width="wide")
