"""The nnx example: it trains, its policy is by module, and it resumes bit for bit."""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vit_nnx
from flax import nnx

import jmp_amp as amp

# Adam of optax raises a float to its integer step count, which strict JAX refuses.
# Slow tests share compiled steps: one process has them all (`--dist loadgroup`).
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("vit_nnx")]


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Shallow(vit_nnx.ViT):
    """One block is saved and restored as four are."""

    def __init__(self, *, rngs):
        super().__init__(depth=1, rngs=rngs)


@pytest.mark.slow
def test_a_few_steps_print_a_table_and_resume_at_the_same_bits(monkeypatch, capsys):
    arguments = "vit_nnx.py --policy mixed_float16 --steps 4"
    monkeypatch.setattr(sys, "argv", arguments.split())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(vit_nnx, "ViT", Shallow)
    vit_nnx.main()
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if "same bits" in line]
    assert row.split()[0] == "mixed_float16"
    assert "DIFFERENT" not in printed
    assert "9 of 10 matmuls in half" in printed


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_at_the_bits_of_one_that_was_not(
    monkeypatch, tmp_path
):
    # The steps that the test above has compiled.
    monkeypatch.setattr(vit_nnx, "ViT", Shallow)
    policy = vit_nnx.policy_for("mixed_float16")
    whole = vit_nnx.train(policy, tmp_path / "a", steps=4, seed=3, save_every=1)
    again = vit_nnx.train(policy, tmp_path / "a", steps=4, seed=3, start=1)
    assert len(whole.losses) == 4 and len(again.losses) == 3
    np.testing.assert_array_equal(again.losses, whole.losses[1:])
    assert vit_nnx.same_bits(whole, again)
    other = vit_nnx.train(policy, tmp_path / "b", steps=4, seed=4)
    assert not vit_nnx.same_bits(whole, other)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_all_products_are_half_but_those_of_the_head(name):
    model = nnx.eval_shape(lambda: vit_nnx.ViT(depth=2, rngs=nnx.Rngs(0)))
    image = jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.float32)
    report = amp.explain(vit_nnx.ViT.__call__, vit_nnx.policy_for(name))(model, image)
    dtypes = {}
    for equation in report.equations:
        if equation.matmuls:
            dtypes.setdefault(equation.module, set()).add(equation.dtype)
    assert dtypes.pop("ViT/head") == {"f32"}
    half = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}[name]
    assert set.union(*dtypes.values()) == {half}
    assert len(dtypes) == 1 + 2 * 7  # patches; q, k, v, attention, out, up and down


@pytest.mark.slow
def test_mixed_precision_learns_as_f32_does(tmp_path):
    def train(name):
        # A directory of its own for every run, which goes on from what it finds.
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        policy = vit_nnx.policy_for(name)
        result = vit_nnx.train(policy, directory, save_every=vit_nnx.STEPS)
        assert len(result.losses) == vit_nnx.STEPS
        return result.accuracy

    accuracy = {name: train(name) for name in vit_nnx.POLICIES}
    assert accuracy["float32"] > 0.75
    # 597 images: two standard deviations of a share of 0.8 are 3.3 %.
    assert accuracy["mixed_bfloat16"] > accuracy["float32"] - 0.035
    assert accuracy["mixed_float16"] > accuracy["float32"] - 0.035
