"""`import jmp_amp` imports nothing; a name imports what it needs when it is used."""

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jmp_amp as amp

INIT = Path(amp.__file__)
HEAVY = ("jax", "flax", "flax.nnx", "optax", "rich", "matplotlib", "numpy")


def fresh(code: str) -> str:
    """What a new Python prints."""
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=INIT.parents[1],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_package_imports_nothing_but_itself():
    code = "import sys; import jmp_amp; print(*sorted(sys.modules))"
    modules = fresh(code).split()
    assert [name for name in modules if name.startswith("jmp_amp")] == ["jmp_amp"]
    assert not {name.partition(".")[0] for name in modules} & set(HEAVY)


# What each line needs not. flax itself imports rich.
USES = {
    "amp.get_policy('bf16')": ("matplotlib", "optax"),
    "amp.autocast(jnp.dot)(jnp.eye(2), jnp.eye(2))": (
        "matplotlib",
        "jmp_amp.training",
        "jmp_amp.reports",
    ),
    "amp.recipe('O1')": ("matplotlib",),
    "amp.explain(jnp.dot)(jnp.eye(2), jnp.eye(2)); amp.plots": ("matplotlib",),
}


def test_a_name_imports_what_it_needs_not_more():
    # One process: the lines need ever more.
    lines = [f"{use}; print(*sys.modules)" for use in USES]
    code = "\n".join(["import sys, jmp_amp as amp, jax.numpy as jnp", *lines])
    for (use, needless), modules in zip(
        USES.items(), fresh(code).splitlines(), strict=True
    ):
        assert not set(needless) & set(modules.split()), use


def test_a_name_may_be_used_first_while_jax_traces_imported_listed_and_starred():
    code = """
import jax, jax.numpy as jnp, jmp_amp as amp
def fn(w):
    loss = amp.autocast(lambda w: jnp.sum(w @ w))(w)
    return amp.dynamic_loss_scale().scale(loss)
print(jax.jit(jax.grad(fn))(jnp.eye(2)))
from jmp_amp import *
from jmp_amp import autocast as same, jmp, plots
import jmp_amp
assert same is autocast is jmp_amp.autocast is vars(jmp_amp)["autocast"]
assert jmp is jmp_amp.jmp and jmp.Policy is not None
assert set(jmp_amp.__all__) <= set(dir(jmp_amp)) and set(jmp_amp.__all__) <= set(dir())
"""
    assert fresh(code).split() == ["[[131072.", "131072.]", "[131072.", "131072.]]"]


def test_what_tab_shows_is_public():
    assert set(dir(amp)) == {*amp.__all__, "__version__"}
    assert dir(amp.plots) == ["diagnose", "explain", "tune"]


def test_a_name_that_is_not_there_is_told_as_of_any_module():
    with pytest.raises(AttributeError) as raised:
        amp.autocats  # noqa: B018
    assert str(raised.value) == "module 'jmp_amp' has no attribute 'autocats'"
    assert raised.value.name == "autocats" and raised.value.obj is amp


@pytest.mark.parametrize("name", amp._ELSEWHERE)
def test_a_name_of_another_library_is_told_what_there_is_in_its_place(name):
    with pytest.raises(AttributeError) as raised:
        getattr(amp, name)
    told = str(raised.value)
    assert told.startswith(f"module 'jmp_amp' has no attribute {name!r}. Use ")
    named = {word for word in re.findall(r"\w+", told) if word in amp.__all__}
    assert named, "a name that is there"
    assert not hasattr(amp, name) and name not in dir(amp)


def test_names_of_jmp_are_in_its_own_module():
    for name in ("DynamicLossScale", "StaticLossScale", "NoOpLossScale"):
        assert hasattr(amp.jmp, name)


def test_a_pickle_reads_in_a_python_that_imported_nothing():
    kept = [amp.get_policy("bf16"), amp.PolicyMap("bf16"), amp.autocast, amp.Report]
    code = f"import pickle; print(*pickle.loads({pickle.dumps(kept)!r})[:2])"
    assert fresh(code) == "p=bf16,c=bf16,o=bf16 p=bf16,c=bf16,o=bf16\n"


def test_type_checkers_read_the_names_that_are_there():
    block = next(n for n in ast.parse(INIT.read_text()).body if isinstance(n, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    read = {
        alias.name: node.module.removeprefix("jmp_amp").removeprefix(".")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert read == amp._ROOMS and sorted(read) == sorted(amp.__all__)
