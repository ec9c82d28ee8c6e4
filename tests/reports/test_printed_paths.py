"""A path as a report prints it is understood where policies and reports take one."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.transform.flax_models import in_linen, with_values

X = jnp.ones((2, 4))


class Net(nn.Module):
    def setup(self):
        self.body = nn.Dense(4)
        self.head = nn.Dense(3)

    def __call__(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        return self.body(x)


class Outer(nn.Module):
    def setup(self):
        self.net = Net()

    def __call__(self, x):
        return self.net(x)

    def encode(self, x):
        return self.net.encode(x)


class NnxNet(nnx.Module):
    def __init__(self):
        self.body = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        return self.body(x)


class NnxOuter(nnx.Module):
    def __init__(self):
        self.net = NnxNet()

    def __call__(self, x):
        return self.net(x)

    def encode(self, x):
        return self.net.encode(x)


LINEN, NNX = Outer(), NnxOuter()
PARAMS = with_values(in_linen(LINEN, X).variables)


@jax.jit
def step(params, x):
    return jnp.sum(LINEN.apply(params, x) ** 2)


def encoded(params, x):
    return LINEN.apply(params, x, method="encode")


CALLS = {
    "linen": (LINEN.apply, (PARAMS, X)),
    "jitted": (step, (PARAMS, X)),
    "method of linen": (encoded, (PARAMS, X)),
    "nnx": (lambda model, x: model(x), (NNX, X)),
    "method of nnx": (lambda model, x: model.encode(x), (NNX, X)),
}


def products(report):
    return {e.module: e.dtype for e in report.equations if e.matmuls}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", CALLS)
def test_every_printed_path_chooses_its_module_in_a_map(name):
    fn, args = CALLS[name]
    printed = products(amp.explain(fn)(*args))
    assert len(printed) == (1 if "method" in name else 2)
    for path in printed:
        policy = amp.PolicyMap("mixed_bfloat16", {path: "float32"})
        found = products(amp.explain(fn, policy)(*args))
        assert found == {each: "f32" if each == path else "bf16" for each in printed}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_glob_that_begins_with_the_outermost_module_is_understood(name):
    fn, args = CALLS[name]
    root = "NnxOuter" if "nnx" in name else "Outer"
    for glob in (root, f"{root}/**", f"{root}/net", f"{root}/*"):
        policy = amp.PolicyMap("mixed_bfloat16", {glob: "float32"})
        assert set(products(amp.explain(fn, policy)(*args)).values()) == {"f32"}


@pytest.mark.parametrize("glob", ["Net/head", "Outer/head", "Other/net"])
def test_another_name_in_front_is_no_path(glob):
    with pytest.warns(UserWarning, match=f"'{glob}' matched no module"):
        amp.explain(LINEN.apply, f"mixed_bfloat16; {glob}: float32")(PARAMS, X)


def dtypes(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.dtype.name for path, leaf in leaves}


@pytest.mark.parametrize("glob", ["Outer/net/head", "step/Outer/net/head"])
@pytest.mark.parametrize("model", [None, LINEN])
def test_parameters_of_a_linen_tree_are_chosen_by_a_printed_path(glob, model):
    policy = amp.PolicyMap("bf16", {glob: "float32"})
    found = dtypes(amp.cast_params(PARAMS, policy, model=model))
    assert {path for path, name in found.items() if name == "float32"} == {
        "['params']['net']['head']['kernel']",
        "['params']['net']['head']['bias']",
    }


def test_parameters_of_an_nnx_module_are_chosen_by_a_printed_path():
    policy = amp.PolicyMap("bf16", {"NnxOuter/net/head": "float32"})
    model = amp.cast_params(NNX, policy)
    assert model.net.head.kernel.dtype == jnp.float32
    assert model.net.body.kernel.dtype == jnp.bfloat16


@pytest.mark.parametrize("glob", ["heda/kernel", "Net/head", "Haed"])
def test_a_misspelt_path_of_a_tree_is_still_warned_of(glob):
    with pytest.warns(UserWarning, match=f"'{glob}' matched no module"):
        amp.cast_params(PARAMS, amp.PolicyMap("bf16", {glob: "float32"}))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("glob", ["Outer/net/head", "net/head", "net/h*", "**/head"])
@pytest.mark.parametrize("name", ["linen", "jitted"])
def test_drill_down_takes_paths_of_both_kinds(name, glob):
    fn, args = CALLS[name]
    report = amp.explain(fn)(*args)
    prefix = "step/" if name == "jitted" else ""
    if glob.startswith("Outer"):
        glob = prefix + glob
    whole = report.drill_down(f"{prefix}Outer/net/head")
    assert whole.startswith("3 of ") and report.drill_down(glob) == whole


def test_drill_down_of_a_diagnosis_takes_paths_of_both_kinds():
    diagnosis = amp.diagnose(LINEN.apply, "mixed_float16")(PARAMS, X)
    both = [diagnosis.drill_down(glob) for glob in ("Outer/net/head", "net/head")]
    assert both[0] == both[1] and "Outer/net/head" in both[0]


def test_drill_down_needs_no_methods():
    report = amp.explain(LINEN.apply)(PARAMS, X)
    told = report.drill_down("Outer/net/net.encode/body")
    assert told.startswith("3 of ")
    assert told == report.drill_down("net/body") == report.drill_down("Outer/net/body")


def test_drill_down_of_nothing_is_what_is_outside_of_modules():
    report = amp.explain(step)(PARAMS, X)
    assert "matches no module" not in report.drill_down("")
    assert "matches no module" in report.drill_down("nowhere")
    assert "matches no module" in amp.explain(LINEN.apply)(PARAMS, X).drill_down("")
