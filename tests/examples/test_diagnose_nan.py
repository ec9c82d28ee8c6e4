"""A step that was skipped is diagnosed, and the diagnosis mends the training."""

import functools
import io
import sys

import diagnose_nan
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp

STEPS = 15


@functools.cache
def trained(policy):
    # Adam of optax raises a float to its integer step count, which strict JAX refuses.
    with jax.numpy_dtype_promotion("standard"):
        return diagnose_nan.train(policy, STEPS, seed=0)


@functools.cache
def diagnosis():
    before = trained("mixed_float16")
    batch = before.skipped[-1]
    return diagnose_nan.diagnosed(before.params, batch, "mixed_float16")


def test_f16_skips_the_batches_whose_products_it_cannot_hold():
    before = trained("mixed_float16")
    assert 0 < len(before.skipped) < STEPS
    assert before.scale == 2.0 ** (16 - len(before.skipped))
    kernel = np.asarray(before.params["stem"]["kernel"], np.float64)
    products = np.abs(before.skipped[-1]["counts"].astype(np.float64) @ kernel)
    # The counts themselves fit, with room for a rounding.
    assert before.skipped[-1]["counts"].max() < 65000 < 66000 < products.max()
    # Other batches fit: these images alone are the reason.
    assert len(before.losses) == STEPS - len(before.skipped)
    assert np.isfinite(before.losses).all()


@pytest.mark.slow
def test_the_diagnosis_names_the_first_layer_and_its_policy_trains_as_f32_does():
    found = diagnosis()
    first = found.first_nonfinite
    assert (first.operation, first.path, first.direction) == (
        *("dot_general", "stem", "forward"),
    )
    assert "diagnose_nan.py" in first.source and "stem" in found.advice[0]
    # Gradients that are NaN have no largest finite value, and are not small ones.
    assert "but for rounding" not in str(found)
    assert found.policy == amp.PolicyMap("mixed_float16", {"stem": "float32"})
    after, f32 = trained(found.policy), trained("float32")
    assert not after.skipped and not f32.skipped
    eps = float(jnp.finfo(jnp.float16).eps)
    np.testing.assert_allclose(after.losses, f32.losses, rtol=4 * eps)
    assert after.losses[-1] < after.losses[0]


@pytest.mark.slow
def test_the_figure_of_the_diagnosis_has_the_layers_in_their_order():
    figure = amp.plots.diagnose(diagnosis())
    figure.savefig(io.BytesIO(), format="png")
    labels = [label.get_text() for label in figure.axes[2].get_yticklabels()]
    named = [label for label in labels if label.startswith("Net/")]
    assert named == ["Net/stem", "Net/norm", "Net/hidden", "Net/head"]


@pytest.mark.slow
def test_the_tuned_policy_halves_the_error():
    after = trained(diagnosis().policy)
    batch = trained("mixed_float16").skipped[-1]
    found = diagnose_nan.tuned(after.params, batch, diagnosis().policy)
    assert found.error <= found.max_grad_error == found.error_before / 2


@pytest.mark.slow
def test_the_script_tells_the_story(monkeypatch, capsys, tmp_path):
    plot = tmp_path / "numbers.png"
    arguments = ["diagnose_nan.py", "--steps", str(STEPS), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", arguments)
    # What it would train has been trained.
    asked = []
    monkeypatch.setattr(
        diagnose_nan,
        "train",
        lambda policy, *rest: asked.append(rest) or trained(policy),
    )
    with jax.numpy_dtype_promotion("standard"):
        diagnose_nan.main()
    assert asked == [(STEPS, 0)] * 2
    first, *_ = printed = capsys.readouterr().out.splitlines()
    skipped = len(trained("mixed_float16").skipped)
    assert f"mixed_float16: {skipped} of {STEPS} steps skipped" in first
    assert any(f": 0 of {STEPS} steps skipped" in line for line in printed)
    assert plot.read_bytes().startswith(b"\x89PNG")
