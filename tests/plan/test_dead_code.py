"""Lines whose results nobody reads: all else is planned as if they were not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.plan.dataflow import dead_code
from jmp_amp.plan.dataflow.dead_code import inputs_read
from jmp_amp.plan.program import binding, jaxprs
from jmp_amp.plan.rewrites.linear import linear_function
from tests.programs import planned

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32) / 3
X = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), jnp.float32)


def near_one(h):
    return 1 + 0.001 * jax.nn.sigmoid(h)


def told(v):
    return (v - 1) * 1000


def half_reader(v):
    return jnp.tanh(v) @ W


def in_a_line(h):
    v = near_one(h)
    half_reader(v)
    return told(v)


def in_a_dropped_value(h):
    v = near_one(h)
    loss, gradient = jax.value_and_grad(lambda v: jnp.sum(half_reader(v) * 1e-3))(v)
    del loss
    return told(v) + gradient


def in_a_helper(wrap):
    def program(h):
        def both(v):
            return half_reader(v), told(v)

        return wrap(both)(near_one(h))[1]

    return program


def in_a_helper_of_a_helper(h):
    inner = jax.jit(lambda v: (half_reader(v), told(v)))
    return jax.jit(lambda v: inner(v))(near_one(h))[1]


def in_an_argument_that_is_not_read(h):
    v = near_one(h)
    return jax.jit(lambda v, unread: told(v))(v, half_reader(v))


def in_a_stack(h):
    def turn(c, _):
        v = near_one(c)
        return told(v), half_reader(v)

    return lax.scan(turn, h, None, length=3)[0]


def in_a_carry(h):
    def turn(carry, _):
        c, unread = carry
        v = near_one(c)
        return (told(v), unread + half_reader(v)), None

    return lax.scan(turn, (h, h), None, length=3)[0][0]


def in_the_start_of_a_carry(h):
    v = near_one(h)
    (out, _), _ = lax.scan(
        lambda c, _: ((c[0] * 2, c[1] + c[0]), None),
        (told(v), half_reader(v)),
        length=3,
    )
    return out


def in_a_while(h):
    def turn(carry):
        i, c, unread = carry
        v = near_one(c)
        return i + 1, told(v), unread + half_reader(v)

    return lax.while_loop(lambda c: c[0] < 3, turn, (0, h, h))[1]


def in_a_branch(h):
    v = near_one(h)

    def one(v):
        return half_reader(v), told(v)

    def other(v):
        return half_reader(2 * v), told(v) + 1

    return lax.cond(jnp.sum(v) > 0, one, other, v)[1]


DEAD = {
    "line": in_a_line,
    "value": in_a_dropped_value,
    "jit": in_a_helper(jax.jit),
    "checkpoint": in_a_helper(jax.checkpoint),
    "vmap": in_a_helper(jax.vmap),
    "helper of a helper": in_a_helper_of_a_helper,
    "argument": in_an_argument_that_is_not_read,
    "stack": in_a_stack,
    "carry": in_a_carry,
    "start": in_the_start_of_a_carry,
    "while": in_a_while,
    "branch": in_a_branch,
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dead", DEAD.values(), ids=DEAD)
def test_the_program_without_dead_lines_computes_the_same(dead):
    program = jax.make_jaxpr(jax.value_and_grad(lambda x: jnp.sum(dead(x @ W))))
    if dead is in_a_while:  # JAX does not differentiate it
        program = jax.make_jaxpr(lambda x: dead(x @ W))
    traced = program(X)
    living = dead_code.without_dead_code(traced)

    def run(program):
        body = jaxprs.body_of(program)
        return binding.run_as_traced(body, [X])

    for got, exact in zip(run(living), run(traced), strict=True):
        np.testing.assert_array_equal(got, exact)


def primitives(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        for body, _ in jaxprs.inner_bodies(eqn):
            found += primitives(body.jaxpr)
    return found


# The gradient of a dropped value multiplies.
@pytest.mark.parametrize("name", [name for name in DEAD if name != "value"])
def test_no_product_is_left_whose_result_nobody_reads(name):
    living = dead_code.without_dead_code(jax.make_jaxpr(DEAD[name])(X))
    assert "dot_general" not in primitives(jaxprs.body_of(living).jaxpr)


def in_a_helper_that_does_not_read_it(h):
    v = jnp.tanh(h)
    return jax.jit(lambda out, unread: 2 * out)(v @ W, v)


def f32_reader(v):
    return jnp.sum(v) + jnp.log(v + 2)


def beside(wrap):
    def program(h):
        def both(v):
            return f32_reader(v), v @ W

        return wrap(both)(jnp.tanh(h))[1]

    return program


def in_an_unread_stack(h):
    def turn(c, w):
        v = jnp.tanh(c)
        return v @ w, f32_reader(v)

    return lax.scan(turn, h, jnp.stack([W] * 3))[0]


def in_an_unread_carry(h):
    def turn(carry, w):
        c, unread = carry
        v = jnp.tanh(c)
        return (v @ w, unread + f32_reader(v)), None

    return lax.scan(turn, (h, h), jnp.stack([W] * 3))[0][0]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "dead",
    [
        beside(lambda f: f),
        beside(jax.jit),
        beside(jax.checkpoint),
        in_a_helper_that_does_not_read_it,
        in_an_unread_stack,
        in_an_unread_carry,
    ],
)
def test_what_half_precision_alone_reads_is_half_beside_a_dead_line(dead):
    # Else it would be f32, as for a line that somebody reads.
    fn = lambda x: dead(x @ W)  # noqa: E731
    assert planned(fn, X, primitive="tanh") == ["bfloat16"]
    live = lambda x: f32_reader(jnp.tanh(x @ W)) + jnp.tanh(x @ W) @ W  # noqa: E731
    assert "float32" in planned(live, X, primitive="tanh")


def test_a_parameter_is_moved_beside_a_helper_that_does_not_read_it_as_without():
    def beside_a_helper(x, b):
        rows = jnp.broadcast_to(b[None], x.shape)
        return jax.jit(lambda out, unread: out * 2)(x @ W + rows, rows) @ W

    def without(x, b):
        return (x @ W + jnp.broadcast_to(b[None], x.shape)) * 2 @ W

    found = planned(beside_a_helper, X, jnp.ones(8), primitive="broadcast_in_dim")
    assert found == planned(without, X, jnp.ones(8), primitive="broadcast_in_dim")
    assert found[-1] == "bfloat16"


def test_a_carry_that_is_read_turns_later_is_alive():
    def fn(x):
        def turn(carry, _):
            first, second, third, unread = carry
            return (second, third, 2 * third, unread + first), None

        return lax.scan(turn, (x, 3 * x, 5 * x, x), None, length=4)[0][0]

    # x, 3 x, 5 x, 10 x, 20 x.
    np.testing.assert_array_equal(amp.autocast(fn)(X), 20 * X)


def test_effects_stay():
    def fn(x):
        jax.debug.print("{}", jnp.sum(x))
        jnp.sin(x)
        return jax.jit(lambda x: (jax.debug.print("{}", x[0]), x * 2)[1])(x)

    living = dead_code.without_dead_code(jax.make_jaxpr(fn)(jnp.ones(3)))
    found = primitives(jaxprs.body_of(living).jaxpr)
    assert found.count("debug_callback") + found.count("debug_print") == 2
    assert "sin" not in found and "reduce_sum" in found


def test_a_body_in_which_nothing_is_dead_is_the_same_object():
    layer = jax.jit(lambda x: jnp.tanh(x @ W))
    traced = jax.make_jaxpr(lambda x: (jnp.sin(x), layer(layer(x)))[1])(X)
    living = jaxprs.body_of(dead_code.without_dead_code(traced)).jaxpr
    before = [e for e in jaxprs.body_of(traced).jaxpr.eqns if e.primitive.name != "sin"]
    assert [a is b for a, b in zip(living.eqns, before, strict=True)] == [True, True]


def test_bodies_that_lose_the_same_lines_are_one_object():
    layer = jax.jit(lambda x: (jnp.tanh(x @ W), jnp.sin(x)))
    traced = jax.make_jaxpr(lambda x: layer(layer(x)[0])[0])(X)
    eqns = jaxprs.body_of(dead_code.without_dead_code(traced)).jaxpr.eqns
    calls = [e for e in eqns if jaxprs.inner_bodies(e)]
    first, second = (jaxprs.inner_bodies(e)[0].body.jaxpr for e in calls)
    assert first is second and "sin" not in primitives(first)


def test_keys_and_arrays_of_many_dtypes_may_be_dead():
    def fn(x, key):
        def helper(x, key):
            noise = jax.random.normal(key, x.shape)
            return x * 2, noise, jax.random.split(key), x > 0, (x * 3).astype(jnp.int8)

        return jax.jit(helper)(x, key)[0]

    got = amp.autocast(fn)(X, jax.random.key(0))
    np.testing.assert_array_equal(got, 2 * X)


def test_what_a_derivative_of_a_solution_reads_is_not_read_when_it_runs():
    def program(moving, exact, rounded, unread):
        (result,) = linear_function(
            lambda xs: [xs[0] * exact], lambda xs: [xs[0] * rounded], [moving], [exact]
        )
        return result

    one = jnp.ones(3)
    args = (one, 2 * one, 3 * one, one)
    traced = jax.make_jaxpr(program)(*args)
    assert inputs_read(traced) == (True, True, False, False)
    assert inputs_read(traced, is_differentiated=True) == (True, True, True, False)
    _, backward = jax.vjp(lambda x: program(x, *args[1:]), one)
    np.testing.assert_array_equal(backward(one)[0], 3 * one)

    def in_loop(xs, exact):
        return jax.lax.scan(lambda c, x: (c + exact, c), one, xs)

    assert inputs_read(jax.make_jaxpr(in_loop)(jnp.ones((2, 3)), one)) == (False, True)


@jax.custom_jvp
def straight_through(x, rounded):
    """Its body does not read `x`, its rule does."""
    return rounded


straight_through.defjvp(lambda xs, ts: (straight_through(*xs), ts[0]))


def rounded_weight(w):
    moved = w.T
    rounded = jax.lax.stop_gradient(jnp.round(8 * moved) / 8)
    return jnp.sum(jnp.tanh(X @ straight_through(moved, rounded)) ** 2)


def fp8_inside(w):
    inner = amp.autocast(lambda w: X2 @ w, "fp8")
    return jnp.mean(jnp.tanh(inner(w.T)) ** 2)


def reduced_inside(w):
    inner = amp.autocast(lambda w: X @ w.T, "p=f32,c=bf16,o=f32,r=f32")
    return jnp.sum(jnp.tanh(inner(w)) ** 2)


X2 = jnp.asarray(np.random.default_rng(2).normal(size=(64, 64)), jnp.float32)
W2 = jnp.asarray(np.random.default_rng(3).normal(size=(64, 64)), jnp.float32) / 9


@pytest.mark.breadth(2)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("fn", "plain", "w", "tolerance"),
    [
        (rounded_weight, rounded_weight, W, 0.05),
        (fp8_inside, lambda w: jnp.mean(jnp.tanh(X2 @ w.T) ** 2), W2, 0.2),
        (reduced_inside, lambda w: jnp.sum(jnp.tanh(X @ w.T) ** 2), W, 0.05),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_what_only_the_rule_of_a_function_reads_is_alive(
    fn, plain, w, tolerance, policy
):
    found = jax.jit(jax.grad(amp.autocast(fn, policy)))(w)
    expected = jax.jit(jax.grad(plain))(w)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < tolerance
