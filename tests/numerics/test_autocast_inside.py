"""A function that is half by itself: an autocast inside of it, dtype=, astype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jmp_amp as amp
from tests.numerics.counting import of
from tests.programs import dtypes_of


def normal(seed, *shape):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


X, Y, W = normal(0, 8, 16), normal(1, 8, 16), normal(2, 16, 16) / 4
F16, BF16 = "mixed_float16", "mixed_bfloat16"
LABELS = jnp.arange(8) % 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(x + nn.Dense(16)(x))
        return nn.Dense(4, name="head")(x)


class Net(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(W)
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.norm(x @ self.kernel[...]))


PARAMS = jax.jit(Block().init)(jax.random.key(5), X)


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def square(h):
    return jnp.mean((h - Y) ** 2)


def layer(w, x):
    return jnp.tanh(x @ w)


def repeated(body):
    def turn(carry, _):
        return carry + body(carry), None

    return jax.lax.scan(turn, X, None, length=3)[0]


# Each of an autocast: with one that does nothing, the program is f32 throughout.
PROGRAMS = {
    "is one": lambda amped: amped(lambda w: square(layer(w, layer(w, X)))),
    "is one, jitted": lambda amped: jax.jit(amped(lambda w: square(layer(w, X) @ w))),
    "closed over": lambda amped: lambda w: square(amped(layer)(w, X)),
    "chained": lambda amped: lambda w: square(amped(layer)(w, amped(layer)(w, X))),
    "nested": lambda amped: (
        lambda w: square(amped(lambda w: amped(layer)(w, X) @ w + 1.0)(w))
    ),
    "jitted": lambda amped: lambda w: square(jax.jit(amped(layer))(w, X) @ w),
    "scan": lambda amped: lambda w: square(repeated(lambda h: amped(layer)(w, h))),
    "checkpoint": lambda amped: lambda w: square(jax.checkpoint(amped(layer))(w, X)),
    "vmap": lambda amped: lambda w: square(jax.vmap(lambda x: amped(layer)(w, x))(X)),
    "cond": lambda amped: (
        lambda w: square(jax.lax.cond(w[0, 0] < 9, amped(layer), lambda w, x: x, w, X))
    ),
    "kernel": lambda amped: (
        lambda w: square(amped(lambda w: amp.full_precision(layer)(w, X) @ w)(w))
    ),
    "linen": lambda amped: lambda p: cross_entropy(amped(Block().apply)(p, X)),
    "linen, is one": lambda amped: amped(lambda p: cross_entropy(Block().apply(p, X))),
    "nnx": lambda amped: lambda net: square(amped(lambda net: net(X))(net)),
    "nnx, is one": lambda amped: amped(lambda net: square(net(X))),
    "nnx, a method": lambda amped: lambda net: square(amped(net.__call__)(X)),
}


def argument(name):
    return PARAMS if "linen" in name else Net() if "nnx" in name else W


def plain(fn):
    return fn


def as_f16(fn):
    return amp.autocast(fn, F16)


def gradient(fn, *args):
    """The gradient, measured without `diagnose` and `tune`: its leaves in f64."""
    step = jax.jit(functools.partial(amp.grad(fn), loss_scale=amp.no_loss_scale()))
    found = step.lower(*args).compile({"xla_allow_excess_precision": False})(*args)
    return jax.tree.map(lambda x: np.float64(np.asarray(x)), found)


def distance(found, exact):
    found, exact = (
        np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
        for tree in (found, exact)
    )
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def sum_of(amped):
    """All losses of a dictionary of arguments, by name of the program."""
    return lambda args: sum(PROGRAMS[name](amped)(arg) for name, arg in args.items())


# Many in one program: a program takes long to compile, however small it is.
AGAIN = ["chained", "checkpoint", "kernel", "nnx"]
INSIDE = [name for name in PROGRAMS if "is one" not in name and name not in AGAIN]
SUMS = {
    "inside": (sum_of(as_f16), INSIDE),
    "inside, again": (sum_of(as_f16), AGAIN),
    "is one": (as_f16(sum_of(plain)), ["is one", "nnx, is one"]),
    "is one, again": (jax.jit(as_f16(sum_of(plain))), ["linen, is one"]),
}


@functools.cache
def measured(name):
    """A program, its arguments, its gradient, and what that is without an autocast."""
    fn, names = SUMS[name]
    args = {name: argument(name) for name in names}
    return fn, args, gradient(sum_of(plain), args)


slow = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("inside, again", "is one, again")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inside", "is one", *slow])
def test_diagnose_measures_what_the_autocast_inside_does_beside_f32(name):
    fn, args, exact = measured(name)
    d = amp.diagnose(fn, BF16)(args)
    assert not any(site.is_in_half for site in d.reference)
    assert {site.dtype for site in d.sites if site.is_in_half} <= {"f16", "bf16"}
    found = gradient(amp.autocast(fn, BF16), args)
    for each in args:
        apart = distance(found[each], exact[each])
        figures = [g for key, g in d.gradients.items() if f"['{each}']" in key]
        # A bias in front of a BatchNorm has no gradient, and all of it is error.
        errors = [figure.error for figure in figures if figure.amax > 1e-4]
        assert min(errors) / 3 < apart < 3 * max(errors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inside", "is one"])
def test_tune_measures_the_error_beside_f32(name):
    fn, args, exact = measured(name)
    expected = distance(gradient(amp.autocast(fn, F16), args), exact)
    t = amp.tune(fn, F16, max_grad_error=0.5)(args)
    assert t.error == pytest.approx(expected, rel=0.05) and t.error > 1e-4
    assert t.notes == () and amp.Tuning.from_json(t.to_json()) == t


def test_tune_reports_no_bound_as_met_that_an_autocast_inside_breaks():
    loss = PROGRAMS["is one"](as_f16)
    with pytest.raises(
        ValueError, match=r"smallest error is 0\.000\d+.*autocast insid"
    ):
        amp.tune(loss, F16, max_grad_error=1e-6)(W)
    # Without the autocast inside the bound is met.
    t = amp.tune(PROGRAMS["is one"](plain), F16, max_grad_error=1e-6)(W)
    assert t.error <= 1e-6 and t.notes == ()


def test_tune_gives_f32_to_what_is_outside_of_the_autocast_inside():
    @jax.jit
    def cancel(h, offset):
        return (h + offset) @ jnp.eye(16) - offset

    def loss_of(amped):
        def loss(w, offset):
            return jnp.mean(jnp.tanh(cancel(amped(layer)(w, X) @ w, offset) @ w))

        return loss

    offset = jnp.full((1, 16), 900.0)
    t = amp.tune(loss_of(as_f16), F16, max_grad_error=0.02)(W, offset)
    assert t.policy.default.full == {"cancel"} and t.is_minimal
    exact = gradient(loss_of(plain), W, offset)
    found = gradient(amp.autocast(loss_of(as_f16), t.policy), W, offset)
    assert distance(found, exact) <= 0.02 < t.error_before


def test_tune_reaches_the_modules_of_an_autocast_inside():
    loss = PROGRAMS["linen"](as_f16)
    t = amp.tune(loss, F16, max_grad_error=2e-4)(PARAMS)
    assert t.policy.entries and t.error <= 2e-4 < t.error_before and t.is_minimal
    exact = gradient(PROGRAMS["linen"](plain), PARAMS)
    found = gradient(amp.autocast(loss, t.policy), PARAMS)
    assert distance(found, exact) <= 2e-4


class Large(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", lambda _: jnp.full((8, 8), 300.0))
        return x @ kernel


class LargeNnx(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.full((8, 8), 300.0))

    def __call__(self, x):
        return x @ self.kernel[...]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("is_one", [True, False])
def test_an_overflow_of_an_autocast_inside_is_not_blamed_on_the_function(is_one):
    w, x = np.full((8, 8), 300.0, np.float32), np.full((4, 8), 40.0, np.float32)
    recipe = amp.recipe("O1", half_dtype="float16")

    def small(h):
        # 8 * 300 * 40 is 96000, and f16 ends at 65504; this is 3.072.
        return jnp.sum(h) * 1e-6

    def inside(weights, x):
        of_recipe, net, w = weights
        return (
            small(recipe.autocast(Large().apply)(of_recipe, x))
            + small(as_f16(lambda net: net(x))(net))
            + small(jax.jit(as_f16(lambda w, x: x @ w))(w, x))
        )

    @amp.autocast(policy=F16)
    def decorated(w, x):
        return small(x @ w)

    weights = {"params": {"kernel": w}}, LargeNnx(), w
    d = amp.diagnose(decorated if is_one else inside, BF16)(w if is_one else weights, x)
    assert not jnp.isfinite(d.value)
    products = of(d.sites, "dot_general")
    assert d.first_nonfinite == products[0]
    overflows = [(site.dtype, site.makes_nonfinite) for site in products]
    assert overflows == [("f16", True)] * (1 if is_one else 3)
    assert all(site.nonfinite == 0 for site in d.reference)
    text = " ".join(d.advice)
    assert "itself is not finite" not in text and "no policy helps" not in text
    assert "in f32 it reaches 96000, and f16 ends at 65504" in d.advice[0]
    assert "(with_policy, an autocast inside, cast_inputs(fn, dtype)) wins" in text
    # No name of d.policy reaches the function, so none is promised to help.
    assert "autocast(fn, d.policy)" not in text


def test_a_gradient_inside_is_measured_beside_f32():
    inner = jax.grad(PROGRAMS["closed over"](as_f16))
    d = amp.diagnose(lambda w: square(inner(w)[:8]), "float32")(W)
    assert any(site.is_in_half for site in d.sites)
    assert not any(site.is_in_half for site in d.reference)


def test_a_helper_that_was_traced_before_is_measured_beside_f32():
    helper = jax.jit(as_f16(layer))
    before = helper(W, X)
    d = amp.diagnose(lambda w: square(helper(w, X)), F16)(W)
    assert not any(site.is_in_half for site in d.reference)
    assert d.gradients[""].error > 1e-4
    # And nothing of it stays in JAX's caches.
    assert (helper(W, X) == before).all()
    assert (before != layer(W, X)).any()


@pytest.mark.slow
def test_what_an_autocast_inside_hands_on_in_half_is_f32_in_the_reference():
    apply = amp.autocast(layer, "bf16")
    assert apply(W, X).dtype == jnp.bfloat16

    def handed(w):
        return jnp.mean(apply(w, X).astype(jnp.float32) ** 2)

    def carried(w):
        start = X.astype(jnp.bfloat16)
        last, _ = jax.lax.scan(lambda h, _: (apply(w, h), None), start, None, length=3)
        return jnp.mean(last.astype(jnp.float32) ** 2)

    d = amp.diagnose(lambda both: handed(both[0]) + carried(both[1]), BF16)((W, W))
    assert not any(site.is_in_half for site in of(d.reference, "dot_general"))
    exact = gradient(lambda w: jnp.mean(layer(w, X) ** 2), W)
    expected = distance(gradient(amp.autocast(handed, BF16), W), exact)
    assert expected / 3 < d.gradients["[0]"].error < 3 * expected
    assert d.gradients["[1]"].error > 1e-3
    assert amp.tune(handed, BF16, max_grad_error=0.5)(W).error == pytest.approx(
        expected, rel=1e-3
    )


# What a program asks for itself


class Half(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16, dtype=jnp.bfloat16, name="low")(x))
        return nn.Dense(16, name="high")(x.astype(jnp.float32))


HALF = jax.jit(Half().init)(jax.random.key(0), X)


def half_by_module(params):
    return square(Half().apply(params, X))


def half_by_cast(w):
    return square((X.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))


def half_by_argument(w):
    return jnp.mean((w @ w).astype(jnp.float32) ** 2)


OWN = {
    "dtype": (half_by_module, HALF, "Half/low"),
    "cast": (half_by_cast, W, "test_autocast_inside.py:"),
    "argument": (half_by_argument, W.astype(jnp.bfloat16), "test_autocast_inside.py:"),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", OWN)
def test_what_a_program_asks_for_itself_is_told_with_the_place_and_the_remedy(name):
    fn, arg, where = OWN[name]
    if name == "cast":
        told = amp.tune(fn, F16, max_grad_error=0.5)(arg).notes
    else:
        told = amp.diagnose(fn, F16)(arg).advice
    (told,) = (each for each in told if "The program itself asks" in each)
    assert where in told and "Remove dtype=, astype and half arrays" in told
    assert "1 matrix product" in told or "1 of them a matrix product" in told
    (asked,) = amp.explain(fn, F16)(arg).asked
    assert (asked.by, asked.matmuls) == ("the program itself", 1)
    assert any(where in each for each in (*asked.modules, *asked.sources))


# What explain credits the policy with


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_shows_an_autocast_inside_as_what_with_policy_marks(name):
    report = amp.explain(PROGRAMS[name](as_f16), BF16)(argument(name))
    marked = amp.explain(PROGRAMS[name](amp.with_policy(F16)), BF16)(argument(name))
    told = [(e.operation, e.dtype, e.reason, e.asked_by) for e in report.equations]
    assert told == [
        (e.operation, e.dtype, e.reason, e.asked_by) for e in marked.equations
    ]
    assert any(e.matmuls and e.dtype == "f16" for e in report.equations)
    assert report.asked == () and amp.Report.from_json(report.to_json()) == report


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_autocast_inside_with_the_outer_policy_changes_no_plan(name):
    once, twice = (
        amp.explain(PROGRAMS[name](amped), F16)(argument(name)).equations
        for amped in (plain, as_f16)
    )
    assert [e.dtype for e in twice] == [e.dtype for e in once]
    assert [e.recomputed for e in twice] == [e.recomputed for e in once]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_inside_is_the_one_of_the_autocast_inside_by_itself(name):
    def step(arg):
        return jax.grad(PROGRAMS[name](as_f16), allow_int=True)(arg)

    arg = argument(name)
    runs = dtypes_of(step, arg, primitive="dot_general")
    assert (
        dtypes_of(amp.autocast(step, "float32"), arg, primitive="dot_general") == runs
    )
    report = amp.explain(step, "float32")(arg)
    products = [e for e in report.equations if e.matmuls]
    found = sorted({"f16": "float16", "f32": "float32"}[e.dtype] for e in products)
    assert found == sorted(operand for operand, *_ in runs)
    assert not any(e.asked_by for e in products)


def test_the_backward_pass_inside_makes_again_what_the_autocast_inside_leaves_out():
    def loss(w):
        def turn(h, _):
            return jax.nn.gelu(h @ w), None

        return square(jax.lax.scan(turn, X, None, length=3)[0])

    policy = amp.Policy("float32", "float16", "float32", saved="least")
    step = jax.grad(amp.autocast(loss, policy))
    runs = len(dtypes_of(step, W, primitive="tanh"))
    report = amp.explain(step, "float32")(W)
    assert sum(e.operation == "tanh" for e in report.equations) == runs == 2


def test_modules_inside_have_the_map_of_the_autocast_inside_or_else_the_outer_one():
    def products(inner, outer):
        apply = amp.autocast(Block().apply, inner)
        report = amp.explain(lambda p: cross_entropy(apply(p, X)), outer)(PARAMS)
        return [e.dtype for e in report.equations if e.matmuls]

    head = {"head": "float32"}
    assert products(F16, amp.PolicyMap(BF16, head)) == ["f16", "f32"]
    assert products(amp.PolicyMap(F16, head), BF16) == ["f16", "f32"]
    with pytest.warns(UserWarning, match="'Dense_0' matched no module"):
        outer = amp.PolicyMap(BF16, {"Dense_0": "float32"})
        assert products(amp.PolicyMap(F16, head), outer) == ["f16", "f32"]


def test_explain_tells_the_programs_own_half_apart_from_the_policys():
    def fn(w):
        return half_by_cast(w) + square(jnp.tanh(X @ w))

    report = amp.explain(fn, F16)(W)
    assert report.total.matmuls_in_half == 2
    assert "1 of 2 matmuls in half by the policy, 1 otherwise" in report.summary
    assert "asked for by the program itself" in report.drill_down()
    without = amp.explain(lambda w: square(jnp.tanh(X @ w)), F16)(W)
    assert without.asked == () and "by the policy" not in without.summary


def test_explain_credits_the_policy_with_what_it_makes_cast_inputs_cast():
    kernel = amp.cast_inputs(layer)
    assert amp.explain(lambda w: square(kernel(w, X)), F16)(W).asked == ()
    named = amp.cast_inputs(layer, jnp.float16)
    (asked,) = amp.explain(lambda w: square(named(w, X)), F16)(W).asked
    assert asked.by == "the program itself"
    inside = amp.autocast(lambda w: square(kernel(w, X)), "bf16")
    assert amp.explain(inside, F16)(W).asked == ()


def test_marks_and_a_cache_in_half_are_no_matter_of_advice():
    marked = amp.with_policy(F16)(layer)
    assert amp.explain(lambda w: square(marked(w, X)), BF16)(W).asked == ()

    def loss(w, cache):
        cache = jax.lax.dynamic_update_slice(cache, X.astype(cache.dtype), (8, 0))
        return square(marked(w, X)) + jnp.mean((cache.astype(jnp.float32) @ w) ** 2)

    assert amp.diagnose(loss, BF16)(W, jnp.zeros((16, 16), jnp.bfloat16)).advice == ()
