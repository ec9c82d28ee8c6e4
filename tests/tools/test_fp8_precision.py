"""fp8 compared with bf16 and with Flax: the programs, and what was measured."""

import doctest
import functools
import itertools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import compare_precision

from examples.benchmarks import fp8_precision
from tests import h100, kept, zoo
from tests.programs import equations

FILE = Path(fp8_precision.__file__).parent / "results" / "fp8_compiled.json"
TWINS = ("mlp", "transformer", "gpt", "gpt_scan")


def committed():
    return json.loads(FILE.read_text())["models"]


def operands_of_products(program, model="mlp"):
    """The dtypes of each product's operands in the gradient of the small model."""
    case = zoo.CASES[model, "small"]
    loss = fp8_precision.loss_of(case, model, program)
    carry, batch = jax.eval_shape(
        lambda key: fp8_precision.sample(case, program, key), jax.random.key(0)
    )
    step = fp8_precision.training_step(loss)
    return [
        tuple(v.aval.dtype.name for v in eqn.invars)
        for eqn in equations(jax.make_jaxpr(step)(carry, batch))
        if eqn.primitive.name == "dot_general"
    ]


def test_twin_of_flax_multiplies_8_bits_in_all_layers_but_the_head():
    found = operands_of_products("flax")
    # Forward, backward to the weight and, as its rule has it, always to the input.
    in_8_bits = [each for each in found if all("float8" in name for name in each)]
    assert len(in_8_bits) == 3 * 3
    assert [each for each in found if each not in in_8_bits] == [("bfloat16",) * 2] * 3


@pytest.mark.slow
def test_first_loss_of_the_twin_of_flax_is_that_of_the_model():
    case = zoo.CASES["mlp", "small"]
    (params, scales), batch = fp8_precision.sample(case, "flax", jax.random.key(0))
    step = jax.jit(fp8_precision.training_step(case.fp8.loss))
    (_, settled), value = step((params, scales), batch)
    eps = float(jnp.finfo(jnp.float8_e4m3fn).eps)
    np.testing.assert_allclose(value, case.loss(params, batch), rtol=eps)
    # The largest input, and the scale that it makes in the next step.
    history = settled["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    largest = np.abs(batch["x"]).max()
    assert abs(float(jnp.max(history)) - largest) <= jnp.finfo(jnp.bfloat16).eps * 4


def test_heads_that_are_modules_stay_in_bf16():
    for model, head in fp8_precision.HEADS.items():
        policy = fp8_precision.policy_for(model, "fp8")
        assert policy.default.matmul is not None
        ((pattern, in_bf16),) = policy.entries
        tied = head == "Embed_0.attend"
        assert pattern == (fp8_precision.attends if tied else head)
        assert in_bf16.matmul is None
        assert fp8_precision.policy_for(model, "bf16") == "mixed_bfloat16"


def test_every_model_was_measured_and_flax_where_a_twin_is_written():
    rows = committed()
    assert [(row["model"], row["size"]) for row in rows] == list(fp8_precision.SIZES)
    for row in rows:
        assert ("flax" in row["programs"]) == (row["model"] in TWINS)
        assert all(figures["f8_calls"] >= 0 for figures in row["programs"].values())


# In bf16 the result of a `relu` is kept once, for its derivative and for the product
# that reads it. In fp8 the product has its own 8 bits, and the `relu` keeps its result.
KEEPS_MORE = {("mlp", "large"): 1.15}


def test_fp8_needs_less_memory_than_bf16_wherever_it_multiplies():
    for row in committed():
        bf16, fp8 = row["programs"]["bf16"], row["programs"]["fp8"]
        assert bf16["f8_calls"] == 0 < fp8["f8_calls"], row["model"]
        # XLA begins every buffer at a multiple of 256 bytes.
        assert fp8["temp"] <= 1.01 * bf16["temp"], row["model"]
        most = KEEPS_MORE.get((row["model"], row["size"]), 1)
        assert fp8["saved"] <= most * bf16["saved"], row["model"]


def test_gradients_of_fp8_are_as_wrong_as_those_of_flax():
    for row in committed():
        programs = row["programs"]
        if "flax" in programs and "errors" in programs["fp8"]:
            ours, theirs = (
                statistics.median(programs[name]["errors"]) for name in ("fp8", "flax")
            )
            assert ours <= 1.15 * theirs, row["model"]


@pytest.mark.slow
@h100.needs_compiler
def test_figures_of_the_mlp_are_those_that_were_measured(tmp_path, capsys, monkeypatch):
    read, number = fp8_precision.compiled_figures, itertools.count()

    def compiled_figures(program):
        name = f"fp8_precision mlp {next(number)}"
        return program(functools.partial(kept.figures, name, read=read))

    # Compiled where they are not kept.
    monkeypatch.setattr(fp8_precision, "compiled_figures", compiled_figures)
    compile_later = {
        "compile_for_gpu": lambda *args, **options: lambda kept: kept(*args, **options)
    }
    there = SimpleNamespace(**vars(h100) | compile_later)
    monkeypatch.setattr(fp8_precision, "h100", there)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    file = tmp_path / "fp8.json"
    arguments = ["--policy", "fp8", "--model", "mlp", "--seeds", "1", "--json", file]
    monkeypatch.setattr("sys.argv", ["compare_precision.py", *map(str, arguments)])
    assert compare_precision.main() == 0
    printed = capsys.readouterr().out
    assert "mlp large" in printed and "mlp wide" in printed
    found = json.loads(file.read_text())["models"]
    expected = [row for row in committed() if row["model"] == "mlp"]
    for here, there in zip(found, expected, strict=True):
        for program, figures in there["programs"].items():
            for name in ("f8_calls", "gemms", "temp", "saved", "kernels"):
                measured = here["programs"][program][name]
                # Another version of the compiler lays it out by a little otherwise.
                np.testing.assert_allclose(measured, figures[name], rtol=0.03)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(fp8_precision).failed == 0
