"""The nnx example: it trains, its policy is by module, and it resumes bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vit_nnx
from flax import nnx

import jmp_amp as amp

ROOT = Path(__file__).parents[2]

# Adam of optax raises a float to its integer step count, which strict JAX refuses.
# Slow tests share compiled steps: one process has them all (`--dist loadgroup`).
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.xdist_group("vit_nnx"),
    pytest.mark.trains,
]


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
def test_a_few_steps_print_a_table_and_resume_at_the_same_bits():
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "examples" / "vit_nnx.py"),
            *("--policy", "mixed_float16", "--steps", "4"),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "same bits" in line]
    assert row.split()[0] == "mixed_float16"
    assert "DIFFERENT" not in done.stdout
    assert "33 of 34 matmuls in half" in done.stdout


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_at_the_bits_of_one_that_was_not(tmp_path):
    policy = vit_nnx.policy_for("mixed_bfloat16")
    whole = vit_nnx.train(policy, tmp_path / "a", steps=6, seed=3, save_every=2)
    again = vit_nnx.train(policy, tmp_path / "a", steps=6, seed=3, start=2)
    assert len(whole.losses) == 6 and len(again.losses) == 4
    np.testing.assert_array_equal(again.losses, whole.losses[2:])
    assert vit_nnx.same_bits(whole, again)
    other = vit_nnx.train(policy, tmp_path / "b", steps=6, seed=4)
    assert not vit_nnx.same_bits(whole, other)


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_all_products_are_half_but_those_of_the_head(name):
    model = nnx.eval_shape(lambda: vit_nnx.ViT(rngs=nnx.Rngs(0)))
    image = jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.float32)
    report = amp.explain(vit_nnx.ViT.__call__, vit_nnx.policy_for(name))(model, image)
    dtypes = {}
    for equation in report.equations:
        if equation.matmuls:
            dtypes.setdefault(equation.module, set()).add(equation.dtype)
    assert dtypes.pop("ViT/head") == {"f32"}
    half = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}[name]
    assert set.union(*dtypes.values()) == {half}
    assert len(dtypes) == 1 + 4 * 7  # patches; q, k, v, attention, out, up and down


@pytest.mark.slow
def test_mixed_precision_learns_as_f32_does(tmp_path):
    accuracy = {
        name: vit_nnx.train(
            vit_nnx.policy_for(name), tmp_path / name, save_every=vit_nnx.STEPS
        ).accuracy
        for name in vit_nnx.POLICIES
    }
    assert accuracy["float32"] > 0.75
    # 597 images: two standard deviations of a share of 0.8 are 3.3 %.
    assert accuracy["mixed_bfloat16"] > accuracy["float32"] - 0.035
    assert accuracy["mixed_float16"] > accuracy["float32"] - 0.035
