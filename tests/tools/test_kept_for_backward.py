"""The benchmark of what is kept for the backward pass; its committed figures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import compare_precision, kept_for_backward
from jax import lax
from rich.console import Console

from examples.benchmarks import roofline
from tests import h100

FILE = Path(kept_for_backward.__file__).parent / "results" / "kept_for_backward.json"
WORDS = ("all", "auto", "least")
BY_HAND = ("by hand", "checkpoint")
PLAIN = tuple(
    f"{name}_{suffix}"
    for suffix in ("scanned", "unrolled")
    for name in ("gpt", "llama", "mlp")
)
OF_ZOO = ("vit", "resnet", "unet", "mamba", "moe")
LOOPS = ("gpt_scanned", "llama_scanned")
# The most memory and modelled time that a step of unrolled layers needs under "auto".
AUTO = {"mlp_unrolled": (0.8, 0.98), "gpt_unrolled": (0.91, 0.98)}
TRACED = {"kept", "products", "trace", "error"}
EPS = float(jnp.finfo(jnp.float32).eps)


def committed() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text())["models"]


def printed(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns the cells of each line of a table, the titles first."""
    console = Console(file=io.StringIO(), width=200)
    console.print(kept_for_backward.table("a model", rows))
    lines = console.file.getvalue().splitlines()
    rows_of_cells = [line.replace("┃", "│").split("│")[1:-1] for line in lines]
    return [[cell.strip() for cell in cells] for cells in rows_of_cells if cells]


def row(**figures: Any) -> dict[str, Any]:
    return {"temp": 2e8, "kept": 4e8, "ms": 8.0, "kernels": 50} | figures


class TestTable:
    def test_ratios_are_to_all(self):
        rows = {"all": row(), "auto": row(temp=5e7), "by hand": row(temp=3e8)}
        found = kept_for_backward.ratios(rows, "temp")
        assert found == {"all": 1.0, "auto": 0.25, "by hand": 1.5}

    def test_a_figure_that_is_nowhere_has_no_ratio(self):
        assert kept_for_backward.ratios({"all": row(), "auto": row()}, "trace") == {}
        assert kept_for_backward.ratios({"all": {"kept": 0}}, "kept") == {}

    def test_each_figure_has_its_ratio_beside_it_but_for_the_error(self):
        rows = {
            "all": row(trace=0.5, error=0.01),
            "least": row(temp=5e7, kept=1e8, ms=9.0, trace=1.0, error=0.02),
        }
        titles, whole, least = printed(rows)
        assert titles == [
            "program",
            *("temp", "x all", "kept", "x all", "modelled", "x all"),
            *("kernels", "x all", "trace", "x all", "error"),
        ]
        assert whole == [
            "all",
            *("200.0MB", "1.000x", "400.0MB", "1.000x", "8.000ms", "1.000x"),
            *("50", "1.000x", "0.50s", "1.000x", "1.000e-02"),
        ]
        assert least == [
            "least",
            *("50.0MB", "0.250x", "100.0MB", "0.250x", "9.000ms", "1.125x"),
            *("50", "1.000x", "1.00s", "2.000x", "2.000e-02"),
        ]

    def test_figures_of_a_gpu_have_no_column_where_nothing_is_compiled(self):
        rows = {word: {"kept": 3e6, "error": 0.5} for word in WORDS}
        assert printed(rows) == [
            ["program", "kept", "x all", "error"],
            *([word, "3.0MB", "1.000x", "5.000e-01"] for word in WORDS),
        ]


class TestWhatIsCounted:
    def test_a_cosine_is_kept_and_an_argument_is_not(self):
        args = (jax.ShapeDtypeStruct((8, 16), jnp.float32),) * 2
        found = kept_for_backward.traced_figures(lambda p, x: jnp.sin(p).sum(), args)
        assert found == {"kept": 4 * 8 * 16, "products": 0}
        found = kept_for_backward.traced_figures(lambda p, x: (p * x).sum(), args)
        assert found == {"kept": 0, "products": 0}

    def test_products_of_both_passes_count_and_those_made_twice(self):
        args = (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2

        def loss(p, x):
            return jnp.sin(jnp.sin(x @ p) @ p).sum()

        # Two, and backward one to each factor that has a gradient.
        assert kept_for_backward.traced_figures(loss, args)["products"] == 5
        again = kept_for_backward.traced_figures(jax.checkpoint(loss), args)
        assert again["products"] > 5


class TestOperationsOneByOne:
    def evaluated(self, fn, *args):
        closed = jax.make_jaxpr(fn)(*args)
        return kept_for_backward.one_by_one(closed.jaxpr, closed.consts, *args)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_a_loop_has_its_carry_and_its_rows(self, reverse):
        def turn(carry, x):
            return carry * 2.0 + x, carry

        xs = np.arange(5, dtype=np.float32)
        found = self.evaluated(
            lambda xs: lax.scan(turn, jnp.float32(1.0), xs, reverse=reverse), xs
        )
        carry, rows = 1.0, []
        for x in xs[::-1] if reverse else xs:
            rows.append(carry)
            carry = 2.0 * carry + x
        assert float(found[0]) == carry
        np.testing.assert_array_equal(found[1], rows[::-1] if reverse else rows)

    @pytest.mark.parametrize("wrapper", [jax.jit, jax.checkpoint])
    def test_of_what_calls_and_checkpoints_compute_each_operation_rounds(self, wrapper):
        def cube(x):
            return (x * x).astype(jnp.float32) * x.astype(jnp.float32)

        x = np.linspace(-2, 2, 64, dtype=np.float32).astype(jnp.bfloat16)
        # Compiled whole, with the excess precision that is the default, the square is
        # not rounded to half.
        (found,) = self.evaluated(wrapper(cube), x)
        assert (cube(x) != x.astype(np.float32) ** 3).any()
        np.testing.assert_array_equal(found, cube(x))


# The library has no part in them.
@pytest.mark.slow
class TestModels:
    def test_attention_is_that_of_jax(self):
        query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 8, 16, 4))
        found = kept_for_backward.attention(query, key, value, jnp.eye(64))
        expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        expected = expected.reshape(found.shape)
        np.testing.assert_allclose(found, expected, rtol=64 * EPS, atol=64 * EPS)

    def test_scores_of_rotated_heads_depend_on_the_distance_alone(self):
        both = jax.random.normal(jax.random.key(0), (2, 4))
        # The same vector at each position.
        each = jnp.broadcast_to(both[:, None, None], (2, 6, 3, 4))
        query, key = np.asarray(kept_for_backward.rotated(each))[:, :, 0]
        scores = query @ key.T
        for distance in range(-5, 6):
            diagonal = np.diagonal(scores, distance)
            np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e3 * EPS)
        assert np.abs(scores[0] - scores[0, 0]).max() > 0.01

    def test_norms_are_those_of_numpy(self):
        x = np.random.default_rng(0).normal(2, 3, (5, 64)).astype(np.float32)
        wide = x.astype(np.float64)
        centred = wide - wide.mean(-1, keepdims=True)
        for norm, each in (("layer_norm", centred), ("rms_norm", wide)):
            found = getattr(kept_for_backward, norm)(x)
            expected = each / np.sqrt((each**2).mean(-1, keepdims=True) + 1e-6)
            np.testing.assert_allclose(found, expected, rtol=64 * EPS, atol=64 * EPS)

    @pytest.mark.parametrize("name", ["gpt", "llama", "mlp"])
    def test_layers_in_a_loop_compute_what_they_do_one_by_one(self, name):
        values = []
        for suffix in ("scanned", "unrolled"):
            size = kept_for_backward.MODELS[f"{name}_{suffix}"].small
            sample = jax.jit(size.sample)(jax.random.key(0))
            with jax.numpy_rank_promotion("allow"):
                values.append(jax.jit(size.loss)(*sample))
        assert values[0] > 0
        np.testing.assert_allclose(*values, rtol=64 * EPS)

    def test_by_hand_multiplies_in_half_alone(self):
        size = kept_for_backward.MODELS["gpt_unrolled"].small
        assert tuple(size.by_hand) == BY_HAND
        for loss in size.by_hand.values():
            with jax.numpy_rank_promotion("allow"):
                text = str(jax.make_jaxpr(loss)(*size.abstract()))
            products = [line for line in text.splitlines() if "= dot_general" in line]
            # Four of attention's weights, two of attention, two dense; and the head.
            assert len(products) == 2 * 8 + 1
            assert all(":bf16[" in line.split("=")[0] for line in products)

    def test_words_have_one_gradient_bit_for_bit(self):
        size = kept_for_backward.MODELS["mlp_scanned"].small
        with jax.numpy_rank_promotion("allow"):
            found = kept_for_backward.gradients(size)
        for word in ("auto", "least"):
            for a, b in zip(found["all"], found[word], strict=True):
                np.testing.assert_array_equal(a, b)
        assert any(
            (a != b).any() for a, b in zip(found["f32"], found["all"], strict=True)
        )


class TestArguments:
    @pytest.mark.nightly
    def test_figures_are_written_and_printed(self, tmp_path, capsys, monkeypatch):
        # The operations that the programs share are compiled once.
        monkeypatch.setattr(jax, "clear_caches", lambda: None)
        file = tmp_path / "found.json"
        options = ["--no-gpu", "--model", "mlp_unrolled", "--rounds", "1"]
        assert kept_for_backward.main([*options, "--json", str(file)]) == 0
        report = json.loads(file.read_text())
        assert report["conditions"]["device"] is None
        assert report["conditions"]["versions"]["jax"] == jax.__version__
        rows = report["models"].pop("mlp_unrolled")
        assert report["models"] == {}
        assert tuple(rows) == (*WORDS, *BY_HAND)
        assert rows["all"]["kept"] > rows["auto"]["kept"] > rows["least"]["kept"]
        shown = capsys.readouterr().out
        for program, figures in rows.items():
            assert figures.keys() == TRACED
            assert all(value > 0 for value in figures.values())
            assert f"│ {program}" in shown
            assert f"{figures['kept'] / rows['all']['kept']:.3f}x" in shown
            assert f"{figures['error']:.3e}" in shown

    def test_a_model_that_is_unknown_is_told_with_those_that_are(self, capsys):
        with pytest.raises(SystemExit) as error:
            kept_for_backward.main(["--model", "gpt_rolled"])
        assert error.value.code == 2
        told = capsys.readouterr().err
        assert "'gpt_rolled'" in told
        assert all(name in told for name in (*PLAIN, *OF_ZOO))

    def test_at_least_one_round_is_asked_for(self, capsys):
        with pytest.raises(SystemExit) as error:
            kept_for_backward.main(["--no-gpu", "--rounds", "0"])
        assert error.value.code == 2
        assert "--rounds begins at 1" in capsys.readouterr().err


def assert_a_loop_gains(rows: dict[str, dict[str, Any]]) -> None:
    assert kept_for_backward.ratios(rows, "temp")["auto"] <= 0.6
    assert kept_for_backward.ratios(rows, "ms")["auto"] <= 0.9


def assert_auto_needs_less(name: str, rows: dict[str, dict[str, Any]]) -> None:
    for figure, most in zip(("temp", "ms"), AUTO[name], strict=True):
        assert kept_for_backward.ratios(rows, figure)["auto"] <= most


def assert_least_needs_less(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["least"]["temp"] <= rows["auto"]["temp"]


def of_program(compiled: Any) -> dict[str, Any]:
    return kept_for_backward.figures_of_program(compiled, roofline.H100)


@pytest.mark.nightly
@h100.needs_compiler
@pytest.mark.parametrize("name", [*LOOPS, "mlp_unrolled", "llama_unrolled"])
def test_figures_are_those_that_are_committed_and_keep_the_bounds(name):
    size, there = kept_for_backward.MODELS[name].large, committed()[name]
    args, here = size.abstract(), {}
    for word, loss in size.programs().items():
        if word in WORDS:
            with jax.numpy_rank_promotion("allow"):
                here[word] = kept_for_backward.traced_figures(loss, args)
                here[word] |= h100.figures(
                    compare_precision.training_step(loss),
                    *args,
                    read=of_program,
                    donate_argnums=0,
                )
            for figure, value in here[word].items():
                # Another version of the compiler lays it out by a little otherwise.
                np.testing.assert_allclose(value, there[word][figure], rtol=0.05)
    assert len({here[word]["products"] for word in WORDS}) == 1
    assert len({here[word]["flops"] for word in WORDS}) == 1
    if name in AUTO:
        assert_auto_needs_less(name, here)
    if name in LOOPS:
        assert_a_loop_gains(here)
    else:
        assert_least_needs_less(here)
