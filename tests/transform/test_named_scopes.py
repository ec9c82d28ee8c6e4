"""Patterns of a `PolicyMap` are for named scopes too, outside of Flax modules."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_amp as amp
from tests.measures import compiled
from tests.programs import products

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
WS = [jnp.eye(8) * (1 + 2.0**-10), jnp.eye(8) * (1 - 2.0**-10)]
HALF, FULL = "bfloat16", "float32"


def layer(name, w, x):
    with jax.named_scope(name):
        return jnp.tanh(x @ w)


def model(ws, x):
    with jax.named_scope("net"):
        return layer("head", ws[1], layer("body", ws[0], x))


def of(fn, entries, default="mixed_bfloat16"):
    return products(amp.autocast(fn, amp.PolicyMap(default, entries)), WS, X)


@pytest.mark.parametrize(
    "pattern", ["net/head", "**/head", "*/h??d", re.compile(r"net/h\w+")], ids=str
)
def test_pattern_gives_a_scope_its_policy(pattern):
    assert of(model, {pattern: "float32"}) == [HALF, FULL]
    assert of(model, {pattern: "mixed_bfloat16"}, "float32") == [FULL, HALF]


def test_a_scope_is_in_the_scopes_around_it():
    assert of(model, {"net": "float32"}) == [FULL, FULL]
    assert of(model, {"net": "float32", "net/head": "bf16"}) == [FULL, HALF]
    # The latest entry wins, and a pattern of the whole path is for no part of it.
    assert of(model, {"**/head": "float32", "net/*": "bf16"}) == [HALF, HALF]
    with pytest.warns(UserWarning, match="'head' matched no module"):
        assert of(model, {"head": "float32"}) == [HALF, HALF]


def test_a_mark_inside_of_a_scope_wins():
    def marked(ws, x):
        with jax.named_scope("net"):
            x = amp.with_policy("mixed_float16")(lambda x: x @ ws[0])(x)
            return x @ ws[1]

    assert of(marked, {"net": "float32"}) == ["float16", FULL]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        jax.checkpoint,
        lambda fn: lambda ws, x: jax.vmap(fn, (None, 0))(ws, x[None])[0],
        lambda fn: (
            lambda ws, x: jax.lax.scan(lambda x, _: (fn(ws, x), None), x, length=1)[0]
        ),
        lambda fn: lambda ws, x: jax.lax.cond(True, fn, lambda ws, x: x, ws, x),
    ],
    ids=["jit", "checkpoint", "vmap", "scan", "cond"],
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_scopes_go_on_in_calls_loops_and_branches(around, split):
    """`split`: the scope `net` is outside of the call, `head` inside."""

    def inner(ws, x):
        return layer("head", ws[1], layer("body", ws[0], x))

    def outer(ws, x):
        with jax.named_scope("net"):
            return around(inner)(ws, x)

    fn = outer if split else around(model)
    entries = {"net/head": "float32"}
    # A `scan` of one turn, and so its slices, is planned as a loop.
    assert sorted(of(fn, entries)) == [HALF, FULL]


def test_gradients_are_f32_where_the_scope_is():
    policies = amp.PolicyMap("mixed_bfloat16", {"**/head": "float32"})

    def loss(ws, x):
        return jnp.sum(model(ws, x) ** 2)

    found, exact, half = (
        compiled(jax.grad(fn))(WS, X)
        for fn in (amp.autocast(loss, policies), loss, amp.autocast(loss))
    )

    def error(grads):
        return np.linalg.norm(grads[1] - exact[1]) / np.linalg.norm(exact[1])

    assert error(found) < error(half)
    program = products(jax.grad(amp.autocast(loss, policies)), WS, X)
    # Of the head two products in f32 and its forward one; of the body those of one
    # weight, whose input has no gradient.
    assert sorted(program) == [HALF] * 2 + [FULL] * 3


def test_scopes_in_flax_modules_are_left_to_patterns_of_modules():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="head")(x)
            with jax.named_scope("tail"):
                return x @ x.T

    net = Net()
    params = jax.eval_shape(net.init, jax.random.key(0), X)
    policies = amp.PolicyMap("mixed_bfloat16", {"**/tail": "float32"})
    with pytest.warns(UserWarning, match="tail' matched no module"):
        found = products(amp.autocast(net.apply, policies), params, X)
    assert found == [HALF, HALF]
    # Outside of modules the same scope has its policy.
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        def beside(params, x):
            x = net.apply(params, x)
            with jax.named_scope("the/tail"):
                return x @ x.T

        found = products(amp.autocast(beside, policies), params, X)
    assert found == [HALF, HALF, FULL]


def test_the_same_map_has_the_same_plan_whatever_it_met_before():
    policies = amp.PolicyMap("mixed_bfloat16", {"**/head": "float32"})
    fn = amp.autocast(model, policies)
    before = products(fn, WS, X)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="head")(x)

    net = Net()
    params = jax.eval_shape(net.init, jax.random.key(0), X)
    assert products(amp.autocast(net.apply, policies), params, X) == [FULL]
    assert products(fn, WS, X) == before == [HALF, FULL]


def test_explain_and_diagnose_print_the_paths_that_patterns_take():
    policies = amp.PolicyMap("mixed_bfloat16", {"net/head": "float32"})
    report = amp.explain(model, policies)(WS, X)
    assert {"net/body", "net/head"} <= report.modules.keys()
    assert [e.dtype for e in report.equations if e.matmuls] == ["bf16", "f32"]
    sites = amp.diagnose(lambda ws, x: jnp.sum(model(ws, x)), policies)(WS, X).sites
    forward = [s for s in sites if s.operation == "dot_general" and s.is_forward]
    assert [(s.module, s.dtype) for s in forward] == [
        ("net/body", "bf16"),
        ("net/head", "f32"),
    ]


def test_blocks_of_one_scope_are_planned_alike():
    def deep(ws, x):
        for _ in range(3):
            x = model(ws, x)
        return x

    assert of(deep, {"net/head": "float32"}) == [HALF, FULL] * 3


def test_scopes_of_an_autocast_inside_of_another_are_those_of_its_own_map():
    inner = amp.autocast(model, amp.PolicyMap("bf16", {"net/head": "float32"}))
    plain = amp.autocast(model, "mixed_bfloat16")

    def loop(ws, x):
        turn = lambda x, _: (inner(ws, x).astype(x.dtype), None)  # noqa: E731
        return jax.lax.scan(turn, x, length=2)[0]

    def both(ws, x):
        with jax.named_scope("around"):
            return 2.0 * inner(ws, model(ws, x))

    assert of(both, {"around/net/body": "float32"}) == [FULL, HALF, HALF, FULL]
    assert of(lambda ws, x: 2.0 * inner(ws, x), {}) == [HALF, FULL]
    assert of(loop, {}) == [HALF, FULL]
    # The outer map reaches what has no map of its own, and is not for what has one.
    assert of(plain, {"net/head": "float32"}) == [HALF, FULL]
    with pytest.warns(UserWarning, match="'net/body' matched no module"):
        assert of(lambda ws, x: 2.0 * inner(ws, x), {"net/body": FULL}) == [HALF, FULL]


def test_an_autocast_in_a_flax_module_sees_the_scopes_of_its_function():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, ws, x):
            policies = amp.PolicyMap("mixed_bfloat16", {"net/head": "float32"})
            return amp.autocast(model, policies)(ws, nn.Dense(8)(x))

    net = Net()
    params = jax.eval_shape(net.init, jax.random.key(0), WS, X)
    policies = amp.PolicyMap("mixed_bfloat16", {"Dense_0": "float32"})
    found = products(amp.autocast(net.apply, policies), params, WS, X)
    assert found == [FULL, HALF, FULL]
