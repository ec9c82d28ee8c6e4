"""`diagnose`: exact counts, directions, planted defects in every construct, errors.

Expected counts are numpy's, of the values that the same equations have in numpy.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jmp_amp as amp
from tests import zoo

F16_MAX = 65504.0


def counts(values: Any) -> tuple[dict[int, int], int, int, float, float]:
    """Exponents, zeros, values that are not finite, largest and smallest magnitude."""
    magnitudes = np.abs(np.asarray(values).astype(np.float64)).ravel()
    finite = magnitudes[np.isfinite(magnitudes)]
    some = finite[finite > 0]
    exponents, numbers = np.unique(np.frexp(some)[1] - 1, return_counts=True)
    return (
        dict(zip(exponents.tolist(), numbers.tolist(), strict=True)),
        int((finite == 0).sum()),
        magnitudes.size - finite.size,
        float(finite.max(initial=0.0)),
        float(some.min(initial=math.inf)) if some.size else 0.0,
    )


def counted(site: Any) -> tuple[dict[int, int], int, int, float, float]:
    return site.exponents, site.zeros, site.nonfinite, site.amax, site.amin


def only(sites: Any, operation: str, direction: str = "forward") -> Any:
    (site,) = [s for s in sites if (s.operation, s.direction) == (operation, direction)]
    return site


def of(sites: Any, operation: str, direction: str = "forward") -> list[Any]:
    return [s for s in sites if (s.operation, s.direction) == (operation, direction)]


def wide_range(shape: tuple[int, ...]) -> np.ndarray:
    """Values of all magnitudes, subnormals, zeros, infinities and NaN among them."""
    rng = np.random.default_rng(math.prod(shape))
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-148, 127, shape)
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    flat = values.ravel()
    for place, special in enumerate((0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45)):
        flat[place :: 97 + place] = special
    return values


def test_counts_are_numpys_for_all_magnitudes_sizes_and_dtypes():
    with np.errstate(all="ignore"):
        arrays = {
            "small": wide_range((7, 30)),
            "one piece": wide_range((1 << 14,)),
            "pieces": wide_range((3, 11_000)),
            "halves": wide_range((50, 40)).astype(np.float16),
            "many halves": wide_range((40_000,)).astype(jnp.bfloat16),
            "complex": wide_range((60, 2)).view(np.complex64)[:, 0],
            "none": np.zeros((0, 3), np.float32),
        }

    def fn(arrays, flag):
        return {k: jax.lax.select_n(flag, x, x) for k, x in arrays.items()}

    d = amp.diagnose(fn)(jax.tree.map(jnp.asarray, arrays), jnp.asarray(True))
    sites = {s.shape + s.dtype: s for s in d.sites}
    for values in (x for x in arrays.values() if x.size):
        shape = f"[{','.join(map(str, values.shape))}]"
        (site,) = [s for k, s in sites.items() if k.startswith(shape)]
        # A complex number is two.
        parts = values.view(np.float32) if values.dtype.kind == "c" else values
        assert counted(site) == counts(parts)
        assert (site.size, site.times) == (parts.size, 1)
    assert sites["[0,3]f32"].exponents == {}


def test_what_is_moved_or_repeated_has_the_numbers_of_what_it_repeats():
    x = np.float32([[1.0, -3.0], [0.0, np.inf]])

    def fn(x):
        y = x * jnp.float32(2.0)
        return jnp.broadcast_to(-y.T.reshape(1, 4), (3, 4))

    d = amp.diagnose(fn, "float32")(jnp.asarray(x))
    for moved in ("transpose", "reshape", "neg"):
        assert counted(only(d.sites, moved)) == counts(2 * x)
    repeated = only(d.sites, "broadcast_in_dim")
    assert counted(repeated) == counts(np.stack([2 * x] * 3))
    assert repeated.size == 12 and repeated.shape == "[3,4]"
    assert not any(s.makes_nonfinite for s in d.sites)


# Loops


def scanned(x, w):
    def turn(c, w):
        c = c * w
        return c, jnp.sin(c)

    return jax.lax.scan(turn, x, w, reverse=True)


def test_a_scan_counts_all_its_turns_and_tells_the_turn():
    x, w = np.float32([1.0, -2.0]), np.float32([1e30, 4.0, 1e30, 8.0, 0.5])
    d = amp.diagnose(scanned, "float32")(jnp.asarray(x), jnp.asarray(w))
    carry, values = x, []
    with np.errstate(over="ignore"):
        for each in w[::-1]:
            carry = carry * each
            values.append(carry)
    mul = only(d.sites, "mul")
    assert counted(mul) == counts(values)
    # 0.5, 8, 1e30, 4, 1e30: the last turn overflows.
    assert (mul.turn, mul.times, mul.size) == (4, 5, 10) and mul.makes_nonfinite
    # The sine of infinity is no number, but sin did not make what it was given.
    sin = only(d.sites, "sin")
    assert (sin.turn, sin.nonfinite, sin.makes_nonfinite) == (4, 2, False)
    assert d.first_nonfinite == mul


@pytest.mark.slow
def test_turns_are_counted_through_nested_loops_and_a_condition_runs_once_more():
    def fn(x):
        def inner(c, _):
            return c * jnp.float32(1e10), None

        def outer(state):
            i, c = state
            return i + 1, jax.lax.scan(inner, c, None, length=2)[0]

        return jax.lax.while_loop(lambda s: jnp.sqrt(s[1]) < 1e18, outer, (0, x))[1]

    d = amp.diagnose(lambda x: (fn(x),), "float32")(jnp.float32(1.0))
    mul, sqrt = only(d.sites, "mul"), only(d.sites, "sqrt")
    # 1e10 ... 1e40: the square root is tested before, and after two turns of two.
    assert (mul.times, mul.turn, sqrt.times) == (4, 3, 3)
    assert sqrt.turn == 2 and not sqrt.makes_nonfinite


def test_only_the_branch_that_ran_is_a_site():
    def fn(i, x):
        return jax.lax.switch(i, [jnp.sin, lambda x: jnp.exp(x * 1e3), jnp.cos], x)

    d = amp.diagnose(fn, "float32", argnums=1)(1, jnp.float32([1.0, 0.0]))
    assert [s.operation for s in d.sites] == ["mul", "exp"]
    assert d.first_nonfinite.operation == "exp" and d.first_nonfinite.nonfinite == 1


# Directions


MODELS = ("mlp", "gpt_scan", "lstm")


def own_equations(fn: Callable[..., Any], policy: str, *args: Any) -> list[tuple]:
    """What explain tells of a program: identity and operation of what has numbers."""
    runs = alive(jax.make_jaxpr(fn)(*args).jaxpr)
    return sorted(
        (e.identity, e.operation, e.times)
        for e in amp.explain(fn, policy)(*args).equations
        if e.is_floating and int(e.identity.split(".")[0]) in runs
    )


def alive(jaxpr: Any) -> set[int]:
    """The equations that lead to a result: others, such as averages, never run."""
    wanted, found = set(map(id, jaxpr.outvars)), set()
    for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if eqn.effects or wanted & set(map(id, eqn.outvars)):
            found.add(index)
            wanted |= set(map(id, eqn.invars))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_forward_sites_are_the_equations_that_explain_tells(name):
    case = zoo.CASES[name, "small"]
    args = case.sample(jax.random.key(0))
    d = amp.diagnose(case.loss, "mixed_float16")(*args)
    rows = {(i, o): n for i, o, n in own_equations(case.loss, "mixed_float16", *args)}
    for sites in (d.sites, d.reference):
        found = [
            (s.identity, s.operation, s.times)
            for s in sites
            if s.direction == "forward" and (s.identity, s.operation) in rows
        ]
        assert len(found) == len({each[:2] for each in found})
        # What is the same in every turn of a loop may be computed before it.
        assert all(times in (rows[i, o], 1) for i, o, times in found)
        # All but comparisons and integers, which have no floating result.
        without = {key for key in rows if key not in {each[:2] for each in found}}
        assert {o for _, o in without} <= NO_NUMBERS, without
    casts = [s for s in d.sites if s.direction == "forward"]
    casts = [s for s in casts if (s.identity, s.operation) not in rows]
    assert {s.operation for s in casts} == {"convert_element_type"}
    assert not [
        s
        for s in d.reference
        if s.direction == "forward" and (s.identity, s.operation) not in rows
    ]
    wanted = jax.jit(jax.grad(case.loss, allow_int=True))(*args)
    assert len(d.gradients) == len(jax.tree.leaves(wanted))


# Comparisons, and operations on integers and keys that explain counts as floating.
NO_NUMBERS = set(
    "gt lt ge le eq ne argmax argmin sign is_finite convert_element_type jit pjit "
    "custom_jvp_call custom_vjp_call cond scan while remat2 checkpoint floor".split()
)


def test_what_exists_for_the_derivative_alone_is_backward():
    def fn(x):
        return jnp.sum(jax.nn.relu(jnp.tanh(x)) / jnp.sqrt(x))

    d = amp.diagnose(fn, "float32")(jnp.float32([1.0, 4.0, 9.0]))
    forward = [s.operation for s in d.sites if s.direction == "forward"]
    assert forward == ["tanh", "max", "sqrt", "div", "reduce_sum"]
    # The rule of relu calls relu: that is the function's own.
    assert all(s.error is not None for s in d.sites if s.direction == "forward")
    root = np.sqrt(np.float64([1, 4, 9]))
    made = [s for s in of(d.sites, "div", "backward") if s.amax == 0.5 / root[0]]
    assert made, "0.5 / sqrt(x) is computed with the forward pass, and is backward"
    # What the forward pass says comes first.
    assert [s.direction for s in d.sites] == sorted(
        (s.direction for s in d.sites), reverse=True
    )


@pytest.mark.slow
def test_what_a_checkpoint_computes_again_is_no_site_again():
    def block(x):
        return jnp.sin(jnp.exp(x))

    for fn in (block, jax.checkpoint(block)):
        d = amp.diagnose(lambda x, f=fn: jnp.sum(f(x)), "float32")(jnp.ones(3))
        forward = [s.operation for s in d.sites if s.direction == "forward"]
        assert forward == ["exp", "sin", "reduce_sum"]
        assert [s.times for s in of(d.sites, "cos", "backward")] == [1]


@pytest.mark.slow
def test_a_derivative_that_the_function_takes_itself_is_forward():
    wave = jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))

    def fn(w, x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(wave(x * w)))(x) ** 2)

    d = amp.diagnose(fn, "float32")(jnp.ones(3), jnp.ones(3))
    forward = [s.operation for s in d.sites if s.direction == "forward"]
    # exp is in the pass to the value, which nobody reads, and in that from it.
    wanted = ["mul", "exp", "cos", "mul", "mul", "mul", "integer_pow", "reduce_sum"]
    assert sorted(set(forward) - {"broadcast_in_dim"}) == sorted(set(wanted))
    assert of(d.sites, "sin", "backward")  # the derivative of cos


@jax.custom_vjp
def squared(x):
    return x * x


squared.defvjp(lambda x: (x * x, x), lambda x, g: (2.0 * x * g,))


def test_a_custom_rule_is_one_site_forward_and_one_backward():
    x = np.float32([1.0, 3e19, -2.0])
    for fn in (squared, lambda x: jnp.sum(squared(x))):
        d = amp.diagnose(fn, "float32")(jnp.asarray(x))
        site = only(d.sites, "custom_vjp_call")
        with np.errstate(over="ignore"):
            assert counted(site) == counts(x * x)
        assert site.makes_nonfinite
    backward = only(d.sites, "custom_vjp_call", "backward")
    assert counted(backward) == counts(2 * x)
    assert not of(d.sites, "mul") and not of(d.sites, "mul", "backward")


# Planted defects


class Block(nn.Module):
    factor: float = 1.0

    @nn.compact
    def __call__(self, x):
        up = nn.Dense(4, name="up", kernel_init=nn.initializers.ones)(x)
        return nn.Dense(4, name="down", kernel_init=nn.initializers.ones)(
            up * self.factor
        )


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, factor in enumerate((1.0, 1e4, 1e-9)):
            x = Block(factor, name=f"b{i}")(x)
        return x


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs, kernel_init=nnx.initializers.ones)
        self.last = nnx.Linear(4, 4, rngs=rngs, kernel_init=nnx.initializers.ones)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.first(self.norm(x) * 0.0 + x) * 1e4) * 1e-9


@jax.custom_jvp
def steep(x):
    return x * 300.0


@steep.defjvp
def _(primals, tangents):
    return steep(primals[0]), 300.0 * tangents[0]


W, X = jnp.full((4, 4), 30.0), jnp.full((8, 4), 2.0)
MESH = functools.partial(jax.make_mesh, (8,), ("d",), axis_types=(AxisType.Auto,))


def in_a_branch(w, x):
    def taken(y):
        return (y @ w) @ w

    return jnp.mean(jax.lax.cond((x @ w)[0, 0] > 0, taken, lambda y: y, x @ w)) * 1e-9


def in_a_scan(w, x):
    return jnp.mean(jax.lax.scan(lambda c, _: (c @ w, None), x @ w, None, 4)[0]) * 1e-9


def in_shards(w, x):
    @functools.partial(
        jax.shard_map,
        mesh=MESH(),
        in_specs=(PartitionSpec(), PartitionSpec("d")),
        out_specs=PartitionSpec(),
    )
    def fn(w, x):
        return jax.lax.pmean(jnp.mean((x @ w) @ w @ w), "d") * 1e-9

    return fn(w, x)


# name: function, arguments, then of the first site: module, operation, line of the
# product's turn, and how many values of it are not finite.
# 2 * 4 * 30 = 240; times 120 is 28 800, and 3 456 000 overflows.
PLANTED: dict[str, tuple] = {
    "turn of a scan": (in_a_scan, (W, X), "", "dot_general", 1, 3 * 32),
    "branch": (in_a_branch, (W, X), "", "dot_general", None, 32),
    "shards": (in_shards, (W, X), "", "dot_general", None, 32),
    "vmap": (
        lambda w, x: jnp.mean(jax.vmap(lambda row: row @ w @ w @ w)(x)) * 1e-9,
        (W, X),
        "",
        "dot_general",
        None,
        32,
    ),
    "remat": (
        lambda w, x: jnp.mean(jax.checkpoint(lambda y: y @ w @ w)(x @ w)) * 1e-9,
        (W, X),
        "",
        "dot_general",
        None,
        32,
    ),
    "custom_jvp": (
        lambda w, x: jnp.mean(steep(x @ w) @ w) * 1e-9,
        (W, X),
        "",
        "mul",
        None,
        32,
    ),
    "jitted": (
        lambda w, x: jnp.mean(jax.jit(thrice)(x, w)) * 1e-9,
        (W, X),
        "thrice",
        "dot_general",
        None,
        32,
    ),
    "parameter": (
        lambda w, x: jnp.mean((x * 1e-9) @ (w * 1.0)),
        (W * 1e5, X),
        "",
        "convert_element_type",
        None,
        16,
    ),
}


PLANTED_SLOW = ("vmap", "remat", "custom_jvp", "jitted", "parameter")


def thrice(x, w):
    return x @ w @ w @ w


@functools.cache
def planted(name: str) -> amp.Diagnosis:
    fn, args, *_ = PLANTED[name]
    return amp.diagnose(fn, "mixed_float16")(*args)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if n in PLANTED_SLOW else [])
        for n in PLANTED
    ],
)
def test_an_overflow_is_found_where_it_is_made_and_the_policy_is_finite(name):
    fn, args, module, operation, turn, nonfinite = PLANTED[name]
    d = planted(name)
    first = d.first_nonfinite
    assert (first.module, first.operation, first.direction, first.dtype) == (
        module,
        operation,
        "forward",
        "f16",
    )
    assert (first.turn, first.nonfinite) == (turn, nonfinite)
    assert "test_diagnose.py" in first.source
    assert d.policy != amp.PolicyMap("mixed_float16") and d.advice
    assert not any(s.makes_nonfinite for s in d.reference)
    value, gradients = jax.jit(jax.value_and_grad(amp.autocast(fn, d.policy)))(*args)
    assert jnp.isfinite(value) and jnp.isfinite(gradients).all()


def test_the_module_that_overflows_is_named_in_linen():
    params = Stack().init(jax.random.key(0), X)

    def loss(params, x):
        return jnp.mean(Stack().apply(params, x))

    d = amp.diagnose(loss, "mixed_float16")(params, X)
    assert d.first_nonfinite.module == "Stack/b1" and d.first_nonfinite.path == "b1"
    assert str(d.policy.default) == "p=f32,c=f16,o=f32"
    assert "b1" in [pattern for pattern, _ in d.policy.entries]
    assert all(str(policy) == "p=f32,c=f32,o=f32" for _, policy in d.policy.entries)
    step = jax.jit(jax.value_and_grad(amp.autocast(loss, d.policy)))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(step(params, X)))
    assert d.modules["Stack/b1"].nonfinite and not d.modules["Stack/b0"].nonfinite
    keys = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    assert list(d.gradients) == keys


def test_an_nnx_module_is_named_and_left_as_it_was():
    model = Layers(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(model))

    def loss(model, x):
        return jnp.mean(model(x))

    d = amp.diagnose(loss, "mixed_float16")(model, X)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))
    assert d.first_nonfinite.path in ("", "last")
    _, gradients = amp.value_and_grad(loss)(model, X)
    paths = jax.tree_util.tree_leaves_with_path(gradients)
    assert list(d.gradients) == [jax.tree_util.keystr(path) for path, _ in paths]
    value, _ = amp.value_and_grad(amp.autocast(loss, d.policy))(model, X)
    assert jnp.isfinite(value)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.linalg.norm(x @ w),
        lambda w, x: jnp.sqrt(jnp.sum((x @ w) ** 2)),
    ],
    ids=["norm", "sqrt"],
)
def test_a_derivative_that_is_infinite_is_found_where_the_forward_pass_is_finite(fn):
    d = amp.diagnose(fn, "mixed_float16")(W * 0.0, X)
    assert d.value == 0 and d.first_nonfinite.direction == "backward"
    assert d.first_nonfinite.operation == "div" and d.first_nonfinite.nonfinite == 1
    assert d.gradients[""].nonfinite == 16
    # No policy helps, and none is suggested.
    assert d.policy == amp.PolicyMap("mixed_float16") and d.advice


# Errors


def test_errors_are_the_distances_to_the_reference():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16)).astype(np.float32)
    w = rng.standard_normal((16, 16)).astype(np.float32)
    d = amp.diagnose(lambda w, x: jnp.sum(jnp.sin(x @ w)), "mixed_float16")(w, x)

    def distance(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    casts = of(d.sites, "convert_element_type")
    half = [each.astype(np.float16) for each in (x, w)]
    assert [s.error for s in casts[:2]] == pytest.approx(
        [distance(half[0], x), distance(half[1], w)], rel=1e-4
    )
    product = only(d.sites, "dot_general")
    rounded = half[0].astype(np.float64) @ half[1].astype(np.float64)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    assert product.error == pytest.approx(
        distance(rounded.astype(np.float16), exact), rel=0.02
    )
    assert product.amplification == pytest.approx(
        product.error / 2.0**-11  # a rounding itself is no amplification
    )
    assert all(s.error is None for s in d.reference)
    assert all(s.error is None for s in d.sites if s.direction == "backward")
    wanted = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(jnp.asarray(w))
    got = jax.grad(
        lambda w: amp.autocast(lambda w: jnp.sum(jnp.sin(x @ w)), "mixed_float16")(w)
    )
    assert d.gradients[""].error == pytest.approx(
        distance(got(jnp.asarray(w)), wanted), rel=0.05
    )


def in_scan(x):
    return jax.lax.scan(lambda c, row: (c, row * row), jnp.float32(0), x)[1]


def in_while(x):
    def turn(state):
        i, total = state
        row = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
        return i + 1, total + row * row

    return jax.lax.while_loop(lambda s: s[0] < len(x), turn, (0, jnp.zeros(64)))[1]


@pytest.mark.parametrize("fn", [in_scan, in_while])
def test_the_error_of_a_loop_is_that_of_all_turns(fn):
    # The rows are of different sizes: no turn has the error of all.
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    x *= np.float32([[1.0], [3.0], [0.01], [2.0], [0.5]])
    d = amp.diagnose(fn, "p=f32,c=f16,o=f32,low=mul")(jnp.asarray(x))
    products = of(d.sites, "mul")
    (product,) = [s for s in products if s.shape == "[64]"]
    assert (product.times, product.dtype) == (5, "f16")
    exact = x.astype(np.float64) ** 2
    rounded = np.square(x.astype(np.float16))
    wanted = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert product.error == pytest.approx(wanted, rel=1e-3)


def test_blame_names_the_operation_that_cancels():
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal((16, 16)), jnp.float32) for _ in "ab")
    big = jnp.full((16, 16), 500.0)

    def fn(w, x, big):
        return jnp.sum(((x @ w + big) - big) @ w)

    policy = "p=f32,c=f16,o=f32,low=add+sub"
    d = amp.diagnose(fn, policy)(w, x, big)
    worst = d.blame[0]
    assert (worst.operation, worst.dtype) == ("sub", "f16")
    assert worst.amplification > 20 and worst.error > 0.01
    assert list(d.blame) == sorted(d.blame, key=lambda s: -s.amplification)


def test_the_two_runs_may_go_different_ways():
    # 2049 in f16 is 2048: the other branch, and one more turn.
    def fn(x, one):
        y = x @ one
        z = jax.lax.cond(y[0, 0] > 2048.5, jnp.sin, jnp.cos, y)
        _, c = jax.lax.while_loop(
            lambda s: s[0] < 2050, lambda s: (s[0] + s[1][0, 0], s[1]), (y[0, 0], one)
        )
        return z + one, c

    d = amp.diagnose(fn, "mixed_float16")(jnp.full((1, 1), 2049.0), jnp.ones((1, 1)))
    assert of(d.sites, "cos") and not of(d.sites, "sin")
    assert of(d.reference, "sin") and not of(d.reference, "cos")
    # What comes after is compared with what comes after the other branch.
    other = np.sin(2049.0) + 1.0
    (after,) = [s for s in of(d.sites, "add") if s.shape == "[1,1]"]
    assert after.error == pytest.approx(
        abs(np.cos(2048.0) + 1.0 - other) / other, rel=1e-3
    )


# Scales, effects, arguments


@pytest.mark.slow
def test_the_loss_scale_that_is_suggested_is_the_largest_that_leaves_room():
    w, x = jnp.full((4, 4), 2.0**-6), jnp.full((8, 4), 2.0**-4)

    def loss(w, x):
        return jnp.mean(x @ w) * 2.0**-9

    d = amp.diagnose(loss, "mixed_float16")(w, x)
    # Backward in f16: the cotangent 2**-9 / 32 = 2**-14, and x.T @ it, 2**-15.
    assert d.loss_scale == 2.0 ** (12 + 14) or d.loss_scale == 2.0**24
    scaled = amp.diagnose(
        lambda w, x: loss(w, x) * 2.0**9,
        "mixed_float16",
        loss_scale=amp.static_loss_scale(2.0**10),
    )(w, x)
    # 2**-6 now, and an eighth of f16's largest is a little less than 2**13.
    assert scaled.loss_scale == 2.0**18
    assert float(scaled.value) == pytest.approx(2.0**-8, rel=1e-3)
    gradient = jax.grad(lambda w: loss(w, x) * 2.0**9)(w)
    assert scaled.gradients[""].amax == pytest.approx(float(gradient.max()), rel=1e-3)
    casts = of(scaled.sites, "convert_element_type", "backward")
    assert max(s.amax for s in casts) == 2.0**5  # 1 / 32 as it ran, scaled
    assert amp.diagnose(loss, "mixed_bfloat16")(w, x).loss_scale == 1.0


def test_the_loss_scale_is_not_bound_by_factors_that_it_does_not_multiply():
    # The derivative of x**2 is 2 x, 200 in f16, and 200 * 64 leaves no room.
    def loss(w, x):
        return jnp.mean((jnp.square(x @ w) @ w) @ w) * 2.0**-24

    w, x = jnp.full((4, 4), 0.5), jnp.full((8, 4), 50.0)
    d = amp.diagnose(loss, "mixed_float16")(w, x)
    factors = [s for s in d.sites if s.direction == "backward" and s.amax == 200.0]
    assert factors and not any(s.scales for s in factors)
    assert d.loss_scale > 64.0 and jnp.isfinite(d.value)


def test_effects_happen_once_in_each_run_and_their_results_are_taken():
    seen: list[float] = []

    def fn(w, x):
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(x))
        return jnp.mean(x @ w)

    d = amp.diagnose(fn, "mixed_float16")(W, X)
    jax.effects_barrier()
    assert seen == [64.0, 64.0] and d.value == 240.0

    def read(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = jax.experimental.io_callback(lambda x: seen.append(0.0) or x, shape, x)
        return jnp.mean(y @ w)

    seen.clear()
    d = amp.diagnose(read, "mixed_float16")(W, X)
    assert len(seen) == 2 and d.value == 240.0
    assert all(s.error is None for s in d.sites)


@pytest.mark.slow
def test_aux_arguments_by_position_and_functions_without_a_gradient():
    def fn(x, w, flag=True):
        return jnp.mean(x @ w), {"product": x @ w, "flag": flag}

    d = amp.diagnose(fn, argnums=(1, 0), has_aux=True)(X, {"w": W}["w"], flag=False)
    assert d.value == 240.0 and list(d.gradients) == ["[0]", "[1]"]
    d = amp.diagnose(lambda w, x: {"y": x @ w})(W, X)
    assert d.gradients == {} and d.value["y"].shape == (8, 4)
    assert {s.direction for s in d.sites} == {"forward"} and d.loss_scale == 1.0
    d = amp.diagnose(lambda x: x**2)(3.0)
    assert d.value == 9.0 and d.gradients[""].amax == 6.0


def test_a_mask_of_minus_infinity_is_no_defect():
    mask = np.tri(4, dtype=bool)

    def fn(w, x):
        scores = jnp.where(mask, x @ w, -jnp.inf)
        return jnp.mean(jax.nn.softmax(scores) ** 2)

    d = amp.diagnose(fn, "mixed_float16")(W * 0.01, X[:4])
    assert any(s.nonfinite for s in d.sites) and d.first_nonfinite is None
    assert d.policy == amp.PolicyMap("mixed_float16")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: amp.diagnose(3), TypeError, "function"),
        (lambda: amp.diagnose(nn.Dense(3)), TypeError, "model.apply"),
        (lambda: amp.diagnose(jnp.sin, 3), TypeError, "polic"),
        (lambda: amp.diagnose(jnp.sin, "mixed_float17"), ValueError, "float17"),
        (lambda: amp.diagnose(jnp.sin, argnums="x"), TypeError, "argnums"),
        (lambda: amp.diagnose(jnp.sin, argnums=1)(1.0), ValueError, "argnums"),
        (lambda: amp.diagnose(jnp.sin, has_aux=1), TypeError, "has_aux"),
        (lambda: amp.diagnose(jnp.sin, has_aux=True)(1.0), TypeError, "pair"),
        (lambda: amp.diagnose(jnp.sin, loss_scale=8.0), TypeError, "loss_scale"),
        (
            lambda: amp.diagnose(jnp.sin)(jax.ShapeDtypeStruct((), jnp.float32)),
            TypeError,
            "explain",
        ),
        (
            lambda: amp.diagnose(lambda i: jnp.float32(i))(jnp.int32(3)),
            TypeError,
            "argnums",
        ),
    ],
)
def test_mistakes_are_told_before_anything_runs(call, error, words):
    with pytest.raises(error, match=r"diagnose\(") as raised:
        call()
    assert words in str(raised.value)


def test_a_function_that_raises_raises_its_own_error():
    def fn(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        amp.diagnose(fn)(1.0)
