"""fp8 compared with bf16 and with Flax: the programs, and what was measured."""

import doctest
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import compare_precision

from examples.benchmarks import fp8_precision
from tests import h100, zoo
from tests.programs import equations

FILE = Path(fp8_precision.__file__).parent / "results" / "fp8_compiled.json"


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


@pytest.mark.slow
@h100.needs_compiler
def test_figures_of_the_mlp_are_those_that_were_measured(tmp_path, capsys, monkeypatch):
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
