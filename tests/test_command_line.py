"""`python -m jmp_amp`."""

import json
import os
import re
import subprocess
import sys

import pytest

import jmp_amp as amp
from jmp_amp.__main__ import main

MODEL = """
import jax
import jax.numpy as jnp

def loss(w, x, *, scale=1.0):
    return jnp.mean(jnp.exp(x @ w)) * scale

def loss_args():
    return jax.ShapeDtypeStruct((16, 16), jnp.float32), jnp.ones((4, 16))

def scaled():
    return loss_args(), {"scale": 2.0}

def a_list():
    return list(loss_args())

def blocks(x):
    with jax.named_scope("narrow"):
        x = x @ jnp.ones((16, 2))
    with jax.named_scope("wide"):
        return x @ jnp.ones((2, 512))

def blocks_args():
    return (jnp.ones((4, 16)),)

def alone(x):
    return x

no_function = 3
no_function_args = 4
alone_with_no_args = ()

class Model:
    @staticmethod
    def apply(x):
        return jnp.sin(x)

    @staticmethod
    def apply_args():
        return (jnp.ones(3),)

def failing(x):
    raise KeyError("of the user")

def failing_args():
    return (1.0,)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    package = folder / "a_project_to_explain"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(MODEL)
    (package / "broken.py").write_text("import a_module_that_nobody_has")
    return folder


@pytest.fixture
def project(folder, monkeypatch):
    """The module of the functions, in a folder below the current one."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    return "a_project_to_explain.model"


def test_it_prints_the_report(project, capsys):
    assert main(["explain", f"{project}:loss"]) == 0
    shown = capsys.readouterr()
    assert "1 of 1 matmuls" in shown.out and "p=f32,c=bf16,o=f32" in shown.out
    assert shown.err == ""


def test_json_is_a_report_that_reads_back(project, capsys):
    command = ["explain", f"{project}:loss", "--json", "--policy", "mixed_float16"]
    assert main(command) == 0
    text = capsys.readouterr().out
    report = amp.Report.from_json(text)
    assert report.policy == "p=f32,c=f16,o=f32"
    assert json.loads(text)["total"]["flops"] == report.total.flops == 2 * 4 * 16 * 16


def test_equations_are_printed_when_asked_for(project, capsys):
    for options, count in (
        ([], 0),
        (["--equations"], 1),
        (["--module", ""], 1),
        (["--module", "no/such"], 0),
    ):
        assert main(["explain", f"{project}:loss", *options]) == 0
        out = capsys.readouterr().out
        assert out.count("dot_general   [4,16]") == count
    assert "'no/such' matches no module" in out


def test_modules_are_printed_by_the_figure_that_they_are_sorted_by(project, capsys):
    assert main(["explain", f"{project}:blocks", "--sort", "flops"]) == 0
    table = capsys.readouterr().out.rpartition("Modules")[2]
    # 2 * 4 * 2 * 512 operations, and 2 * 4 * 16 * 2.
    assert re.findall("narrow|wide", table) == ["wide", "narrow"]
    with pytest.raises(SystemExit) as error:
        main(["explain", f"{project}:blocks", "--sort", "error"])
    assert error.value.code == 2
    assert "choose from flops, saved, casts" in capsys.readouterr().err.replace("'", "")


def test_the_plan_is_for_the_target_that_is_named(project, capsys):
    for target, told in (("gpu", 0), ("cpu", 1)):
        assert main(["explain", f"{project}:loss", "--target", target]) == 0
        assert capsys.readouterr().out.count("on this CPU (") == told
    with pytest.raises(SystemExit) as error:
        main(["explain", f"{project}:loss", "--target", "cuda"])
    assert error.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_a_page_and_a_figure_are_written_where_they_are_asked_for(
    project, capsys, tmp_path
):
    page, figure = tmp_path / "plan.html", tmp_path / "plan.png"
    files = ["--html", str(page), "--plot", str(figure)]
    assert main(["explain", f"{project}:loss", *files]) == 0
    assert "1 of 1 matmuls" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<title>loss</title>" in text
    assert "1 of 1 matmuls" in text
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "name", "told"),
    [("--plot", "plan.xyz", "xyz"), ("--html", "no/such/folder.html", "No such file")],
)
def test_a_file_that_cannot_be_written_is_a_mistake(
    project, capsys, tmp_path, option, name, told
):
    words = ["explain", f"{project}:loss", option, str(tmp_path / name)]
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_arguments_come_from_the_function_that_is_named(project, capsys):
    assert main(["explain", f"{project}:loss", "--args", "scaled"]) == 0
    assert main(["explain", f"{project}:Model.apply"]) == 0
    assert "apply with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.loss"], "Write the module, a colon and the function"),
        ([":loss"], "Write the module, a colon and the function"),
        (["model:"], "Write the module, a colon and the function"),
        (["nowhere:loss"], "there is no module 'nowhere'"),
        (["{project}.nowhere:loss"], "there is no module '{project}.nowhere'"),
        ([".relative:loss"], "Write the module, a colon and the function"),
        (["{project}:lost"], "has no function 'lost'. Did you mean 'loss'?"),
        (["{project}:alone"], "has no function 'alone_args'"),
        (["{project}:alone"], "def alone_args(): return (jax.ShapeDtypeStruct("),
        (["{project}:loss", "--args", "others"], "has no function 'others'"),
        (["{project}:no_function"], "no_function is not a function, but int"),
        (["{project}:loss", "--args", "no_function"], "not a function, but int"),
        (["{project}:loss", "--args", "a_list"], "a_list() returned list"),
        (["{project}:loss", "--policy", "c=fp17"], "unknown dtype 'fp17'"),
        (["{project}:loss", "--policy", "p=f32,c=f64"], "cannot compute in float64"),
    ],
)
def test_a_mistake_is_one_paragraph_and_status_2(project, capsys, words, message):
    words = [word.format(project=project) for word in words]
    assert main(["explain", *words]) == 2
    shown = capsys.readouterr()
    assert message.format(project=project) in shown.err
    assert len(shown.err.splitlines()) == 1 and shown.out == ""


def test_a_bare_call_prints_the_help_with_an_example(capsys):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert "usage: python -m jmp_amp" in shown.out and shown.err == ""
    assert "python -m jmp_amp explain train:loss" in shown.out
    for command_ in ("explain", "diagnose", "tune", "doctor"):
        assert f"\n    {command_} " in shown.out


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"jmp_amp {amp.__version__}\n"


@pytest.mark.parametrize("words", [["explian"], ["explain"], ["explain", "a", "b"]])
def test_an_unknown_command_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: python -m jmp_amp" in capsys.readouterr().err


def test_errors_of_the_users_own_code_are_not_hidden(project):
    with pytest.raises(KeyError, match="of the user"):
        main(["explain", f"{project}:failing"])
    broken = project.replace("model", "broken")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        main(["explain", f"{broken}:loss"])


def run(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "jmp_amp", *words],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_reads_a_module_of_the_current_folder_and_tells_no_traceback(
    folder,
):
    result = run(folder, "explain", "a_project_to_explain.model:lost")
    assert result.returncode == 2
    assert "has no function 'lost'" in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
