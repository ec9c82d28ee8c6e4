"""`python -m jmp_amp diagnose`."""

import json
import math
import sys

import pytest

from jmp_amp.__main__ import main
from jmp_amp.numerics.diagnose.diagnosis import Diagnosis
from jmp_amp.numerics.tune.tuning import Tuning

MODEL = """
import jax
import jax.numpy as jnp
import jmp_amp as amp

def loss(w, x, *, scale=1.0):
    return jnp.sum(jnp.square(x @ w)) * scale

def loss_args():
    return jnp.full(4, 1.0), jnp.eye(4)

def large():
    return jnp.full(4, 300.0), jnp.full((4, 4), 300.0)

def scaled():
    return loss_args(), {"scale": 2.0}

def with_aux(w, x, *, scale):
    return loss(w, x, scale=scale), x

def shapes():
    return jax.ShapeDtypeStruct((4,), jnp.float32), jnp.eye(4)

def alone(x):
    return x

def doubled(x):
    return jax.lax.while_loop(lambda y: y < 9.0, lambda y: 2 * y, jnp.sum(x))

def square(w, x):
    return jnp.sum(jnp.square((w / 3) @ (x / 7)))

@amp.with_policy("p=f32,c=f16,o=f32")
def half(w, x):
    return w @ x

def marked(w, x):
    return jnp.sum(jnp.square(half(w / 3, x / 7)))

def failing(x):
    raise ValueError("of the user")

def failing_args():
    return (jnp.ones(1),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "a_model_to_diagnose.py").write_text(MODEL)
    return folder


@pytest.fixture
def project(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    return "a_model_to_diagnose"


def test_a_finite_run_is_status_0_and_its_sites_are_printed_if_asked(project, capsys):
    command = ["diagnose", f"{project}:loss"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "loss with p=f32,c=f16,o=f32: value 4" in shown.out and shown.err == ""
    assert "sites" not in shown.out
    assert main([*command, "--module", "**"]) == 0
    out = capsys.readouterr().out
    assert " backward " in out and " forward " in out


def test_what_is_not_finite_is_status_1_and_another_policy_mends_it(project, capsys):
    command = ["diagnose", f"{project}:loss", "--args", "large"]
    assert main([*command, "--json"]) == 1
    text = capsys.readouterr().out
    assert Diagnosis.from_json(text).value == math.inf
    assert json.loads(text)["is_finite"] is False
    mended = [*command, "--policy", "float32", "--module", "no/such"]
    assert main(mended) == 0
    assert "'no/such' matches no module" in capsys.readouterr().out


def test_options_reach_the_diagnosis(project, capsys):
    options = ["--args", "scaled", "--has-aux", "--loss-scale", "256", "--json"]
    assert main(["diagnose", f"{project}:with_aux", *options]) == 0
    found = Diagnosis.from_json(capsys.readouterr().out)
    # The sum of four ones, twice; each number's gradient is 2 * 2.
    assert found.value == 8.0 and found.gradients[""].amax == 4.0
    backward = [s.amax for s in found.sites if s.direction == "backward"]
    assert max(backward) == 256 * 4.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{project}:lost"], "has no function 'lost'. Did you mean 'loss'?"),
        (["{project}:alone"], "def alone_args(): return (params, jnp.ones((8, 16)))"),
        (["{project}:loss", "--args", "shapes"], "Give arrays"),
        (["{project}:doubled", "--args", "failing_args"], "diagnose(doubled): the fu"),
        (["{project}:loss", "--policy", "c=fp17"], "unknown dtype 'fp17'"),
        (["{project}:loss", "--loss-scale", "0"], "--loss-scale: static_loss_scale("),
    ],
)
def test_a_mistake_is_one_paragraph_and_status_2(project, capsys, words, message):
    assert main(["diagnose", *(word.format(project=project) for word in words)]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1 and shown.out == ""


def test_errors_of_the_users_own_code_are_not_hidden(project):
    with pytest.raises(ValueError, match="of the user"):
        main(["diagnose", f"{project}:failing"])


ACCURATE = ("--args", "loss_args", "--max-grad-error", "1e-9")


def test_tune_prints_the_policy_that_the_command_line_reads(project, capsys):
    words = ["tune", f"{project}:square", "--args", "loss_args"]
    assert main([*words, "--max-grad-error", "1e-6"]) == 0
    told, _, policy = capsys.readouterr().out.partition("--policy ")
    assert "bound 1e-06" in told
    assert main([*words, "--json", "--policy", policy.strip().strip("'")]) == 0
    found = Tuning.from_json(capsys.readouterr().out)
    assert str(found.policy) == "p=f32,c=f16,o=f32,full=dot_general"
    assert found.error <= found.max_grad_error == 0.01


@pytest.mark.slow
def test_tune_and_diagnose_write_pages_and_figures(project, capsys, tmp_path):
    for name in ("tune", "diagnose"):
        page, figure = tmp_path / f"{name}.html", tmp_path / f"{name}.svg"
        files = ["--html", str(page), "--plot", str(figure)]
        assert main([name, f"{project}:loss", *files]) == 0
        assert "<table>" in page.read_text() and "<svg" in figure.read_text()
    capsys.readouterr()


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        (["{project}:loss", "--max-grad-error", "-1"], "a positive number", 2),
        (["{project}:loss", "--args", "shapes"], "Give arrays", 2),
        (["{project}:alone", "--args", "failing_args"], "one real floating-point", 2),
        (["{project}:marked", *ACCURATE], "no policies were found", 1),
    ],
)
def test_what_tune_cannot_do_is_one_paragraph(project, capsys, words, message, status):
    words = [word.format(project=project) for word in words]
    assert main(["tune", *words]) == status
    shown = capsys.readouterr()
    assert message in shown.err and shown.out == ""
    assert len(shown.err.splitlines()) == 1
