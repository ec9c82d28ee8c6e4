"""Equal siblings are one row of the table of modules."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_amp as amp
from jmp_amp.reports.folding import folded
from jmp_amp.reports.rows import Costs

ONE, TWO = Costs(*range(1, 18)), Costs(*range(2, 19))


def rows(*paths, **others):
    named = {path: others.get(path.rpartition("/")[2], ONE) for path in paths}
    return [(row.depth, row.name, row.costs) for row in folded(named)]


def times(count):
    return Costs(*(count * each for each in ONE))


@pytest.mark.parametrize("stem", ["", "block_", "Dense_"])
def test_three_equal_siblings_are_one_row_with_their_sum(stem):
    paths = [f"net/{stem}{i}" for i in range(3)]
    assert rows(*paths) == [(0, "net", None), (1, f"{stem}0 .. {stem}2 (3x)", times(3))]


def test_what_is_inside_is_added_up_too():
    inside = [f"b_{i}/{name}" for i in range(9, 12) for name in ("up", "down")]
    assert rows(*inside) == [
        (0, "b_9 .. b_11 (3x)", None),
        (1, "up", times(3)),
        (1, "down", times(3)),
    ]


def test_siblings_between_each_other_fold_at_the_place_of_the_first():
    paths = [f"{name}_{i}" for i in range(3) for name in ("norm", "attn")]
    assert [name for _, name, _ in rows(*paths)] == [
        "norm_0 .. norm_2 (3x)",
        "attn_0 .. attn_2 (3x)",
    ]


@pytest.mark.parametrize(
    ("paths", "others"),
    [
        (["b_0", "b_1"], {}),
        (["b_0", "b_1", "b_2"], {"b_1": TWO}),
        (["b_0", "b_2", "b_4"], {}),
        (["b_0", "c_1", "d_2"], {}),
        (["one", "two", "three"], {}),
    ],
)
def test_what_is_not_equal_or_not_in_a_row_stays(paths, others):
    assert [name for _, name, _ in rows(*paths, **others)] == paths


def test_siblings_that_differ_inside_stay():
    paths = [f"b_{i}/up" for i in range(3)] + ["b_1/more"]
    names = [name for _, name, _ in rows(*paths)]
    assert names == ["b_0", "up", "b_1", "up", "more", "b_2", "up"]


def test_a_stack_of_layers_is_as_long_as_one_in_a_report():
    class Stack(nn.Module):
        layers: int

        @nn.compact
        def __call__(self, x):
            for i in range(self.layers):
                x = x + nn.Dense(8, name=f"up_{i}")(nn.LayerNorm(name=f"norm_{i}")(x))
            return nn.Dense(2, name="head")(x)

    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    lengths = []
    for layers in (5, 7):
        model = Stack(layers)
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        report = amp.explain(lambda p, x, m=model: jnp.sum(m.apply(p, x)))(params, x)
        table = str(report).partition("What stays in f32")[0]
        lengths.append(table.count("\n"))
        assert re.search(r" up_\d+ \.\. up_\d+ \(\d+x\) ", table), table
        assert "equal modules, added up" in table
        assert f"norm_{layers - 1}" in report.drill_down("Stack/*")
    assert lengths[0] == lengths[1]
