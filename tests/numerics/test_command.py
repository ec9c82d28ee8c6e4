"""`python -m jmp_amp diagnose`.

TODO of the merge: `diagnose` is not on this branch. Delete the fixture `stub` and its
uses when `jmp_amp.numerics.diagnosing` is there; nothing else here knows of it.
"""

import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jmp_amp.__main__ import main
from jmp_amp.numerics.diagnosis import Diagnosis
from tests.numerics.made import diagnosis, gradient, site

MODEL = """
import jax
import jax.numpy as jnp

def loss(w, x, *, scale=1.0):
    return jnp.sum(jnp.square(x @ w)) * scale

def loss_args():
    return jnp.full(4, 1.0), jnp.eye(4)

def large():
    return jnp.full(4, 300.0), jnp.full((4, 4), 300.0)

def scaled():
    return loss_args(), {"scale": 2.0}

def with_aux(w, x):
    return loss(w, x), x

with_aux_args = loss_args

def shapes():
    return jax.ShapeDtypeStruct((4,), jnp.float32), jnp.eye(4)

def alone(x):
    return x

def failing(x):
    raise ValueError("of the user")

def failing_args():
    return (jnp.ones(1),)
"""


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    """`diagnose` for these functions: f16 if a product is too large for it."""

    def diagnose(fn, policy, *, argnums=0, loss_scale=None, has_aux=False):
        if loss_scale == 0:
            raise ValueError("diagnose(fn, loss_scale=0.0): no scale.")

        def diagnosed(*args, **kwargs):
            value = fn(*args, **kwargs)
            value = float(value[0] if has_aux else value)
            lost = value > 65504 and policy.default.compute_dtype == np.float16
            made = site([math.inf if lost else value], makes_nonfinite=lost)
            seen = value * (loss_scale or 1.0)
            return diagnosis(
                [made, site([seen], direction="backward", identity="1")],
                value=jnp.float32(math.inf if lost else value),
                gradients={"": gradient([value])},
                given=str(policy),
            )

        return diagnosed

    module = types.ModuleType("jmp_amp.numerics.diagnosing")
    module.diagnose = diagnose
    monkeypatch.setitem(sys.modules, module.__name__, module)


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


def test_a_finite_run_is_status_0_and_is_printed(project, capsys):
    assert main(["diagnose", f"{project}:loss"]) == 0
    shown = capsys.readouterr()
    assert "loss with p=f32,c=f16,o=f32: value 4" in shown.out and shown.err == ""
    assert "sites" not in shown.out


def test_what_is_not_finite_is_status_1_and_another_policy_mends_it(project, capsys):
    command = ["diagnose", f"{project}:loss", "--args", "large"]
    assert main(command) == 1
    assert "value inf" in capsys.readouterr().out
    assert main([*command, "--policy", "float32"]) == 0


def test_json_is_a_diagnosis_that_reads_back(project, capsys):
    command = ["diagnose", f"{project}:loss", "--args", "large", "--json"]
    assert main(command) == 1
    text = capsys.readouterr().out
    assert Diagnosis.from_json(text).value == math.inf
    assert json.loads(text)["is_finite"] is False


def test_sites_of_modules_are_printed_when_asked_for(project, capsys):
    assert main(["diagnose", f"{project}:loss", "--module", "**"]) == 0
    out = capsys.readouterr().out
    assert " backward " in out and " forward " in out
    assert main(["diagnose", f"{project}:loss", "--module", "no/such"]) == 0
    assert "'no/such' matches no module" in capsys.readouterr().out


def test_options_reach_the_diagnosis(project, capsys):
    assert main(["diagnose", f"{project}:loss", "--args", "scaled"]) == 0
    assert "value 8" in capsys.readouterr().out
    assert main(["diagnose", f"{project}:with_aux", "--has-aux"]) == 0
    assert "value 4" in capsys.readouterr().out
    largest = []
    for scale in ("1", "256"):
        main(["diagnose", f"{project}:loss", "--loss-scale", scale, "--json"])
        found = Diagnosis.from_json(capsys.readouterr().out)
        largest.append(max(s.amax for s in found.sites if s.direction == "backward"))
    assert largest[1] == 256 * largest[0] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{project}:lost"], "has no function 'lost'. Did you mean 'loss'?"),
        (["{project}:alone"], "def alone_args(): return (params, jnp.ones((8, 16)))"),
        (["{project}:loss", "--args", "shapes"], "Return arrays"),
        (["{project}:loss", "--policy", "c=fp17"], "unknown dtype 'fp17'"),
        (["{project}:loss", "--loss-scale", "0"], "diagnose("),
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
