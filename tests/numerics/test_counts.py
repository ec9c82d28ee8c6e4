"""`diagnose`: exact counts, turns and branches, forward and backward.

Expected counts are numpy's, of the values that the same equations have in numpy.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
from tests import zoo
from tests.numerics.counting import counted, counts, of, only


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
    for values in (x for x in arrays.values() if x.size):
        (site,) = [s for s in d.sites if s.shape == values.shape]
        # A complex number is two.
        parts = values.view(np.float32) if values.dtype.kind == "c" else values
        assert counted(site) == counts(parts)
        assert (site.size, site.times) == (parts.size, 1)
    (empty,) = [s for s in d.sites if s.shape == (0, 3)]
    assert empty.exponents == {}


def test_what_is_moved_repeated_or_made_complex_has_the_numbers_of_what_it_repeats():
    x = np.float32([[1.0, -3.0], [0.0, np.inf]])

    def fn(x, y):
        moved = -(x * jnp.float32(2.0)).T.reshape(1, 4)
        return jnp.broadcast_to(moved, (3, 4)), y.astype(jnp.complex64)

    d = amp.diagnose(fn, "float32")(x, x[0])
    for moved in ("transpose", "reshape", "neg"):
        assert counted(only(d.sites, moved)) == counts(2 * x)
    repeated = only(d.sites, "broadcast_in_dim")
    assert counted(repeated) == counts(np.stack([2 * x] * 3))
    assert repeated.size == 12 and repeated.shape == (3, 4)
    assert not any(s.makes_nonfinite for s in d.sites)
    # A real number has two parts then.
    two = only(d.sites, "convert_element_type")
    assert counted(two) == counts(x[0].astype(np.complex64).view(np.float32))
    assert two.size == 4


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


# Loops over layers and over time; the products between them are those of any model.
MODELS = ("gpt_scan", "lstm")


def own_equations(fn: Callable[..., Any], policy: str, *args: Any) -> list[tuple]:
    """What explain tells of a program: identity and operation of what has numbers."""
    return sorted(
        (e.identity, e.operation, e.times)
        for e in amp.explain(fn, policy)(*args).equations
        if e.is_floating
    )


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


def test_what_a_rule_of_the_user_computes_for_the_tangent_is_backward():
    @jax.custom_jvp
    def fn(x):
        return jnp.exp(x)

    @fn.defjvp
    def rule(primals, tangents):
        (x,), (tangent,) = primals, tangents
        return jnp.exp(x), jnp.cos(x) * tangent

    d = amp.diagnose(lambda x: jnp.sum(fn(x)), "float32")(jnp.float32([0.0, 1.0]))
    forward = [s.operation for s in d.sites if s.direction == "forward"]
    assert forward == ["exp", "reduce_sum"]
    assert only(d.sites, "cos", "backward").amax == 1.0


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


@jax.custom_vjp
def gated(x):
    return x * 1.0


gated.defvjp(lambda x: (x * 1.0, x), lambda x, g: (g + jnp.where(x > 0, jnp.inf, 0.0),))


def test_a_derivative_that_a_constant_makes_infinite_is_made_there():
    d = amp.diagnose(lambda x: jnp.sum(gated(x)), "float32")(jnp.array([1.0, -1.0]))
    found = d.first_nonfinite
    assert (found.operation, found.direction) == ("custom_vjp_call", "backward")
    assert found.nonfinite == 1 and "derivative itself" in d.advice[0]


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


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["svd", "qr"])
def test_results_that_nobody_reads_are_not_counted(name):
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    if name == "svd":
        # Its derivative computes the vectors, the function does not.
        fn = lambda x: jnp.sum(jnp.linalg.svd(x, compute_uv=False))  # noqa: E731
        wanted = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    else:
        fn = lambda x: jnp.linalg.qr(x)[1]  # noqa: E731
        wanted = np.linalg.qr(x.astype(np.float64))[1]
    d = amp.diagnose(fn)(jnp.asarray(x))
    for sites in (d.sites, d.reference):
        site = only(sites, name)
        assert (site.size, site.zeros) == (wanted.size, np.sum(wanted == 0))
        assert site.amax == pytest.approx(np.max(np.abs(wanted)), rel=1e-5)
